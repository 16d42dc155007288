"""Failover: what rank 0 leaves to the others in the shared folder, and how one of them takes its place."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from ddpdiag.codec import assemble, disassemble, read_lines
from ddpdiag.errors import RunLost
from ddpdiag.model import Arrival, End, Event, EventKind, Header, Outcome, Recording, Report, Status
from ddpdiag.model.recording import Line
from ddpdiag.probes.net.tcp_connect import answers, is_loopback, resolve
from ddpdiag.runtime.control.messages import Shutdown
from ddpdiag.runtime.deadlines import DEADLINES, ELECTION_TIMES, ElectionTimes
from ddpdiag.runtime.record.shared_folder import RUN, Note, NoteReader, SharedFolder, SharedRunLog, within


class Published(NamedTuple):
    """A report, and whether every file that was asked for could be written."""

    report: Report
    complete: bool


class Rank0Address(NamedTuple):
    """The name under which rank 0's host is known here, and the job's port there."""

    host: str
    port: int


class Handover:
    """Rank 0's side: what it shares as it happens, and what it asks before it judges.

    `folder` is the run's shared folder, `notes` looks there for ranks that do not find rank 0; None without
    `--shared-dir`.
    """

    def __init__(self, folder: Path | None, notes: NoteReader | None, lines: Callable[[], Sequence[Line]]) -> None:
        self._run_log = SharedRunLog(folder, lines) if folder is not None else None
        self._notes = notes
        self._readers: tuple[int, ...] = ()

    def explain(self, lines: Sequence[Line], at: Rank0Address) -> list[Line]:
        """The lines, with what absent ranks wrote, and whether hosts of lost ones answer.

        RunLost when another rank has made the report by now.
        """
        if self._run_log is not None and self._run_log.was_replaced(DEADLINES.replaced):
            raise RunLost("rank 0 did not run for so long that another rank made the report in its place")
        notes = self._notes.stop() if self._notes is not None else {}
        explained = with_host_answers(with_notes(lines, notes), 0, at.host, at.port)
        self._readers = tuple(unreachable_ranks(explained))
        return explained

    def close(self, shutdown: Shutdown) -> None:
        """Write the verdict for ranks that cannot receive messages any more, and remove the shared files."""
        if self._run_log is not None:
            self._run_log.close(shutdown, self._readers, DEADLINES.readers if self._readers else 0.0)


def with_notes(lines: Sequence[Line], notes: Mapping[int, Note]) -> list[Line]:
    """The lines with the notes of absent ranks."""
    noted = list(lines)
    for place, line in enumerate(lines):
        if not isinstance(line, Event) or line.kind is not EventKind.ABSENT or line.rank is None:
            continue
        if (note := notes.get(line.rank)) is not None:
            noted[place] = structs.replace(line, node=note.node, detail=note.sentence)
    return noted


def unreachable_ranks(lines: Sequence[Line]) -> list[int]:
    """Lost ranks that may live: their hosts do not answer, so perhaps the network to them is cut."""
    hosts = {line.place.rank: line.host for line in lines if isinstance(line, Arrival)}
    lost = [line for line in lines if isinstance(line, Event) and line.kind is EventKind.LOST and not line.answers]
    return [e.rank for e in lost if e.rank is not None and hosts.get(e.rank) not in (None, hosts.get(0))]


def verdict_without_rank_0(
    shared: SharedFolder, header: Header, begin: float, at: Rank0Address, publish: Callable[[Sequence[Line]], Published]
) -> tuple[Shutdown, str] | None:
    """The verdict, and a sentence for the user; None if there is none. The lowest living rank makes it itself.

    `begin` is when this process started, on the monotonic clock.
    """
    made: list[Published] = []

    def take_over(candidates: tuple[int, ...]) -> Shutdown:
        # Rank 0's own lines first, which count: it settled places and times.
        lines = read_lines([shared.folder / RUN, *sorted(shared.folder.glob("rank-*.jsonl"))])
        known = list(without_rank_0(lines, header, candidates, time.monotonic() - begin))
        published = publish(with_host_answers(known, header.writer, at.host, at.port))
        made.append(published)
        nonces = {line.place.rank: line.nonce for line in known if isinstance(line, Arrival)}
        gone = {rank: nonce for rank, nonce in nonces.items() if rank not in candidates}
        return Shutdown(published.report.exit_code, published.report.sentence, gone)

    shutdown = Election(shared, header.writer, take_over).run()
    if shutdown is None:
        return None
    if not made:
        return shutdown, f"the verdict was read from {shared.path.parent}: {shutdown.sentence}"
    if not made[0].complete:
        return shutdown, f"the records of the run are kept in {shared.path}"
    within(DEADLINES.remove_shared, shared.remove)
    return shutdown, "this rank made the report"


# The election --------------------------------------------------------------------------------------------------------

# So that a thousand waiting ranks ask a file server a thousand times a second, not five thousand.
_LOOK_SECONDS_PER_CANDIDATE = 0.001
_MOST_LOOK_SECONDS = 1.0  # well below what the successor waits for its readers


class Election:
    """One rank's part when rank 0 is lost; `take_over` gets the living ranks, makes the report and returns the verdict.

    Each rank that has lost rank 0 leaves a mark. After a grace, in which the others notice, too, the lowest of them
    claims rank 0's place, reads what all have written, judges, publishes, and leaves the verdict in the folder; the
    others wait for that, and all leave with the same exit code. If it dies, the next one takes over. Where rank 0's
    heartbeat goes on in the folder, only the way to it is cut: its own verdict is waited for, so that there are never
    two reports.
    """

    def __init__(
        self,
        shared: SharedFolder,
        rank: int,
        take_over: Callable[[tuple[int, ...]], Shutdown],
        turns: ElectionTimes = ELECTION_TIMES,
    ) -> None:
        self._shared = shared
        self._rank = rank
        self._take_over = take_over
        self._turns = turns

    def run(self) -> Shutdown | None:
        """The verdict, or None if no rank made one; it takes no longer than its turns, whatever a file server does."""
        return within(self._turns.total, self._run)

    def _run(self) -> Shutdown | None:
        heartbeat = self._shared.heartbeat()
        verdict = self._wait_for_verdict(self._turns.grace)
        if verdict is not None:
            return verdict
        if self._shared.heartbeat() != heartbeat:
            return self._wait_for_verdict(self._turns.alive)
        for turn in range(self._turns.count):
            candidates = self._shared.ranks("candidate", self._rank)
            if candidates[turn : turn + 1] == (self._rank,) and self._shared.claim(turn, self._rank):
                return self._lead(turn, candidates)
            if (verdict := self._wait_for_verdict(self._turns.turn)) is not None:
                return verdict
        return None

    def _wait_for_verdict(self, seconds: float) -> Shutdown | None:
        end = time.monotonic() + seconds
        candidates = len(self._shared.ranks("candidate", self._rank))
        pause = max(self._turns.look, min(_LOOK_SECONDS_PER_CANDIDATE * candidates, _MOST_LOOK_SECONDS))
        while True:
            self._shared.refresh(self._rank)  # or NFS would go on saying that there is no such file
            if (verdict := self._shared.verdict()) is not None:
                with contextlib.suppress(OSError):  # nobody may wait for that any more
                    self._shared.mark("read", self._rank)
                return verdict
            if time.monotonic() > end:
                return None
            time.sleep(pause)

    def _lead(self, turn: int, candidates: tuple[int, ...]) -> Shutdown | None:
        end = time.monotonic() + self._turns.ready
        while not set(candidates) <= set(self._shared.ranks("ready", self._rank)) and time.monotonic() < end:
            time.sleep(self._turns.look)
        if max(self._shared.ranks("leader", self._rank), default=-1) != turn:
            # This process stood still, and the next one went on.
            return self._wait_for_verdict(self._turns.turn)
        shutdown = self._take_over(candidates)
        self._shared.write_verdict(shutdown)
        self._shared.wait_for_readers(candidates, self._rank, self._turns.readers)
        return shutdown


def without_rank_0(lines: list[Line], header: Header, candidates: tuple[int, ...], seconds: float) -> Iterator[Line]:
    """The run as its successor records it: a rank that left no mark is lost. `header` is the successor's own."""
    known = assemble([*lines, header])
    recording = structs.replace(
        known,
        header=structs.replace(known.header, writer=header.writer),
        events=(*known.events, *_lost(known, candidates, seconds)),
        outcomes=(*known.outcomes, *_unheard(known, {0, *known.arrivals} - {*candidates})),
        end=End(seconds=seconds),
    )
    return disassemble(recording)


