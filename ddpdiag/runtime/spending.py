"""What trials may take of a run's budget, and what is kept from them."""

from collections.abc import Sequence

from msgspec import structs

from ddpdiag.model import Trial

# Kept back for judgement, report and farewell.
RESERVE_SECONDS = 3.0
# With less than this, no trial is begun.
LEAST_SECONDS = 1.0
# What a trial that the budget cuts short may take beyond its deadline.
CUT_SECONDS = 1.5
# For each check that runs last this many times what it says that it takes is kept; for all no more than this share.
_KEPT_TIMES = 1.5
_KEPT_SHARE = 1 / 3
# A first use that never ends must leave time to look for variables that help.
_FIRST_USE_SHARE = 1 / 3


class BudgetSpent(Exception):
    """Too little is left for the next trial; checks that run last, for which some was kept, may still run."""


def kept_seconds(budget_seconds: float, takes: Sequence[float]) -> float:
    """What is kept for checks that run last and say that they take so long: what runs before each may be cut short."""
    wanted = sum(_KEPT_TIMES * max(LEAST_SECONDS, seconds) + CUT_SECONDS for seconds in takes)
    return min(_KEPT_SHARE * budget_seconds, wanted)


def too_late(left_seconds: float, takes_seconds: float) -> str | None:
    """Why a check that takes so long is not begun, or None: cut short, it would look as if it had hung."""
    least = max(LEAST_SECONDS, takes_seconds)
    if left_seconds >= least:
        return None
    return f"the budget had left {max(0.0, left_seconds):.1f} s, and it takes {least:.1f} s"


def with_number(
    trial: Trial, number: int, wanted_seconds: float, left_seconds: float, begin_seconds: float | None = None
) -> Trial:
    """The trial as it is handed out: numbered, and within what is left of the budget."""
    hurried = left_seconds < wanted_seconds
    deadline = min(wanted_seconds, left_seconds)
    return structs.replace(
        trial,
        number=number,
        deadline_seconds=deadline,
        hurried=hurried,
        begin_seconds=begin_seconds,
        first_use_seconds=min(trial.first_use_seconds, left_seconds - deadline, _FIRST_USE_SHARE * left_seconds),
    )
