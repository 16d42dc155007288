"""Adjust a recording to the end of its run, by a signal or by the loss of rank 0.

Launchers and schedulers end ranks one after the other, together with their workers. If a rank did not complete a trial
after the first signal, this is no evidence against the rank. A failure before the first signal is evidence, because a
launcher ends the other ranks after one rank has died.
"""

import signal
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from msgspec import structs

from ddpdiag.checks.blame import is_echo
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.errors import ExitCode
from ddpdiag.model import End, Event, EventKind, Outcome, Recording, Report, Status, Trial
from ddpdiag.model.recording import SIGNAL_EVENTS
from ddpdiag.model.trial import NO_DATA

# Signals that ask a process to end. A worker can die of them only while it starts, and supervisors send only SIGKILL.
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "KeyboardInterrupt")
_DID_NOT_FAIL = (Status.DONE, Status.SKIPPED)

OutcomeByRank = Mapping[tuple[int, int], Outcome]  # by trial number and rank


class RecordingForms(NamedTuple):
    """A recording in two forms.

    In `recording` the outcomes that the end of the run caused have the status SKIPPED. Checks judge `established`, from
    which the trials that the end of the run cut short are removed as well.
    """

    recording: Recording
    established: Recording


def recording_forms(recording: Recording) -> RecordingForms:
    """Return both forms of a recording. If rank 0 was lost, the missing end of the recording is added first."""
    recording = _with_end(recording)
    signal_seconds = first_signal_seconds(recording)
    if signal_seconds is None:
        return RecordingForms(recording, recording)
    recording = _with_skipped(recording, signal_seconds)
    return RecordingForms(recording, _established_recording(recording))


def first_signal_seconds(recording: Recording) -> float | None:
    """The seconds from the start until the first rank received a signal to end, or None if no rank received one."""
    return min((event.seconds for event in recording.events if event.kind in SIGNAL_EVENTS), default=None)


def was_ended_by_signal(recording: Recording) -> bool:
    """Whether a signal ended the run. False if a rank was lost, because launchers then send signals to other ranks."""
    return first_signal_seconds(recording) is not None and not any(e.kind is EventKind.LOST for e in recording.events)


def ctrl_c_seconds(recording: Recording) -> float | None:
    """The seconds from the start until Ctrl-C ended the run, or None."""
    moments = (e.seconds for e in recording.events if e.kind in SIGNAL_EVENTS and e.detail == str(int(signal.SIGINT)))
    return min(moments, default=None)


def with_signal(report: Report, signum: int | None) -> Report:
    """Return the report with the exit code of the signal; unchanged if `signum` is None. The verdict stays."""
    return report if signum is None else structs.replace(report, exit_code=ExitCode.of_signal(signum))


def _with_skipped(recording: Recording, signal_seconds: float) -> Recording:
    """Return the recording, in which all outcomes that the end of the run caused have the status SKIPPED."""
    outcome_of = _by_trial_and_rank(recording)
    skipped = {}
    for trial in recording.trials:
        for group in trial.groups:
            outcomes = [outcome_of[trial.number, rank] for rank in group if (trial.number, rank) in outcome_of]
            for outcome in _truncated_outcomes(trial, outcomes, signal_seconds):
                # The error text is removed: it only describes the signal.
                skipped[trial.number, outcome.rank] = structs.replace(
                    outcome,
                    status=Status.SKIPPED,
                    interrupted=True,
                    error="",
                    detail="",
                    process=None,
                    collectives=None,
                )
    return structs.replace(recording, outcomes=tuple(skipped.get((o.trial, o.rank), o) for o in recording.outcomes))


def _established_recording(recording: Recording) -> Recording:
    """Return the recording without the trials that the end of the run cut short.

    Groups that had failed before are kept, unless the trial `may_fail`: an incomplete experiment proves nothing.
    Trials with partial data are kept as well, such as a benchmark that completed some sizes.
    """
    outcome_of = _by_trial_and_rank(recording)
    last = max((trial.number for trial in recording.trials), default=0)
    trials = tuple(_established_trials(recording.trials, outcome_of, last))
    kept = {(trial.number, rank) for trial in trials for rank in trial.ranks}
    outcomes = tuple(outcome for outcome in recording.outcomes if (outcome.trial, outcome.rank) in kept)
    return structs.replace(recording, trials=trials, outcomes=outcomes)


def _by_trial_and_rank(recording: Recording) -> OutcomeByRank:
    return {(outcome.trial, outcome.rank): outcome for outcome in recording.outcomes}