def _lost(known: Recording, candidates: tuple[int, ...], seconds: float) -> Iterator[Event]:
    explained = _ranks(known, EventKind.LOST) | _ranks(known, EventKind.LEAVING)
    for rank, arrival in known.arrivals.items():
        if rank not in candidates and rank not in explained:
            why, node = "no sign of it after rank 0 was lost", arrival.place.node
            yield Event(kind=EventKind.LOST, rank=rank, seconds=seconds, node=node, detail=why)


def _ranks(known: Recording, kind: EventKind) -> set[int | None]:
    return {event.rank for event in known.events if event.kind is kind}


def _unheard(known: Recording, gone: Set[int]) -> Iterator[Outcome]:
    """Their part in the trial that was running; one that reported a signal to end is not at fault."""
    heard = {(outcome.trial, outcome.rank) for outcome in known.outcomes}
    leaving = _ranks(known, EventKind.LEAVING) - _ranks(known, EventKind.LOST)
    for trial in known.trials:
        for rank in trial.ranks:
            if rank in gone and (trial.number, rank) not in heard:
                told = rank in leaving
                status, error = (Status.SKIPPED, "") if told else (Status.UNHEARD, "it was lost")
                yield Outcome(trial=trial.number, code=trial.code, rank=rank, status=status, error=error, told=told)


