"""The summaries of stages and checks in the report.

RUN001 to RUN004, the checks of the run, judge the trials of other stages, and which ranks joined. The report shows
their findings under the stages that the findings are about.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ddpdiag.checks.api import MovedFinding, Stage
from ddpdiag.judgement.check_judgements import CheckJudgement, Judgements
from ddpdiag.model import CheckSummary, EventKind, Finding, Outcome, Recording, Severity, StageSummary, Status
from ddpdiag.model.recording import SIGNAL_EVENTS

_FAILED = (Status.UNHEARD, Status.DIED, Status.HUNG, Status.RAISED)
_WORST_FIRST = (Severity.ERROR, Severity.WARNING, Severity.NOTE)

OutcomesByCode = Mapping[str, Sequence[Outcome]]


class Summaries(NamedTuple):
    """The summaries of the stages that had checks to run, and of all checks."""

    stages: tuple[StageSummary, ...]
    checks: tuple[CheckSummary, ...]


def summaries_of(recording: Recording, judgements: Judgements) -> Summaries:
    """Summarize stages and checks. A stage includes the findings of RUN001 to RUN004 that are about this stage."""
    outcomes: dict[str, list[Outcome]] = {}
    for outcome in recording.outcomes:
        outcomes.setdefault(outcome.code, []).append(outcome)
    moved_findings = [moved for each in judgements for moved in each.contribution.moved_findings]
    run_findings = _run_findings(judgements, moved_findings)
    wait_seconds = max((event.seconds for event in recording.events if event.kind is EventKind.ABSENT), default=0.0)
    stages = tuple(
        _stage_summary(stage, members, recording, outcomes, run_findings.get(stage, ()), wait_seconds)
        for stage in Stage
        if (members := [each for each in judgements if each.check.stage is stage and each.check.measure is not None])
    )
    affected: dict[str, Counter[str]] = {}
    for moved in moved_findings:
        affected.setdefault(str(moved.shown_under), Counter()).update(moved.affected_counts)
    checks = (
        _check_summary(each, outcomes.get(each.check.code, ()), affected.get(each.check.code, {}))
        for each in judgements
    )
    return Summaries(stages, tuple(checks))


def _stage_summary(
    stage: Stage,
    judgements: Judgements,
    recording: Recording,
    outcomes: OutcomesByCode,
    run_findings: Sequence[Finding],
    wait_seconds: float,
) -> StageSummary:
    """Summarize a stage. `wait_seconds` is the time for which the run waited for ranks that never joined."""
    status, detail = _status(judgements, recording, outcomes), ""
    findings = [*(finding for each in judgements for finding in each.findings), *run_findings]
    severities = {finding.severity for finding in findings}
    if stage is Stage.LAUNCH and (errors := [f.title for f in run_findings if f.severity is Severity.ERROR]):
        status, detail = "error", errors[0]
    if status == "interrupted":
        check = next(each.check for each in judgements if _is_interrupted(outcomes.get(each.check.code, ())))
        detail = f"interrupted in {check.code} ({check.name})"
    return StageSummary(
        name=stage.value,
        status=status,
        # The launch includes the time for which ranks waited for ranks that never joined.
        seconds=sum(trials_seconds(outcomes.get(each.check.code, ())) for each in judgements)
        + (wait_seconds if stage is Stage.LAUNCH else 0.0),
        severity=next((severity for severity in _WORST_FIRST if severity in severities), None),
        codes=tuple(dict.fromkeys(finding.code for finding in findings)),
        detail=detail,
    )


def trials_seconds(outcomes: Iterable[Outcome]) -> float:
    """The sum of the seconds of all trials. A trial takes as long as its slowest rank."""
    slowest: dict[int, float] = {}
    for outcome in outcomes:
        slowest[outcome.trial] = max(slowest.get(outcome.trial, 0.0), outcome.seconds)
    return sum(slowest.values())


def _status(judgements: Judgements, recording: Recording, outcomes: OutcomesByCode) -> str:
    """The worst status: error, a trial's failure, interrupted, warning, part (some checks not run), done, skipped."""
    severities = {f.severity for each in judgements for f in each.findings}
    if Severity.ERROR in severities:
        return "error"
    experiments = {trial.number for trial in recording.trials if trial.may_fail}
    stage_outcomes = [o for each in judgements for o in outcomes.get(each.check.code, ())]
    statuses = {Status.DONE} if any(o.trial in experiments for o in stage_outcomes) else set()
    statuses |= {o.status for o in stage_outcomes if o.trial not in experiments}
    for status in _FAILED:
        if status in statuses:
            return str(status.value)
    if _is_interrupted(stage_outcomes) and any(event.kind in SIGNAL_EVENTS for event in recording.events):
        return "interrupted"
    if Severity.WARNING in severities:
        return "warning"
    if Status.DONE in statuses and any(each.skip is None and each.check.code not in outcomes for each in judgements):
        return "part"
    return "done" if Status.DONE in statuses else "skipped"


def _is_interrupted(outcomes: Sequence[Outcome]) -> bool:
    """Whether the end of the run interrupted a rank in the trials of these outcomes."""
    return any(outcome.interrupted and outcome.status is Status.SKIPPED for outcome in outcomes)


def _run_findings(judgements: Judgements, moved_findings: Sequence[MovedFinding]) -> dict[Stage, list[Finding]]:
    """The findings of RUN001 to RUN004, by the stage that they are about."""
    stage_of: dict[Stage | str, Stage] = {stage: stage for stage in Stage}
    stage_of |= {each.check.code: each.check.stage for each in judgements}
    run_findings: dict[Stage, list[Finding]] = {}
    for moved in moved_findings:
        if (stage := stage_of.get(moved.shown_under)) is not None:
            run_findings.setdefault(stage, []).append(moved.finding)
    return run_findings


def _check_summary(judgement: CheckJudgement, outcomes: Sequence[Outcome], affected: Mapping[str, int]) -> CheckSummary:
    check = judgement.check
    return CheckSummary(
        code=check.code,
        name=check.name,
        stage=check.stage.value,
        statuses={status.value: count for status, count in Counter(o.status for o in outcomes).items()},
        skipped_because=judgement.skip.reason if judgement.skip else None,
        measures=check.measure is not None,
        affected_counts=dict(affected),
    )
