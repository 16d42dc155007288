"""Declarations of findings, and a check's own section of the report.

A declaration is the finding's text on the manual page, its usual severity, and its effect on the verdict.
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
    """The declaration of a finding: its text on the manual page, severity (None: depends on the data), and effect.

    With `same_item` the text continues the list item of the finding before. A finding that `slows` names a host or rank
    that slows the job down. As a warning it makes the verdict "FIT, degraded".
    """

    text: str
    severity: Severity | None = None
    effect: Effect = Effect.UNFIT
    same_item: bool = False
    slows: bool = False

    @classmethod
    def error(cls, text: str, *, effect: Effect = Effect.UNFIT, same_item: bool = False) -> "FindingSpec":
        """Declare a finding that is always an error."""
        return cls(text, Severity.ERROR, effect, same_item)

    @classmethod
    def warning(cls, text: str, *, same_item: bool = False, slows: bool = False) -> "FindingSpec":
        return cls(text, Severity.WARNING, same_item=same_item, slows=slows)

    @classmethod
    def note(cls, text: str, *, same_item: bool = False) -> "FindingSpec":
        return cls(text, Severity.NOTE, same_item=same_item)

    @classmethod
    def not_seen(cls, text: str, *, same_item: bool = False) -> "FindingSpec":
        """Declare a warning that something could not be checked. The verdict is then never FIT."""
        return cls(text, Severity.WARNING, Effect.NOT_SEEN, same_item)


# Findings that any check may make; manual pages need not repeat them.
COMMON = {
    "unreadable": FindingSpec.not_seen("the check could not read what it needs; the verdict is UNKNOWN, never healthy.")
}


class Section(Struct, frozen=True, kw_only=True):
    """The part of the report of the check for which the run was made: a benchmark, or a training by strategies.

    `question` begins the sentence of the verdict UNKNOWN ("How well {} can communicate"; {}: the ranks and hosts).
    `sentence` answers it, and `measured` says whether there is an answer. `figures` and `series` can be compared with
    those of another run.
    """

    question: str
    sentence: str
    measured: bool
    bench: BenchReport | None = None
    train: TrainReport | None = None
    figures: tuple[Figure, ...] = ()
    series: tuple[BenchCurve, ...] = ()


def workarounds_text(env: Mapping[str, str | None]) -> str:
    """Variables in words, such as "with NCCL_P2P_DISABLE=1" or "without NCCL_ALGO"."""
    settings = ", ".join(f"{name}={value}" for name, value in env.items() if value is not None)
    removed = ", ".join(name for name, value in env.items() if value is None)
    words = ([f"with {settings}"] if settings else []) + ([f"without {removed}"] if removed else [])
    return " and ".join(words)
