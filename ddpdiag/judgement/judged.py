"""What a check says of a run."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from ddpdiag.checks.api import Check, Section
from ddpdiag.model import Finding, Matrix, Scalar, Skip


class Judged(Struct, frozen=True, kw_only=True):
    """One check, judged. `readable` is False when its recorded data does not fit this version."""

    check: Check[Any]
    findings: tuple[Finding, ...] = ()
    columns: Mapping[int, Mapping[str, Scalar]] = field(default_factory=dict)
    figures: Mapping[str, Scalar] = field(default_factory=dict)
    matrices: tuple[Matrix, ...] = ()
    section: Section | None = None
    skip: Skip | None = None
    readable: bool = True
