"""The end of a run by a signal or by the loss of rank 0, and the evidence that remains of the recording.

Launchers and schedulers end ranks one after the other, together with their workers. After the first signal, a trial
that a rank did not complete is no evidence about the rank. A failure before the first signal still counts, because a
launcher ends the other ranks after one has died.
"""

import signal
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from msgspec import structs

from ddpdiag.checks.blame import is_echo
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.errors import ExitCode
from ddpdiag.model import End, Event, EventKind, Outcome, Recording, Report, Status, Trial
from ddpdiag.model.recording import TOLD_TO_LEAVE
from ddpdiag.model.trial import NOTHING

# Signals that ask a process to end. A worker ignores them only once it has started; supervisors send SIGKILL only.
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "KeyboardInterrupt")
_DID_NOT_FAIL = (Status.DONE, Status.SKIPPED)

Parts = Mapping[tuple[int, int], Outcome]  # by trial number and rank


class Run(NamedTuple):
    """A recording in the two forms that are judged.

    In `recording` the outcomes that the end of the run caused have the status SKIPPED. `established`, which checks
    judge, also lacks the trials that the end of the run cut short.
    """

    recording: Recording
    established: Recording


def run_of(recording: Recording) -> Run:
    """Add an end that was not recorded, and remove the evidence that the end of the run made worthless."""
    recording = _with_end(recording)
    moment = first_signal_seconds(recording)
    if moment is None:
        return Run(recording, recording)
    recording = _with_skipped(recording, moment)
    return Run(recording, _established(recording))


def first_signal_seconds(recording: Recording) -> float | None:
    """The seconds from the start until a rank first received a signal to end; None if no rank did."""
    return min((event.seconds for event in recording.events if event.kind in TOLD_TO_LEAVE), default=None)


def ended_by_a_signal(recording: Recording) -> bool:
    """Whether a signal ended the run and no rank was lost: after a loss, launchers send signals to the other ranks."""
    return first_signal_seconds(recording) is not None and not any(e.kind is EventKind.LOST for e in recording.events)


def ended_by_ctrl_c(recording: Recording) -> float | None:
    """The seconds from the start until Ctrl-C ended the run, or None."""
    moments = (e.seconds for e in recording.events if e.kind in TOLD_TO_LEAVE and e.detail == str(int(signal.SIGINT)))
    return min(moments, default=None)


def with_signal(report: Report, signum: int | None) -> Report:
    """Replace the report's exit code if a signal arrived during judgement or output. The verdict does not change."""
    return report if signum is None else structs.replace(report, exit_code=ExitCode.of_signal(signum))


def _with_skipped(recording: Recording, moment: float) -> Recording:
    """Set the outcomes that the end of the run caused to SKIPPED."""
    parts = _parts(recording)
    changed = {}
    for trial in recording.trials:
        for group in trial.groups:
            outcomes = [parts[trial.number, rank] for rank in group if (trial.number, rank) in parts]
            for outcome in _truncated(trial, outcomes, moment):
                # The reason is left out, because it is the signal.
                changed[trial.number, outcome.rank] = structs.replace(
                    outcome, status=Status.SKIPPED, told=True, error="", detail="", process=None, collectives=None
                )
    return structs.replace(recording, outcomes=tuple(changed.get((o.trial, o.rank), o) for o in recording.outcomes))


def _established(recording: Recording) -> Recording:
    """Remove the trials that the end of the run cut short.

    A group that failed before is kept, unless its trial is an experiment, which proves nothing if it is incomplete.
    Trials with partial data are kept as well, such as the sizes that a benchmark completed.
    """
    parts = _parts(recording)
    last = max((trial.number for trial in recording.trials), default=0)
    trials = tuple(_with_known_groups(recording.trials, parts, last))
    kept = {(trial.number, rank) for trial in trials for rank in trial.ranks}
    outcomes = tuple(outcome for outcome in recording.outcomes if (outcome.trial, outcome.rank) in kept)
    return structs.replace(recording, trials=trials, outcomes=outcomes)


def _parts(recording: Recording) -> Parts:
    return {(outcome.trial, outcome.rank): outcome for outcome in recording.outcomes}


