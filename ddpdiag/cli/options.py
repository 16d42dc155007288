"""The options of `check` and `host`, and those that commands share. `ddpdiag.cli.outputs` has those of reports."""

import math
from collections.abc import Sequence
from dataclasses import Field, dataclass
from enum import StrEnum
from typing import Any

from ddpdiag.errors import UsageError
from ddpdiag.model.declared import completion, option
from ddpdiag.model.options import Depth

__all__ = ["completion", "option"]


def option_name(name: str) -> str:
    """The option that a field declares, such as "--port-range" for the field "port_range"."""
    return "--" + name.rstrip("_").replace("_", "-")


def variable_of(declared: "Field[Any]") -> str | None:
    """The environment variable that sets an option, such as DDPDIAG_BUDGET, or None if no variable sets it."""
    return f"DDPDIAG_{declared.name.rstrip('_').upper()}" if declared.metadata["variable"] else None


TESTS, VERDICT, FILES, DISPLAY = "What is checked", "Verdict", "Files to write", "Display"  # headings in --help


class Color(StrEnum):
    """Whether the report has colours. AUTO: on a terminal, unless NO_COLOR is set or TERM is dumb."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, kw_only=True)
class DisplayArgs:
    """The options for the amount of text and for colours."""

    quiet: bool = option(False, "Print the verdict and what is wrong, nothing else.", "-q", panel=DISPLAY)
    color: Color = option(Color.AUTO, "Colours (auto: on a terminal, unless NO_COLOR is set).", panel=DISPLAY)


@dataclass(frozen=True, kw_only=True)
class ExplainArgs(DisplayArgs):
    """The options of `ddpdiag explain`."""

    details: bool = option(False, "Also list the logs, each with its first text.", panel=DISPLAY)


def stages() -> list[str]:
    """The stages that --stage accepts."""
    from ddpdiag.checks.api import Stage

    return [stage.value for stage in Stage if stage is not Stage.RUN]


def codes() -> list[str]:
    """The codes of all checks."""
    from ddpdiag.checks.registry import all_checks

    return [check.code for check in all_checks()]


def codes_and_names() -> list[str]:
    """The codes and names of the manual pages that `ddpdiag explain` shows."""
    from ddpdiag.cli.manual import pages

    return [word for page in pages() for word in (page.code, page.name)]


def backends() -> tuple[str, ...]:
    """The values that the shell completes after --backend."""
    return "auto", "nccl", "gloo"


def split_at_commas(values: Sequence[str]) -> tuple[str, ...]:
    """Split the values of a repeatable option. Each may be a list, as in `--stage gpu,collective`."""
    return tuple(part.strip() for value in values for part in value.split(","))


_SECONDS_BY_UNIT = {"s": 1.0, "m": 60.0, "h": 3600.0}
_MAX_SOAK_SECONDS = 7 * 24 * 3600.0


def _parse_duration(text: str) -> float:
    """Parse a duration such as "45s", "30m", "1.5h" or "90" (seconds) into seconds. UsageError for any other text."""
    unit = text[-1:].lower()
    number, factor = (text[:-1], _SECONDS_BY_UNIT[unit]) if unit in _SECONDS_BY_UNIT else (text, 1.0)
    try:
        seconds = float(number) * factor
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= _MAX_SOAK_SECONDS:  # false for NaN
        raise UsageError("expected a time from 1s to 168h, such as 45s, 30m or 2h")
    return seconds


def _parse_codes(values: Sequence[str]) -> tuple[str, ...]:
    return tuple(code.upper() for code in split_at_commas(values))


def _parse_settings(values: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Split each `CODE.name=number` into a pair. UsageError for any other form."""
    settings = []
    for value in values:
        name, equals, number = value.partition("=")
        code, dot, word = name.partition(".")
        if not equals or not dot or not _is_threshold(number):
            raise UsageError("expected CODE.name=number, 0 or more, such as COL001.deadline_seconds=60")
        settings.append((f"{code.upper()}.{word}", number))
    return tuple(settings)


