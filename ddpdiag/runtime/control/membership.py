"""Rank 0's side of the control channel: which ranks have joined, which got a signal to end, which are lost.

Events of ranks are written to the run's lines. This module does not know of checks or trials.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import structs

from ddpdiag.errors import ExitCode, RunLost
from ddpdiag.model import Arrival, Event, EventKind, Header
from ddpdiag.model.recording import Line
from ddpdiag.runtime.control.messages import (
    AnyHello,
    Downward,
    Hello,
    HelloAck,
    Leaving,
    Ping,
    Refused,
    Shutdown,
    Start,
    Upward,
)
from ddpdiag.runtime.deadlines import BEAT_PER_RANK, LOST_AFTER_SECONDS, frozen_seconds
from ddpdiag.sanitize import printable
from ddpdiag.text import count


@dataclass(frozen=True)
class Patience:
    """Time-outs of rank 0 in seconds."""

    beat: float = 1.0
    lost: float = 6.0  # supervisors answer every beat; on an overloaded machine a healthy one was once silent for 3 s
    grace: float = 1.5  # peers of a failed rank may fail in this time, which shows more than being stopped
    wind_down: float = 2.0  # ranks that launchers end with a signal may still answer in this time
    shutdown: float = 1.0  # wait for the last messages of ranks that exit


PATIENCE = Patience()
_CHECKS_PER_BEAT = 4
_BEATS_TO_ANSWER = 5
# Refused processes that are recorded for each rank; for all ranks together the square of it.
_MOST_OBJECTIONS = 64
# Stands for processes of other runs, which are recorded once; no rank has this number.
_OTHER_RUN = -1
_PING = Ping()


class Channel(Protocol):
    """Carries messages between rank 0 and the ranks: the control server, or `single_rank.OwnRank`."""

    def send(self, identity: bytes, message: Downward) -> None:
        """Send to the rank that joined with this identity."""

    def receive(self, seconds: float) -> Iterator[tuple[bytes, Upward | AnyHello]]:
        """Messages that have arrived, or that arrive within so many seconds."""

    def close(self) -> None:
        """Release all resources."""


class RunEnded(Exception):
    """The run ends because a rank or this process got a signal; `messages` are the last ones, not handled yet."""

    def __init__(self, messages: Sequence[tuple[int, Upward]] = ()) -> None:
        super().__init__()
        self.messages = messages


class Membership:
    """The ranks of a run, as rank 0 knows them.

    `signal_received` returns the signal to end that this process got, or None; `note` is called with each new line;
    `own` is rank 0's arrival.
    """

    def __init__(
        self,
        server: Channel,
        header: Header,
        signal_received: Callable[[], int | None],
        patience: Patience,
        note: Callable[[Line], None],
        own: Arrival | None = None,
    ) -> None:
        self.arrivals: dict[int, Arrival] = {}
        self.leaving: set[int] = set()
        self.lost: set[int] = set()
        self._first_signal: int | None = None
        self._server = server
        self._header = header
        self._signal_received = signal_received
        self._patience = patience
        self._note = note
        self._own = own
        self._begin = time.monotonic()
        self._identities: dict[int, bytes] = {}
        self._ranks: dict[bytes, int] = {}
        self._last_message_at: dict[int, float] = {}
        self._beat_at = 0.0
        self._checked_at = 0.0
        self._beat_seconds = max(patience.beat, BEAT_PER_RANK * header.world_size)
        self._frozen = 0.0
        self._closed = False  # whether the wait for ranks is over
        self._other_versions: set[bytes] = set()
        self._objections: Counter[int] = Counter()

    @property
    def gone(self) -> set[int]:
        """Ranks that joined and take no further part: they are lost, or got a signal to end."""
        return self.lost | self.leaving

    @property
    def signal(self) -> int | None:
        """The first signal by which a rank was asked to end, or None."""
        return self._signal_received() if self._first_signal is None else self._first_signal

    def now(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self._begin

    def clock(self) -> float:
        """Seconds that pass only while this process runs: after a stop the other ranks must not look late."""
        return time.monotonic() - self._frozen

    def gather(self, wait_seconds: float, waiting: Callable[[float], None]) -> None:
        """Wait for all ranks, at most `wait_seconds`; then send every rank its place.

        `waiting` is called again and again with the seconds that are left.
        """
        size = self._header.world_size
        try:
            while len(self.arrivals) < size and self.now() < wait_seconds:
                self.attend(0.05)
                waiting(max(0.0, wait_seconds - self.now()))
        finally:
            self._closed = True
            self.arrivals = settle(self.arrivals)
            for arrival in self.arrivals.values():
                self._note(arrival)
        # Only after the wait: a rank that had no time to join is not absent.
        for rank in sorted(set(range(size)) - set(self.arrivals)):
            self._note(Event(kind=EventKind.ABSENT, rank=rank, seconds=self.now()))
        for rank in self.arrivals:
            self._send_start(rank)

    def _send_start(self, rank: int) -> None:
        nonce = self.arrivals[0].nonce if 0 in self.arrivals else ""
        self.send(rank, Start(self.arrivals[rank].place, self._header.options.for_ranks, nonce))

    def send(self, rank: int, message: Downward) -> None:
        """Send to a rank; does nothing if it has not joined."""
        identity = self._identities.get(rank)
        if identity is not None:
            self._server.send(identity, message)

    def attend(self, seconds: float) -> list[tuple[int, Upward]]:
        """Receive, send heartbeats, find lost ranks; RunEnded if a rank or this process got a signal to end."""
        before = time.monotonic()
        messages = list(self._receive(seconds))
        now = time.monotonic()
        self._frozen += frozen_seconds(before, now)
        self._beat_if_due(now)
        self._find_lost_if_due(now)
        signum = self._signal_received()
        if signum is not None:
            self._note(Event(kind=EventKind.SIGNAL, seconds=self.now(), detail=str(signum)))
        if signum is not None or self.leaving:
            raise RunEnded(messages + self._wind_down())
        return messages

    def idle(self, seconds: float) -> None:
        """Send heartbeats for so many seconds; all messages but hellos are dropped."""
        list(self._receive(seconds))
        self._beat_if_due(time.monotonic())

    def check_not_lost(self) -> None:
        """RunLost if this process was stopped so long that other ranks ended without it, which is not their fault."""
        if self._frozen > LOST_AFTER_SECONDS and (self.lost or self._ask_all(self._patience.wind_down)[0]):
            raise RunLost(f"rank 0 was stopped for {self._frozen:.0f} s, and other ranks ended without it meanwhile")

    def _beat_if_due(self, now: float) -> None:
        if now - self._beat_at >= self._beat_seconds:
            self._beat_at = now
            for rank in self._identities:
                self.send(rank, _PING)

    def _find_lost_if_due(self, now: float) -> None:
        """Record ranks as lost that were silent for too long. Not at every message: thousands of ranks send."""
        if now - self._checked_at < self._patience.beat / _CHECKS_PER_BEAT:
            return
        self._checked_at = now
        patience = max(self._patience.lost, _BEATS_TO_ANSWER * self._beat_seconds)
        awake = self.clock()
        for rank in set(self._identities) - self.gone:
            if awake - self._last_message_at.setdefault(rank, awake) > patience:
                self._lose(rank, f"no message from it for {patience:g} s")

    def shut_down(self, exit_code: int, sentence: str) -> Shutdown:
        """Send every rank the exit code, wait 1 s at most for answers, close, and return the message that they got."""
        shutdown = Shutdown(exit_code, sentence, {rank: self.arrivals[rank].nonce for rank in sorted(self.lost)})
        for rank in self._identities:
            self.send(rank, shutdown)
        waiting = set(self._identities) - self.gone
        end = time.monotonic() + self._patience.shutdown
        while waiting and time.monotonic() < end:
            waiting -= {rank for rank, _message in self._receive(0.05)}
        self._server.close()
        return shutdown

    def _receive(self, seconds: float) -> Iterator[tuple[int, Upward]]:
        """Messages of ranks that joined. Hellos are handled here, and leaving messages are recorded."""
        for identity, message in self._server.receive(seconds):
            if isinstance(message, Hello):
                self._handle_hello(identity, message.arrival)
                continue
            if isinstance(message, AnyHello):
                self._refuse_version(identity, message.version)
                continue
            rank = self._ranks.get(identity)
            if rank is None:
                continue
            self._last_message_at[rank] = self.clock()
            if isinstance(message, Leaving) and rank not in self.leaving:
                self.leaving.add(rank)
                self._first_signal = message.signal if self._first_signal is None else self._first_signal
                self._note(Event(kind=EventKind.LEAVING, rank=rank, seconds=self.now(), detail=str(message.signal)))
            yield rank, message

    def _handle_hello(self, identity: bytes, arrival: Arrival) -> None:
        rank = arrival.place.rank
        if rank < 0:  # no launcher gives such a rank, so the sender is no part of a job: nothing is recorded
            self._server.send(identity, Refused(f"rank {rank}: expected 0 or more", ExitCode.USAGE))
            return
        arrival = structs.replace(arrival, seconds=self.now())
        known = self.arrivals.get(rank)
        if known is not None and known.nonce == arrival.nonce:
            # The same process says hello again because an answer or its relay was lost: repeat what that may have lost.
            self._server.send(identity, HelloAck())
            if self._identities.get(rank) == identity:
                self._last_message_at[rank] = self.clock()
                if self._closed:
                    self._send_start(rank)
            return
        own = self._own or self.arrivals.get(0)
        # All ranks were there at the start: a process with the number of one that says hello later is of another run.
        is_late = self._closed and known is not None and len(self.arrivals) == self._header.world_size
        if own is not None and arrival.nonce != own.nonce and (is_late or is_of_another_run(arrival, own)):
            self._refuse_other_run(identity, arrival)
            return
        refusal = objection(known, arrival, self._header.world_size)
        if refusal is not None:
            event, sentence = refusal
            # Any process may send a hundred thousand hellos, under as many rank numbers.
            if self._objections[rank] < _MOST_OBJECTIONS and self._objections.total() < _MOST_OBJECTIONS**2:
                self._objections[rank] += 1
                self._note(event)
            self._server.send(identity, Refused(sentence, ExitCode.USAGE))
        elif self._closed:
            signum = self.signal
            state = "had begun without it" if signum is None else "was ending after a signal"
            late = f"rank {rank} joined {self.now():.1f} s after the start, when the run {state}"
            self._server.send(
                identity, Refused(late, ExitCode.UNKNOWN if signum is None else ExitCode.of_signal(signum))
            )
        else:
            size = self._header.world_size
            if arrival.place.world_size != size:
                self._note(other_world_size(arrival))
            # The rank takes part all the same, so that only its world size is blamed.
            self.arrivals[rank] = structs.replace(arrival, place=structs.replace(arrival.place, world_size=size))
            self._identities[rank] = identity
            self._ranks[identity] = rank
            self._server.send(identity, HelloAck())

    def _refuse_other_run(self, identity: bytes, arrival: Arrival) -> None:
        if not self._objections[_OTHER_RUN]:
            self._objections[_OTHER_RUN] += 1
            self._note(Event(kind=EventKind.OTHER_RUN, seconds=arrival.seconds, detail=in_words(arrival)))
        self._server.send(identity, Refused("another run listens there", ExitCode.USAGE, other_run=True))

    def _refuse_version(self, identity: bytes, version: str) -> None:
        """Refuse a rank of another version: only `version` of its hello can be read, and the rank in its identity."""
        rank, _, _nonce = identity.partition(b"-")
        if not rank.isdigit() or not 0 <= int(rank) < self._header.world_size or rank in self._other_versions:
            return
        self._other_versions.add(rank)
        own, other = self._header.version, printable(version)[:40] or "an older version"
        self._note(Event(kind=EventKind.VERSION, rank=int(rank), seconds=self.now(), detail=other))
        sentence = f"rank {int(rank)} runs ddpdiag {other}, but rank 0 runs {own}; install one version on all hosts"
        self._server.send(identity, Refused(sentence, ExitCode.UNKNOWN))

    def _lose(self, rank: int, why: str) -> None:
        self.lost.add(rank)
        node = self.arrivals[rank].place.host
        self._note(Event(kind=EventKind.LOST, rank=rank, seconds=self.now(), detail=why, host=node))

    def _wind_down(self) -> list[tuple[int, Upward]]:
        """Find the ranks that died first when launchers end the run: they signal the others within 0.1 s of a death.

        A rank that answers or reports its signal lives; a silent one died first, and is lost. Returns the messages
        received.
        """
        silent, messages = self._ask_all(self._patience.wind_down)
        for rank in sorted(silent):
            self._lose(
                rank, f"no message from it for {self._patience.wind_down:g} s while the run was ended by a signal"
            )
        return messages

    def _ask_all(self, seconds: float) -> tuple[set[int], list[tuple[int, Upward]]]:
        """Ping every rank; return those that do not answer in time, and the messages of the others."""
        messages: list[tuple[int, Upward]] = []
        silent = self._identities.keys() - self.gone
        for rank in silent:
            self.send(rank, _PING)
        end = time.monotonic() + seconds
        while silent and time.monotonic() < end:
            messages += self._receive(0.05)
            silent -= {rank for rank, _message in messages}
        return silent, messages


def settle(arrivals: Mapping[int, Arrival]) -> dict[int, Arrival]:
    """The arrivals by rank, with the local rank, local world size and node that no launcher gave filled in.

    Local ranks follow the order of ranks on one host (host name and boot id).
    """
    hosts: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(arrivals):
        hosts.setdefault(arrivals[rank].host, []).append(rank)
    settled: dict[int, Arrival] = {}
    for number, ranks in enumerate(hosts.values()):
        for local, rank in enumerate(ranks):
            place = arrivals[rank].place
            known = {"local_rank": local, "local_world_size": len(ranks), "node_rank": number}
            missing = {name: value for name, value in known.items() if getattr(place, name) is None}
            settled[rank] = structs.replace(arrivals[rank], place=structs.replace(place, **missing))
    return dict(sorted(settled.items()))


def other_world_size(new: Arrival) -> Event:
    """The event that a joining rank was started with another world size than rank 0."""
    place, size = new.place, str(new.place.world_size)
    return Event(kind=EventKind.MISMATCH, rank=place.rank, seconds=new.seconds, detail=size, host=place.host)


def is_of_another_run(new: Arrival, own: Arrival) -> bool:
    """Whether a process is of another job than rank 0 (`own`): of Slurm, or of another user on rank 0's host."""
    jobs = {arrival.slurm.partition(".")[0] for arrival in (new, own)}
    users = {new.user, own.user} if new.host_id == own.host_id else set()
    return (len(jobs) > 1 and "" not in jobs) or (len(users) > 1 and "" not in users)


