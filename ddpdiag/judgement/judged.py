"""The checks of a run: which of them it takes, each one judged, and the result of each stage.

Checks of the run (RUN001 to RUN004) judge what happened to trials of other stages, and which ranks joined: their
findings belong to these stages.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from msgspec import Struct

from ddpdiag.checks.api import Check, Concern, Contribution, Stage
from ddpdiag.checks.findings import Effect, FindingSpec
from ddpdiag.checks.registry import BY_WHOLE_CODE
from ddpdiag.checks.world import World, without_gpu
from ddpdiag.errors import UsageError, nearest
from ddpdiag.model import (
    EventKind,
    Finding,
    Options,
    Outcome,
    Recording,
    Severity,
    Skip,
    StageLine,
    Status,
)
from ddpdiag.model.recording import TOLD_TO_LEAVE

# So many names fit into a sentence.
_FEW = 12


def selected(check: Check[Any], options: Options) -> bool:
    """Does this run take the check? `--select` and `--ignore` take codes or their prefixes; ignoring wins."""
    if check.code.startswith(options.ignore) and options.ignore:
        return False
    if check.code in BY_WHOLE_CODE and not options.alone and check.code not in options.select:
        return False
    if check.stage.value in options.skip_stages:
        return False
    if options.select and not check.code.startswith(options.select):
        return False
    return not options.stages or check.stage.value in options.stages


def lacks_named_backend(skip: Skip, world: World) -> bool:
    """Whether a check was left out because the user's `--backend` lacks its GPUs, which is a failure."""
    return world.options.backend != "auto" and skip.reason == without_gpu(world)


def validate(options: Options, checks: Iterable[Check[Any]]) -> None:
    """UsageError for a stage or code that does not exist, or a `--set` that names none."""
    by_code = {check.code: check for check in checks}
    codes = list(by_code)
    stages = [stage.value for stage in Stage if stage is not Stage.RUN]
    for option, names in (("--stage", options.stages), ("--skip-stage", options.skip_stages)):
        _known(option, names, stages, "stage")
    for option, names in (("--select", options.select), ("--ignore", options.ignore)):
        unknown = [name for name in names if not name or not any(code.startswith(name) for code in codes)]
        _known(option, unknown, codes, "code")
    if not any(check.stage is not Stage.RUN and selected(check, options) for check in by_code.values()):
        raise UsageError("--stage, --skip-stage, --select and --ignore leave no check to run")
    for name, value in options.settings.items():
        code, _, threshold = name.partition(".")
        _known("--set", [code], codes, "code")
        _known("--set", [name], [f"{code}.{own}" for own in by_code[code].thresholds], f"threshold of {code}")
        if threshold == "deadline_seconds" and float(value) <= 0:
            raise UsageError(f"--set {name}={value}: a deadline must be more than 0 seconds")


def _known(option: str, names: Iterable[str], known: Sequence[str], word: str) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"{option} {name}: unknown {word}; {_those(name, known, word)}")


def _those(name: str, known: Sequence[str], word: str) -> str:
    """What there is instead: all of a few, and of many those with similar names."""
    if len(known) <= _FEW:
        near = nearest(name, known) if len(known) > 1 else ""
        return f"expected {', '.join(known)}{near}" if known else "there is none"
    similar = get_close_matches(name, known, n=3)
    meant = f"did you mean {', '.join(similar)}? " if similar else ""
    return f"{meant}`ddpdiag checks` lists the {word}s"


ByCode = Mapping[str, Sequence[Outcome]]
_FAILED = (Status.UNHEARD, Status.DIED, Status.HUNG, Status.RAISED)
_WORST_FIRST = (Severity.ERROR, Severity.WARNING, Severity.NOTE)


class Judged(Struct, frozen=True, kw_only=True):
    """One check, judged. `readable` is False when its recorded data does not fit this version."""

    check: Check[Any]
    findings: tuple[Finding, ...] = ()
    added: Contribution = Contribution()
    skip: Skip | None = None
    readable: bool = True

    def not_seen(self) -> Iterator[Finding]:
        """Findings that something could not be checked: promise 3, that is never "healthy"."""
        return (finding for finding in self.findings if self.effect_of(finding) is Effect.NOT_SEEN)

    def slowing(self) -> Iterator[Finding]:
        """Warnings that name a host or rank which slows the job down."""
        warnings = (finding for finding in self.findings if finding.severity is Severity.WARNING)
        return (own for own in warnings if self._declared(own).slows and (own.ranks or own.hosts))

    def effect_of(self, finding: Finding) -> Effect:
        """What the check declares that one of its findings means for the verdict."""
        return self._declared(finding).effect

    def _declared(self, finding: Finding) -> FindingSpec:
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
        seconds=sum(trials_seconds(outcomes.get(j.check.code, ())) for j in own)
        + (waited if stage is Stage.LAUNCH else 0.0),
        severity=next((severity for severity in _WORST_FIRST if severity in severities), None),
        codes=tuple(dict.fromkeys(finding.code for finding in findings)),
        note=note,
    )


def trials_seconds(outcomes: Iterable[Outcome]) -> float:
    """What trials took, each as long as its slowest rank."""
    slowest: dict[int, float] = {}
    for outcome in outcomes:
        slowest[outcome.trial] = max(slowest.get(outcome.trial, 0.0), outcome.seconds)
    return sum(slowest.values())


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


def concerns_of(judged: Sequence[Judged]) -> tuple[Concern, ...]:
    """What checks of the run found of other checks and stages."""
    return tuple(concern for own in judged for concern in own.added.concerns)


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
