"""Which hosts and links explain the bad cells of a matrix."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpdiag.checks.matrix import Link, Pattern, explain, links_of

few = settings(max_examples=40, deadline=None)


def links(size: int) -> set[Link]:
    return set(permutations(range(size), 2))


def explained(size: int, bad: set[Link]) -> Pattern | None:
    return explain(bad, links(size) - bad)


def of_host(size: int, host: int) -> set[Link]:
    return {link for link in links(size) if host in link}


def from_host(size: int, host: int) -> set[Link]:
    return {link for link in links(size) if link[0] == host}


def to_host(size: int, host: int) -> set[Link]:
    return {link for link in links(size) if link[1] == host}


def test_nothing_bad_is_nothing_to_explain():
    assert explained(3, set()) is None


@few
@given(st.integers(3, 20), st.data())
def test_a_bad_row_and_column_is_that_host(size, data):
    host = data.draw(st.integers(0, size - 1))
    assert explained(size, of_host(size, host)) == Pattern(hosts=(host,))


@few
@given(st.integers(3, 20), st.data())
def test_a_bad_row_is_that_hosts_sending_and_a_column_its_receiving(size, data):
    host = data.draw(st.integers(0, size - 1))
    assert explained(size, from_host(size, host)) == Pattern(senders=(host,))
    assert explained(size, to_host(size, host)) == Pattern(receivers=(host,))


@few
@given(st.integers(3, 20), st.data())
def test_one_bad_cell_is_a_link(size, data):
    link = data.draw(st.sampled_from(sorted(links(size))))
    assert explained(size, {link}) == Pattern(links=(link,))
    both = {link, link[::-1]}
    assert explained(size, both) == Pattern(links=tuple(sorted(both)))


@pytest.mark.parametrize("bad", [{(0, 1)}, {(0, 1), (1, 0)}])
def test_two_hosts_cannot_tell_which_side_is_at_fault(bad):
    assert explained(2, bad) == Pattern(links=tuple(sorted(bad)))


@few
@given(st.integers(3, 20))
def test_bad_everywhere_blames_nobody(size):
    assert explained(size, links(size)) == Pattern(everywhere=True)


@few
@given(st.integers(4, 24), st.data())
def test_up_to_half_of_the_hosts_can_be_bad(size, data):
    hosts = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size // 2))
    bad = set().union(*(of_host(size, host) for host in hosts))
    assert explained(size, bad) == Pattern(hosts=tuple(sorted(hosts)))


@few
@given(st.integers(3, 24), st.data())
def test_more_than_half_are_not_blamed(size, data):
    hosts = data.draw(st.sets(st.integers(0, size - 1), min_size=size // 2 + 1, max_size=size))
    bad = set().union(*(of_host(size, host) for host in hosts))
    assert explained(size, bad) == Pattern(everywhere=True)


def test_a_host_that_is_bad_where_nothing_else_was_measured_is_not_blamed():
    assert explain(of_host(4, 0), set()) == Pattern(everywhere=True)


def test_a_bad_sender_and_a_bad_receiver_are_told_apart():
    assert explained(8, from_host(8, 1) | to_host(8, 2)) == Pattern(senders=(1,), receivers=(2,))


def test_a_row_and_a_column_of_three_hosts_that_explain_each_other_blame_nobody():
    bad = {(0, 1), (0, 2), (2, 1)}
    assert explained(3, bad) == Pattern(links=tuple(sorted(bad)))


def test_a_host_of_many_is_to_blame_although_some_of_its_ways_are_fine():
    bad = of_host(16, 5) - {(5, 3), (9, 5)}
    assert explained(16, bad) == Pattern(hosts=(5,))


def test_two_groups_that_do_not_reach_each_other_are_islands():
    inside = {(a, b) for a, b in links(6) if (a < 2) == (b < 2)}
    assert explain(links(6) - inside, inside) == Pattern(islands=((0, 1), (2, 3, 4, 5)))


def test_a_single_host_that_nobody_reaches_is_no_island():
    assert explained(5, of_host(5, 4)) == Pattern(hosts=(4,))


matrices = st.integers(3, 8).flatmap(
    lambda size: st.tuples(st.just(size), st.sets(st.sampled_from(sorted(links(size)))), st.randoms())
)


@few
@given(matrices)
def test_hosts_without_a_bad_way_are_never_blamed_and_every_bad_way_is_explained(matrix):
    size, bad, _ = matrix
    pattern = explained(size, bad)
    if pattern is None:
        assert not bad
        return
    touched = {end for link in bad for end in link}
    assert touched.issuperset((*pattern.hosts, *pattern.senders, *pattern.receivers))
    assert bad.issuperset(pattern.links)
    assert set().union(*(own for _, _, own in links_of(pattern, bad))) == bad


@few
@given(matrices)
def test_who_is_blamed_does_not_depend_on_the_numbering(matrix):
    size, bad, random = matrix
    new = list(range(size))
    random.shuffle(new)
    pattern, other = explained(size, bad), explained(size, {(new[a], new[b]) for a, b in bad})
    if pattern is None or other is None:
        assert pattern is other
        return
    assert {new[host] for host in pattern.hosts} == set(other.hosts)
    assert {new[host] for host in pattern.senders} == set(other.senders)
    assert {new[host] for host in pattern.receivers} == set(other.receivers)
    assert {(new[a], new[b]) for a, b in pattern.links} == set(other.links)
    assert pattern.everywhere == other.everywhere


@few
@given(matrices)
def test_the_transposed_matrix_swaps_senders_and_receivers(matrix):
    size, bad, _ = matrix
    pattern, other = explained(size, bad), explained(size, {link[::-1] for link in bad})
    if pattern is not None and other is not None:
        assert (pattern.senders, pattern.receivers) == (other.receivers, other.senders)
