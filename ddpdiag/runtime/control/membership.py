"""The membership of a run, kept by rank 0: the ranks that have joined, received a signal to end, or are lost.

Each change is recorded as an `Event`. This module knows nothing of checks and trials.
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
    Hello,
    HelloAck,
    Leaving,
    MessageToRank,
    MessageToRank0,
    OtherVersionHello,
    Ping,
    Refused,
    Shutdown,
    Start,
)
from ddpdiag.runtime.deadlines import HEARTBEAT_SECONDS_PER_RANK, LOST_AFTER_SECONDS, frozen_seconds
from ddpdiag.sanitize import printable
from ddpdiag.text import count


@dataclass(frozen=True)
class Patience:
    """Time-outs of rank 0 in seconds."""

    heartbeat: float = 1.0  # between two heartbeats
    silence: float = 6.0  # after it a rank is lost; on an overloaded machine a healthy one was once silent for 3 s
    grace: float = 1.5  # peers of a failed rank may still fail in this time: their errors show more than a stop would
    wind_down: float = 2.0  # ranks that a launcher ends with a signal may still answer in this time
    shutdown: float = 1.0  # wait for the last messages of ranks that exit


PATIENCE = Patience()
_CHECKS_PER_HEARTBEAT = 4
_HEARTBEATS_TO_ANSWER = 5  # a rank is lost after so many without an answer; heartbeats are rare in a large world
# The most refusals that are recorded for one rank. For all ranks together the limit is the square of this number.
_MAX_REFUSALS = 64
# The key in `_refusal_counts` for processes of other runs, which are recorded once. No rank has this number.
_OTHER_RUN = -1
_PING = Ping()


class Channel(Protocol):
    """Rank 0's connection to all ranks: the control server, or `single_rank.SingleRank`."""

    def send(self, identity: bytes, message: MessageToRank) -> None:
        """Send to the rank that joined with this identity."""

    def receive(self, seconds: float) -> Iterator[tuple[bytes, MessageToRank0 | OtherVersionHello]]:
        """Yield messages that have arrived or arrive within so many seconds, each with its sender's identity."""

    def close(self) -> None:
        """Release all resources."""


class RunEnded(Exception):
    """The run ends because a rank or this process got a signal. `messages` were received, but not handled yet."""

    def __init__(self, messages: Sequence[tuple[int, MessageToRank0]]) -> None:
        self.messages = messages


