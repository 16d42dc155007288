"""The judgement of each check of a run."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import Struct, structs

from ddpdiag.checks.api import Check, Contribution, Seen, Stage
from ddpdiag.checks.findings import Effect, FindingSpec
from ddpdiag.checks.world import World
from ddpdiag.judgement.ending import Run
from ddpdiag.judgement.selection import selected
from ddpdiag.model import Finding, Severity, Skip


class Judged(Struct, frozen=True, kw_only=True):
    """The judgement of one check. `unreadable` is a sentence if this version cannot read the recorded data."""

    check: Check[Any]
    findings: tuple[Finding, ...] = ()
    added: Contribution = Contribution()
    skip: Skip | None = None
    unreadable: str = ""

    def not_seen(self) -> Iterator[Finding]:
        """The findings that something could not be checked. With any, the verdict is never FIT."""
        return (finding for finding in self.findings if self.effect_of(finding) is Effect.NOT_SEEN)

    def slowing(self) -> Iterator[Finding]:
        """The warnings that name a host or rank that slows the job down."""
        warnings = (finding for finding in self.findings if finding.severity is Severity.WARNING)
        return (own for own in warnings if self._declared(own).slows and (own.ranks or own.hosts))

    def effect_of(self, finding: Finding) -> Effect:
        """The declared effect of a finding on the verdict."""
        return self._declared(finding).effect

    def _declared(self, finding: Finding) -> FindingSpec:
        return self.check.explained(finding.code.partition(".")[2])


def judge_checks(world: World, run: Run, checks: Sequence[Check[Any]]) -> tuple[Judged, ...]:
    """Judge each check that was selected for the run, and the checks of the run itself (Stage.RUN)."""
    header = run.recording.header
    known = header.checks or [check.code for check in checks]
    chosen = [
        check
        for check in checks
        if check.stage is Stage.RUN or (check.code in known and selected(check, header.options))
    ]
    kept: dict[str, tuple[Finding, ...]] = {}
    judged: list[Judged] = []
    for check in chosen:
        sections = tuple(own.added.section for own in judged if own.added.section is not None)
        judged.append(_judge_check(Seen(world, check, run.established, kept=kept, sections=sections)))
    return _excused(judged)


def _judge_check(seen: Seen[Any]) -> Judged:
    check = seen.check
    skip = _skip_of(seen)
    try:
        return Judged(
            check=check,
            findings=seen.findings,
            added=check.report(seen),
            skip=skip,
        )
    except (ValueError, ArithmeticError, LookupError) as error:  # msgspec's own errors are ValueErrors
        why = f"{check.code} was not judged: this version of ddpdiag cannot read its recorded data ({error})"
        return Judged(check=check, unreadable=why)


def _revised(judged: Judged, revise: Callable[[Finding], Finding]) -> Judged:
    """Apply `revise` to each finding of the check, including those that are shown under other stages."""
    concerns = tuple(concern._replace(finding=revise(concern.finding)) for concern in judged.added.concerns)
    return structs.replace(
        judged,
        findings=tuple(map(revise, judged.findings)),
        added=structs.replace(judged.added, concerns=concerns) if concerns else judged.added,
    )


def _excused(judged: Sequence[Judged]) -> tuple[Judged, ...]:
    """Make an error a warning if the `excuse` of a check says that it does not concern the job."""
    excuses = [own.added.excuse for own in judged if own.added.excuse is not None]

    def eased(finding: Finding) -> Finding:
        if finding.severity is not Severity.ERROR:
            return finding
        why = next(filter(None, (_excuse_text(excuse, finding) for excuse in excuses)), None)
        if why is None:
            return finding
        return structs.replace(finding, severity=Severity.WARNING, message=f"{finding.message} {why}")

    return tuple(_revised(own, eased) for own in judged)


def _excuse_text(excuse: Callable[[Finding], str | None], finding: Finding) -> str | None:
    try:
        return excuse(finding)
    except (ValueError, ArithmeticError, LookupError):  # the recorded data of another check cannot be read
        return None


def _skip_of(seen: Seen[Any]) -> Skip | None:
    """The skip of the check, or None: by its own `skip` if it measures nothing, else from the recording."""
    check = seen.check
    reason = check.skip(seen) if check.measure is None else None
    if reason is not None:
        return reason.skip(check, seen.options)
    return next((skip for skip in seen.recording.skips if skip.code == check.code), None)
