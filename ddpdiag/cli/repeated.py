"""Options that may be given several times."""

import math
from collections.abc import Sequence

from ddpdiag.errors import UsageError


def split(values: Sequence[str]) -> tuple[str, ...]:
    """Options that may be repeated take several values at once, too: `--stage gpu,collective`."""
    return tuple(part.strip() for value in values for part in value.split(","))


def thresholds(values: Sequence[str]) -> dict[str, str]:
    """`--set CODE.name=number`, by CODE.name; UsageError for anything else."""
    settings = {}
    for value in values:
        name, equals, number = value.partition("=")
        code, dot, _word = name.partition(".")
        if not equals or not dot or not _is_threshold(number):
            raise UsageError(f"--set {value}: expected CODE.name=number, 0 or more, such as COL001.deadline_seconds=60")
        settings[f"{code.upper()}{name[len(code) :]}"] = number
    return settings


def _is_threshold(text: str) -> bool:
    """A finite number that is not negative: with NaN no limit is ever passed, and no deadline."""
    try:
        return math.isfinite(number := float(text)) and number >= 0
    except ValueError:
        return False
