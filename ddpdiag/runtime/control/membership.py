"""Membership: which ranks have joined, which are leaving, which are lost. Rank 0's side of the control channel.

It notes what happens to ranks in the run's lines, and knows nothing of checks and trials.
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
    lost: float = 6.0  # supervisors answer every beat; on an overloaded machine a healthy one was seen silent for 3 s
    grace: float = 1.5  # peers of a failed rank may fail by themselves, which shows more than being stopped
    wind_down: float = 2.0  # launchers kill the ranks that can still answer; this long they may
    shutdown: float = 1.0  # for the last messages of ranks that exit


PATIENCE = Patience()
_LOOKS_A_BEAT = 4
_BEATS_TO_ANSWER = 5
# Noted of each rank; of all together the square of it.
_MOST_OBJECTIONS = 64
# Processes of other runs are noted once; no rank has this number.
_OTHER_RUN = -1
_PING = Ping()


class Channel(Protocol):
    """Carries messages between rank 0 and the ranks: the control server, or `single_rank.OwnRank`."""

    def send(self, identity: bytes, message: Downward) -> None:
        """Send to the rank that joined with this identity."""

    def receive(self, seconds: float) -> Iterator[tuple[bytes, Upward | AnyHello]]:
        """Messages that have arrived, or arrive within so many seconds."""

    def close(self) -> None:
        """Give back what it holds."""


class RunEnded(Exception):
    """The run cannot go on: a signal, or ranks that leave. What was seen so far is judged, with the `messages` that
    came last."""

    def __init__(self, messages: Sequence[tuple[int, Upward]] = ()) -> None:
        super().__init__()
        self.messages = messages


class Membership:
    """The ranks of a run.

    `signal_received` gives the signal that this process got, or None; `note` takes each event; `own` is rank 0's
    arrival.
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
        self._heard: dict[int, float] = {}
        self._beat = 0.0
        self._looked = 0.0
        self._beat_seconds = max(patience.beat, BEAT_PER_RANK * header.world_size)
        self._frozen = 0.0
        self._closed = False  # no more hellos
        self._other_versions: set[bytes] = set()
        self._objections: Counter[int] = Counter()

    @property
    def gone(self) -> set[int]:
        """Ranks that joined and can do nothing more."""
        return self.lost | self.leaving

    @property
    def signal(self) -> int | None:
        """The first signal to end that a rank got, or None."""
        return self._signal_received() if self._first_signal is None else self._first_signal

    def now(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self._begin

    def clock(self) -> float:
        """Seconds that pass only while this process runs: a suspended one must not find all others late."""
        return time.monotonic() - self._frozen

    def gather(self, wait_seconds: float, waiting: Callable[[float], None]) -> None:
        """Wait for all ranks, at most so long; then send every rank its place.

        `waiting` gets the seconds that are left, again and again.
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
        # Not before: a rank that had no time to join is not absent.
        for rank in sorted(set(range(size)) - set(self.arrivals)):
            self._note(Event(kind=EventKind.ABSENT, rank=rank, seconds=self.now()))
        for rank in self.arrivals:
            self._send_start(rank)

    def _send_start(self, rank: int) -> None:
        nonce = self.arrivals[0].nonce if 0 in self.arrivals else ""
        self.send(rank, Start(self.arrivals[rank].place, self._header.options.for_ranks, nonce))

    def send(self, rank: int, message: Downward) -> None:
        """Send to a rank, if it joined."""
        identity = self._identities.get(rank)
        if identity is not None:
            self._server.send(identity, message)

    def attend(self, seconds: float) -> list[tuple[int, Upward]]:
        """Receive, send heartbeats, find lost ranks; RunEnded when ranks or this process got a signal to end."""
        before = time.monotonic()
        messages = list(self._receive(seconds))
        now = time.monotonic()
        self._frozen += frozen_seconds(before, now)
        self._beat_if_due(now)
        self._look_if_due(now)
        signum = self._signal_received()
        if signum is not None:
            self._note(Event(kind=EventKind.SIGNAL, seconds=self.now(), detail=str(signum)))
        if signum is not None or self.leaving:
            raise RunEnded(messages + self._wind_down())
        return messages

    def idle(self, seconds: float) -> None:
        """Send heartbeats, and ignore messages."""
        list(self._receive(seconds))
        self._beat_if_due(time.monotonic())

    def check_not_lost(self) -> None:
        """RunLost where this process was stopped so long that others ended without it: that is not their fault."""
        if self._frozen > LOST_AFTER_SECONDS and (self.lost or self._ask_all(self._patience.wind_down)[0]):
            raise RunLost(f"rank 0 was stopped for {self._frozen:.0f} s, and other ranks ended without it meanwhile")

    def _beat_if_due(self, now: float) -> None:
        if now - self._beat >= self._beat_seconds:
            self._beat = now
            for rank in self._identities:
                self.send(rank, _PING)

    def _look_if_due(self, now: float) -> None:
        """Ranks that have been silent for too long are lost. Not checked at every message of thousands of ranks."""
        if now - self._looked < self._patience.beat / _LOOKS_A_BEAT:
            return
        self._looked = now
        patience = max(self._patience.lost, _BEATS_TO_ANSWER * self._beat_seconds)
        awake = self.clock()
        for rank in set(self._identities) - self.gone:
            if awake - self._heard.setdefault(rank, awake) > patience:
                self._lose(rank, f"no message from it for {patience:g} s")

    def shut_down(self, exit_code: int, sentence: str) -> Shutdown:
        """Send every rank the exit code, and exit last; returns the message that they got."""
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
        """Messages of ranks; hellos are handled here."""
        for identity, message in self._server.receive(seconds):
            if isinstance(message, Hello):
                self._greet(identity, message.arrival)
                continue
            if isinstance(message, AnyHello):
                self._refuse_version(identity, message.version)
                continue
            rank = self._ranks.get(identity)
            if rank is None:
                continue
            self._heard[rank] = self.clock()
            if isinstance(message, Leaving) and rank not in self.leaving:
                self.leaving.add(rank)
                self._first_signal = message.signal if self._first_signal is None else self._first_signal
                self._note(Event(kind=EventKind.LEAVING, rank=rank, seconds=self.now(), detail=str(message.signal)))
            yield rank, message

    def _greet(self, identity: bytes, arrival: Arrival) -> None:
        rank = arrival.place.rank
        if rank < 0:  # a stranger: no launcher gives such a rank, and nothing is noted of it
            self._server.send(identity, Refused(f"rank {rank}: expected 0 or more", ExitCode.USAGE))
            return
        arrival = structs.replace(arrival, seconds=self.now())
        known = self.arrivals.get(rank)
        if known is not None and known.nonce == arrival.nonce:
            # The same process again, after a lost answer, or after its relay was: what that may have lost.
            self._server.send(identity, HelloAck())
            if self._identities.get(rank) == identity:
                self._heard[rank] = self.clock()
                if self._closed:
                    self._send_start(rank)
            return
        own = self._own or self.arrivals.get(0)
        # All ranks were there when the run began: one that comes later was not started twice with them.
        is_late = self._closed and known is not None and len(self.arrivals) == self._header.world_size
        if own is not None and arrival.nonce != own.nonce and (is_late or is_of_another_run(arrival, own)):
            self._refuse_other_run(identity, arrival)
            return
        refusal = objection(known, arrival, self._header.world_size)
        if refusal is not None:
            event, sentence = refusal
            # A stranger may send a hundred thousand hellos, under as many numbers.
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
            # It can take part all the same, so that only its world size is to blame.
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
        """Of its hello only the version is sure to be read, and of its identity the rank."""
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
        """The ranks to blame when launchers end the run: they kill the ranks that live within 0.1 s of a death.

        A rank that sends a leaving message, or answers, lives; a silent one is the dead one. Returns their messages.
        """
        silent, messages = self._ask_all(self._patience.wind_down)
        for rank in sorted(silent):
            self._lose(
                rank, f"no message from it for {self._patience.wind_down:g} s while the run was ended by a signal"
            )
        return messages

    def _ask_all(self, seconds: float) -> tuple[set[int], list[tuple[int, Upward]]]:
        """Ping every rank: those that do not answer in time, and the messages of the others."""
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
    """The arrivals by rank, with what launchers left open filled in.

    A local rank that no launcher gave is the order of ranks on one host (host name and boot id).
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
    """The event for a newcomer that was started with another world size than rank 0."""
    place, size = new.place, str(new.place.world_size)
    return Event(kind=EventKind.MISMATCH, rank=place.rank, seconds=new.seconds, detail=size, host=place.host)


def is_of_another_run(new: Arrival, own: Arrival) -> bool:
    """Whether a newcomer belongs to another job than rank 0 (`own`): of Slurm, or of another user of one host."""
    jobs = {arrival.slurm.partition(".")[0] for arrival in (new, own)}
    users = {new.user, own.user} if new.host_id == own.host_id else set()
    return (len(jobs) > 1 and "" not in jobs) or (len(users) > 1 and "" not in users)


def in_words(arrival: Arrival) -> str:
    """The process for people: "user ann, pid 17 on n1, started 12 s ago"."""
    parts = [f"user {arrival.user}" if arrival.user else "", f"pid {arrival.pid} on {arrival.place.host}"]
    parts += [f"job {arrival.slurm} of Slurm"] if arrival.slurm else []
    parts += [f"started {arrival.up_seconds:.0f} s before"] if arrival.up_seconds is not None else []
    return printable(", ".join(filter(None, parts)))


def objection(known: Arrival | None, new: Arrival, world_size: int) -> tuple[Event, str] | None:
    """Why a newcomer cannot take part: its rank is taken, or outside the world. The event, and the sentence for it."""
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
