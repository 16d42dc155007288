"""What a run measured, small enough to be held against another run: figures with their repeats, versions, settings."""

from enum import Enum

from msgspec import Struct

from ddpdiag.model.bench import BaselineSeries

# Of so many ranks every repeat is kept; of a fleet of 131,072 that would be 30 MB, which nobody looks at.
KEPT_RANKS = 1_024


class Sampling(Enum):
    """What the values of a figure are: repeats, in the order in which they were measured; the quickest, the median and
    the 95th percentile of many; or a single one, of whose noise nothing is known."""

    REPEATS = "repeats"
    SUMMARY = "summary"
    SINGLE = "single"


class Figure(Struct, frozen=True, kw_only=True):
    """One figure of a run. `name` is for scripts, with the unit at its end, `title` for people; `rank` is None where it
    is the whole world's. Less is better, unless the unit is a rate (`is_rate`).

    A figure `within` is held against that of the other ranks at the same moments, not against itself in another run.
    """

    name: str
    title: str
    values: tuple[float, ...]
    sampling: Sampling
    rank: int | None = None
    is_rate: bool = False
    within: bool = False


class Standings(Struct, frozen=True, kw_only=True):
    """A figure of very many ranks, without its repeats: each rank's value as a multiple of the others' at the same
    moments, and the standard error of that, as a share.

    `ranks` are the first and the last of ranks that follow each other; `ratios` and `errors` have one number for each
    rank, in that order.
    """

    name: str
    title: str
    ranks: tuple[tuple[int, int], ...]
    ratios: tuple[float, ...]
    errors: tuple[float, ...]


class Snapshot(Struct, frozen=True, kw_only=True):
    """A run's figures, and what they depend on.

    `shape` are ranks, hosts, backend; `facts` are "versions" and "variables", each by name, as far as they were looked
    at. `busy_share` is the share of their cores that the ranks had when they computed, in the median of the rank that
    had least; None where nobody looked. `on_gpus` says that they computed on GPUs, whose times do not depend on that.
    Figures `within` of more than KEPT_RANKS ranks are kept as `standings`.
    """

    created: str
    shape: dict[str, str]
    facts: dict[str, dict[str, str]]
    figures: tuple[Figure, ...]
    series: tuple[BaselineSeries, ...] = ()
    busy_share: float | None = None
    on_gpus: bool = False
    standings: tuple[Standings, ...] = ()