def _truncated(trial: Trial, outcomes: Sequence[Outcome], moment: float) -> list[Outcome]:
    """The outcomes of a group that the end of the run caused."""
    cut = [o for o in outcomes if _was_ended(o) or _is_killed(o) or _is_later(trial, o, moment)]
    own = [o for o in outcomes if o.status not in _DID_NOT_FAIL and o not in cut and not is_echo(o)]
    # If a signal ended a worker, the errors of its peers are a consequence, and no evidence.
    if not cut or (own and not any(map(_is_killed, cut))):
        return cut
    return [outcome for outcome in outcomes if outcome.status is not Status.DONE]


def _was_ended(outcome: Outcome) -> bool:
    return outcome.status is Status.SKIPPED and outcome.told


def _is_killed(outcome: Outcome) -> bool:
    """Whether a signal ended the worker of the rank."""
    failed = outcome.status in (Status.DIED, Status.RAISED)
    texts = (outcome.error, outcome.detail.rstrip().rpartition("\n")[2])
    return failed and any(name in text for text in texts for name in _SIGNALS)


def _is_later(trial: Trial, outcome: Outcome, moment: float) -> bool:
    """Whether the rank failed after the first signal. UNHEARD does not count: it may be the reason for the signal."""
    if trial.begin_seconds is None or outcome.status in (*_DID_NOT_FAIL, Status.UNHEARD):
        return False
    return trial.begin_seconds + outcome.seconds >= moment


def _with_known_groups(trials: Sequence[Trial], parts: Parts, last: int) -> Iterator[Trial]:
    """The trials; those that the end of the run cut short keep only the groups that had failed before."""
    for trial in trials:
        outcomes = [parts[trial.number, rank] for rank in trial.ranks if (trial.number, rank) in parts]
        lacking = trial.number == last and len(outcomes) < len(trial.ranks)
        figures = any(bytes(outcome.so_far) != bytes(NOTHING) for outcome in outcomes)
        if figures or not (lacking or any(map(_was_ended, outcomes))):
            yield trial
        elif not trial.may_fail:
            failed = {outcome.rank for outcome in outcomes if outcome.status not in _DID_NOT_FAIL}
            groups = tuple(group for group in trial.groups if not failed.isdisjoint(group))
            if groups:
                yield structs.replace(trial, groups=groups)


def _with_end(recording: Recording) -> Recording:
    """Add the losses, outcomes and end that a lost rank 0 could not record; unchanged if rank 0 was not lost."""
    reports = [event for event in recording.events if event.reporter is not None]
    if recording.end is not None or not reports:
        return recording
    reporters = {event.reporter for event in reports if event.reporter is not None}
    seconds = max(event.seconds for event in reports)
    records = f"the record of {ranks_text(sorted(reporters))}"
    return structs.replace(
        recording,
        events=(*recording.events, *_losses(recording, reporters, seconds)),
        outcomes=(*recording.outcomes, *_missing_outcomes(recording, {0, *recording.arrivals} - reporters)),
        end=End(seconds=seconds),
        notes=(*recording.notes, f"rank 0 was lost: this report is made from its last lines and {records}"),
    )


def _losses(recording: Recording, reporters: Set[int], seconds: float) -> Iterator[Event]:
    """A LOST event for each rank that joined, did not record the loss of rank 0, and had received no signal to end."""
    explained = _ranks(recording, EventKind.LOST) | _ranks(recording, EventKind.LEAVING)
    for rank, arrival in recording.arrivals.items():
        if rank not in reporters and rank not in explained:
            why = "it did not record the loss of rank 0"
            yield Event(kind=EventKind.LOST, rank=rank, seconds=seconds, host=arrival.place.host, detail=why)


def _ranks(recording: Recording, kind: EventKind) -> set[int | None]:
    return {event.rank for event in recording.events if event.kind is kind}


def _missing_outcomes(recording: Recording, gone: Set[int]) -> Iterator[Outcome]:
    """The outcomes that the `gone` ranks lack. A rank that reported a signal to end is not at fault."""
    known = {(outcome.trial, outcome.rank) for outcome in recording.outcomes}
    leaving = _ranks(recording, EventKind.LEAVING) - _ranks(recording, EventKind.LOST)
    for trial in recording.trials:
        for rank in trial.ranks:
            if rank in gone and (trial.number, rank) not in known:
                is_leaving = rank in leaving
                status, error = (Status.SKIPPED, "") if is_leaving else (Status.UNHEARD, "it was lost")
                yield Outcome(
                    trial=trial.number, code=trial.code, rank=rank, status=status, error=error, told=is_leaving
                )
