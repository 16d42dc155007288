"""The coordinator: rank 0 asks each check for its next trials, sends them to the ranks, and collects the outcomes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ddpdiag.checks.api import Check, Scope, Seen, SkipKind, Stage
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.checks.world import World
from ddpdiag.codec import extend
from ddpdiag.judgement.selection import is_selected
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
from ddpdiag.model.news import CheckBegan, CheckProgress, Listener, PartialResults, RunStarted
from ddpdiag.model.recording import SIGNAL_EVENTS, Line
from ddpdiag.runtime.control.membership import PATIENCE, Channel, Membership, Patience, RunEnded
from ddpdiag.runtime.control.messages import Ack, BarrierReached, MessageToRank0, PartialData, Stop
from ddpdiag.runtime.coordinator.dispatch import (
    BudgetSpent,
    DispatchedTrial,
    OpenGroup,
    ProgressReporter,
    numbered_trial,
    reason_too_late,
    seconds_for_last_checks,
)
from ddpdiag.runtime.deadlines import DEADLINES
from ddpdiag.runtime.record import SharedRecord

AnyCheck = Check[Any]


def _by_stage(checks: Sequence[AnyCheck]) -> list[tuple[Stage, list[AnyCheck]]]:
    by_stage = ((stage, [check for check in checks if check.stage is stage]) for stage in Stage)
    return [(stage, in_stage) for stage, in_stage in by_stage if in_stage]


class Coordinator:
    """Runs the checks of one run, on rank 0: from the first hello to the shutdown.

    `signal_received` returns the signal to end that this process got, or None. Each line of the recording is also
    written to `shared`, the record in `--shared-dir`. `own_arrival` is the arrival of rank 0, if known. After `run` the
    caller must keep sending heartbeats through `membership`, and at the end shut the run down.
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
        own_arrival: Arrival | None = None,
    ) -> None:
        self._header = header
        self._checks = checks
        self._send_news = listener.tell
        self._progress = ProgressReporter(listener)
        self._patience = patience
        self._shared = shared
        self._lines: list[Line] = []
        self._write_line(header)
        self._assembled_count = 1  # number of lines that `_recording` holds
        self._recording = Recording(header=header)
        self._last_world: World | None = None
        self.membership = Membership(server, header, signal_received, patience, self._write_line, own_arrival)
        self._ranks_without_torch: set[int] = set()
        self._torch_is_imported = False
        self._open_group = OpenGroup(header.world_size)
        self._last_checks: list[AnyCheck] = []  # checks that run last and have not run yet

    def run(self, wait_seconds: float) -> Recording:
        """Wait for the ranks, run all checks, and return the recording. No failure of a rank raises an error."""
        try:
            self._gather(wait_seconds)
            self._run_checks()
        except (RunEnded, BudgetSpent):
            pass
        self._write_line(End(seconds=self.membership.now()))
        return self.recording()

    def _gather(self, wait_seconds: float) -> None:
        size, budget_seconds = self._header.world_size, self._header.options.budget_seconds
        self._send_news(RunStarted(budget_seconds=budget_seconds))
        self.membership.gather(
            min(wait_seconds, budget_seconds - DEADLINES.reserve),
            lambda left: self._progress.report_wait(self.membership.arrivals, size, left),
        )
        self._progress.report_gathered(self.membership.arrivals, size)

    def _write_line(self, line: Line) -> None:
        self._lines.append(line)
        if self._shared is not None:
            self._shared.write(line)
        self._progress.report_event(line)

    def recording(self) -> Recording:
        if new := self._lines[self._assembled_count :]:
            self._recording = extend(self._recording, new)
            self._assembled_count += len(new)
        return self._recording

    def lines(self) -> tuple[Line, ...]:
        return tuple(self._lines)

    def late_signal(self) -> int | None:
        """The signal to end that a rank got after the recording was complete, or None."""
        return None if any(event.kind in SIGNAL_EVENTS for event in self._recording.events) else self.membership.signal

    @property
    def _unable_ranks(self) -> set[int]:
        """Ranks that joined but can take part in no further trial."""
        return self.membership.gone_ranks | self._ranks_without_torch

    def _run_checks(self) -> None:
        measuring_checks = [c for c in self._checks if c.measure is not None and is_selected(c, self._header.options)]
        self._last_checks = [check for check in measuring_checks if check.last_seconds is not None]
        # Plain checks are first: they run while the fork servers import torch.
        first_checks = [c for c in measuring_checks if c.last_seconds is None or c.plan(self._seen(c))]
        kinds = (Kind.PLAIN, Kind.TORCH)
        first_parts = [part for kind in kinds for part in _by_stage([c for c in first_checks if c.kind is kind])]
        last_parts = _by_stage(self._last_checks)
        # Progress shows a stage as done before the checks that run last, because these only compare two measurements.
        self._progress.set_stages(stage for stage, _checks in first_parts)
        # Checks that run last may run even when the budget is spent, because time is reserved for some of them.
        for parts in (first_parts, last_parts):
            for stage, checks in parts:
                if self._run_stage(stage, checks, is_last=parts is last_parts):
                    break

    def _run_stage(self, stage: Stage, checks: Sequence[AnyCheck], *, is_last: bool) -> bool:
        """Run some checks of a stage. Returns whether the budget was spent meanwhile."""
        begin, first_line, budget_spent = self.membership.now(), len(self._lines), False
        self._progress.stage_began(stage)
        try:
            for check in checks:
                self._run_check(check, is_last=is_last)
        except BudgetSpent:
            budget_spent = True  # `_run_trial` has recorded this
        lines, seconds = self._lines[first_line:], self.membership.now() - begin
        self._progress.stage_ended(stage, lines, seconds, budget_spent=budget_spent)
        return budget_spent

    def _run_check(self, check: AnyCheck, *, is_last: bool) -> None:
        if is_last:
            self._last_checks = [other for other in self._last_checks if other is not check]
        skip = self._reason_to_skip(check, is_last=is_last)
        if skip is not None:
            self._write_line(skip)
            return
        seen, reserved_seconds = self._seen(check, is_last=is_last), self._seconds_for_last_checks()
        needed_seconds = check.last_seconds(seen) if is_last and check.last_seconds and check.plan(seen) else 0.0
        if needed_seconds and (reason := reason_too_late(self._left_seconds(reserved_seconds), needed_seconds)):
            self._write_line(Skip(code=check.code, reason=reason, is_inapplicable=False))
            return
        self._send_news(CheckBegan(code=check.code, name=check.name))
        while trials := check.plan(
            replace(self._seen(check, is_last=is_last), left_seconds=self._left_seconds(reserved_seconds))
        ):
            for trial in trials:
                if gone_ranks := self._unable_ranks.intersection(trial.ranks):
                    reason = f"{ranks_text(sorted(gone_ranks))} can take no further part"
                    self._write_line(Skip(code=check.code, reason=reason, is_inapplicable=False))
                    return
                self._run_trial(trial, reserved_seconds)

    def _left_seconds(self, reserved_seconds: float) -> float:
        """Seconds of the budget that trials may still take."""
        return self._header.options.budget_seconds - self.membership.now() - DEADLINES.reserve - reserved_seconds

    def _seconds_for_last_checks(self) -> float:
        """Seconds of the budget that are reserved for the checks that run last and still plan a trial."""
        estimates = [
            check.last_seconds(seen)
            for check in self._last_checks
            if check.last_seconds is not None
            and self._reason_to_skip(check, is_last=True) is None
            and check.plan(seen := self._seen(check, is_last=True))
        ]
        return seconds_for_last_checks(self._header.options.budget_seconds, estimates)

    def _reason_to_skip(self, check: AnyCheck, *, is_last: bool) -> Skip | None:
        world, seen = self._world(), self._seen(check, is_last=is_last)
        reason = check.skip(seen)
        if reason is not None and reason.kind in (SkipKind.INAPPLICABLE, SkipKind.OPTIONAL):
            return reason.skip(check, seen.options)
        if not world.living_ranks:
            return Skip(code=check.code, reason="no rank can take part", is_inapplicable=False)
        missing_ranks = sorted(set(range(world.size)).difference(world.living_ranks))
        if check.scope is Scope.WORLD and missing_ranks:
            reason_text = f"it needs all {world.size} ranks, and {ranks_text(missing_ranks)} cannot take part"
            return Skip(code=check.code, reason=reason_text, is_inapplicable=False)
        return reason.skip(check, seen.options) if reason is not None else None

    def _world(self) -> World:
        header, world = self._header, self._last_world
        arrivals, out = self.membership.arrivals, frozenset(self._unable_ranks)
        if world is None or world.arrivals is not arrivals or world.inactive_ranks != out:
            size, launcher, options = header.world_size, header.launcher, header.options
            world = World(size=size, launcher=launcher, options=options, arrivals=arrivals, inactive_ranks=out)
            self._last_world = world
        return world

    def _seen(self, check: AnyCheck, *, is_last: bool = False) -> Seen[Any]:
        return Seen(self._world(), check, self.recording(), is_last=is_last)

    def _run_trial(self, planned_trial: Trial, reserved_seconds: float) -> None:
        left_seconds = self._left_seconds(reserved_seconds)
        if left_seconds < DEADLINES.min_trial:
            detail = f"before {planned_trial.code} could run"
            self._write_line(Event(kind=EventKind.BUDGET, seconds=self.membership.now(), detail=detail))
            raise BudgetSpent
        number = len(self.recording().trials) + 1
        may_wait_for_import = planned_trial.kind is Kind.TORCH and not self._torch_is_imported
        wanted_seconds = planned_trial.deadline_seconds + (DEADLINES.import_torch if may_wait_for_import else 0.0)
        planned_trial = self._open_group.prepare(planned_trial)
        trial = numbered_trial(planned_trial, number, wanted_seconds, left_seconds, self.membership.now())
        self._write_line(trial)
        slack = min(DEADLINES.late_outcome, left_seconds - trial.limit_seconds + DEADLINES.outcome_after_budget)
        dispatched = DispatchedTrial(trial, trial.limit_seconds + slack, self.membership.clock)
        for rank in trial.ranks:
            self.membership.send(rank, dispatched.trial_message(rank))
        self._progress.trial_began(trial, importing=may_wait_for_import)
        try:
            while dispatched.pending_ranks:
                for rank, message in self.membership.attend(0.05):
                    self._handle(dispatched, rank, message)
                self._close_overdue(dispatched)
                self._repeat_messages(dispatched)
                self._progress.report_pending(dispatched, self.membership.arrivals)
        except RunEnded as ended:
            for rank, message in ended.messages:
                self._handle(dispatched, rank, message)
            self._close_trial(dispatched)
            raise

    def _handle(self, dispatched: DispatchedTrial, rank: int, message: MessageToRank0) -> None:
        match message:
            case BarrierReached(number, offer, is_exchange) if number == dispatched.trial.number:
                self._open_barrier(dispatched, dispatched.mark_at_barrier(rank, offer, is_exchange=is_exchange))
            case PartialData(number, data, text) if number == dispatched.trial.number:
                all_reported = dispatched.add_partial_data(rank, data)
                if rank == dispatched.first_rank:
                    self._send_news(CheckProgress(text=text))
                if all_reported:
                    partial = dispatched.partial_outcomes()
                    self._send_news(PartialResults(recording=extend(self.recording(), partial)))
            case Outcome() as outcome if outcome.rank == rank:
                self.membership.send(rank, Ack(outcome.trial))
                if outcome.trial == dispatched.trial.number and rank in dispatched.pending_ranks:
                    self._record_outcome(dispatched, outcome)
            case _:
                pass

    def _record_outcome(self, dispatched: DispatchedTrial, outcome: Outcome) -> None:
        self._write_line(outcome)
        self._open_group.record_outcome(dispatched.trial, outcome)
        dispatched.pending_ranks.discard(outcome.rank)
        if outcome.status is Status.DONE:
            dispatched.mark_done(outcome.rank)
        else:
            dispatched.mark_failed(outcome.rank)
        self._torch_is_imported |= dispatched.trial.kind is Kind.TORCH and not dispatched.pending_ranks
        if outcome.last_step == IMPORT_STEP and outcome.status is not Status.DONE:
            self._ranks_without_torch.add(outcome.rank)

    def _open_barrier(self, dispatched: DispatchedTrial, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.membership.send(rank, dispatched.barrier_message(rank, self.membership.arrivals))

    def _close_overdue(self, dispatched: DispatchedTrial) -> None:
        """Record lost and overdue ranks as unheard, and stop late groups and groups with a failed rank."""
        for rank in dispatched.pending_ranks & self.membership.lost_ranks:
            self._record_unheard(dispatched, rank)
        now = self.membership.clock()
        for index, since in dispatched.failed_at.items():
            if now - since > self._patience.grace:
                self._stop_group(dispatched, index)
        if dispatched.has_late_groups() and self._torch_is_imported:
            for index in {dispatched.group_index[rank] for rank in dispatched.pending_ranks}:
                self._stop_group(dispatched, index)
        if now > dispatched.closes_at:
            for rank in list(dispatched.pending_ranks):
                self._record_unheard(dispatched, rank)

    def _stop_group(self, dispatched: DispatchedTrial, index: int) -> None:
        """Tell the ranks of a group that have no outcome yet to stop. Does so once per group."""
        if index not in dispatched.stopped_groups:
            dispatched.stopped_groups.add(index)
            stop = Stop(dispatched.trial.number)
            for rank in dispatched.pending_ranks.intersection(dispatched.trial.groups[index]):
                self.membership.send(rank, stop)

    def _repeat_messages(self, dispatched: DispatchedTrial) -> None:
        """Repeat messages that may have been lost, if it is time. A rank ignores a message that it has handled."""
        if not dispatched.repeat_is_due():
            return
        for rank in dispatched.pending_ranks - self.membership.gone_ranks:
            if dispatched.group_index[rank] in dispatched.stopped_groups:
                self.membership.send(rank, Stop(dispatched.trial.number))
            elif not dispatched.is_at_barrier(rank):
                self.membership.send(rank, dispatched.trial_message(rank))
            elif dispatched.barrier_is_open(rank):
                self._open_barrier(dispatched, (rank,))

    def _record_unheard(self, dispatched: DispatchedTrial, rank: int) -> None:
        reason = "it was lost" if rank in self.membership.lost_ranks else "its process reported nothing"
        dispatched.pending_ranks.discard(rank)
        dispatched.mark_failed(rank)
        outcome = dispatched.missing_outcome(rank, Status.UNHEARD, error=reason)
        self._write_line(outcome)
        self._open_group.record_outcome(dispatched.trial, outcome)

    def _close_trial(self, dispatched: DispatchedTrial) -> None:
        """Record the missing outcomes of the trial in which the run ends: UNHEARD for lost ranks, else SKIPPED."""
        for rank in sorted(dispatched.pending_ranks):
            is_lost = rank in self.membership.lost_ranks
            status = Status.UNHEARD if is_lost else Status.SKIPPED
            self._write_line(dispatched.missing_outcome(rank, status, interrupted=not is_lost))