# Hosts of lost ranks -------------------------------------------------------------------------------------------------

# A kernel answers for closed ports, too; behind a firewall that lets only some ports through, ssh's is the likeliest.
_SSH_PORT = 22
_MOST_HOSTS = 64  # where more are lost at once, these say enough


def with_host_answers(lines: Sequence[Line], me: int, coordinator: str, port: int) -> list[Line]:
    """The lines, in which lost ranks on other hosts than that of rank `me` record whether their host answers.

    Rank 0's host is looked for under the name `coordinator`. Takes a second or two when a rank was lost.
    """
    arrivals = {line.place.rank: line for line in lines if isinstance(line, Arrival)}
    lost = {line.rank for line in lines if isinstance(line, Event) and line.kind is EventKind.LOST}
    hosts = {arrivals[rank].host: rank for rank in lost if rank in arrivals}
    if me in arrivals:
        hosts.pop(arrivals[me].host, None)
    if not hosts:
        return list(lines)
    some = dict(islice(hosts.items(), _MOST_HOSTS))
    with ThreadPoolExecutor(len(some)) as pool:
        said = pool.map(lambda rank: _answers(arrivals, rank, coordinator, port), some.values())
        heard = dict(zip(some, said, strict=True))
    return [
        structs.replace(line, answers=heard.get(arrivals[line.rank].host))
        if isinstance(line, Event) and line.kind is EventKind.LOST and line.rank in arrivals
        else line
        for line in lines
    ]


def _answers(arrivals: Mapping[int, Arrival], rank: int, coordinator: str, port: int) -> bool | None:
    """None where no address of it is known: a name that cannot be resolved proves nothing about the host."""
    own = arrivals[rank]
    addresses: tuple[str, ...] = (own.address,)
    if 0 in arrivals and own.host == arrivals[0].host:  # rank 0 reached itself over loopback
        addresses = resolve(coordinator, port, DEADLINES.host_answer) or ()
    asked = [address for address in addresses[:2] if address and not is_loopback(address)]
    return any(answers(address, (port, _SSH_PORT), DEADLINES.host_answer) for address in asked) if asked else None