def _is_threshold(text: str) -> bool:
    """Whether `text` is a finite number, 0 or more. NaN is refused: every comparison with it is false."""
    try:
        return math.isfinite(number := float(text)) and number >= 0
    except ValueError:
        return False


def parse_percentage(text: str) -> float:
    """The share that a percentage such as "10%" means. UsageError for any other form."""
    number, percent, rest = text.partition("%")
    if not percent or rest.strip() or not _is_threshold(number) or float(number) >= 100:
        raise UsageError("expected a percentage below 100, such as 10%")
    return float(number) / 100


_IGNORE = "Skip codes or prefixes (a,b)."
_SET = "A threshold of a check (repeatable)."


@dataclass(frozen=True, kw_only=True)
class CheckArgs:
    """The options of `ddpdiag check`. RunOptions are made of them: files are read, and defaults are computed."""

    stage: tuple[str, ...] = option(
        (), "Only these stages (a,b).", metavar="NAME", panel=TESTS, words=stages, parse=split_at_commas
    )
    skip_stage: tuple[str, ...] = option(
        (), "Skip these stages (a,b).", metavar="NAME", panel=TESTS, words=stages, parse=split_at_commas
    )
    select: tuple[str, ...] = option(
        (), "Only codes or prefixes (a,b).", metavar="CODE", panel=TESTS, words=codes, parse=_parse_codes
    )
    ignore: tuple[str, ...] = option((), _IGNORE, metavar="CODE", panel=TESTS, words=codes, parse=_parse_codes)
    backend: str = option(
        "auto", "nccl, gloo or another backend of torch.", metavar="NAME", panel=TESTS, words=backends
    )
    expect_gpus: int | None = option(None, "Number of GPUs expected on every host.", metavar="N", panel=VERDICT, min=0)
    depth: Depth = option(Depth.QUICK, "How much is measured.", panel=TESTS)
    budget: float | None = option(
        None,
        "End within this time (default: 60; 120 on several hosts; more with GPUs).",
        metavar="SECONDS",
        panel=TESTS,
        min=5.0,  # judgement and shutdown need 3 s; with a smaller budget nothing could be measured
    )
    soak: float | None = option(
        None,
        "Compare bits for 45s, 30m or 2h.",
        metavar="TIME",
        panel=TESTS,
        parse=_parse_duration,
    )
    shared_dir: str | None = option(
        None,
        "A directory that all hosts share: tests file://, and keeps the records of all ranks, from which "
        "`ddpdiag judge` makes the report if rank 0 is lost.",
        metavar="DIR",
        panel=TESTS,
        advanced=True,
    )
    topology: str | None = option(
        None,
        "The leaf switch of each host: one HOST LEAF per line, or Slurm's topology.conf (default: from Slurm). "
        "Read on rank 0's host.",
        metavar="FILE",
        panel=TESTS,
        advanced=True,
    )
    baseline: str | None = option(
        None,
        "Compare with the recording or JSON report of an earlier run. Read on rank 0's host.",
        metavar="FILE",
        panel=VERDICT,
    )
    set_: tuple[tuple[str, str], ...] = option(
        (), _SET, metavar="CODE.NAME=VALUE", panel=VERDICT, advanced=True, parse=_parse_settings
    )


@dataclass(frozen=True, kw_only=True)
class HostArgs:
    """The options of `ddpdiag host`."""

    torch: bool = option(False, "Also import torch, and compute on each GPU (or the CPU).", panel=TESTS)
    expect_gpus: int | None = option(None, "Number of GPUs expected on this host.", metavar="N", panel=TESTS, min=0)
    ignore: tuple[str, ...] = option((), _IGNORE, metavar="CODE", panel=TESTS, words=codes, parse=_parse_codes)
    budget: float = option(
        10.0,
        "End within this time, even if a driver hangs.",
        metavar="SECONDS",
        panel=TESTS,
        min=8.0,  # ending processes that hang and the report need 3 s; reading the kernel's log may need a third
        max=3600.0,
    )
    set_: tuple[tuple[str, str], ...] = option((), _SET, metavar="CODE.NAME=VALUE", panel=TESTS, parse=_parse_settings)
