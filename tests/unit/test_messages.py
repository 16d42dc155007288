from messages import declared, read_listing


def test_the_listing_has_every_finding_that_a_check_declares():
    assert list(read_listing()) == declared()
