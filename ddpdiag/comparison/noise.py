"""Is a difference between two runs more than the noise that their own repeats show?

Times of two runs differ for reasons that neither run shows within itself: where the processes run, other jobs
on the machine. So a difference must be beyond what the repeats spread, and beyond a share that is larger for what the
whole machine disturbs than for what is compared with other ranks at the same moments.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from statistics import fmean, median
from typing import NamedTuple

from ddpdiag.model.options import Figure, Sampling, Snapshot, Standings
from ddpdiag.stats import quantile

# As TRN003's straggler: 9 % of GPU time varies in a healthy fleet (arXiv 2510.15596). Of 210 pairs of healthy runs of
# two ranks on two cores that others used as well, none differed by so much, and of 120 pairs with a rank that was
# slowed by 15 % 114 did.
WITHIN_RATIO = 1.10
_ERRORS = 2
# Chosen: the processor time of a step differed by up to 27 % between runs of one machine that others used as well.
ACROSS_RATIO = 1.4
# Between the quickest call now and the 95th percentile then (a summary does not show its quartiles), by SLOW_RATIO of
# bench/slow.py, and by twice what the calls of one run spread, since they are disturbed together. Of 3,540 pairs of
# healthy runs of two ranks over gloo 82 differed beyond the first two, 4 beyond all three.
SUMMARY_RATIO, SUMMARY_SPREADS = 1.5, 2
# Of a single value no noise is known: a difference is reported, and is not judged.
SINGLE_RATIO = 1.5
# Ranks that had less of their cores were disturbed too much to be compared; for figures of the whole machine they must
# have been all but alone.
LEAST_BUSY_WITHIN, LEAST_BUSY_ACROSS = 0.6, 0.9
_LEAST_REPEATS = 5
# The distance between the quartiles of a normal distribution, in standard deviations.
_QUARTILES_OF_NORMAL = 1.349


class Shift(NamedTuple):
    """From `old` to `new`, in the figure's unit: `ratio` is above one for worse. `is_beyond` means that it is more than
    noise, which is the wider of both runs' distances between their quartiles, as a share of the median."""

    old: float
    new: float
    ratio: float
    noise: float | None
    is_beyond: bool


def shift(old: Figure, new: Figure) -> Shift | None:
    """How one figure differs; None where it cannot be compared with the other."""
    if not _is_sound(old) or not _is_sound(new) or old.sampling is not new.sampling:
        return None
    was, now = sorted(old.values), sorted(new.values)
    if old.sampling is Sampling.SINGLE:
        return _shift(was[0], now[0], None, SINGLE_RATIO, is_rate=old.is_rate, apart=True)
    if old.sampling is Sampling.SUMMARY:
        apart = now[0] > was[-1] or now[-1] < was[0]
        noise = max((each[-1] - each[0]) / each[1] for each in (was, now))
        limit = max(SUMMARY_RATIO, 1 + SUMMARY_SPREADS * noise)
        return _shift(was[1], now[1], noise, limit, is_rate=old.is_rate, apart=apart)
    if min(len(was), len(now)) < _LEAST_REPEATS:
        return None
    apart = quantile(now, 0.25) > quantile(was, 0.75) or quantile(now, 0.75) < quantile(was, 0.25)
    noise = max((quantile(each, 0.75) - quantile(each, 0.25)) / median(each) for each in (was, now))
    return _shift(median(was), median(now), noise, ACROSS_RATIO, is_rate=old.is_rate, apart=apart)


def _shift(old: float, new: float, noise: float | None, limit: float, *, is_rate: bool, apart: bool) -> Shift:
    ratio = old / new if is_rate else new / old
    return Shift(old, new, ratio, noise, apart and not 1 / limit < ratio < limit)


def _is_sound(figure: Figure) -> bool:
    """Positive, finite, and as many values as its sampling has."""
    least = {Sampling.SINGLE: 1, Sampling.SUMMARY: 3, Sampling.REPEATS: 1}[figure.sampling]
    return len(figure.values) >= least and all(0 < value < float("inf") for value in figure.values)


# Ranks against their peers -------------------------------------------------------------------------------------------


class Standing(NamedTuple):
    """A rank's figure as a multiple of the others', and its standard error, as a share."""

    ratio: float
    error: float


