"""The judgement of each check of a run."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import Struct, structs

from ddpdiag.checks.api import Check, Contribution, Seen, Stage
from ddpdiag.checks.findings import Effect, FindingSpec
from ddpdiag.checks.world import World
from ddpdiag.judgement.ending import RecordingForms
from ddpdiag.judgement.selection import is_selected
from ddpdiag.model import Finding, Severity, Skip
from ddpdiag.text import share_text


class CheckJudgement(Struct, frozen=True, kw_only=True):
    """The judgement of one check. `unreadable` says that this version cannot read the recorded data; else empty."""

    check: Check[Any]
    findings: tuple[Finding, ...] = ()
    contribution: Contribution = Contribution()
    skip: Skip | None = None
    unreadable: str = ""

    def unchecked_findings(self) -> Iterator[Finding]:
        """The findings about something that could not be checked. With such a finding the verdict is never FIT."""
        return (finding for finding in self.findings if self.effect_of(finding) is Effect.UNCHECKED)

    def slowing_findings(self) -> Iterator[Finding]:
        """The warnings that name a host or rank that slows the job down."""
        warnings = (finding for finding in self.findings if finding.severity is Severity.WARNING)
        return (each for each in warnings if self._declared(each).slows_job and (each.ranks or each.hosts))

    def effect_of(self, finding: Finding) -> Effect:
        """The declared effect of a finding on the verdict."""
        return self._declared(finding).effect

    def _declared(self, finding: Finding) -> FindingSpec:
        return self.check.spec_of(finding.code.partition(".")[2])


Judgements = Sequence[CheckJudgement]


def judge_checks(world: World, forms: RecordingForms, checks: Sequence[Check[Any]]) -> tuple[CheckJudgement, ...]:
    """Judge each check that was selected for the run, and the checks of the run as a whole (Stage.RUN)."""
    header = forms.recording.header
    known_codes = header.checks or [check.code for check in checks]
    selected_checks = [
        check
        for check in checks
        if check.stage is Stage.RUN or (check.code in known_codes and is_selected(check, header.options))
    ]
    findings_by_code: dict[str, tuple[Finding, ...]] = {}
    judgements: list[CheckJudgement] = []
    for check in selected_checks:
        sections = tuple(each.contribution.section for each in judgements if each.contribution.section is not None)
        seen = Seen(world, check, forms.established, findings_by_code=findings_by_code, sections=sections)
        judgements.append(_judge_check(seen))
    return _with_excuses(_with_limit(judgements, header.options.max_slower_share))


def _judge_check(seen: Seen[Any]) -> CheckJudgement:
    check = seen.check
    try:
        skip = _skip_of(seen)
        return CheckJudgement(check=check, findings=seen.findings, contribution=check.report(seen), skip=skip)
    except (ValueError, ArithmeticError, LookupError) as error:  # msgspec's own errors are ValueErrors
        why = f"{check.code} was not judged: this version of ddpdiag cannot read its recorded data ({error})"
        return CheckJudgement(check=check, unreadable=why)


def _map_findings(judgement: CheckJudgement, change: Callable[[Finding], Finding]) -> CheckJudgement:
    """Apply `change` to each finding of the check, including findings that are shown under other stages."""
    moved = tuple(each._replace(finding=change(each.finding)) for each in judgement.contribution.moved_findings)
    return structs.replace(
        judgement,
        findings=tuple(map(change, judgement.findings)),
        contribution=structs.replace(judgement.contribution, moved_findings=moved) if moved else judgement.contribution,
    )


def _with_limit(judgements: Judgements, limit: float | None) -> Judgements:
    """Turn each warning that a host or rank slows the job down by more than the share `limit` into an error."""
    if limit is None:
        return judgements

    def upgraded(judgement: CheckJudgement) -> CheckJudgement:
        too_slow = [each for each in judgement.slowing_findings() if (slower_share(each) or 0.0) > limit]

        def upgrade(finding: Finding) -> Finding:
            if finding not in too_slow:
                return finding
            reason = f"More than {share_text(limit)} slower is an error, because --max-slowdown was given."
            return structs.replace(finding, severity=Severity.ERROR, message=f"{finding.message} {reason}")

        return _map_findings(judgement, upgrade)

    return tuple(map(upgraded, judgements))


def slower_share(finding: Finding) -> float | None:
    """The share by which the host or rank of a finding is slower than usual, or None if the finding has no share."""
    share = finding.evidence.get("slower_share")
    return share if isinstance(share, float) else None


def _with_excuses(judgements: Judgements) -> tuple[CheckJudgement, ...]:
    """Turn each error into a warning if the `excuse` of any check says that the error does not concern the job."""
    excuses = [each.contribution.excuse for each in judgements if each.contribution.excuse is not None]

    def downgrade(finding: Finding) -> Finding:
        if finding.severity is not Severity.ERROR:
            return finding
        reason = next(filter(None, (_excuse_text(excuse, finding) for excuse in excuses)), None)
        if reason is None:
            return finding
        return structs.replace(finding, severity=Severity.WARNING, message=f"{finding.message} {reason}")

    return tuple(_map_findings(each, downgrade) for each in judgements)


def _excuse_text(excuse: Callable[[Finding], str | None], finding: Finding) -> str | None:
    try:
        return excuse(finding)
    except (ValueError, ArithmeticError, LookupError):  # this version cannot read the data that the excuse needs
        return None


def _skip_of(seen: Seen[Any]) -> Skip | None:
    """The recorded skip of the check, or None. A check that measures nothing first decides whether to skip itself."""
    check = seen.check
    reason = check.skip(seen) if check.measure is None else None
    if reason is not None:
        return reason.skip(check, seen.options)
    return next((skip for skip in seen.recording.skips if skip.code == check.code), None)
