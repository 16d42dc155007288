"""When rank 0 is lost: the lowest living rank makes the report in its place, over the shared folder.

Each rank that heard nothing of rank 0 leaves a sign. After a grace, in which the others notice, too, the lowest of them
claims rank 0's place, reads what all have written, judges, publishes, and leaves the verdict in the folder; the others
wait for that, and all leave with the same exit code. If it dies, the next one takes over. Where rank 0's beat goes on
in the folder, only the way to it is cut: its own verdict is waited for, so that there are never two reports.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from msgspec import structs

from ddpdiag.codec import assemble, disassemble
from ddpdiag.model import End, Event, EventKind, Header, Outcome, Recording, Status
from ddpdiag.model.recording import Line
from ddpdiag.runtime.control.messages import Shutdown
from ddpdiag.runtime.shared import Signs

# So that a thousand waiting ranks ask a file server a thousand times a second, not five thousand.
_LOOK_SECONDS_PER_HEIR = 0.001
_MOST_LOOK_SECONDS = 1.0  # well below what the successor waits for its readers


@dataclass(frozen=True)
class Turns:
    """How long is waited for what, in seconds."""

    look: float = 0.2
    grace: float = 2.5  # rank 0 beats every second, and a supervisor looks every half: so much later others may notice
    ready: float = 4.0  # a hung worker is dumped for 0.5 s and killed within 2 s; and the way through a file server
    turn: float = 10.0  # so long a successor may take, until the next one does
    count: int = 3
    readers: float = 3.0
    alive: float = 20.0  # rank 0 loses us after 6 s, and ends the trial that was running

    @property
    def total(self) -> float:
        """What all of it takes at most."""
        return self.grace + max(self.alive, self.turn * self.count) + self.ready + self.readers


TURNS = Turns()


class Succession:
    """One rank's part. `take_over` gets the living ranks, makes the report and returns the verdict."""

    def __init__(
        self, signs: Signs, rank: int, take_over: Callable[[tuple[int, ...]], Shutdown], turns: Turns = TURNS
    ) -> None:
        self._signs = signs
        self._rank = rank
        self._take_over = take_over
        self._turns = turns

    def run(self) -> Shutdown | None:
        """The verdict, or None if nobody made one; it takes no longer than its turns, whatever a file server does."""
        attempt = ThreadPoolExecutor(1).submit(self._run)
        try:
            return attempt.result(self._turns.total)
        except (OSError, TimeoutError):
            return None

    def _run(self) -> Shutdown | None:
        beat = self._signs.beat()
        word = self._await_word(self._turns.grace)
        if word is not None:
            return word
        if self._signs.beat() != beat:
            return self._await_word(self._turns.alive)
        for turn in range(self._turns.count):
            heirs = self._signs.ranks("heir", self._rank)
            if heirs[turn : turn + 1] == (self._rank,) and self._signs.claim(turn, self._rank):
                return self._lead(turn, heirs)
            if (word := self._await_word(self._turns.turn)) is not None:
                return word
        return None

    def _await_word(self, seconds: float) -> Shutdown | None:
        end = time.monotonic() + seconds
        pause = self._pause()
        while True:
            self._signs.refresh(self._rank)  # or NFS would go on saying that there is no such file
            if (word := self._signs.word()) is not None:
                with contextlib.suppress(OSError):  # nobody may wait for that any more
                    self._signs.put("read", self._rank)
                return word
            if time.monotonic() > end:
                return None
            time.sleep(pause)

    def _pause(self) -> float:
        heirs = len(self._signs.ranks("heir", self._rank))
        return max(self._turns.look, min(_LOOK_SECONDS_PER_HEIR * heirs, _MOST_LOOK_SECONDS))

    def _lead(self, turn: int, heirs: tuple[int, ...]) -> Shutdown | None:
        end = time.monotonic() + self._turns.ready
        while not set(heirs) <= set(self._signs.ranks("ready", self._rank)) and time.monotonic() < end:
            time.sleep(self._turns.look)
        if max(self._signs.ranks("chief", self._rank), default=-1) != turn:  # we stood still, and the next one went on
            return self._await_word(self._turns.turn)
        farewell = self._take_over(heirs)
        self._signs.write_word(farewell)
        self._signs.await_readers(heirs, self._rank, self._turns.readers)
        return farewell


def inherited(lines: list[Line], header: Header, heirs: tuple[int, ...], seconds: float) -> Iterator[Line]:
    """The run as its successor tells it: who left no sign is lost. `header` is the successor's own."""
    known = assemble([*lines, header])
    recording = structs.replace(
        known,
        header=structs.replace(known.header, writer=header.writer),
        events=(*known.events, *(_event(known, rank, seconds) for rank in _lost(known, heirs))),
        outcomes=(*known.outcomes, *_unheard(known, {0, *known.arrivals} - {*heirs})),
        end=End(seconds=seconds),
    )
    return disassemble(recording)


def _lost(known: Recording, heirs: tuple[int, ...]) -> list[int]:
    told = _ranks(known, EventKind.LOST) | _ranks(known, EventKind.LEAVING)
    return [rank for rank in known.arrivals if rank not in heirs and rank not in told]


def _ranks(known: Recording, kind: EventKind) -> set[int | None]:
    return {event.rank for event in known.events if event.kind is kind}


def _event(known: Recording, rank: int, seconds: float) -> Event:
    node = known.arrivals[rank].place.node
    return Event(
        kind=EventKind.LOST, rank=rank, seconds=seconds, node=node, detail="it left no sign after rank 0 was lost"
    )


def _unheard(known: Recording, gone: Set[int]) -> Iterator[Outcome]:
    """Their part in the trial that was running; who said that it was told to leave is a bystander."""
    heard = {(outcome.trial, outcome.rank) for outcome in known.outcomes}
    leaving = _ranks(known, EventKind.LEAVING) - _ranks(known, EventKind.LOST)
    for trial in known.trials:
        for rank in trial.ranks:
            if rank in gone and (trial.number, rank) not in heard:
                told = rank in leaving
                status, error = (Status.SKIPPED, "") if told else (Status.UNHEARD, "it was lost")
                yield Outcome(trial=trial.number, code=trial.code, rank=rank, status=status, error=error, told=told)
