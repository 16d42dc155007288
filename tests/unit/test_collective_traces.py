"""What ranks posted, compared."""

from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.checks.posted import in_words, lag, last, split
from ddpdiag.model import Collective


def collective(seq: int, name: str = "gloo:all_reduce", elements: int = 4, **more: object) -> Collective:
    return Collective(seq=seq, name=name, elements=elements, dtype="Float", group="0", **more)  # type: ignore[arg-type]


def trace(upto: int, last: int = 8, **more: object) -> tuple[Collective, ...]:
    """The last collectives of a rank that posted so many."""
    return tuple(collective(seq, **more) for seq in range(max(1, upto - last + 1), upto + 1))  # type: ignore[arg-type]


def test_a_collective_is_named_without_its_backend_and_with_its_size(golden) -> None:
    golden(*map(in_words, (collective(7), collective(1, elements=1), Collective(seq=3, name="nccl:barrier"))))


def test_equal_flights_differ_nowhere() -> None:
    assert split({rank: trace(9) for rank in range(4)}) is None
    assert lag({rank: trace(9) for rank in range(4)}).ranks == ()


def test_the_first_number_with_another_size_shows_the_odd_rank() -> None:
    odd = (*trace(5), collective(6, elements=5), collective(7))
    found = split({0: trace(7), 1: odd, 2: trace(7)})
    assert found is not None
    assert found.odd == (1,)
    assert found.sides == ((collective(6, elements=5), (1,)), (collective(6), (0, 2)))


def test_another_operation_under_the_same_number_is_a_mismatch() -> None:
    found = split({0: trace(3), 1: (*trace(2), collective(3, "gloo:broadcast")), 2: trace(3)})
    assert found is not None
    assert found.odd == (1,)


def test_two_ranks_that_differ_have_no_majority() -> None:
    found = split({0: trace(3), 1: trace(3, elements=8)})
    assert found is not None
    assert found.odd == ()
    assert len(found.sides) == 2


def test_a_root_may_scatter_more_than_the_others_do() -> None:
    assert split({0: (collective(1, "gloo:scatter", 8),), 1: (collective(1, "gloo:scatter", 0),)}) is None


def test_groups_count_for_themselves() -> None:
    other = Collective(seq=1, name="gloo:broadcast", elements=99, group="1")
    assert split({0: (collective(1), other), 1: (collective(1),), 2: (collective(1),)}) is None


def test_point_to_point_counts_mean_nothing_to_others() -> None:
    sends = (collective(1), collective(9, "gloo:send", p2p=True))
    assert split({0: sends, 1: (collective(1), collective(9, "gloo:recv", 1, p2p=True)), 2: sends}) is None
    assert last(sends) == collective(1)
    assert lag({0: sends, 1: trace(1), 2: trace(1)}).ranks == ()


def test_who_posted_fewer_than_most_lags_and_the_next_one_is_what_it_lacks() -> None:
    assert lag({0: trace(7), 1: trace(6), 2: trace(7)}) == ((1,), collective(7))
    assert lag({0: trace(2), 1: (), 2: trace(2)}) == ((1,), collective(1))


def test_nobody_lags_where_nothing_was_posted() -> None:
    assert lag({0: (), 1: ()}) == ((), None)
    assert last(None) is None


@given(st.permutations(range(6)), st.lists(st.integers(0, 4), min_size=6, max_size=6))
def test_the_order_of_the_ranks_does_not_matter(order: list[int], upto: list[int]) -> None:
    traces = {rank: trace(number) for rank, number in enumerate(upto)}
    shuffled = {rank: traces[rank] for rank in order}
    assert lag(shuffled) == lag(traces)
    assert split(shuffled) == split(traces)


@given(
    st.dictionaries(st.integers(0, 9), st.lists(st.builds(collective, st.integers(1, 4), elements=st.integers(1, 2))))
)
def test_whoever_is_odd_did_post_something(traces: dict[int, list[Collective]]) -> None:
    found = split(traces)
    if found is not None:
        assert {rank for rank, trace in traces.items() if trace}.issuperset(found.odd)
        assert len(found.sides) >= 2
