"""Whether hosts of lost ranks answer; nothing is sent here, since loopback is never asked."""

from msgspec import structs
from seen import arrival_of

from ddpdiag.model import Arrival, Event, EventKind
from ddpdiag.model.recording import Line
from ddpdiag.runtime.record.failover import with_host_answers

LOST = Event(kind=EventKind.LOST, rank=2, seconds=3.0)


def arrival(rank: int, address: str) -> Arrival:
    return structs.replace(arrival_of(rank, 4), address=address)


def answer(me: int, *lines: Line) -> bool | None:
    (event,) = (line for line in with_host_answers(lines, me, "localhost", 1) if isinstance(line, Event))
    return event.answers


def test_a_host_whose_address_nobody_knows_was_not_asked() -> None:
    assert answer(0, arrival(0, ""), arrival(2, ""), LOST) is None
    assert answer(0, arrival(0, ""), arrival(2, "127.0.0.1"), LOST) is None


def test_where_the_name_of_rank_0_means_no_other_host_that_was_not_asked() -> None:
    assert answer(2, arrival(0, "127.0.0.1"), arrival(2, ""), structs.replace(LOST, rank=0)) is None


def test_the_own_host_and_ranks_that_never_came_are_not_asked() -> None:
    assert answer(3, arrival(2, "192.0.2.1"), arrival(3, "192.0.2.1"), LOST) is None
    assert answer(0, arrival(0, ""), LOST) is None
