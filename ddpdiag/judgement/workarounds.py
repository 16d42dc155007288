"""Variables that the job needs, and errors that are only warnings for this job."""

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import structs

from ddpdiag.checks.api import Seen
from ddpdiag.checks.findings import Workarounds
from ddpdiag.checks.world import World
from ddpdiag.judgement.judged import Judged
from ddpdiag.model import Finding, Recording, Severity


def workarounds_of(world: World, recording: Recording, judged: Sequence[Judged]) -> Workarounds:
    """The variables that the job needs, if a check that this version can read found some."""
    found = (
        own.check.workarounds(Seen(world, own.check, recording))
        for own in judged
        if own.check.workarounds is not None and own.readable
    )
    return next(found, Workarounds())


def excused(world: World, recording: Recording, judged: Sequence[Judged]) -> list[Judged]:
    """Errors of which a check knows that they do not concern the job are warnings."""
    asked = [Seen(world, own.check, recording) for own in judged if own.check.excuse is not None and own.readable]
    return [structs.replace(own, findings=tuple(_eased(own.findings, asked))) for own in judged]


def _eased(findings: Sequence[Finding], asked: Sequence[Seen[Any]]) -> Iterator[Finding]:
    for finding in findings:
        why = next(filter(None, (_excuse(seen, finding) for seen in asked)), None)
        if finding.severity is not Severity.ERROR or why is None:
            yield finding
        else:
            yield structs.replace(finding, severity=Severity.WARNING, message=f"{finding.message} {why}")


def _excuse(seen: Seen[Any], finding: Finding) -> str | None:
    if seen.check.excuse is None or finding.severity is not Severity.ERROR:
        return None
    try:
        reason: str | None = seen.check.excuse(seen, finding)
    except (ValueError, ArithmeticError, LookupError):  # what another check recorded cannot be read
        return None
    return reason
