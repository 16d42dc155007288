"""Each check, judged, and the result of each stage.

Checks of the run (RUN001 to RUN004) judge what happened to trials of other stages, and which ranks joined: their
findings belong to these stages.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct, field

from ddpdiag.checks.api import Check, Concern, Seen, Stage
from ddpdiag.checks.findings import Effect, Explained, Section
from ddpdiag.checks.world import World
from ddpdiag.model import EventKind, Finding, Matrix, Outcome, Recording, Scalar, Severity, Skip, StageLine, Status
from ddpdiag.model.recording import TOLD_TO_LEAVE
from ddpdiag.model.report import Setting
from ddpdiag.model.trial import spent_seconds

ByCode = Mapping[str, Sequence[Outcome]]
_FAILED = (Status.UNHEARD, Status.DIED, Status.HUNG, Status.RAISED)
_WORST_FIRST = (Severity.ERROR, Severity.WARNING, Severity.NOTE)


class Judged(Struct, frozen=True, kw_only=True):
    """One check, judged. `readable` is False when its recorded data does not fit this version."""

    check: Check[Any]
    findings: tuple[Finding, ...] = ()
    columns: Mapping[int, Mapping[str, Scalar]] = field(default_factory=dict)
    figures: Mapping[str, Scalar] = field(default_factory=dict)
    matrices: tuple[Matrix, ...] = ()
    section: Section | None = None
    settings: tuple[Setting, ...] = ()
    skip: Skip | None = None
    readable: bool = True

    def not_seen(self) -> Iterator[Finding]:
        """Findings that something could not be checked: promise 3, that is never "healthy"."""
        return (finding for finding in self.findings if self.effect_of(finding) is Effect.NOT_SEEN)

    def slowing(self) -> Iterator[Finding]:
        """Warnings that name a host or rank which slows the job down."""
        warnings = (finding for finding in self.findings if finding.severity is Severity.WARNING)
        return (own for own in warnings if self._declared(own).slows and (own.ranks or own.nodes))

    def effect_of(self, finding: Finding) -> Effect:
        """What the check declares that one of its findings means for the verdict."""
        return self._declared(finding).effect

    def _declared(self, finding: Finding) -> Explained:
        return self.check.explained(finding.code.partition(".")[2])


def by_code(recording: Recording) -> ByCode:
    """The outcomes of each check: of a large fleet there are millions."""
    found: dict[str, list[Outcome]] = {}
    for outcome in recording.outcomes:
        found.setdefault(outcome.code, []).append(outcome)
    return found


def stages_of(
    recording: Recording, judged: Sequence[Judged], outcomes: ByCode, concerns: Sequence[Concern]
) -> tuple[StageLine, ...]:
    """The stages that had checks to run; `concerns` is what checks of the run say of them."""
    of_the_run = _of_the_run(judged, concerns)
    absent = [event.seconds for event in recording.events if event.kind is EventKind.ABSENT]
    return tuple(
        _line(stage, own, recording, outcomes, of_the_run.get(stage, _Beside()), max(absent, default=0.0))
        for stage in Stage
        if (own := [j for j in judged if j.check.stage is stage and j.check.measure is not None])
    )


class _Beside(NamedTuple):
    """What checks of the run found of a stage, and what the stage's own line does not tell."""

    findings: tuple[Finding, ...] = ()
    note: str = ""


def _line(
    stage: Stage, own: Sequence[Judged], recording: Recording, outcomes: ByCode, beside: _Beside, waited: float
) -> StageLine:
    status = _status(own, recording, outcomes)
    findings = [*(finding for j in own for finding in j.findings), *beside.findings]
    severities = {finding.severity for finding in findings}
    note = beside.note
    if stage is Stage.LAUNCH and any(finding.severity is Severity.ERROR for finding in beside.findings):
        status = "error"
    if status == "interrupted":
        truncated = next(j.check for j in own if _is_truncated(outcomes.get(j.check.code, ())))
        note = f"interrupted in {truncated.code} ({truncated.name})"
    return StageLine(
        name=stage.value,
        status=status,
        # The others waited for ranks that never joined before any trial.
        seconds=sum(spent_seconds(outcomes.get(j.check.code, ())) for j in own)
        + (waited if stage is Stage.LAUNCH else 0.0),
        severity=next((severity for severity in _WORST_FIRST if severity in severities), None),
        codes=tuple(dict.fromkeys(finding.code for finding in findings)),
        note=note,
    )


def _status(judged: Sequence[Judged], recording: Recording, outcomes: ByCode) -> str:
    """The worst of the stage: error or warning findings, else what hindered its trials, else part or done."""
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
    """Were ranks told to stop during it?"""
    return any(outcome.told and outcome.status is Status.SKIPPED for outcome in outcomes)


# What checks of the run say of other stages ---------------------------------------------------------------------------


def concerns_of(world: World, recording: Recording, judged: Sequence[Judged]) -> Iterator[Concern]:
    """What checks of the run found of other checks and stages."""
    for own in judged:
        if own.check.concerns is not None:
            yield from own.check.concerns(Seen(world, own.check, recording), own.findings)


def affected_by_code(concerns: Sequence[Concern]) -> Mapping[str, Mapping[str, int]]:
    """How many outcomes of each check, by status, are those of ranks that failed only because of others."""
    affected: dict[str, Counter[str]] = {}
    for concern in concerns:
        affected.setdefault(str(concern.where), Counter()).update(concern.affected)
    return affected


def _of_the_run(judged: Sequence[Judged], concerns: Sequence[Concern]) -> dict[Stage, _Beside]:
    stages: dict[Stage | str, Stage] = {stage: stage for stage in Stage}
    stages |= {j.check.code: j.check.stage for j in judged}
    beside: dict[Stage, _Beside] = {}
    for concern in concerns:
        if (stage := stages.get(concern.where)) is not None:
            known = beside.get(stage, _Beside())
            beside[stage] = _Beside((*known.findings, concern.finding), known.note or concern.note)
    return beside
