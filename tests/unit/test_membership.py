"""Who says hello to rank 0, and how much of it is noted."""

from collections import Counter
from collections.abc import Iterator

from msgspec import structs
from seen import arrival_of

from ddpdiag.model import Arrival, Event, EventKind, Header, RunOptions
from ddpdiag.model.recording import Line
from ddpdiag.runtime.control.membership import Membership, Patience
from ddpdiag.runtime.control.messages import (
    Hello,
    HelloAck,
    MessageToRank,
    MessageToRank0,
    OtherVersionHello,
    Ping,
    Refused,
    Start,
)

Said = tuple[bytes, MessageToRank0 | OtherVersionHello]


class StandIn:
    """A channel on which all of this was said at once."""

    def __init__(self, said: list[Said]) -> None:
        self.said = said
        self.answers: list[tuple[bytes, MessageToRank]] = []

    def send(self, identity: bytes, message: MessageToRank) -> None:
        self.answers.append((identity, message))

    def receive(self, seconds: float) -> Iterator[Said]:
        now, self.said = self.said, []
        yield from now

    def close(self) -> None: ...


def membership_of(channel: StandIn, world_size: int = 2, own: Arrival | None = None) -> tuple[Membership, list[Event]]:
    """Rank 0's membership on this channel, and the events that it notes."""
    events: list[Event] = []
    header = Header(run_id="r", world_size=world_size, launcher="hand", options=RunOptions(), created="", version="0")

    def write(line: Line) -> None:
        if isinstance(line, Event):
            events.append(line)

    return Membership(channel, header, lambda: None, Patience(), write, own), events


def noted(*said: Said, world_size: int = 2) -> tuple[Counter[EventKind], StandIn]:
    """How often each kind of event is noted."""
    channel = StandIn(list(said))
    membership, events = membership_of(channel, world_size)
    membership.attend(0.0)
    return Counter(event.kind for event in events), channel


def hello(rank: int, number: int) -> Said:
    arrival = structs.replace(arrival_of(0, 2), nonce=f"{number:08x}", pid=number)
    return b"%d-%08x" % (rank, number), Hello(structs.replace(arrival, place=structs.replace(arrival.place, rank=rank)))


def test_of_a_hundred_thousand_processes_with_one_rank_some_are_noted_and_all_are_refused() -> None:
    kinds, channel = noted(*(hello(0, number) for number in range(10_000)))
    assert kinds == {EventKind.DUPLICATE: 64}
    assert sum(isinstance(message, Refused) for _, message in channel.answers) == 9_999


def test_of_as_many_ranks_outside_of_the_world_too() -> None:
    kinds, _channel = noted(*(hello(number, number) for number in range(2, 20_000)))
    assert kinds == {EventKind.MISMATCH: 64**2}


def test_a_rank_with_another_world_size_takes_part_and_is_noted() -> None:
    kinds, channel = noted(hello(0, 1), world_size=4)
    assert kinds == {EventKind.MISMATCH: 1}
    assert [type(message) for _identity, message in channel.answers if not isinstance(message, Ping)] == [HelloAck]


def test_ranks_that_never_join_are_noted() -> None:
    membership, events = membership_of(StandIn([hello(1, 1)]), 4)
    membership.gather(0.2, lambda _left: None)
    assert [event.rank for event in events if event.kind is EventKind.ABSENT] == [0, 2, 3]


def test_a_rank_of_another_version_is_noted_once_and_told() -> None:
    kinds, channel = noted((b"1-00000001", OtherVersionHello("9.9\x1b[31m")), (b"1-00000002", OtherVersionHello("9.9")))
    assert kinds == {EventKind.VERSION: 1}
    ((_identity, refused),) = channel.answers
    assert isinstance(refused, Refused)
    assert "9.9" in refused.sentence
    assert refused.sentence.isprintable()
    assert refused.exit_code == 3


def test_who_has_no_rank_of_this_world_is_not_noted() -> None:
    for identity in (b"", b"x", b"-1-00000001", b"2-00000001", b"\xff\xfe"):
        kinds, channel = noted((identity, OtherVersionHello("9.9")))
        assert (kinds, channel.answers) == ({}, [])


def test_a_rank_that_says_hello_again_after_the_start_gets_what_it_may_have_missed() -> None:
    channel = StandIn([hello(0, 1)])
    membership, _ = membership_of(channel, 1)
    membership.gather(1.0, lambda _left: None)
    before = [type(message) for _identity, message in channel.answers if not isinstance(message, Ping)]
    assert before == [HelloAck, Start]
    channel.said, channel.answers = [hello(0, 1)], []
    membership.attend(0.0)
    assert [type(message) for _identity, message in channel.answers if not isinstance(message, Ping)] == before


def test_ranks_of_another_job_or_user_and_late_ones_are_of_another_run() -> None:
    own = structs.replace(arrival_of(0, 2), nonce="own", slurm_step="7.0", user="ann")
    others = {
        "another job": {"slurm_step": "8.0"},
        "another user": {"user": "bob"},
        "the same job": {"slurm_step": "7"},
        "another user elsewhere": {"user": "bob", "host_id": "another"},
    }
    channel = StandIn([])
    membership, events = membership_of(channel, 8, own)
    for number, fields in enumerate(others.values(), 1):
        arrival = structs.replace(own, nonce=str(number), place=structs.replace(own.place, rank=number), **fields)
        channel.said.append((b"%d-x" % number, Hello(arrival)))
    membership.attend(0.0)
    refused = {identity for identity, message in channel.answers if isinstance(message, Refused) and message.other_run}
    assert refused == {b"1-x", b"2-x"}
    assert sorted(membership.arrivals) == [3, 4]
    (event,) = (event for event in events if event.kind is EventKind.OTHER_RUN)
    assert "job 8.0 of Slurm" in event.detail


def test_one_that_comes_when_all_are_there_and_the_run_has_begun_is_of_another_run() -> None:
    channel = StandIn([hello(0, 1), hello(1, 2)])
    membership, events = membership_of(channel)
    membership.gather(5.0, lambda _left: None)
    channel.said = [hello(0, 3), hello(1, 4)]
    membership.attend(0.0)
    assert [event.kind for event in events] == [EventKind.OTHER_RUN]
    assert sum(isinstance(message, Refused) and message.other_run for _, message in channel.answers) == 2
