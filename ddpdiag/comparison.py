"""Compare two runs: the differences that are larger than the noise of their repeated measurements.

Figures of the whole machine, benchmarks, versions and variables are compared. Ranks are not: TRN003 reports a rank that
falls behind its peers in a finding of either run.
Times of two runs also differ for reasons that the repeats of one run do not show, such as the placement of processes
and other jobs on the machine. So a difference must exceed both the spread of the repeats and a fixed share.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from statistics import median
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.model.bench import BenchCurve, BenchPoint
from ddpdiag.model.options import Figure, Sampling, Snapshot
from ddpdiag.stats import quantile
from ddpdiag.text import quantity, rate_text, share_text, size_text, time_text

# Chosen: the time of a step differed by up to 27 % between runs on one machine on which other jobs ran as well.
ACROSS_RATIO = 1.4
# Conditions for a difference of summaries, which have no quartiles: the quickest call of one run takes longer than the
# 95th percentile of the other; the medians differ by 1.5 (SLOW_RATIO of bench/series.py) and by twice the spread of the
# calls of a run, which are disturbed together. Of 3,540 pairs of healthy runs of two ranks over gloo 82 met the first
# two conditions, 4 all three.
SUMMARY_RATIO, SUMMARY_SPREADS = 1.5, 2
# The noise of a single value is not known: a difference by this ratio is reported as neutral.
SINGLE_RATIO = 1.5
# If the ranks of a run had a smaller share of their cores, other processes disturbed its times, and none is compared.
MIN_CORE_SHARE = 0.9
_LEAST_REPEATS = 5


class Direction(Enum):
    """The meaning of a change, in the order of the report. `UNJUDGED` marks a reason why something was not compared."""

    REGRESSION = "regression"
    IMPROVEMENT = "improvement"
    NEUTRAL = "neutral"
    UNJUDGED = "unjudged"


class Change(Struct, frozen=True, kw_only=True):
    """A difference between the runs. `name` is for scripts: a finding's code, or the name of a figure or fact.

    For a figure, `old` and `new` are medians, and `ratio` is above one if the new run is slower by this factor. `noise`
    is the wider spread of the repeats of either run, as a share; None if there are no repeats.
    """

    direction: Direction
    name: str
    text: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    old: float | None = None
    new: float | None = None
    ratio: float | None = None
    noise: float | None = None


def incomparable(old: Mapping[str, str], new: Mapping[str, str]) -> str | None:
    """The reason why two runs with these shapes (ranks, hosts, backend) cannot be compared; None if they can."""
    for name in dict.fromkeys((*old, *new)):
        was, now = (shape.get(name, "unknown") for shape in (old, new))
        if was != now:
            return f"{name}: {was} then, {now} now"
    return None


def compared_figures(old: Snapshot, new: Snapshot) -> tuple[int, tuple[Change, ...]]:
    """The number of figures and benchmark curves that were compared, and the changes."""
    if (why := incomparable(old.shape, new.shape)) is not None:
        return 0, (_unjudged("shape", f"figures were not compared, {why}"),)
    of_all = {each.name for each in old.figures} & {each.name for each in new.figures}
    busy = lowest_core_share(old, new)
    changes: list[Change] = []
    count = sum(not isinstance(find(old.series, curve), str) for curve in new.series)
    if busy >= MIN_CORE_SHARE:
        changes += _figure_changes(old, new)
        count += len(of_all)
    changes += compared_curves(old.series, new.series) if old.series else ()
    if of_all:
        changes += _unjudged_times(old, new)
    elif not old.series:
        changes.append(_unjudged("figures", "the runs have no figure in common"))
    return count, tuple(changes)


def changed_facts(old: Mapping[str, Mapping[str, str]], new: Mapping[str, Mapping[str, str]]) -> Iterator[Change]:
    """Yield the versions and variables that differ. A kind that only one run recorded is skipped."""
    for kind in (kind for kind in old if kind in new):
        for name in sorted({*old[kind], *new[kind]}):
            was, now = old[kind].get(name, "none"), new[kind].get(name, "none")
            if was != now:
                yield Change(direction=Direction.NEUTRAL, name=name, text=f"{name}: {was} -> {now}")


def _unjudged(name: str, text: str) -> Change:
    return Change(direction=Direction.UNJUDGED, name=name, text=text)


def lowest_core_share(old: Snapshot | None, new: Snapshot | None) -> float:
    """The smaller of both runs' shares of their cores that the ranks had: 1 on GPUs, 0 if no check measured it."""
    return min(0.0 if each is None else 1.0 if each.on_gpus else each.core_share or 0.0 for each in (old, new))