def in_words(arrival: Arrival) -> str:
    """A process in words, such as "user ann, pid 17 on n1, started 12 s before"."""
    parts = [f"user {arrival.user}" if arrival.user else "", f"pid {arrival.pid} on {arrival.place.host}"]
    parts += [f"job {arrival.slurm} of Slurm"] if arrival.slurm else []
    parts += [f"started {arrival.up_seconds:.0f} s before"] if arrival.up_seconds is not None else []
    return printable(", ".join(filter(None, parts)))


def objection(known: Arrival | None, new: Arrival, world_size: int) -> tuple[Event, str] | None:
    """The reason to refuse a process, as event and sentence: its rank is taken or outside the world. Else None."""
    place = new.place
    who = f"{place.host} (pid {new.pid})"
    if known is not None:
        first = f"{known.place.host} (pid {known.pid})"
        event = Event(kind=EventKind.DUPLICATE, rank=place.rank, seconds=new.seconds, detail=first, host=who)
        return event, (
            f"rank {place.rank} joined twice, from {first} and from {who}; each process needs its own rank, "
            "and each job on a host its own --master-port (or --run-id)"
        )
    if place.rank >= world_size:
        return other_world_size(new), (
            f"rank {place.rank} on {who} expects {count(place.world_size, 'rank')}, but rank 0 expects {world_size}; "
            "start all ranks with one world size"
        )
    return None
