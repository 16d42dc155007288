"""Options that several commands share, and those of `check` and `host`; `ddpdiag.cli.outputs` has those of reports."""

import math
from collections.abc import Sequence
from dataclasses import Field, dataclass
from enum import StrEnum
from typing import Any

from ddpdiag.errors import UsageError
from ddpdiag.model.declared import completion, option
from ddpdiag.model.options import Depth

__all__ = ["completion", "option"]


def spelled(name: str) -> str:
    """The option of the field `name`: "--port-range" of "port_range"."""
    return "--" + name.rstrip("_").replace("_", "-")


def variable_of(declared: "Field[Any]") -> str | None:
    """The variable of the environment that an option is read from, such as DDPDIAG_BUDGET; None if there is none."""
    return f"DDPDIAG_{declared.name.rstrip('_').upper()}" if declared.metadata["variable"] else None


WHAT, VERDICT, FILES, OUT = "What is checked", "Verdict", "Files to write", "Display"


class Color(StrEnum):
    """Whether the report has colours; `AUTO`: on a terminal, unless NO_COLOR or TERM=dumb says otherwise."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, kw_only=True)
class DisplayOptions:
    """The amount of text and the colours of a command."""

    quiet: bool = option(False, "Print the verdict and what is wrong, nothing else.", "-q", panel=OUT)
    color: Color = option(Color.AUTO, "Colours (auto: on a terminal, unless NO_COLOR is set).", panel=OUT)


def stages() -> list[str]:
    """The stages that --stage takes."""
    from ddpdiag.checks.api import Stage

    return [stage.value for stage in Stage if stage is not Stage.RUN]


def codes() -> list[str]:
    """The codes of all checks."""
    from ddpdiag.checks.registry import all_checks

    return [check.code for check in all_checks()]


def codes_and_names() -> list[str]:
    """The codes and names that `ddpdiag explain` has pages of."""
    from ddpdiag.cli.manual import pages

    return [word for page in pages() for word in (page.code, page.name)]


def backends() -> tuple[str, ...]:
    """The backends that most jobs use."""
    return "auto", "nccl", "gloo"


def split(values: Sequence[str]) -> tuple[str, ...]:
    """The values of a repeatable option, each of which may be a list: `--stage gpu,collective`."""
    return tuple(part.strip() for value in values for part in value.split(","))


def _codes(values: Sequence[str]) -> tuple[str, ...]:
    return tuple(code.upper() for code in split(values))


def _thresholds(values: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Split each `CODE.name=number` into a pair. Raises UsageError for any other form."""
    settings = []
    for value in values:
        name, equals, number = value.partition("=")
        code, dot, word = name.partition(".")
        if not equals or not dot or not _is_threshold(number):
            raise UsageError("expected CODE.name=number, 0 or more, such as COL001.deadline_seconds=60")
        settings.append((f"{code.upper()}.{word}", number))
    return tuple(settings)


def _is_threshold(text: str) -> bool:
    """Whether `text` is a finite number, 0 or more: with NaN no limit is ever passed, and no deadline."""
    try:
        return math.isfinite(number := float(text)) and number >= 0
    except ValueError:
        return False


_IGNORE = "Skip these codes or prefixes (a,b)."
_SET = "A threshold of a check (repeatable)."


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The options of `ddpdiag check` as they were typed."""

    stage: tuple[str, ...] = option(
        (), "Only these stages (a,b).", metavar="NAME", panel=WHAT, words=stages, parse=split
    )
    skip_stage: tuple[str, ...] = option(
        (), "Skip these stages (a,b).", metavar="NAME", panel=WHAT, words=stages, parse=split
    )
    select: tuple[str, ...] = option(
        (), "Only these codes or prefixes (a,b).", metavar="CODE", panel=WHAT, words=codes, parse=_codes
    )
    ignore: tuple[str, ...] = option((), _IGNORE, metavar="CODE", panel=WHAT, words=codes, parse=_codes)
    backend: str = option("auto", "nccl, gloo or another backend of torch.", metavar="NAME", panel=WHAT, words=backends)
    expect_gpus: int | None = option(None, "Number of GPUs expected on every host.", metavar="N", panel=VERDICT, min=0)
    depth: Depth = option(Depth.QUICK, "How much is measured.", panel=WHAT)
    budget: float | None = option(
        None,
        "End within this time (default: 60; 120 on several hosts; more with GPUs).",
        metavar="SECONDS",
        panel=WHAT,
        min=5.0,  # 3 s are kept for judgement and shutdown; below this nothing could be measured
    )
    shared_dir: str | None = option(
        None,
        "A directory that all hosts share: tests file://, and keeps the records of all ranks, from which "
        "`ddpdiag judge` makes the report if rank 0 is lost.",
        metavar="DIR",
        panel=WHAT,
        advanced=True,
    )
    topology: str | None = option(
        None,
        "The leaf switch of each host: one HOST LEAF per line, or Slurm's topology.conf (default: from Slurm). "
        "Read on rank 0's host.",
        metavar="FILE",
        panel=WHAT,
        advanced=True,
    )
    baseline: str | None = option(
        None,
        "Compare with the recording or JSON report of an earlier run. Read on rank 0's host.",
        metavar="FILE",
        panel=VERDICT,
    )
    set_: tuple[tuple[str, str], ...] = option(
        (), _SET, metavar="CODE.NAME=VALUE", panel=VERDICT, advanced=True, parse=_thresholds
    )


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """The options of `ddpdiag host` as they were typed."""

    torch: bool = option(False, "Also import torch, and compute on each GPU (or the CPU).", panel=WHAT)
    expect_gpus: int | None = option(None, "Number of GPUs expected on this host.", metavar="N", panel=WHAT, min=0)
    ignore: tuple[str, ...] = option((), _IGNORE, metavar="CODE", panel=WHAT, words=codes, parse=_codes)
    budget: float = option(
        10.0,
        "End within this time, even if a driver hangs.",
        metavar="SECONDS",
        panel=WHAT,
        min=8.0,  # 3 s are kept for ending what hangs and for the report, and a third for the kernel's log
        max=3600.0,
    )
    set_: tuple[tuple[str, str], ...] = option((), _SET, metavar="CODE.NAME=VALUE", panel=WHAT, parse=_thresholds)
