"""The lines of the report about stages and checks.

Checks of the run (RUN001 to RUN004) judge trials of other stages, and which ranks joined. Their findings are shown
under the stages that they are about.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ddpdiag.checks.api import Concern, Stage
from ddpdiag.judgement.judged import Judged
from ddpdiag.model import CheckLine, EventKind, Finding, Outcome, Recording, Severity, StageLine, Status
from ddpdiag.model.recording import TOLD_TO_LEAVE

_FAILED = (Status.UNHEARD, Status.DIED, Status.HUNG, Status.RAISED)
_WORST_FIRST = (Severity.ERROR, Severity.WARNING, Severity.NOTE)

ByCode = Mapping[str, Sequence[Outcome]]


class Lines(NamedTuple):
    """The lines of the stages that had checks to run, and of all checks."""

    stages: tuple[StageLine, ...]
    checks: tuple[CheckLine, ...]


def lines_of(recording: Recording, judged: Sequence[Judged]) -> Lines:
    """The lines of stages and checks. A stage's line includes the findings of checks of the run about this stage."""
    outcomes: dict[str, list[Outcome]] = {}
    for outcome in recording.outcomes:
        outcomes.setdefault(outcome.code, []).append(outcome)
    concerns = [concern for own in judged for concern in own.added.concerns]
    of_run = _by_stage(judged, concerns)
    absent = max((event.seconds for event in recording.events if event.kind is EventKind.ABSENT), default=0.0)
    stages = tuple(
        _line(stage, own, recording, outcomes, of_run.get(stage, ()), absent)
        for stage in Stage
        if (own := [j for j in judged if j.check.stage is stage and j.check.measure is not None])
    )
    affected: dict[str, Counter[str]] = {}
    for concern in concerns:
        affected.setdefault(str(concern.where), Counter()).update(concern.affected)
    checks = (_check_line(j, outcomes.get(j.check.code, ()), affected.get(j.check.code, {})) for j in judged)
    return Lines(stages, tuple(checks))


def _line(
    stage: Stage,
    own: Sequence[Judged],
    recording: Recording,
    outcomes: ByCode,
    of_run: Sequence[Finding],
    waited: float,
) -> StageLine:
    """The line of a stage. `of_run`: findings of checks of the run about it. `waited`: seconds for absent ranks."""
    status, note = _status(own, recording, outcomes), ""
    findings = [*(finding for j in own for finding in j.findings), *of_run]
    severities = {finding.severity for finding in findings}
    if stage is Stage.LAUNCH and (errors := [f.title for f in of_run if f.severity is Severity.ERROR]):
        status, note = "error", errors[0]
    if status == "interrupted":
        truncated = next(j.check for j in own if _is_truncated(outcomes.get(j.check.code, ())))
        note = f"interrupted in {truncated.code} ({truncated.name})"
    return StageLine(
        name=stage.value,
        status=status,
        # Before any trial, ranks waited for those that never joined.
        seconds=sum(trials_seconds(outcomes.get(j.check.code, ())) for j in own)
        + (waited if stage is Stage.LAUNCH else 0.0),
        severity=next((severity for severity in _WORST_FIRST if severity in severities), None),
        codes=tuple(dict.fromkeys(finding.code for finding in findings)),
        note=note,
    )


def trials_seconds(outcomes: Iterable[Outcome]) -> float:
    """The total seconds of trials; a trial takes as long as its slowest rank."""
    slowest: dict[int, float] = {}
    for outcome in outcomes:
        slowest[outcome.trial] = max(slowest.get(outcome.trial, 0.0), outcome.seconds)
    return sum(slowest.values())


def _status(judged: Sequence[Judged], recording: Recording, outcomes: ByCode) -> str:
    """The first that applies of: error, a failure of a trial, interrupted, warning, part, done, skipped."""
    severities = {f.severity for j in judged for f in j.findings}
    if Severity.ERROR in severities:
        return "error"
    experiments = {trial.number for trial in recording.trials if trial.may_fail}
    own = [o for j in judged for o in outcomes.get(j.check.code, ())]
    statuses = {Status.DONE} if any(o.trial in experiments for o in own) else set()
    statuses |= {o.status for o in own if o.trial not in experiments}
    for status in _FAILED:
        if status in statuses:
            return str(status.value)
    if _is_truncated(own) and any(event.kind in TOLD_TO_LEAVE for event in recording.events):
        return "interrupted"
    if Severity.WARNING in severities:
        return "warning"
    if Status.DONE in statuses and any(j.skip is None and j.check.code not in outcomes for j in judged):
        return "part"
    return "done" if Status.DONE in statuses else "skipped"


def _is_truncated(outcomes: Sequence[Outcome]) -> bool:
    """Whether the end of the run stopped ranks during these trials."""
    return any(outcome.told and outcome.status is Status.SKIPPED for outcome in outcomes)


def _by_stage(judged: Sequence[Judged], concerns: Sequence[Concern]) -> dict[Stage, list[Finding]]:
    """The findings that belong to other stages, by the stage that they are about."""
    stages: dict[Stage | str, Stage] = {stage: stage for stage in Stage}
    stages |= {j.check.code: j.check.stage for j in judged}
    of_run: dict[Stage, list[Finding]] = {}
    for concern in concerns:
        if (stage := stages.get(concern.where)) is not None:
            of_run.setdefault(stage, []).append(concern.finding)
    return of_run


def _check_line(judged: Judged, outcomes: Sequence[Outcome], affected: Mapping[str, int]) -> CheckLine:
    check = judged.check
    return CheckLine(
        code=check.code,
        name=check.name,
        stage=check.stage.value,
        statuses={status.value: count for status, count in Counter(o.status for o in outcomes).items()},
        skipped_because=judged.skip.reason if judged.skip else None,
        measures=check.measure is not None,
        affected=dict(affected),
    )
