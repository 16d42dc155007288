from messages import Example, chosen, declared, read_listing


def test_the_listing_has_every_finding_that_a_check_declares():
    assert list(read_listing()) == declared()


def test_an_example_moves_to_another_test_where_its_own_makes_it_no_longer():
    old, bare, full = Example("a.py::test_a", "x"), Example("b.py::test_b", "y"), Example("c.py::test_c", "z\nfix: w")
    assert chosen(old, old, [bare]) == old
    assert chosen(old, None, [bare, full]) == full
    assert chosen(old, None, [full, old._replace(text="new")]).text == "new"
    assert chosen(old, None, []) is None