class Membership:
    """The ranks of a run, as rank 0 knows them.

    `signal_received` returns the signal to end that this process got, or None. `write_line` gets each new line of the
    recording. `own_arrival` is rank 0's arrival, or None if rank 0 joins like any other rank.
    """

    def __init__(
        self,
        server: Channel,
        header: Header,
        signal_received: Callable[[], int | None],
        patience: Patience,
        write_line: Callable[[Line], None],
        own_arrival: Arrival | None = None,
    ) -> None:
        self.arrivals: dict[int, Arrival] = {}
        self.leaving_ranks: set[int] = set()
        self.lost_ranks: set[int] = set()
        self._first_signal: int | None = None
        self._server = server
        self._header = header
        self._signal_received = signal_received
        self._patience = patience
        self._write_line = write_line
        self._own_arrival = own_arrival
        self._begin = time.monotonic()
        self._identities: dict[int, bytes] = {}
        self._ranks: dict[bytes, int] = {}
        self._last_message_at: dict[int, float] = {}
        self._heartbeat_at = 0.0
        self._checked_at = 0.0
        self._heartbeat_seconds = max(patience.heartbeat, HEARTBEAT_SECONDS_PER_RANK * header.world_size)
        self._frozen_seconds = 0.0
        self._is_closed = False  # whether the wait for ranks is over, so that no further rank can join
        self._ranks_of_other_versions: set[bytes] = set()
        self._refusal_counts: Counter[int] = Counter()

    @property
    def gone_ranks(self) -> set[int]:
        """Ranks that joined and take no further part: they are lost, or got a signal to end."""
        return self.lost_ranks | self.leaving_ranks

    @property
    def signal(self) -> int | None:
        """The first signal by which a rank was asked to end, or None."""
        return self._signal_received() if self._first_signal is None else self._first_signal

    def now(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self._begin

    def clock(self) -> float:
        """The monotonic time without stops of this process. After a stop the other ranks must not look late."""
        return time.monotonic() - self._frozen_seconds

    def gather(self, wait_seconds: float, report_wait: Callable[[float], None]) -> None:
        """Wait for all ranks until `wait_seconds` after the start. Then record arrivals, and send each rank its place.

        Meanwhile `report_wait` is called repeatedly with the seconds that are left.
        """
        size = self._header.world_size
        try:
            while len(self.arrivals) < size and self.now() < wait_seconds:
                self.attend(0.05)
                report_wait(max(0.0, wait_seconds - self.now()))
        finally:
            self._is_closed = True
            self.arrivals = complete_places(self.arrivals)
            for arrival in self.arrivals.values():
                self._write_line(arrival)
        # Only after the wait: a rank that had no time to join is not absent.
        for rank in sorted(set(range(size)) - set(self.arrivals)):
            self._write_line(Event(kind=EventKind.ABSENT, rank=rank, seconds=self.now()))
        for rank in self.arrivals:
            self._send_start(rank)

    def _send_start(self, rank: int) -> None:
        nonce = self.arrivals[0].nonce if 0 in self.arrivals else ""
        self.send(rank, Start(self.arrivals[rank].place, self._header.options.for_ranks, nonce))

    def send(self, rank: int, message: MessageToRank) -> None:
        """Send to a rank. Does nothing if the rank has not joined."""
        identity = self._identities.get(rank)
        if identity is not None:
            self._server.send(identity, message)

    def attend(self, seconds: float) -> list[tuple[int, MessageToRank0]]:
        """Receive messages, send heartbeats, and find lost ranks. RunEnded if a rank or this process got a signal."""
        before = time.monotonic()
        messages = list(self._receive(seconds))
        now = time.monotonic()
        self._frozen_seconds += frozen_seconds(before, now)
        self._send_heartbeats_if_due(now)
        self._find_lost_if_due(now)
        signum = self._signal_received()
        if signum is not None:
            self._write_line(Event(kind=EventKind.SIGNAL, seconds=self.now(), detail=str(signum)))
        if signum is not None or self.leaving_ranks:
            raise RunEnded(messages + self._find_dead_ranks())
        return messages

    def send_heartbeats(self) -> None:
        """Send heartbeats if due. For at most 0.05 s, handles hellos and `Leaving`, and drops other messages."""
        list(self._receive(0.05))
        self._send_heartbeats_if_due(time.monotonic())

    def check_not_lost(self) -> None:
        """RunLost if this process was stopped for so long that other ranks counted it as lost, and ended."""
        stopped_seconds = self._frozen_seconds
        if stopped_seconds > LOST_AFTER_SECONDS and (self.lost_ranks or self._ping_all(self._patience.wind_down)[0]):
            raise RunLost(f"rank 0 was stopped for {stopped_seconds:.0f} s, and other ranks ended without it meanwhile")

    def _send_heartbeats_if_due(self, now: float) -> None:
        if now - self._heartbeat_at >= self._heartbeat_seconds:
            self._heartbeat_at = now
            for rank in self._identities:
                self.send(rank, _PING)

    def _find_lost_if_due(self, now: float) -> None:
        """Record ranks that were silent for too long as lost. Does so four times per heartbeat at most."""
        if now - self._checked_at < self._patience.heartbeat / _CHECKS_PER_HEARTBEAT:
            return
        self._checked_at = now
        patience = max(self._patience.silence, _HEARTBEATS_TO_ANSWER * self._heartbeat_seconds)
        awake = self.clock()
        for rank in set(self._identities) - self.gone_ranks:
            if awake - self._last_message_at.setdefault(rank, awake) > patience:
                self._lose(rank, f"no message from it for {patience:g} s")

    def shut_down(self, exit_code: int, sentence: str) -> Shutdown:
        """Send every rank a `Shutdown`, wait at most 1 s for answers, close the channel, and return the message."""
        shutdown = Shutdown(exit_code, sentence, {rank: self.arrivals[rank].nonce for rank in sorted(self.lost_ranks)})
        for rank in self._identities:
            self.send(rank, shutdown)
        waiting = set(self._identities) - self.gone_ranks
        end = time.monotonic() + self._patience.shutdown
        while waiting and time.monotonic() < end:
            waiting -= {rank for rank, _message in self._receive(0.05)}
        self._server.close()
        return shutdown

    def _receive(self, seconds: float) -> Iterator[tuple[int, MessageToRank0]]:
        """Yield messages of ranks that joined, with their ranks. Answers hellos, and records `Leaving` messages."""
        for identity, message in self._server.receive(seconds):
            if isinstance(message, Hello):
                self._handle_hello(identity, message.arrival)
                continue
            if isinstance(message, OtherVersionHello):
                self._refuse_version(identity, message.version)
                continue
            rank = self._ranks.get(identity)
            if rank is None:
                continue
            self._last_message_at[rank] = self.clock()
            if isinstance(message, Leaving) and rank not in self.leaving_ranks:
                self.leaving_ranks.add(rank)
                self._first_signal = message.signal if self._first_signal is None else self._first_signal
                event = Event(kind=EventKind.LEAVING, rank=rank, seconds=self.now(), detail=str(message.signal))
                self._write_line(event)
            yield rank, message

    def _handle_hello(self, identity: bytes, arrival: Arrival) -> None:
        rank = arrival.place.rank
        if rank < 0:  # no launcher sets such a rank, so the sender is no part of a job: nothing is recorded
            self._server.send(identity, Refused(f"rank {rank}: expected 0 or more", ExitCode.USAGE))
            return
        arrival = structs.replace(arrival, seconds=self.now())
        known = self.arrivals.get(rank)
        if known is not None and known.nonce == arrival.nonce:
            # The same process sends its hello again, because an answer or its relay was lost. Repeat the answers.
            self._server.send(identity, HelloAck())
            if self._identities.get(rank) == identity:
                self._last_message_at[rank] = self.clock()
                if self._is_closed:
                    self._send_start(rank)
            return
        rank_0_arrival = self._own_arrival or self.arrivals.get(0)
        # If all ranks joined before the start, a later process with one of their numbers is of another run.
        is_late = self._is_closed and known is not None and len(self.arrivals) == self._header.world_size
        if (
            rank_0_arrival is not None
            and arrival.nonce != rank_0_arrival.nonce
            and (is_late or is_of_another_run(arrival, rank_0_arrival))
        ):
            self._refuse_other_run(identity, arrival)
            return
        refusal = reason_to_refuse(known, arrival, self._header.world_size)
        if refusal is not None:
            event, sentence = refusal
            # Any process may send a hundred thousand hellos, under as many rank numbers.
            if self._refusal_counts[rank] < _MAX_REFUSALS and self._refusal_counts.total() < _MAX_REFUSALS**2:
                self._refusal_counts[rank] += 1
                self._write_line(event)
            self._server.send(identity, Refused(sentence, ExitCode.USAGE))
        elif self._is_closed:
            signum = self.signal
            state = "had begun without it" if signum is None else "was ending after a signal"
            sentence = f"rank {rank} joined {self.now():.1f} s after the start, when the run {state}"
            exit_code = ExitCode.UNKNOWN if signum is None else ExitCode.of_signal(signum)
            self._server.send(identity, Refused(sentence, exit_code))
        else:
            size = self._header.world_size
            if arrival.place.world_size != size:
                self._write_line(world_size_event(arrival))
            # The rank takes part nevertheless, so that only its world size is blamed.
            self.arrivals[rank] = structs.replace(arrival, place=structs.replace(arrival.place, world_size=size))
            self._identities[rank] = identity
            self._ranks[identity] = rank
            self._server.send(identity, HelloAck())

    def _refuse_other_run(self, identity: bytes, arrival: Arrival) -> None:
        if not self._refusal_counts[_OTHER_RUN]:
            self._refusal_counts[_OTHER_RUN] += 1
            self._write_line(Event(kind=EventKind.OTHER_RUN, seconds=arrival.seconds, detail=describe_process(arrival)))
        self._server.send(identity, Refused("another run listens there", ExitCode.USAGE, other_run=True))

    def _refuse_version(self, identity: bytes, version: str) -> None:
        """Refuse a process of another version. Reads its rank from its identity, because its arrival is not decoded."""
        rank, _, _nonce = identity.partition(b"-")
        if not rank.isdigit() or not 0 <= int(rank) < self._header.world_size or rank in self._ranks_of_other_versions:
            return
        self._ranks_of_other_versions.add(rank)
        own, other = self._header.version, printable(version)[:40] or "an older version"
        self._write_line(Event(kind=EventKind.VERSION, rank=int(rank), seconds=self.now(), detail=other))
        sentence = f"rank {int(rank)} runs ddpdiag {other}, but rank 0 runs {own}; install one version on all hosts"
        self._server.send(identity, Refused(sentence, ExitCode.UNKNOWN))

    def _lose(self, rank: int, reason: str) -> None:
        self.lost_ranks.add(rank)
        host = self.arrivals[rank].place.host
        self._write_line(Event(kind=EventKind.LOST, rank=rank, seconds=self.now(), detail=reason, host=host))

    def _find_dead_ranks(self) -> list[tuple[int, MessageToRank0]]:
        """Record as lost the ranks that died before a signal ended the run. Returns messages received meanwhile.

        Launchers signal the other ranks within 0.1 s of a rank's death. So a rank that does not answer died first.
        """
        silent, messages = self._ping_all(self._patience.wind_down)
        for rank in sorted(silent):
            silence = f"no message from it for {self._patience.wind_down:g} s"
            self._lose(rank, f"{silence} while the run was ended by a signal")
        return messages

    def _ping_all(self, seconds: float) -> tuple[set[int], list[tuple[int, MessageToRank0]]]:
        """Ping every rank. Returns the ranks that do not answer in time, and the messages of the other ranks."""
        messages: list[tuple[int, MessageToRank0]] = []
        silent = self._identities.keys() - self.gone_ranks
        for rank in silent:
            self.send(rank, _PING)
        end = time.monotonic() + seconds
        while silent and time.monotonic() < end:
            messages += self._receive(0.05)
            silent -= {rank for rank, _message in messages}
        return silent, messages


def complete_places(arrivals: Mapping[int, Arrival]) -> dict[int, Arrival]:
    """The arrivals by rank. Local ranks, local world sizes and node ranks that no launcher set are filled in.

    Local ranks are numbered in the order of ranks on one host (host name and boot id).
    """
    hosts: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(arrivals):
        hosts.setdefault(arrivals[rank].host, []).append(rank)
    settled: dict[int, Arrival] = {}
    for node_rank, ranks in enumerate(hosts.values()):
        for local_rank, rank in enumerate(ranks):
            place = arrivals[rank].place
            values = {"local_rank": local_rank, "local_world_size": len(ranks), "node_rank": node_rank}
            missing = {name: value for name, value in values.items() if getattr(place, name) is None}
            settled[rank] = structs.replace(arrivals[rank], place=structs.replace(place, **missing))
    return dict(sorted(settled.items()))


def world_size_event(new: Arrival) -> Event:
    """The event that the rank of `new` was started with another world size than rank 0."""
    place, size = new.place, str(new.place.world_size)
    return Event(kind=EventKind.MISMATCH, rank=place.rank, seconds=new.seconds, detail=size, host=place.host)


def is_of_another_run(new: Arrival, rank_0_arrival: Arrival) -> bool:
    """Whether a process is in another Slurm job than rank 0, or on rank 0's host but of another user."""
    jobs = {arrival.slurm_step.partition(".")[0] for arrival in (new, rank_0_arrival)}
    users = {new.user, rank_0_arrival.user} if new.host_id == rank_0_arrival.host_id else set()
    return (len(jobs) > 1 and "" not in jobs) or (len(users) > 1 and "" not in users)


def describe_process(arrival: Arrival) -> str:
    """A process in words, such as "user ann, pid 17 on n1, job 7 of Slurm, started 12 s before"."""
    parts = [f"user {arrival.user}" if arrival.user else "", f"pid {arrival.pid} on {arrival.place.host}"]
    parts += [f"job {arrival.slurm_step} of Slurm"] if arrival.slurm_step else []
    parts += [f"started {arrival.process_age_seconds:.0f} s before"] if arrival.process_age_seconds is not None else []
    return printable(", ".join(filter(None, parts)))


def reason_to_refuse(known: Arrival | None, new: Arrival, world_size: int) -> tuple[Event, str] | None:
    """The reason to refuse the process `new`, as event and sentence, or None. `known` joined earlier with its rank."""
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
        return world_size_event(new), (
            f"rank {place.rank} on {who} expects {count(place.world_size, 'rank')}, but rank 0 expects {world_size}; "
            "start all ranks with one world size"
        )
    return None
