"""What ranks posted, compared."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.evidence.collectives import collective_text, find_lag, first_mismatch, last_collective
from ddpdiag.model import Collective


def collective(seq: int, name: str = "gloo:all_reduce", elements: int = 4, **more: object) -> Collective:
    return Collective(seq=seq, name=name, elements=elements, dtype="Float", group="0", **more)  # type: ignore[arg-type]


def trace(upto: int, last: int = 8, **more: object) -> tuple[Collective, ...]:
    """The last collectives of a rank that posted so many."""
    return tuple(collective(seq, **more) for seq in range(max(1, upto - last + 1), upto + 1))  # type: ignore[arg-type]


def test_a_collective_is_named_without_its_backend_and_with_its_size(golden) -> None:
    golden(*map(collective_text, (collective(7), collective(1, elements=1), Collective(seq=3, name="nccl:barrier"))))


OTHER_GROUP = Collective(seq=1, name="gloo:broadcast", elements=99, group="1")
SENDS = (collective(1), collective(9, "gloo:send", p2p=True))
LARGER, BROADCAST = collective(6, elements=5), collective(3, "gloo:broadcast")
# What each rank posted, and the sides on which the ranks are that posted different collectives.
FLIGHTS = {
    "equal flights": ([trace(9)] * 4, None),
    "a root scatters more": ([(collective(1, "gloo:scatter", size),) for size in (8, 0)], None),
    "another group": ([(collective(1), OTHER_GROUP), trace(1), trace(1)], None),
    "sends": ([SENDS, (collective(1), collective(9, "gloo:recv", 1, p2p=True)), SENDS], None),
    "another size": (
        [trace(7), (*trace(5), LARGER, collective(7)), trace(7)],
        ((1,), ((LARGER, (1,)), (collective(6), (0, 2)))),
    ),
    "another operation": (
        [trace(3), (*trace(2), BROADCAST), trace(3)],
        ((1,), ((BROADCAST, (1,)), (collective(3), (0, 2)))),
    ),
    "two that differ": (
        [trace(3), trace(3, elements=8)],
        ((), ((collective(1), (0,)), (collective(1, elements=8), (1,)))),
    ),
}


@pytest.mark.parametrize(("posted", "sides"), FLIGHTS.values(), ids=FLIGHTS)
def test_the_first_number_with_another_collective_shows_the_odd_rank(posted, sides) -> None:
    found = first_mismatch(dict(enumerate(posted)))
    assert (found and (found.minority, found.variants)) == sides


@pytest.mark.parametrize(
    ("posted", "lacks"),
    [
        ([trace(9)] * 4, ()),
        ([SENDS, trace(1), trace(1)], ()),
        ([(), ()], ()),
        ([trace(7), trace(6), trace(7)], ((1,), collective(7))),
        ([trace(2), (), trace(2)], ((1,), collective(1))),
    ],
    ids=["equal flights", "a send", "nothing was posted", "one fewer", "none"],
)
def test_who_posted_fewer_than_most_lags_and_the_next_one_is_what_it_lacks(posted, lacks) -> None:
    found = find_lag(dict(enumerate(posted)))
    assert found == lacks if lacks else found.ranks == ()


def test_the_last_collective_is_no_send() -> None:
    assert (last_collective(SENDS), last_collective(None)) == (collective(1), None)


@given(st.permutations(range(6)), st.lists(st.integers(0, 4), min_size=6, max_size=6))
def test_the_order_of_the_ranks_does_not_matter(order: list[int], upto: list[int]) -> None:
    traces = {rank: trace(number) for rank, number in enumerate(upto)}
    shuffled = {rank: traces[rank] for rank in order}
    assert find_lag(shuffled) == find_lag(traces)
    assert first_mismatch(shuffled) == first_mismatch(traces)


@given(
    st.dictionaries(st.integers(0, 9), st.lists(st.builds(collective, st.integers(1, 4), elements=st.integers(1, 2))))
)
def test_whoever_is_odd_did_post_something(traces: dict[int, list[Collective]]) -> None:
    found = first_mismatch(traces)
    if found is not None:
        assert {rank for rank, trace in traces.items() if trace}.issuperset(found.minority)
        assert len(found.variants) >= 2
