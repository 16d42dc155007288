"""Samples, and the odd one out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.stats import find_odd_ranks, outliers, quantile, samples

values = st.dictionaries(st.integers(0, 50), st.sampled_from(["a", "b", "c", None]), max_size=20)


@given(values)
def test_the_odd_are_fewer_than_half_and_nobody_is_blamed_without_a_strict_majority(ranks):
    odd = find_odd_ranks(ranks)
    assert (odd is None) == (len(set(ranks.values())) <= 1)
    if odd is None:
        return
    assert sorted(rank for group in odd.by_value.values() for rank in group) == sorted(ranks)
    if odd.ranks:
        assert 2 * len(odd.ranks) < len(ranks)
        assert set(odd.ranks) == {rank for rank, value in ranks.items() if value != odd.majority}
    else:
        assert all(2 * len(group) <= len(ranks) for group in odd.by_value.values())


@given(values, st.permutations(range(20)))
def test_the_order_of_arrival_changes_nothing(ranks, order):
    items = list(ranks.items())
    shuffled = dict(items[index] for index in order if index < len(items))
    ours, theirs = find_odd_ranks(ranks), find_odd_ranks(shuffled)
    assert (ours is None) == (theirs is None)
    assert ours is None or (ours.ranks, ours.by_value) == (theirs.ranks, theirs.by_value)


def test_the_usual_value_may_be_that_nothing_is_set():
    odd = find_odd_ranks({0: None, 1: None, 2: "x"})
    assert odd.ranks == (2,)
    assert odd.majority is None


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50))
def test_samples_are_in_order(seconds):
    seen = samples(seconds)
    assert seen.min <= seen.median <= seen.p95 <= max(seconds)
    assert seen.count == len(seconds)


def test_quantiles_are_interpolated_and_no_values_are_no_summary():
    assert quantile([1.0, 2.0], 0.5) == 1.5
    with pytest.raises(ValueError, match="no values"):
        samples([])


@pytest.mark.parametrize(
    ("values", "far"),
    [
        pytest.param([100.0, 101.0, 99.0, 100.0, 80.0], {4}, id="far for what the others scatter"),
        pytest.param([100.0, 60.0, 140.0, 120.0, 80.0], set(), id="all scatter"),
        pytest.param([100.0, 100.0, 100.0, 95.0], set(), id="less than a tenth"),
        pytest.param([100.0, 1.0], set(), id="two decide nothing"),
    ],
)
def test_outliers_are_far_from_the_others(values, far):
    assert outliers(values) == far


@given(st.lists(st.floats(0.1, 1e6), min_size=3, max_size=30), st.floats(0.01, 100))
def test_outliers_do_not_hang_on_the_unit(values, unit):
    far, scaled = outliers(values), outliers([unit * value for value in values])
    assert 2 * len(far) <= len(values)
    # Rounding may move one that stands at the limit.
    assert len(far ^ scaled) <= 1
