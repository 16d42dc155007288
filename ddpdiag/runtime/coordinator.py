"""The coordinator: rank 0 asks each check for its next trials, hands them out, and waits for all, or the deadline."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import structs

from ddpdiag.check import Check, Scope, Seen, Stage, World, with_number
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.codec import assemble
from ddpdiag.errors import ExitCode
from ddpdiag.judgement.selection import asked_for, selected
from ddpdiag.model import Arrival, End, Event, EventKind, Header, Kind, Outcome, Recording, Skip, Status, Trial
from ddpdiag.model.recording import Line
from ddpdiag.runtime.board import Hub
from ddpdiag.runtime.flight import Flight
from ddpdiag.runtime.gathering import absent, objection, settle
from ddpdiag.runtime.messages import (
    Downward,
    Farewell,
    Hello,
    Leaving,
    Open,
    Order,
    Ready,
    Refused,
    Result,
    RollCall,
    Seated,
    Stop,
    Upward,
    Welcome,
)
from ddpdiag.runtime.running import IMPORT_STEP

AnyCheck = Check[Any]

# Kept back from the budget for judgement, report and farewell.
RESERVE_SECONDS = 3.0


@dataclass(frozen=True)
class Patience:
    """How long rank 0 waits, in seconds."""

    beat: float = 1.0
    lost: float = 6.0  # supervisors answer every beat; on an overloaded machine a healthy one was seen silent for 3 s
    grace: float = 1.5  # peers of a failed rank may fail by themselves, which says more than being stopped
    wind_down: float = 2.0  # launchers kill the witnesses; this long they may still speak


class Listener(Protocol):
    """Whoever shows progress."""

    def stage_started(self, name: str) -> None:
        """A stage begins."""

    def check_started(self, code: str, name: str) -> None:
        """A check begins."""

    def stage_ended(self, name: str, status: str, seconds: float) -> None:
        """A stage is over."""


class RunEnded(Exception):
    """The run cannot go on: a signal, ranks that leave, or the budget. What was seen so far is judged."""


class Coordinator:
    """One run, from the first hello to the farewell.

    `told_to_leave` gives the signal that this process got, or None.
    """

    def __init__(
        self,
        hub: Hub,
        header: Header,
        checks: Sequence[AnyCheck],
        listener: Listener,
        told_to_leave: Callable[[], int | None],
        patience: Patience = Patience(),
    ) -> None:
        self._patience = patience
        self._hub = hub
        self._header = header
        self._checks = checks
        self._listener = listener
        self._told_to_leave = told_to_leave
        self._begin = time.monotonic()
        self._lines: list[Line] = [header]
        self._arrivals: dict[int, Arrival] = {}
        self._identities: dict[int, bytes] = {}
        self._ranks: dict[bytes, int] = {}
        self._heard: dict[int, float] = {}
        self._out: dict[int, str] = {}
        self._leaving: set[int] = set()
        self._beat = 0.0
        self._closed = False  # no more hellos

    # The run ---------------------------------------------------------------------------------------------------------

    def conduct(self, wait_seconds: float) -> Recording:
        """Gather, run all checks, and return what was seen; never raises for what ranks do."""
        try:
            self._gather(wait_seconds)
            self._run_checks()
        except RunEnded:
            pass
        self._lines.append(End(seconds=self._now()))
        return self.recording()

    def recording(self) -> Recording:
        """The run so far."""
        return assemble(self._lines)

    def lines(self) -> tuple[Line, ...]:
        """The run so far, line by line."""
        return tuple(self._lines)

    def farewell(self, exit_code: int, sentence: str) -> None:
        """Tell every rank the exit code, and leave last."""
        lost = tuple(rank for rank in self._arrivals if rank in self._out and rank not in self._leaving)
        waiting = set(self._identities)
        for rank in waiting:
            self._send(rank, Farewell(exit_code, sentence, lost))
        waiting -= set(lost)
        end = time.monotonic() + 1.0
        while waiting and time.monotonic() < end:
            waiting -= {rank for rank, _message in self._receive(0.05)}
        self._hub.close()

    def _now(self) -> float:
        return time.monotonic() - self._begin

    # Arrivals --------------------------------------------------------------------------------------------------------

    def _gather(self, wait_seconds: float) -> None:
        size = self._header.world_size
        while len(self._arrivals) < size and self._now() < wait_seconds:
            self._attend(0.05)
        self._closed = True
        self._arrivals = settle(self._arrivals)
        self._lines.extend(self._arrivals.values())
        missing = absent(self._arrivals, size, self._now())
        self._lines.extend(missing)
        for rank, arrival in self._arrivals.items():
            self._send(rank, Welcome(arrival.place, self._header.options))

    def _greet(self, identity: bytes, arrival: Arrival) -> None:
        rank = arrival.place.rank
        arrival = structs.replace(arrival, seconds=self._now())
        known = self._arrivals.get(rank)
        if known is not None and (known.pid, known.host_id) == (arrival.pid, arrival.host_id):
            known = None  # the same process again, by another port or after a lost answer
        refusal = objection(known, arrival, self._header.world_size)
        if refusal is not None:
            event, sentence = refusal
            self._lines.append(event)
            self._hub.send(identity, Refused(sentence, ExitCode.USAGE))
        elif self._closed:
            late = f"rank {rank} came {self._now():.1f} s after the start, when the run had begun without it"
            self._hub.send(identity, Refused(late, ExitCode.UNKNOWN))
        else:
            self._arrivals[rank] = arrival
            self._identities[rank] = identity
            self._ranks[identity] = rank
            self._hub.send(identity, Seated())

    # Messages --------------------------------------------------------------------------------------------------------

    def _send(self, rank: int, message: Downward) -> None:
        identity = self._identities.get(rank)
        if identity is not None:
            self._hub.send(identity, message)

    def _receive(self, seconds: float) -> Iterator[tuple[int, Upward]]:
        """Messages of ranks; hellos are dealt with here."""
        for identity, message in self._hub.receive(seconds):
            if isinstance(message, Hello):
                self._greet(identity, message.arrival)
                continue
            rank = self._ranks.get(identity)
            if rank is None:
                continue
            self._heard[rank] = time.monotonic()
            if isinstance(message, Leaving):
                self._note_leaving(rank, message.signal)
            yield rank, message

    def _attend(self, seconds: float) -> list[tuple[int, Upward]]:
        """Receive, beat, notice who is lost; RunEnded when ranks or this process were told to leave."""
        messages = list(self._receive(seconds))
        now = time.monotonic()
        if now - self._beat >= self._patience.beat:
            self._beat = now
            for rank in self._identities:
                self._send(rank, RollCall())
        for rank in self._identities:
            if rank not in self._out and now - self._heard.setdefault(rank, now) > self._patience.lost:
                self._lose(rank, f"nothing was heard of it for {self._patience.lost:g} s")
        signum = self._told_to_leave()
        if signum is not None:
            self._lines.append(Event(kind=EventKind.SIGNAL, seconds=self._now(), detail=str(signum)))
        if signum is not None or self._leaving:
            self._wind_down()
            raise RunEnded
        return messages

    def _note_leaving(self, rank: int, signum: int) -> None:
        if rank not in self._leaving:
            self._leaving.add(rank)
            self._out[rank] = "told to leave"
            self._lines.append(Event(kind=EventKind.LEAVING, rank=rank, seconds=self._now(), detail=str(signum)))

    def _lose(self, rank: int, why: str) -> None:
        self._out[rank] = "lost"
        node = self._arrivals[rank].place.node
        self._lines.append(Event(kind=EventKind.LOST, rank=rank, seconds=self._now(), detail=why, node=node))

    def _wind_down(self) -> None:
        """Who is to blame when launchers end the run: they kill the witnesses within 0.1 s of a death.

        Who says leaving, or answers, is a witness; who is silent is the dead one.
        """
        silent = {rank for rank in self._identities if rank not in self._out}
        for rank in silent:
            self._send(rank, RollCall())
        end = time.monotonic() + self._patience.wind_down
        while silent and time.monotonic() < end:
            silent -= {rank for rank, _message in self._receive(0.05)}
        for rank in sorted(silent):
            self._lose(
                rank, f"it was silent for {self._patience.wind_down:g} s while the others were told to leave"
            )

    # Checks ----------------------------------------------------------------------------------------------------------

    def _run_checks(self) -> None:
        chosen = [check for check in self._checks if selected(check, self._header.options)]
        # Plain ones first: they run while the nurseries import torch.
        for kind in (Kind.PLAIN, Kind.TORCH):
            for stage in Stage:
                of_stage = [c for c in chosen if c.stage is stage and c.kind is kind and c.measure is not None]
                if of_stage:
                    self._run_stage(stage, of_stage)

    def _run_stage(self, stage: Stage, checks: Sequence[AnyCheck]) -> None:
        begin = self._now()
        self._listener.stage_started(stage.value)
        before = len(self._lines)
        for check in checks:
            self._run_check(check)
        new = self._lines[before:]
        failed = any(isinstance(line, Outcome) and line.status is not Status.DONE for line in new)
        self._listener.stage_ended(stage.value, "failed" if failed else "done", self._now() - begin)

    def _run_check(self, check: AnyCheck) -> None:
        skip = self._reason_to_skip(check)
        if skip is not None:
            self._lines.append(skip)
            return
        self._listener.check_started(check.code, check.name)
        while trials := check.plan(self._seen(check)):
            for trial in trials:
                if any(rank in self._out for rank in trial.ranks):
                    return
                self._run_trial(trial)

    def _reason_to_skip(self, check: AnyCheck) -> Skip | None:
        world = self._world()
        if reason := check.ground(world):
            return Skip(code=check.code, reason=reason, grounds=not asked_for(check, self._header.options))
        if not world.living:
            return Skip(code=check.code, reason="no rank can take part", grounds=False)
        missing = [rank for rank in range(world.size) if rank not in world.living]
        if check.scope is Scope.WORLD and missing:
            reason = f"it needs all {world.size} ranks, and {ranks_text(missing)} cannot take part"
            return Skip(code=check.code, reason=reason, grounds=False)
        for other in self._checks:
            if other.code in check.needs and not self._went_well(other):
                reason = f"{other.code} ({other.name}) did not go well"
                return Skip(code=check.code, reason=reason, grounds=False)
        return None

    def _went_well(self, check: AnyCheck) -> bool:
        seen = self._seen(check)
        return all(seen.went_well(trial) for trial in seen.trials)

    def _world(self) -> World:
        header = self._header
        return World(
            size=header.world_size,
            launcher=header.launcher,
            options=header.options,
            arrivals=self._arrivals,
            out=frozenset(self._out),
        )

    def _seen(self, check: AnyCheck) -> Seen[Any]:
        return Seen(self._world(), check, self.recording())

    # Trials ----------------------------------------------------------------------------------------------------------

    def _run_trial(self, planned: Trial) -> None:
        left = self._header.options.budget_seconds - self._now() - RESERVE_SECONDS
        if left < 1.0:
            spent = f"before {planned.code} could run"
            self._lines.append(Event(kind=EventKind.BUDGET, seconds=self._now(), detail=spent))
            raise RunEnded
        number = sum(isinstance(line, Trial) for line in self._lines) + 1
        trial = with_number(planned, number, min(planned.deadline_seconds, left))
        self._lines.append(trial)
        flight = Flight(trial)
        for rank in trial.ranks:
            self._send(rank, Order(trial))
        try:
            while flight.pending:
                for rank, message in self._attend(0.05):
                    self._take(flight, rank, message)
                self._tend(flight)
        except RunEnded:
            self._close(flight)
            raise

    def _take(self, flight: Flight, rank: int, message: Upward) -> None:
        match message:
            case Ready(trial=number, offer=offer) if number == flight.trial.number:
                flight.offers[rank] = offer
                self._open_gate(flight, flight.trial.group_of(rank))
            case Result(outcome) if outcome.trial == flight.trial.number and outcome.rank == rank:
                self._book(flight, outcome)
            case _:
                pass

    def _book(self, flight: Flight, outcome: Outcome) -> None:
        self._lines.append(outcome)
        flight.pending.discard(outcome.rank)
        if outcome.status is not Status.DONE:
            flight.fail(outcome.rank)
        if outcome.at == IMPORT_STEP and outcome.status is not Status.DONE:
            self._out[outcome.rank] = "it has no torch"

    def _open_gate(self, flight: Flight, group: tuple[int, ...]) -> None:
        if not all(rank in flight.offers for rank in group):
            return
        first = group[0]
        for rank in group:
            self._send(rank, Open(flight.trial.number, self._address(first, group), flight.offers[first]))

    def _address(self, rank: int, group: tuple[int, ...]) -> str:
        """Where its group reaches a rank: at its address towards rank 0; on rank 0's host, at rank 0's name."""
        own = self._arrivals[rank]
        hosts = {self._arrivals[other].host_id for other in group}
        if len(hosts) == 1:
            return "127.0.0.1"
        return own.coordinator if own.host_id == self._arrivals[0].host_id else own.address

    def _tend(self, flight: Flight) -> None:
        """Close what cannot end by itself: lost ranks, peers of failed ones, and what is long past its deadline."""
        for rank in [rank for rank in flight.pending if rank in self._out and rank not in self._leaving]:
            self._unheard(flight, rank)
        now = time.monotonic()
        for group, since in flight.failed.items():
            if now - since > self._patience.grace and group not in flight.stopped:
                flight.stopped.add(group)
                for rank in flight.pending.intersection(group):
                    self._send(rank, Stop(flight.trial.number))
        if now > flight.latest:
            for rank in list(flight.pending):
                self._unheard(flight, rank)

    def _unheard(self, flight: Flight, rank: int) -> None:
        trial = flight.trial
        why = self._out.get(rank, "its supervisor sent no outcome")
        flight.pending.discard(rank)
        flight.fail(rank)
        self._lines.append(
            Outcome(
                trial=trial.number, code=trial.code, rank=rank, status=Status.UNHEARD, error=why, seconds=flight.age()
            )
        )

    def _close(self, flight: Flight) -> None:
        """The run ends in the middle of a trial: who was lost is unheard, everybody else was told to stop."""
        trial = flight.trial
        for rank in sorted(flight.pending):
            lost = self._out.get(rank) == "lost"
            status = Status.UNHEARD if lost else Status.SKIPPED
            self._lines.append(
                Outcome(
                    trial=trial.number, code=trial.code, rank=rank, status=status, told=not lost, seconds=flight.age()
                )
            )
