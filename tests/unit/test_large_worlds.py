"""What keeps rank 0 quick among thousands of ranks, and fair where many of them share a core."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from seen import arrival_of, world_of

from ddpdiag.checks.world import World, extra_deadline_seconds
from ddpdiag.model import Arrival, Kind, Trial
from ddpdiag.runtime.control.messages import Ping, RunTrial
from ddpdiag.runtime.control.wire import Wire
from ddpdiag.runtime.coordinator.dispatch import DispatchedTrial, address_lookup


def trial(*groups: tuple[int, ...]) -> Trial:
    return Trial(code="COL001", groups=groups, kind=Kind.PLAIN, deadline_seconds=5.0, number=1)


def dispatched(*groups: tuple[int, ...]) -> DispatchedTrial:
    return DispatchedTrial(trial(*groups), 10.0, lambda: 0.0)


def arrivals(size: int, ranks_per_node: int) -> dict[int, Arrival]:
    return {rank: arrival_of(rank, size, ranks_per_node=ranks_per_node) for rank in range(size)}


@given(st.lists(st.integers(0, 50), unique=True, min_size=1).map(tuple))
def test_an_order_holds_its_group_in_its_order(group: tuple[int, ...]) -> None:
    assert RunTrial.for_group(group, trial(group, (99,))).trial_for(group[0]) == trial(group)


def test_the_order_of_ten_thousand_ranks_is_short() -> None:
    group = tuple(range(10_000))
    assert len(Wire("run").encode(RunTrial.for_group(group, trial(group)))) < 500


def test_ranks_that_are_alone_share_one_order() -> None:
    own = dispatched((0, 1), (2,), (3,))
    assert own.trial_message(2) is own.trial_message(3) is not own.trial_message(0)
    assert [own.trial_message(rank).trial_for(rank).groups for rank in (2, 3)] == [((2,),), ((3,),)]


def test_a_group_shares_one_order_and_one_opening() -> None:
    own = dispatched((0, 1), (2,))
    assert own.trial_message(0) is own.trial_message(1) is not own.trial_message(2)
    own.mark_at_barrier(0, "a", is_exchange=False)
    own.mark_at_barrier(1, "b", is_exchange=False)
    assert own.barrier_message(0, arrivals(3, 8)) is own.barrier_message(1, arrivals(3, 8))


def test_the_barrier_opens_for_all_when_the_last_one_comes_and_again_for_who_asks_again() -> None:
    own = dispatched((0, 1, 2), (3, 4))
    assert own.mark_at_barrier(0, "", is_exchange=False) == own.mark_at_barrier(2, "", is_exchange=False) == ()
    assert own.mark_at_barrier(0, "", is_exchange=False) == ()
    assert own.mark_at_barrier(1, "", is_exchange=False) == (0, 1, 2)
    assert own.mark_at_barrier(2, "", is_exchange=False) == (2,)
    assert own.barrier_is_open(0)
    assert not own.barrier_is_open(3)


@given(st.integers(1, 12), st.integers(1, 4), st.randoms())
def test_a_rank_is_reached_as_the_first_of_another_host_sees_it(size: int, per_node: int, random: object) -> None:
    own = {rank: structs.replace(each, master_addr=f"name-{rank}") for rank, each in arrivals(size, per_node).items()}
    group = tuple(random.sample(range(size), size))  # type: ignore[attr-defined]
    reached_at = address_lookup(group, own)
    for rank in group:
        others = [own[other] for other in group if own[other].host != own[rank].host]
        on_first_host = own[rank].host == own[0].host
        expected = (others[0].master_addr if on_first_host else own[rank].address) if others else "127.0.0.1"
        assert reached_at(rank) == expected


def test_a_message_to_many_is_written_once() -> None:
    wire, call = Wire("run", b"secret"), Ping()
    assert wire.encode(call) is wire.encode(call)
    assert wire.decode_for_rank(wire.encode(Ping())) == call


def crowd(masks: list[str], ranks_per_node: int = 8) -> World:
    known = world_of(len(masks), ranks_per_node=ranks_per_node)
    own = {rank: structs.replace(known.arrivals[rank], cpu_mask=mask) for rank, mask in enumerate(masks)}
    return structs.replace(known, arrivals=own)


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        (["3"] * 8, 4.0),
        (["1", "2", "4", "8"], 1.0),  # each bound to a core of its own
        (["ff"] * 8 + ["1"] * 8, 8.0),  # the worst host
        ([""] * 4, 0.0),  # nobody looked
    ],
)
def test_ranks_that_share_a_core_are_counted_by_host(masks: list[str], expected: float) -> None:
    assert crowd(masks).ranks_per_core == expected


def test_two_ranks_on_a_core_get_no_more_time_than_one() -> None:
    assert extra_deadline_seconds(0.0) == extra_deadline_seconds(2.0) == 0.0
    assert extra_deadline_seconds(8.0) == 18.0