def standings(figures: Mapping[int, Figure]) -> dict[int, Standing]:
    """Each rank against the median of the others at the same moments; none of fewer than two ranks, or repeats.

    The ratio is that of the quicker half of the repeats, since disturbances only add; the error comes from the
    distance between the quartiles of all repeats' ratios.
    """
    count = min((len(figure.values) for figure in figures.values()), default=0)
    if len(figures) < 2 or count < _LEAST_REPEATS or not all(map(_is_sound, figures.values())):
        return {}
    moments = [sorted(figure.values[at] for figure in figures.values()) for at in range(count)]
    quick = {rank: quicker_half(figure.values[:count]) for rank, figure in figures.items()}
    quickest = sorted(quick.values())
    found = {}
    for rank, figure in figures.items():
        ratios = sorted(figure.values[at] / median_without(moments[at], figure.values[at]) for at in range(count))
        width = (quantile(ratios, 0.75) - quantile(ratios, 0.25)) / _QUARTILES_OF_NORMAL
        error = width / math.sqrt(count) / median(ratios)
        found[rank] = Standing(quick[rank] / median_without(quickest, quick[rank]), error)
    return found


def median_without(ordered: Sequence[float], value: float) -> float:
    """The median of at least two sorted values without this one of them: one sorting serves all ranks of a fleet."""
    place, left = bisect_left(ordered, value), len(ordered) - 1
    middle = [ordered[at if at < place else at + 1] for at in ((left - 1) // 2, left // 2)]
    return quantile(middle, 0.5)


def quicker_half(values: Sequence[float]) -> float:
    """The mean of the lower half."""
    return fmean(sorted(values)[: max(1, len(values) // 2)])


def moved(old: Standing, new: Standing) -> Shift:
    """How a rank's standing among the others changed: beyond noise, if beyond 10 % and two standard errors."""
    ratio, noise = new.ratio / old.ratio, _ERRORS * math.hypot(old.error, new.error)
    # Not 1 / ratio, which may be 0: a file can hold any numbers.
    most = max(ratio, old.ratio / new.ratio)
    return Shift(old.ratio, new.ratio, ratio, noise, most - 1 >= max(WITHIN_RATIO - 1, noise))


# Standings of a run, from its repeats, or as they were kept of a fleet without them ----------------------------------


# Of 10 % that count: a hundredth of a per cent is no difference.
_DIGITS = 4


class Field(NamedTuple):
    """One figure of all ranks: `ranks` are those that have it, of which some may have no standing."""

    name: str
    title: str
    ranks: frozenset[int]
    standings: Mapping[int, Standing]


def kept(figures: Mapping[int, Figure]) -> Iterator[Standings]:
    """What is left of a figure of these ranks when its repeats go; nothing where these are too few."""
    found = standings(figures)
    first = next(iter(figures.values()), None)
    if first is not None and found:
        ranks = sorted(found)
        runs: list[tuple[int, int]] = []
        for rank in ranks:
            begin = runs.pop()[0] if runs and runs[-1][1] == rank - 1 else rank
            runs.append((begin, rank))
        yield Standings(
            name=first.name,
            title=first.title,
            ranks=tuple(runs),
            ratios=tuple(round(found[rank].ratio, _DIGITS) for rank in ranks),
            errors=tuple(round(found[rank].error, _DIGITS) for rank in ranks),
        )


def fields(snapshot: Snapshot) -> dict[str, Field]:
    """The figures of a run that are compared with those of the other ranks, by name."""
    by_name: dict[str, dict[int, Figure]] = {}
    for figure in snapshot.figures:
        if figure.within and figure.rank is not None:
            by_name.setdefault(figure.name, {})[figure.rank] = figure
    measured = {
        name: Field(name, next(iter(own.values())).title, frozenset(own), standings(own))
        for name, own in by_name.items()
    }
    recorded = {}
    for own in snapshot.standings:  # files come from anywhere: numbers that mean nothing are left out
        found = {
            rank: Standing(ratio, error)
            for rank, ratio, error in zip(ranks_of(own), own.ratios, own.errors, strict=False)
            if 0 < ratio < float("inf") and 0 <= error < float("inf")
        }
        recorded[own.name] = Field(own.name, own.title, frozenset(found), found)
    return recorded | measured


def ranks_of(own: Standings) -> Iterator[int]:
    """The ranks, at most as many as have a ratio."""
    ranks = chain.from_iterable(range(first, last + 1) for first, last in own.ranks)
    return islice(ranks, len(own.ratios))