def _truncated_outcomes(trial: Trial, outcomes: Sequence[Outcome], signal_seconds: float) -> list[Outcome]:
    """The outcomes of a group that the end of the run caused."""
    cut = [o for o in outcomes if _was_interrupted(o) or _is_killed(o) or _failed_later(trial, o, signal_seconds)]
    failed = [o for o in outcomes if o.status not in _DID_NOT_FAIL and o not in cut and not is_echo(o)]
    # If a signal ended a worker, the errors of its peers are a consequence, and no evidence.
    if not cut or (failed and not any(map(_is_killed, cut))):
        return cut
    return [outcome for outcome in outcomes if outcome.status is not Status.DONE]


def _was_interrupted(outcome: Outcome) -> bool:
    return outcome.status is Status.SKIPPED and outcome.interrupted


def _is_killed(outcome: Outcome) -> bool:
    """Whether a signal ended the worker of the rank."""
    failed = outcome.status in (Status.DIED, Status.RAISED)
    texts = (outcome.error, outcome.detail.rstrip().rpartition("\n")[2])
    return failed and any(name in text for text in texts for name in _SIGNALS)


def _failed_later(trial: Trial, outcome: Outcome, signal_seconds: float) -> bool:
    """Whether the rank failed after the first signal. False for UNHEARD, which may be the reason for the signal."""
    if trial.begin_seconds is None or outcome.status in (*_DID_NOT_FAIL, Status.UNHEARD):
        return False
    return trial.begin_seconds + outcome.seconds >= signal_seconds


def _established_trials(trials: Sequence[Trial], outcome_of: OutcomeByRank, last: int) -> Iterator[Trial]:
    """Yield the trials. A trial that was cut short, without partial data, keeps only the groups that failed before."""
    for trial in trials:
        outcomes = [outcome_of[trial.number, rank] for rank in trial.ranks if (trial.number, rank) in outcome_of]
        is_incomplete = trial.number == last and len(outcomes) < len(trial.ranks)
        has_data = any(bytes(outcome.partial_data) != bytes(NO_DATA) for outcome in outcomes)
        if has_data or not (is_incomplete or any(map(_was_interrupted, outcomes))):
            yield trial
        elif not trial.may_fail:
            failed = {outcome.rank for outcome in outcomes if outcome.status not in _DID_NOT_FAIL}
            groups = tuple(group for group in trial.groups if not failed.isdisjoint(group))
            if groups:
                yield structs.replace(trial, groups=groups)


def _with_end(recording: Recording) -> Recording:
    """If rank 0 was lost, return the recording with the lost ranks, outcomes and end that rank 0 could not record."""
    loss_reports = [event for event in recording.events if event.reporter is not None]
    if recording.end is not None or not loss_reports:
        return recording
    reporters = {event.reporter for event in loss_reports if event.reporter is not None}
    seconds = max(event.seconds for event in loss_reports)
    records = f"the record of {ranks_text(sorted(reporters))}"
    return structs.replace(
        recording,
        events=(*recording.events, *_losses(recording, reporters, seconds)),
        outcomes=(*recording.outcomes, *_missing_outcomes(recording, {0, *recording.arrivals} - reporters)),
        end=End(seconds=seconds),
        problems=(*recording.problems, f"rank 0 was lost: this report is made from its last lines and {records}"),
    )


def _losses(recording: Recording, reporters: Set[int], seconds: float) -> Iterator[Event]:
    """Yield a LOST event for each rank that joined, received no signal, and did not record the loss of rank 0."""
    explained_ranks = _ranks_of_events(recording, EventKind.LOST) | _ranks_of_events(recording, EventKind.LEAVING)
    for rank, arrival in recording.arrivals.items():
        if rank not in reporters and rank not in explained_ranks:
            why = "it did not record the loss of rank 0"
            yield Event(kind=EventKind.LOST, rank=rank, seconds=seconds, host=arrival.place.host, detail=why)


def _ranks_of_events(recording: Recording, kind: EventKind) -> set[int | None]:
    return {event.rank for event in recording.events if event.kind is kind}


def _missing_outcomes(recording: Recording, lost_ranks: Set[int]) -> Iterator[Outcome]:
    """Yield an outcome for each that `lost_ranks` did not record. A rank that reported a signal is not at fault."""
    recorded = {(outcome.trial, outcome.rank) for outcome in recording.outcomes}
    leaving_ranks = _ranks_of_events(recording, EventKind.LEAVING) - _ranks_of_events(recording, EventKind.LOST)
    for trial in recording.trials:
        for rank in trial.ranks:
            if rank in lost_ranks and (trial.number, rank) not in recorded:
                is_leaving = rank in leaving_ranks
                status, error = (Status.SKIPPED, "") if is_leaving else (Status.UNHEARD, "it was lost")
                yield Outcome(
                    trial=trial.number, code=trial.code, rank=rank, status=status, error=error, interrupted=is_leaving
                )