def _unjudged_times(old: Snapshot, new: Snapshot) -> Iterator[Change]:
    busy = lowest_core_share(old, new)
    if busy < MIN_CORE_SHARE:
        why = f"in one of the runs a rank had {share_text(busy)} of its core, and other processes had the rest"
        if any(not each.on_gpus and each.core_share is None for each in (old, new)):
            why = "in one of the runs it was not checked whether other processes used the cores (TRN003 does that)"
        yield _unjudged("busy", f"no times were judged: {why}")


class Shift(NamedTuple):
    """The change of a figure, in its unit; `ratio` is above one if it is worse. `noise` is the wider spread of either
    run (between quartiles of repeats) as a share of the median. `is_beyond`: the change exceeds noise and a ratio."""

    old: float
    new: float
    ratio: float
    noise: float | None
    is_beyond: bool


def _shifted(name: str, text: str, change: Shift) -> Change:
    old, new, ratio, noise, _ = change
    direction = Direction.REGRESSION if ratio > 1 else Direction.IMPROVEMENT
    if noise is None:
        direction = Direction.NEUTRAL
    return Change(direction=direction, name=name, text=text, old=old, new=new, ratio=ratio, noise=noise)


def median_without(ordered: Sequence[float], value: float) -> float:
    """The median of at least two sorted values after removing one `value`, so that a fleet's values are sorted once."""
    place, left = bisect_left(ordered, value), len(ordered) - 1
    middle = [ordered[at if at < place else at + 1] for at in ((left - 1) // 2, left // 2)]
    return quantile(middle, 0.5)


def _figure_changes(old: Snapshot, new: Snapshot) -> Iterator[Change]:
    before = {figure.name: figure for figure in old.figures}
    for figure in new.figures:
        was = before.get(figure.name)
        shifted = shift(was, figure) if was is not None else None
        if shifted is None or not shifted.is_beyond:
            continue
        then, now = (_value_text(figure, value) for value in (shifted.old, shifted.new))
        spread = "its spread is not known" if shifted.noise is None else f"repeats spread {share_text(shifted.noise)}"
        text = f"{figure.title}: {then} -> {now} ({100 * (shifted.new / shifted.old - 1):+.0f} %; {spread})"
        yield _shifted(figure.name, text, shifted)


def _value_text(figure: Figure, value: float) -> str:
    """The value with its unit: bytes per second if the figure's name says so, else a number per second, or a time."""
    if not figure.is_rate:
        return time_text(value)
    return quantity(figure.name, value) if figure.name.endswith("_bytes_per_s") else f"{value:,.0f} /s"


def shift(old: Figure, new: Figure) -> Shift | None:
    """The change of one figure; None if the runs sampled it differently, or have too few values or values such as 0."""
    least = {Sampling.SINGLE: 1, Sampling.SUMMARY: 3, Sampling.REPEATS: _LEAST_REPEATS}[old.sampling]
    sound = all(len(each.values) >= least and all(0 < v < math.inf for v in each.values) for each in (old, new))
    if not sound or old.sampling is not new.sampling:
        return None
    was, now = sorted(old.values), sorted(new.values)
    noise: float | None
    match old.sampling:
        case Sampling.SINGLE:
            middles, noise, limit, is_apart = (was[0], now[0]), None, SINGLE_RATIO, True
        case Sampling.SUMMARY:
            middles, is_apart = (was[1], now[1]), now[0] > was[-1] or now[-1] < was[0]
            noise = max((each[-1] - each[0]) / each[1] for each in (was, now))
            limit = max(SUMMARY_RATIO, 1 + SUMMARY_SPREADS * noise)
        case Sampling.REPEATS:
            low, high = ([quantile(each, q) for each in (was, now)] for q in (0.25, 0.75))
            middles, limit = (median(was), median(now)), ACROSS_RATIO
            is_apart = low[1] > high[0] or high[1] < low[0]
            noise = max((high[at] - low[at]) / middles[at] for at in (0, 1))
    ratio = middles[0] / middles[1] if old.is_rate else middles[1] / middles[0]
    return Shift(*middles, ratio, noise, is_apart and not 1 / limit < ratio < limit)


# SuperBench's rule for a baseline of the same system.
WORSE_SHARE = 0.05
# A loss must exceed this many cv (spreads) of the calls. Not cv / sqrt(calls): the calls of one run are disturbed
# together, so their mean is not that much steadier than one call.
SPREADS = 2


def compared_curves(old: Sequence[BenchCurve], new: Sequence[BenchCurve]) -> Iterator[Change]:
    """Yield the curves of benchmarks that became worse or better, and those that cannot be compared."""
    for curve in new:
        held, name = find(old, curve), name_of(curve)
        if isinstance(held, str):
            yield _unjudged(name, f"{name} was not compared: {held}")
            continue
        # A gain is a loss if the runs are compared in the opposite order.
        loss, gain = worst_loss(held, curve), worst_loss(curve, held)
        for direction, word, points in (
            (Direction.REGRESSION, "slower", loss),
            (Direction.IMPROVEMENT, "faster", None if loss or gain is None else gain[::-1]),
        ):
            if points is not None:
                was, now = (point.busbw_bytes_per_s for point in points)
                rates = f"{rate_text(was)} -> {rate_text(now)} busbw at {size_text(points[0].size_bytes)}"
                text = f"{name}: {rates} ({share_text(1 - min(was, now) / max(was, now))} {word})"
                yield Change(direction=direction, name=name, text=text, old=was, new=now, ratio=was / now)


def name_of(curve: BenchCurve) -> str:
    """The name of a curve, such as "all_reduce over gloo (float)"."""
    return f"{curve.collective} over {curve.backend} ({curve.dtype})"


def find(baseline: Sequence[BenchCurve], new: BenchCurve) -> BenchCurve | str:
    """The baseline's curve of the same collective, backend and dtype on the same hardware, or the reason for none."""
    old = next((curve for curve in baseline if name_of(curve) == name_of(new)), None)
    if old is None:
        return "the baseline has no such benchmark"
    differences = [
        f"{name} of the baseline: {was}, of this run: {now}"
        for name in dict.fromkeys((*old.fabric, *new.fabric))
        if (was := old.fabric.get(name, "unknown")) != (now := new.fabric.get(name, "unknown"))
    ]
    if differences:
        return "; ".join(differences)
    known_sizes, large = _measured(new), _large(_measured(old))
    if large and not any(size in known_sizes for size in large):
        return f"none of the sizes that show its bandwidth ({size_text(large[0])} or more) was measured now"
    return old


def worst_loss(old: BenchCurve, new: BenchCurve) -> tuple[BenchPoint, BenchPoint] | None:
    """The old and the new point of the size with the largest loss; None without a loss.

    A loss is more than 5 % of the bandwidth, and more than the spread of the calls in either run. Only sizes from the
    first one with half of the old peak are compared: the time of smaller ones depends on the cost of a call.
    """
    now, before = _measured(new), _measured(old)
    lost = []
    for size in _large({size: point for size, point in before.items() if size in now}):
        was, here = before[size], now[size]
        share = 1 - here.busbw_bytes_per_s / was.busbw_bytes_per_s
        # `cv` is the spread of times, so it is compared with the increase of the time.
        longer = was.busbw_bytes_per_s / here.busbw_bytes_per_s - 1
        if share > WORSE_SHARE and longer > SPREADS * max(was.cv, here.cv):
            lost.append((share, size))
    _, worst = max(lost, default=(0.0, None))
    return None if worst is None else (before[worst], now[worst])


def _measured(curve: BenchCurve) -> dict[int, BenchPoint]:
    """The points with a positive, finite bus bandwidth, by size in rising order."""
    points = sorted(curve.points, key=lambda point: point.size_bytes)
    return {point.size_bytes: point for point in points if 0 < point.busbw_bytes_per_s < math.inf}


def _large(points: Mapping[int, BenchPoint]) -> list[int]:
    """The smallest size whose bus bandwidth is at least half of the peak, and all larger sizes."""
    peak = max((point.busbw_bytes_per_s for point in points.values()), default=0.0)
    first = next((size for size, point in points.items() if 2 * point.busbw_bytes_per_s >= peak), 0)
    return [size for size in points if size >= first]
