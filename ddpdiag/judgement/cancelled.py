"""What a run that a signal ended had established before, and how far it was.

Launchers and schedulers end ranks one after the other, and with them their workers: from the first signal on, what a
rank did not complete is no evidence about it. What failed before the first signal still counts, since a rank that dies
makes its launcher end the others.
"""

import signal
from collections.abc import Iterator, Mapping, Sequence

from msgspec import structs

from ddpdiag.checks.blame import is_echo
from ddpdiag.checks.world import World
from ddpdiag.errors import ExitCode
from ddpdiag.judgement.judged import Judged, by_code, concerns_of, stages_of
from ddpdiag.model import EventKind, Outcome, Recording, Report, Severity, Status, Trial
from ddpdiag.model.recording import TOLD_TO_LEAVE
from ddpdiag.model.trial import NOTHING
from ddpdiag.text import count

# By these a process is told to end; a worker that starts does not ignore them yet, and supervisors send SIGKILL only.
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "KeyboardInterrupt")
_DID_NOT_FAIL = (Status.DONE, Status.SKIPPED)

Parts = Mapping[tuple[int, int], Outcome]  # by trial and rank


def not_tried(recording: Recording) -> Recording:
    """The run with the outcomes that its end brought about as skipped."""
    moment = first_signal_seconds(recording)
    if moment is None:
        return recording
    parts = _parts(recording)
    changed = {}
    for trial in recording.trials:
        for group in trial.groups:
            outcomes = [parts[trial.number, rank] for rank in group if (trial.number, rank) in parts]
            for outcome in _truncated(trial, outcomes, moment):
                # Without the reason, which is the signal.
                changed[trial.number, outcome.rank] = structs.replace(
                    outcome, status=Status.SKIPPED, told=True, error="", detail="", process=None, collectives=None
                )
    return structs.replace(recording, outcomes=tuple(changed.get((o.trial, o.rank), o) for o in recording.outcomes))


def established(recording: Recording) -> Recording:
    """What checks are shown of a `not_tried` run: without trials that its end cut short.

    A group that failed before stays, unless its trial is an experiment, which says nothing as long as it is not whole;
    and so do figures that were handed over before, as the sizes that a benchmark completed.
    """
    if first_signal_seconds(recording) is None:
        return recording
    parts = _parts(recording)
    last = max((trial.number for trial in recording.trials), default=0)
    trials = tuple(_with_known_groups(recording.trials, parts, last))
    kept = {(trial.number, rank) for trial in trials for rank in trial.ranks}
    outcomes = tuple(outcome for outcome in recording.outcomes if (outcome.trial, outcome.rank) in kept)
    return structs.replace(recording, trials=trials, outcomes=outcomes)


def first_signal_seconds(recording: Recording) -> float | None:
    """When a rank was first told to end, since the start of the run; None if no rank was."""
    return min((event.seconds for event in recording.events if event.kind in TOLD_TO_LEAVE), default=None)


def ended_by_a_signal(recording: Recording) -> bool:
    """Was a signal the cause of the end? Launchers also send one to all other ranks after a rank was lost."""
    return first_signal_seconds(recording) is not None and not any(e.kind is EventKind.LOST for e in recording.events)


def interruption(world: World, recording: Recording, judged: Sequence[Judged]) -> str:
    """Such as "the run was interrupted after 3.3 s, in TRN001 (ddp-mnist); no problems found in launch, host".

    Empty where no Ctrl-C ended it.
    """
    seconds = ended_by_ctrl_c(recording)
    if seconds is None:
        return ""
    cut = {outcome.code for outcome in recording.outcomes if _was_told(outcome)}
    own = next((j.check for j in judged if j.check.code in cut), None)
    came = f"{len(world.arrivals):,} of {count(world.size, 'rank')} had joined"
    where = f", in {own.code} ({own.name})" if own else "" if recording.trials else f", before any check: {came}"
    stages = stages_of(recording, judged, by_code(recording), concerns_of(judged))
    fine = [line.name for line in stages if line.status == "done" and line.severity in (None, Severity.NOTE)]
    so_far = f"; no problems found in {', '.join(fine)}" if fine else ""
    return f"the run was interrupted after {seconds:.1f} s{where}{so_far}"


def ended_by_ctrl_c(recording: Recording) -> float | None:
    """When, in seconds since the start, or None."""
    told = (e.seconds for e in recording.events if e.kind in TOLD_TO_LEAVE and e.detail == str(int(signal.SIGINT)))
    return min(told, default=None)


def with_signal(report: Report, signum: int | None) -> Report:
    """The report of a whole run with the code of a signal that came during judgement or output; the verdict stays."""
    return report if signum is None else structs.replace(report, exit_code=ExitCode.of_signal(signum))


def _parts(recording: Recording) -> Parts:
    return {(outcome.trial, outcome.rank): outcome for outcome in recording.outcomes}


def _truncated(trial: Trial, outcomes: Sequence[Outcome], moment: float) -> list[Outcome]:
    """Of a group, the outcomes that the end of the run brought about."""
    cut = [o for o in outcomes if _was_told(o) or _is_killed(o) or _is_later(trial, o, moment)]
    own = [o for o in outcomes if o.status not in _DID_NOT_FAIL and o not in cut and not is_echo(o)]
    # What its peers report is no evidence where a signal ended a worker: the end of the group is its consequence.
    if not cut or (own and not any(map(_is_killed, cut))):
        return cut
    return [outcome for outcome in outcomes if outcome.status is not Status.DONE]


def _was_told(outcome: Outcome) -> bool:
    return outcome.status is Status.SKIPPED and outcome.told


def _is_killed(outcome: Outcome) -> bool:
    """Did the signal reach the worker as well?"""
    failed = outcome.status in (Status.DIED, Status.RAISED)
    said = (outcome.error, outcome.detail.rstrip().rpartition("\n")[2])
    return failed and any(name in text for text in said for name in _SIGNALS)


def _is_later(trial: Trial, outcome: Outcome, moment: float) -> bool:
    """Did it fail after the first signal? A rank of which nothing was heard may have been the reason for the signal."""
    if trial.begin_seconds is None or outcome.status in (*_DID_NOT_FAIL, Status.UNHEARD):
        return False
    return trial.begin_seconds + outcome.seconds >= moment


def _with_known_groups(trials: Sequence[Trial], parts: Parts, last: int) -> Iterator[Trial]:
    """The trials without groups of which nothing is known, since the run ended in the middle of them."""
    for trial in trials:
        outcomes = [parts[trial.number, rank] for rank in trial.ranks if (trial.number, rank) in parts]
        lacking = trial.number == last and len(outcomes) < len(trial.ranks)
        figures = any(bytes(outcome.so_far) != bytes(NOTHING) for outcome in outcomes)
        if figures or not (lacking or any(map(_was_told, outcomes))):
            yield trial
        elif not trial.may_fail:
            failed = {outcome.rank for outcome in outcomes if outcome.status not in _DID_NOT_FAIL}
            groups = tuple(group for group in trial.groups if not failed.isdisjoint(group))
            if groups:
                yield structs.replace(trial, groups=groups)
