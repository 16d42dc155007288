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
    """The effect of a finding on the verdict."""

    UNFIT = "an error breaks jobs"
    UNKNOWN = "after an error it is not known whether jobs break"
    UNCHECKED = "whatever its severity, something could not be checked, or there was nothing to judge"
    USAGE = "an error is the user's mistake, and no verdict on the machine"


class FindingSpec(NamedTuple):
    """The declaration of a finding: its text on the manual page, severity (None: depends on the data), and effect.

    `same_item`: the text continues the manual's list item of the previous finding. `slows_job`: the finding names a
    host or rank that slows the job down. As a warning, such a finding makes the verdict "FIT, degraded".
    """

    text: str
    severity: Severity | None = None
    effect: Effect = Effect.UNFIT
    same_item: bool = False
    slows_job: bool = False

    @classmethod
    def error(cls, text: str, *, effect: Effect = Effect.UNFIT, same_item: bool = False) -> "FindingSpec":
        return cls(text, Severity.ERROR, effect, same_item)

    @classmethod
    def warning(cls, text: str, *, same_item: bool = False, slows_job: bool = False) -> "FindingSpec":
        return cls(text, Severity.WARNING, same_item=same_item, slows_job=slows_job)

    @classmethod
    def note(cls, text: str, *, same_item: bool = False) -> "FindingSpec":
        return cls(text, Severity.NOTE, same_item=same_item)

    @classmethod
    def unchecked(cls, text: str, *, same_item: bool = False) -> "FindingSpec":
        """Declare a warning about something that could not be checked. It keeps the verdict from being FIT."""
        return cls(text, Severity.WARNING, Effect.UNCHECKED, same_item)


# Findings that any check may make. Manual pages need not list them.
COMMON = {
    "unreadable": FindingSpec.unchecked(
        "the check could not read what it needs; the verdict is UNKNOWN, never healthy."
    )
}


class Section(Struct, frozen=True, kw_only=True):
    """A check's own part of the report, if the run was made for this check: a benchmark, or training by strategies.

    `question` begins the sentence of the verdict UNKNOWN: "How well {} can communicate", with the ranks and hosts for
    {}. `sentence` is the answer; without measurements `has_answer` is False. `figures` and `series` can be compared
    with those of another run.
    """

    question: str
    sentence: str
    has_answer: bool
    bench: BenchReport | None = None
    train: TrainReport | None = None
    figures: tuple[Figure, ...] = ()
    series: tuple[BenchCurve, ...] = ()


def workarounds_text(env: Mapping[str, str | None]) -> str:
    """Describe variables, such as "with NCCL_P2P_DISABLE=1", or "without NCCL_ALGO" for the value None (unset)."""
    settings = ", ".join(f"{name}={value}" for name, value in env.items() if value is not None)
    removed = ", ".join(name for name, value in env.items() if value is None)
    words = ([f"with {settings}"] if settings else []) + ([f"without {removed}"] if removed else [])
    return " and ".join(words)
