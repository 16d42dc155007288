"""Many names in few characters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.text import fold_hosts, fold_ranks


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["n0"], "n0"),
        (["n3", "n0", "n7", "n1", "n2", "n0"], "n[0-3,7]"),
        (["gpu01", "gpu02", "login"], "gpu[01-02],login"),
        (["n1.site", "n2.site"], "n[1-2].site"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
    ],
)
def test_hosts_fold(names, text):
    assert fold_hosts(names) == text


@pytest.mark.parametrize("name", ["@all", "n[0-999999999]", "a!b", "a&b", "[red]", "a,b", "", "*", "n" * 300])
def test_a_name_that_means_something_else_to_nodeset_stays_as_it_is(name):
    assert fold_hosts(["n0", name, "n1"]) == f"n[0-1],{name}"


def test_what_is_left_out_is_counted(golden):
    names = [f"n{number}" for number in (0, 1, 2, 3, 7, 9, 11, 12)]
    assert fold_hosts(names, limit=4) == "n[0-3,7,9,11-12]"
    golden(fold_hosts(names, limit=2), fold_hosts(["a", "b", "c"], limit=1))
    golden(fold_ranks([0, 1, 2, 10, 20, 21], limit=2))


def test_hosts_with_two_numbers_fold_and_count(golden):
    names = [f"r{rack}n{node}" for rack in range(2) for node in range(3)]
    assert fold_hosts(names) == "r[0-1]n[0-2]"
    golden(fold_hosts(["a", *names], limit=1))


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([7, 0, 1, 2, 3], "0-3,7"), ([0, 0], "0"), (range(16384), "0-16383")]
)
def test_ranks_fold(ranks, text):
    assert fold_ranks(ranks) == text


@given(st.sets(st.integers(0, 300)))
def test_folded_ranks_unfold(ranks):
    unfolded = set()
    for piece in filter(None, fold_ranks(ranks).split(",")):
        first, _, last = piece.partition("-")
        unfolded |= set(range(int(first), int(last or first) + 1))
    assert unfolded == ranks
