"""Which ranks hold the others back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpdiag.bench.series import RankEvidence, slow_ranks

# The machine may be busy.
relaxed = settings(deadline=None)

rates = st.floats(1e8, 1e11)
noise = st.floats(1.0, 1.2)
anything = st.dictionaries(
    st.integers(0, 20),
    st.builds(
        RankEvidence, st.lists(st.floats(), max_size=4).map(tuple), st.none() | st.floats(), st.none() | st.floats()
    ),
    max_size=9,
)


@relaxed
@given(st.integers(0, 64), st.lists(rates, max_size=5))
def test_equal_ranks_name_no_rank(ranks: int, copies: list[float]) -> None:
    equal = RankEvidence(tuple(copies), lag_share=0.1, started_last_share=1 / max(1, ranks))
    assert slow_ranks(dict.fromkeys(range(ranks), equal)) == {}


@relaxed
@given(st.integers(2, 64), st.data(), rates)
def test_one_rank_that_copies_at_half_the_rate_is_named(ranks: int, data: st.DataObject, rate: float) -> None:
    slow = data.draw(st.integers(0, ranks - 1))
    evidence = {
        rank: RankEvidence(tuple(rate * data.draw(noise) / (2.4 if rank == slow else 1) for _ in range(5)))
        for rank in range(ranks)
    }
    assert list(slow_ranks(evidence)) == [slow]


@relaxed
@given(anything)
def test_never_more_than_half_are_named(evidence: dict[int, RankEvidence]) -> None:
    assert 2 * len(slow_ranks(evidence)) <= len(evidence)


def test_two_of_four_may_be_slow_and_three_share_a_cause() -> None:
    evidence = {rank: RankEvidence((rate,) * 5) for rank, rate in enumerate((10e9, 4e9, 10e9, 4e9))}
    assert list(slow_ranks(evidence)) == [1, 3]
    assert slow_ranks(evidence | {2: evidence[2]._replace(lag_share=1.0, started_last_share=0.9)}) == {}


LATE = RankEvidence(lag_share=0.7, started_last_share=0.93)


@pytest.mark.parametrize(
    ("evidence", "slow"),
    [
        pytest.param([RankEvidence(), LATE], [1], id="last in most calls by much"),
        pytest.param([RankEvidence(), LATE._replace(lag_share=0.1)], [], id="last by little"),
        pytest.param([RankEvidence(), LATE._replace(started_last_share=0.5)], [], id="last in half of the calls"),
        pytest.param([RankEvidence((1.0,), 9.0, 1.0)], [], id="a rank alone"),
        pytest.param([RankEvidence((9e9, 2e9, 9e9))] * 3, [], id="a moment that is slow for all"),
        pytest.param([RankEvidence((9e9, 9e9, 9e9)), RankEvidence((9e9, 1e9, 9e9))], [], id="a rank disturbed once"),
    ],
)
def test_who_comes_last_in_most_calls_by_much_is_slow(evidence: list[RankEvidence], slow: list[int]) -> None:
    assert list(slow_ranks(dict(enumerate(evidence)))) == slow


@pytest.mark.parametrize(
    "own",
    [
        RankEvidence((10e9 / 2.1,) * 5),
        RankEvidence(lag_share=0.7, started_last_share=0.93),
        RankEvidence((5e9,) * 5, lag_share=0.5, started_last_share=0.8),
    ],
    ids=["copies", "lags", "copies and lags"],
)
def test_the_reason_says_by_how_much(golden, own: RankEvidence) -> None:
    usual = RankEvidence((10e9,) * 5)
    golden(slow_ranks({0: usual, 1: usual, 2: own})[2])
