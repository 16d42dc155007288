"""Which hosts and links explain the bad cells of a matrix."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpdiag.checks.matrix import Link, Pattern, blamed_subjects, find_pattern

few = settings(max_examples=40, deadline=None)


def links(size: int) -> set[Link]:
    return set(permutations(range(size), 2))


def explained(size: int, bad: set[Link]) -> Pattern | None:
    return find_pattern(bad, links(size) - bad)


def from_host(size: int, host: int) -> set[Link]:
    return {link for link in links(size) if link[0] == host}


def to_host(size: int, host: int) -> set[Link]:
    return {link for link in links(size) if link[1] == host}


def of_host(size: int, host: int) -> set[Link]:
    return from_host(size, host) | to_host(size, host)


ACROSS = {(a, b) for a, b in links(6) if (a < 2) != (b < 2)}
EACH_OTHER = {(0, 1), (0, 2), (2, 1)}


@pytest.mark.parametrize(
    ("size", "bad", "pattern"),
    [
        pytest.param(3, set(), None, id="nothing bad"),
        pytest.param(2, {(0, 1)}, Pattern(links=((0, 1),)), id="one direction of two hosts"),
        pytest.param(2, {(0, 1), (1, 0)}, Pattern(links=((0, 1), (1, 0))), id="both directions of two hosts"),
        pytest.param(
            8, from_host(8, 1) | to_host(8, 2), Pattern(senders=(1,), receivers=(2,)), id="a sender and a receiver"
        ),
        pytest.param(3, EACH_OTHER, Pattern(links=tuple(sorted(EACH_OTHER))), id="a row and a column of three hosts"),
        pytest.param(16, of_host(16, 5) - {(5, 3), (9, 5)}, Pattern(hosts=(5,)), id="some ways of it are fine"),
        pytest.param(6, ACROSS, Pattern(islands=((0, 1), (2, 3, 4, 5))), id="groups that do not reach each other"),
        pytest.param(5, of_host(5, 4), Pattern(hosts=(4,)), id="a single host is no island"),
    ],
)
def test_the_hosts_or_links_that_explain_the_bad_cells_are_named(size, bad, pattern):
    assert explained(size, bad) == pattern


def test_a_host_that_is_bad_where_nothing_else_was_measured_is_not_blamed():
    assert find_pattern(of_host(4, 0), set()) == Pattern(is_everywhere=True)


@few
@given(st.integers(3, 20), st.data())
def test_a_bad_row_is_that_hosts_sending_and_a_column_its_receiving(size, data):
    host = data.draw(st.integers(0, size - 1))
    assert explained(size, from_host(size, host)) == Pattern(senders=(host,))
    assert explained(size, to_host(size, host)) == Pattern(receivers=(host,))
    assert explained(size, of_host(size, host)) == Pattern(hosts=(host,))


@few
@given(st.integers(3, 20), st.data())
def test_one_bad_cell_is_a_link(size, data):
    link = data.draw(st.sampled_from(sorted(links(size))))
    assert explained(size, {link}) == Pattern(links=(link,))
    both = {link, link[::-1]}
    assert explained(size, both) == Pattern(links=tuple(sorted(both)))


@few
@given(st.integers(3, 24), st.data())
def test_up_to_half_of_the_hosts_can_be_bad_and_more_are_not_blamed(size, data):
    hosts = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size))
    bad = set().union(*(of_host(size, host) for host in hosts))
    blames = 2 * len(hosts) <= size
    assert explained(size, bad) == (Pattern(hosts=tuple(sorted(hosts))) if blames else Pattern(is_everywhere=True))


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
    assert set().union(*(own for _, _, own in blamed_subjects(pattern, bad))) == bad


@few
@given(matrices)
def test_who_is_blamed_does_not_depend_on_the_numbering(matrix):
    size, bad, random = matrix
    new = random.sample(range(size), size)
    pattern, other = explained(size, bad), explained(size, {(new[a], new[b]) for a, b in bad})
    if pattern is None or other is None:
        assert pattern is other
        return
    for part in ("hosts", "senders", "receivers"):
        assert {new[host] for host in getattr(pattern, part)} == {*getattr(other, part)}
    assert {(new[a], new[b]) for a, b in pattern.links} == set(other.links)
    assert pattern.is_everywhere == other.is_everywhere


@few
@given(matrices)
def test_the_transposed_matrix_swaps_senders_and_receivers(matrix):
    size, bad, _ = matrix
    pattern, other = explained(size, bad), explained(size, {link[::-1] for link in bad})
    if pattern is not None and other is not None:
        assert (pattern.senders, pattern.receivers) == (other.receivers, other.senders)
