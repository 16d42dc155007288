"""What a check says of a run."""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct, field

from ddpdiag.checks.api import Check, Section
from ddpdiag.checks.findings import Effect
from ddpdiag.model import Finding, Matrix, Scalar, Skip
from ddpdiag.model.report import Setting


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
        """Findings that something could not be looked at: promise 3, that is never "healthy"."""
        return (finding for finding in self.findings if self.effect_of(finding) is Effect.NOT_SEEN)

    def effect_of(self, finding: Finding) -> Effect:
        """What the check declares that one of its findings means for the verdict."""
        return self.check.explained(finding.code.partition(".")[2]).effect
