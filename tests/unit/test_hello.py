"""The places that rank 0 settles, and the hellos that it refuses."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from seen import arrival_of

from ddpdiag.model import Arrival, EventKind
from ddpdiag.runtime.control.membership import complete_places, reason_to_refuse


def nameless(rank: int, size: int, ranks_per_node: int) -> Arrival:
    arrival = arrival_of(rank, size, ranks_per_node=ranks_per_node)
    place = structs.replace(arrival.place, local_rank=None, local_world_size=None, node_rank=None)
    return structs.replace(arrival, place=place)


@given(st.integers(1, 12), st.integers(1, 4), st.randoms(use_true_random=False))
def test_local_ranks_are_the_order_of_ranks_on_a_host(size: int, per_node: int, random: object) -> None:
    arrivals = {rank: nameless(rank, size, per_node) for rank in range(size)}
    shuffled = dict(sorted(arrivals.items(), key=lambda _item: random.random()))  # type: ignore[attr-defined]
    settled = complete_places(shuffled)
    assert list(settled) == list(range(size))
    assert [a.place.local_rank for a in settled.values()] == [rank % per_node for rank in range(size)]
    assert [a.place.node_rank for a in settled.values()] == [rank // per_node for rank in range(size)]


def test_what_a_launcher_said_is_kept() -> None:
    arrival = arrival_of(1, 2)
    place = structs.replace(arrival.place, local_rank=0, local_world_size=8)
    settled = complete_places({1: structs.replace(arrival, place=place)})
    assert (settled[1].place.local_rank, settled[1].place.local_world_size) == (0, 8)


def test_two_hosts_of_one_name_are_two_hosts() -> None:
    twins = {rank: structs.replace(nameless(rank, 2, 1), host_id=f"boot-{rank}") for rank in (0, 1)}
    same_name = {rank: structs.replace(a, place=structs.replace(a.place, host="host")) for rank, a in twins.items()}
    assert [a.place.local_rank for a in complete_places(same_name).values()] == [0, 0]


def test_a_second_process_with_a_rank_is_refused_and_both_are_named(golden) -> None:
    event, sentence = reason_to_refuse(arrival_of(1, 2), structs.replace(arrival_of(1, 2), pid=7), 2) or (None, "")
    assert event is not None
    assert (event.kind, event.rank) == (EventKind.DUPLICATE, 1)
    golden(sentence)


def test_a_rank_outside_the_world_is_refused(golden) -> None:
    event, sentence = reason_to_refuse(None, arrival_of(5, 8), 4) or (None, "")
    assert event is not None
    assert event.kind is EventKind.MISMATCH
    golden(sentence)


def test_a_newcomer_in_its_place_is_welcome() -> None:
    assert reason_to_refuse(None, arrival_of(1, 2), 2) is None
