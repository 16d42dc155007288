"""Whether hosts of lost ranks answer; nothing is sent here, since loopback is never asked."""

from msgspec import structs
from seen import arrival_of

from ddpdiag.model import Arrival, Event, EventKind
from ddpdiag.model.recording import Line
from ddpdiag.runtime.lost_hosts import add_host_answers, rank_0_answers

LOST = Event(kind=EventKind.LOST, rank=2, seconds=3.0)


def arrival(rank: int, address: str) -> Arrival:
    return structs.replace(arrival_of(rank, 4), address=address)


def answer(*lines: Line) -> bool | None:
    (event,) = (line for line in add_host_answers(lines, 1) if isinstance(line, Event))
    return event.host_answered


def test_a_host_without_a_known_address_is_not_asked() -> None:
    assert answer(arrival(0, ""), arrival(2, ""), LOST) is None
    assert answer(arrival(0, ""), arrival(2, "127.0.0.1"), LOST) is None


def test_loopback_is_no_other_host() -> None:
    assert rank_0_answers("127.0.0.1", 1) is None


def test_the_host_of_rank_0_and_absent_ranks_are_not_asked() -> None:
    assert answer(arrival(0, "192.0.2.1"), arrival(1, "192.0.2.1"), structs.replace(LOST, rank=1)) is None
    assert answer(arrival(0, ""), LOST) is None
