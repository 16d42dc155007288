"""Declarations of findings (the text of the manual page, the usual severity, the effect on the verdict),
and what else it adds to the report: a section of its own, variables that the job needs.
"""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.model import Severity
from ddpdiag.model.bench import BenchCurve, BenchReport
from ddpdiag.model.options import Figure
from ddpdiag.model.train import TrainReport


class Effect(Enum):
    """The meaning of a finding for the verdict."""

    UNFIT = "an error breaks jobs"
    UNKNOWN = "after an error it is not known whether jobs break"
    NOT_SEEN = "whatever its severity, something could not be checked, or there was nothing to judge"
    USAGE = "an error is the user's mistake, and no verdict on the machine"


class FindingSpec(NamedTuple):
    """The text of a finding on the manual page, its severity unless that depends on the data, and its effect.

    With `same_item` its text continues the item of the finding before it in the page's list. One that `slows` names a
    host or rank that slows the job down: where it is a warning, the job is fit and degraded.
    """

    text: str
    severity: Severity | None = None
    effect: Effect = Effect.UNFIT
    same_item: bool = False
    slows: bool = False

    @classmethod
    def error(cls, text: str, *, effect: Effect = Effect.UNFIT, same_item: bool = False) -> "FindingSpec":
        """A finding that is an error wherever it is made."""
        return cls(text, Severity.ERROR, effect, same_item)

    @classmethod
    def warning(cls, text: str, *, same_item: bool = False, slows: bool = False) -> "FindingSpec":
        return cls(text, Severity.WARNING, same_item=same_item, slows=slows)

    @classmethod
    def note(cls, text: str, *, same_item: bool = False) -> "FindingSpec":
        return cls(text, Severity.NOTE, same_item=same_item)

    @classmethod
    def not_seen(cls, text: str, *, same_item: bool = False) -> "FindingSpec":
        """A warning that something could not be checked, so that the run is never healthy."""
        return cls(text, Severity.WARNING, Effect.NOT_SEEN, same_item)


# What any check may find, and pages need not repeat.
COMMON = {
    "unreadable": FindingSpec.not_seen("the check could not read what it needs; the verdict is UNKNOWN, never healthy.")
}


class Section(Struct, frozen=True, kw_only=True):
    """A check's own part of the report, where the run was made for it: a benchmark, a training by strategies.

    `question` is what is unknown where it could not look ("How well {} can communicate", {} being the ranks and hosts);
    `sentence` is its answer, which `measured` says that there is. `figures` and `series` are what another run can be
    held against.
    """

    question: str
    sentence: str
    measured: bool
    bench: BenchReport | None = None
    train: TrainReport | None = None
    figures: tuple[Figure, ...] = ()
    series: tuple[BenchCurve, ...] = ()


def workarounds_text(env: Mapping[str, str | None]) -> str:
    """Such as "with NCCL_P2P_DISABLE=1" or "without NCCL_ALGO"."""
    settings = ", ".join(f"{name}={value}" for name, value in env.items() if value is not None)
    removed = ", ".join(name for name, value in env.items() if value is None)
    words = ([f"with {settings}"] if settings else []) + ([f"without {removed}"] if removed else [])
    return " and ".join(words)
