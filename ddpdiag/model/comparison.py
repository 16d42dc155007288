"""One difference between two runs."""

from enum import Enum

from msgspec import Struct


class Direction(Enum):
    """What a change means, the worst first. `UNJUDGED` is none: what was not held against the other run, and why."""

    REGRESSION = "regression"
    IMPROVEMENT = "improvement"
    NEUTRAL = "neutral"
    UNJUDGED = "unjudged"


class Change(Struct, frozen=True, kw_only=True):
    """Something that differs. `name` is for scripts: a finding's code, a figure's or a fact's name.

    Of a figure, `old` and `new` are medians, `ratio` says how many times as long it takes (or was slower), and `noise`
    the share by which the repeats of either run spread; None where there are none.
    """

    direction: Direction
    name: str
    text: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    old: float | None = None
    new: float | None = None
    ratio: float | None = None
    noise: float | None = None
