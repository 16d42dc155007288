"""The coordinator: rank 0 asks each check for its next trials, sends them to the ranks, and collects the outcomes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ddpdiag.checks.api import Check, Scope, Seen, SkipKind, Stage
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.checks.world import World
from ddpdiag.codec import extend
from ddpdiag.judgement.selection import selected
from ddpdiag.model import (
    IMPORT_STEP,
    Arrival,
    End,
    Event,
    EventKind,
    Header,
    Kind,
    Outcome,
    Recording,
    Skip,
    Status,
    Trial,
)
from ddpdiag.model.news import CheckBegan, Listener, Progressed, Started
from ddpdiag.model.recording import TOLD_TO_LEAVE, Line
from ddpdiag.runtime.control.membership import PATIENCE, Channel, Membership, Patience, RunEnded
from ddpdiag.runtime.control.messages import Ack, BarrierReached, Partial, Shutdown, Stop, Upward
from ddpdiag.runtime.coordinator.dispatch import (
    BudgetSpent,
    DispatchedTrial,
    KeptGroup,
    ProgressReporter,
    kept_seconds,
    too_late,
    with_number,
)
from ddpdiag.runtime.deadlines import DEADLINES
from ddpdiag.runtime.record import SharedRecord

AnyCheck = Check[Any]


def _by_stage(checks: Sequence[AnyCheck]) -> list[tuple[Stage, list[AnyCheck]]]:
    by_stage = ((stage, [check for check in checks if check.stage is stage]) for stage in Stage)
    return [(stage, in_stage) for stage, in_stage in by_stage if in_stage]


class Coordinator:
    """Runs one run on rank 0, from the first hello to the shutdown.

    `signal_received` returns the signal to end that this process got, or None; `shared` is the record in
    `--shared-dir`.
    """

    def __init__(
        self,
        server: Channel,
        header: Header,
        checks: Sequence[AnyCheck],
        listener: Listener,
        signal_received: Callable[[], int | None],
        patience: Patience = PATIENCE,
        shared: SharedRecord | None = None,
        own: Arrival | None = None,
    ) -> None:
        self._header = header
        self._checks = checks
        self._tell = listener.tell
        self._progress = ProgressReporter(listener)
        self._patience = patience
        self._shared = shared
        self._lines: list[Line] = []
        self._write(header)
        self._assembled = 1  # number of lines that `_recording` holds
        self._recording = Recording(header=header)
        self._known_world: World | None = None
        self._membership = Membership(server, header, signal_received, patience, self._note, own)
        self._without_torch: set[int] = set()
        self._torch_is_there = False
        self._kept_group = KeptGroup(header.world_size)
        self._last_checks: list[AnyCheck] = []  # checks that run last and have not run yet

    def run(self, wait_seconds: float) -> Recording:
        """Wait for the ranks, run all checks, and return the recording; no failure of a rank raises an error."""
        try:
            self._gather(wait_seconds)
            self._run_checks()
        except (RunEnded, BudgetSpent):
            pass
        self._write(End(seconds=self._membership.now()))
        return self.recording()

    def _gather(self, wait_seconds: float) -> None:
        size, budget_seconds = self._header.world_size, self._header.options.budget_seconds
        self._tell(Started(budget_seconds=budget_seconds))
        self._membership.gather(
            min(wait_seconds, budget_seconds - DEADLINES.reserve),
            lambda left: self._progress.waiting(self._membership.arrivals, size, left),
        )
        self._progress.gathered(self._membership.arrivals, size)

    def _write(self, line: Line) -> None:
        self._lines.append(line)
        if self._shared is not None:
            self._shared.write(line)

    def _note(self, line: Line) -> None:
        self._write(line)
        self._progress.saw_line(line)

    def recording(self) -> Recording:
        """The recording of all lines up to now."""
        if new := self._lines[self._assembled :]:
            self._recording = extend(self._recording, new)
            self._assembled += len(new)
        return self._recording

    def lines(self) -> tuple[Line, ...]:
        """All lines up to now."""
        return tuple(self._lines)

    def idle(self) -> None:
        """Send heartbeats for 0.05 s; another thread judges and writes meanwhile."""
        self._membership.idle(0.05)

    def late_signal(self) -> int | None:
        """The signal by which a rank was asked to end after all trials, or None."""
        return None if any(event.kind in TOLD_TO_LEAVE for event in self._recording.events) else self._membership.signal

    def check_not_lost(self) -> None:
        """RunLost if the other ranks ended the run without rank 0, while it was stopped."""
        self._membership.check_not_lost()

    def shut_down(self, exit_code: int, sentence: str) -> Shutdown:
        """Send every rank the exit code, wait 1 s at most for answers, and return the message that they got."""
        return self._membership.shut_down(exit_code, sentence)

    @property
    def _unable(self) -> set[int]:
        """Ranks that joined but can take part in no further trial."""
        return self._membership.gone | self._without_torch

    def _run_checks(self) -> None:
        chosen = [c for c in self._checks if c.measure is not None and selected(c, self._header.options)]
        self._last_checks = [check for check in chosen if check.last_seconds is not None]
        # Plain checks are first: they run while the fork servers import torch.
        before = [check for check in chosen if check.last_seconds is None or check.plan(self._seen(check))]
        usual = [part for kind in (Kind.PLAIN, Kind.TORCH) for part in _by_stage([c for c in before if c.kind is kind])]
        last = _by_stage(self._last_checks)
        # Progress counts a stage as done before the checks that run last, because these only compare.
        self._progress.planned(stage for stage, _checks in usual)
        # Once the budget is spent, checks that run last may still run, because time was kept for some of them.
        for parts in (usual, last):
            for stage, checks in parts:
                if self._run_stage(stage, checks, is_last=parts is last):
                    break

    def _run_stage(self, stage: Stage, checks: Sequence[AnyCheck], *, is_last: bool) -> bool:
        """Run a part of a stage; return whether the budget was spent in it."""
        begin, before, spent = self._membership.now(), len(self._lines), False
        self._progress.stage_began(stage)
        try:
            for check in checks:
                self._run_check(check, is_last=is_last)
        except BudgetSpent:
            spent = True  # `_run_trial` has recorded this
        self._progress.stage_ended(stage, self._lines[before:], self._membership.now() - begin, cut=spent)
        return spent

    def _run_check(self, check: AnyCheck, *, is_last: bool) -> None:
        if is_last:
            self._last_checks = [other for other in self._last_checks if other is not check]
        skip = self._reason_to_skip(check, is_last=is_last)
        if skip is not None:
            self._write(skip)
            return
        seen, kept = self._seen(check, is_last=is_last), self._kept_seconds()
        takes = check.last_seconds(seen) if is_last and check.last_seconds and check.plan(seen) else 0.0
        if takes and (reason := too_late(self._left_seconds(kept), takes)):
            self._write(Skip(code=check.code, reason=reason, grounds=False))
            return
        self._tell(CheckBegan(code=check.code, name=check.name))
        while trials := check.plan(replace(self._seen(check, is_last=is_last), left_seconds=self._left_seconds(kept))):
            for trial in trials:
                if gone := self._unable.intersection(trial.ranks):
                    reason = f"{ranks_text(sorted(gone))} can take no further part"
                    self._write(Skip(code=check.code, reason=reason, grounds=False))
                    return
                self._run_trial(trial, kept)

    def _left_seconds(self, kept: float) -> float:
        """Seconds of the budget that trials may still take."""
        return self._header.options.budget_seconds - self._membership.now() - DEADLINES.reserve - kept

    def _kept_seconds(self) -> float:
        """Seconds of the budget that are kept for checks that run last and still plan a trial."""
        takes = [
            check.last_seconds(seen)
            for check in self._last_checks
            if check.last_seconds is not None
            and self._reason_to_skip(check, is_last=True) is None
            and check.plan(seen := self._seen(check, is_last=True))
        ]
        return kept_seconds(self._header.options.budget_seconds, takes)

    def _reason_to_skip(self, check: AnyCheck, *, is_last: bool) -> Skip | None:
        world, seen = self._world(), self._seen(check, is_last=is_last)
        reason = check.skip(seen)
        if reason is not None and reason.kind in (SkipKind.INAPPLICABLE, SkipKind.OPTIONAL):
            return reason.skip(check, seen.options)
        if not world.living:
            return Skip(code=check.code, reason="no rank can take part", grounds=False)
        missing = sorted(set(range(world.size)).difference(world.living))
        if check.scope is Scope.WORLD and missing:
            needs = f"it needs all {world.size} ranks, and {ranks_text(missing)} cannot take part"
            return Skip(code=check.code, reason=needs, grounds=False)
        return reason.skip(check, seen.options) if reason is not None else None

    def _world(self) -> World:
        header, known = self._header, self._known_world
        arrivals, out = self._membership.arrivals, frozenset(self._unable)
        if known is None or known.arrivals is not arrivals or known.out != out:
            size, launcher, options = header.world_size, header.launcher, header.options
            known = World(size=size, launcher=launcher, options=options, arrivals=arrivals, out=out)
            self._known_world = known
        return known

    def _seen(self, check: AnyCheck, *, is_last: bool = False) -> Seen[Any]:
        return Seen(self._world(), check, self.recording(), is_last=is_last)

    def _run_trial(self, planned: Trial, kept: float) -> None:
        left = self._left_seconds(kept)
        if left < DEADLINES.least_trial:
            spent = f"before {planned.code} could run"
            self._write(Event(kind=EventKind.BUDGET, seconds=self._membership.now(), detail=spent))
            raise BudgetSpent
        number = len(self.recording().trials) + 1
        importing = planned.kind is Kind.TORCH and not self._torch_is_there
        wanted = planned.deadline_seconds + (DEADLINES.import_torch if importing else 0.0)
        planned = self._kept_group.prepared(planned)
        trial = with_number(planned, number, wanted, left, self._membership.now())
        self._write(trial)
        slack = min(DEADLINES.outcome, left - trial.limit_seconds + DEADLINES.cut_short)
        dispatched = DispatchedTrial(trial, trial.limit_seconds + slack, self._membership.clock)
        for rank in trial.ranks:
            self._membership.send(rank, dispatched.run_trial(rank))
        self._progress.trial_began(trial, importing=importing)
        try:
            while dispatched.pending:
                for rank, message in self._membership.attend(0.05):
                    self._handle(dispatched, rank, message)
                self._close_overdue(dispatched)
                self._repeat(dispatched)
                self._progress.pending(dispatched, self._membership.arrivals)
        except RunEnded as ended:
            for rank, message in ended.messages:
                self._handle(dispatched, rank, message)
            self._close(dispatched)
            raise

    def _handle(self, dispatched: DispatchedTrial, rank: int, message: Upward) -> None:
        match message:
            case BarrierReached(number, offer, shares) if number == dispatched.trial.number:
                self._open_barrier(dispatched, dispatched.reached_barrier(rank, offer, shares=shares))
            case Partial(number, data, text) if number == dispatched.trial.number:
                dispatched.partial[rank] = data
                if rank == dispatched.first:
                    self._tell(Progressed(text=text))
            case Outcome() as outcome if outcome.rank == rank:
                self._membership.send(rank, Ack(outcome.trial))
                if outcome.trial == dispatched.trial.number and rank in dispatched.pending:
                    self._record_outcome(dispatched, outcome)
            case _:
                pass

    def _record_outcome(self, dispatched: DispatchedTrial, outcome: Outcome) -> None:
        self._write(outcome)
        self._kept_group.ended(dispatched.trial, outcome)
        dispatched.pending.discard(outcome.rank)
        if outcome.status is Status.DONE:
            dispatched.done(outcome.rank)
        else:
            dispatched.fail(outcome.rank)
        self._torch_is_there |= dispatched.trial.kind is Kind.TORCH and not dispatched.pending
        if outcome.at == IMPORT_STEP and outcome.status is not Status.DONE:
            self._without_torch.add(outcome.rank)

    def _open_barrier(self, dispatched: DispatchedTrial, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._membership.send(rank, dispatched.barrier_open(rank, self._membership.arrivals))

    def _close_overdue(self, dispatched: DispatchedTrial) -> None:
        """Close what cannot end: lost ranks, peers of failed ranks, late groups, and ranks past the deadline."""
        for rank in dispatched.pending & self._membership.lost:
            self._close_unheard(dispatched, rank)
        now = self._membership.clock()
        for index, since in dispatched.failed.items():
            if now - since > self._patience.grace:
                self._stop(dispatched, index)
        if dispatched.late() and self._torch_is_there:
            for index in {dispatched.index_of(rank) for rank in dispatched.pending}:
                self._stop(dispatched, index)
        if now > dispatched.latest:
            for rank in list(dispatched.pending):
                self._close_unheard(dispatched, rank)

    def _stop(self, dispatched: DispatchedTrial, index: int) -> None:
        """Stop the ranks of a group that have no outcome yet."""
        if index not in dispatched.stopped:
            dispatched.stopped.add(index)
            stop = Stop(dispatched.trial.number)
            for rank in dispatched.pending.intersection(dispatched.trial.groups[index]):
                self._membership.send(rank, stop)

    def _repeat(self, dispatched: DispatchedTrial) -> None:
        """Repeat messages that may have been lost; a rank obeys each message once, even if it arrives again."""
        if not dispatched.repeat_is_due():
            return
        for rank in dispatched.pending - self._membership.gone:
            if dispatched.index_of(rank) in dispatched.stopped:
                self._membership.send(rank, Stop(dispatched.trial.number))
            elif not dispatched.is_at_barrier(rank):
                self._membership.send(rank, dispatched.run_trial(rank))
            elif dispatched.barrier_is_open(rank):
                self._open_barrier(dispatched, (rank,))

    def _close_unheard(self, dispatched: DispatchedTrial, rank: int) -> None:
        why = "it was lost" if rank in self._membership.lost else "its process reported nothing"
        dispatched.pending.discard(rank)
        dispatched.fail(rank)
        outcome = dispatched.missing_outcome(rank, Status.UNHEARD, error=why)
        self._write(outcome)
        self._kept_group.ended(dispatched.trial, outcome)

    def _close(self, dispatched: DispatchedTrial) -> None:
        """Close the trial in which the run ends: lost ranks are unheard, all others are recorded as stopped."""
        for rank in sorted(dispatched.pending):
            lost = rank in self._membership.lost
            status = Status.UNHEARD if lost else Status.SKIPPED
            self._write(dispatched.missing_outcome(rank, status, told=not lost))
