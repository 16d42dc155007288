"""Compare two runs, and report differences that are larger than the noise of their repeated measurements.

Figures of the world, benchmarks, versions and variables are compared. Single ranks are not compared, because TRN003
already reports a rank that is slower than its peers in the same run.
Times of two runs also differ for reasons that the repeats within one run do not show, such as the placement of
processes and other jobs on the machine. So a difference must exceed both the spread of the repeats and a fixed ratio.
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

# The least ratio of two medians of repeats. The time of a step differed by up to 27 % between runs on one busy machine.
REPEATS_RATIO = 1.4
# Summaries (minimum, median, 95th percentile) differ on three conditions: the quickest call of one run takes longer
# than the 95th percentile of the other; the medians differ by a factor of 1.5 (SLOW_RATIO of bench/series.py), and by
# twice the spread of the calls of a run, which are disturbed together. Of 3,540 pairs of healthy runs of two ranks over
# gloo, 82 met the first two conditions, and 4 met all three.
SUMMARY_RATIO, SUMMARY_SPREADS = 1.5, 2
# The noise of a single value is not known, so a difference by this ratio or more is reported as neutral.
SINGLE_RATIO = 1.5
# If a rank had less than this share of its core, other processes disturbed the run, and no times are compared.
MIN_CORE_SHARE = 0.9
_MIN_REPEATS = 5


class Direction(Enum):
    """The direction of a change, in the order of the report. UNJUDGED marks a text that says what was not compared."""

    REGRESSION = "regression"
    IMPROVEMENT = "improvement"
    NEUTRAL = "neutral"
    UNJUDGED = "unjudged"


class Change(Struct, frozen=True, kw_only=True):
    """A line of the comparison: a difference between the runs, or the reason why something was not compared.

    `name` is for scripts: a finding's code, or the name of a figure or fact. For a figure, `old` and `new` are medians,
    and `ratio` is above 1 if the new run is worse. `noise` is the wider spread of both runs' repeats, as a share.
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


def why_incomparable(old: Mapping[str, str], new: Mapping[str, str]) -> str | None:
    """The reason why two runs cannot be compared, from their numbers of ranks and hosts and so on; None if they can."""
    for name in dict.fromkeys((*old, *new)):
        was, now = (shape.get(name, "unknown") for shape in (old, new))
        if was != now:
            return f"{name}: {was} then, {now} now"
    return None


def compare_figures(old: Snapshot, new: Snapshot) -> tuple[int, tuple[Change, ...]]:
    """Compare figures and benchmark curves. Returns how many were compared, and the changes."""
    if (reason := why_incomparable(old.shape, new.shape)) is not None:
        return 0, (_unjudged("shape", f"figures were not compared, {reason}"),)
    shared_names = {each.name for each in old.figures} & {each.name for each in new.figures}
    core_share = lowest_core_share(old, new)
    changes: list[Change] = []
    count = sum(not isinstance(matching_curve(old.series, curve), str) for curve in new.series)
    if core_share >= MIN_CORE_SHARE:
        changes += _figure_changes(old, new)
        count += len(shared_names)
    changes += compare_curves(old.series, new.series) if old.series else ()
    if shared_names:
        changes += _unjudged_times(old, new)
    elif not old.series:
        changes.append(_unjudged("figures", "the runs have no figure in common"))
    return count, tuple(changes)


def compare_facts(old: Mapping[str, Mapping[str, str]], new: Mapping[str, Mapping[str, str]]) -> Iterator[Change]:
    """Yield the versions and variables that differ. The outer key is their kind; kinds in only one run are skipped."""
    for kind in (kind for kind in old if kind in new):
        for name in sorted({*old[kind], *new[kind]}):
            was, now = old[kind].get(name, "none"), new[kind].get(name, "none")
            if was != now:
                yield Change(direction=Direction.NEUTRAL, name=name, text=f"{name}: {was} -> {now}")


def _unjudged(name: str, text: str) -> Change:
    return Change(direction=Direction.UNJUDGED, name=name, text=text)


def lowest_core_share(old: Snapshot | None, new: Snapshot | None) -> float:
    """The smaller `core_share` (a rank's share of its core) of two runs. 1 for a run on GPUs, 0 if not measured."""
    return min(0.0 if each is None else 1.0 if each.on_gpus else each.core_share or 0.0 for each in (old, new))


def _unjudged_times(old: Snapshot, new: Snapshot) -> Iterator[Change]:
    core_share = lowest_core_share(old, new)
    if core_share < MIN_CORE_SHARE:
        reason = f"in one of the runs a rank had {share_text(core_share)} of its core, and other processes had the rest"
        if any(not each.on_gpus and each.core_share is None for each in (old, new)):
            reason = "in one of the runs it was not checked whether other processes used the cores (TRN003 does that)"
        yield _unjudged("busy", f"no times were judged: {reason}")


class Shift(NamedTuple):
    """The numbers of a figure's change, as in `Change`; `is_significant` if it exceeds the noise and a fixed ratio."""

    old: float
    new: float
    ratio: float
    noise: float | None
    is_significant: bool


def _change_of_figure(name: str, text: str, shift: Shift) -> Change:
    old, new, ratio, noise, _ = shift
    direction = Direction.REGRESSION if ratio > 1 else Direction.IMPROVEMENT
    if noise is None:
        direction = Direction.NEUTRAL
    return Change(direction=direction, name=name, text=text, old=old, new=new, ratio=ratio, noise=noise)


def median_without(ordered: Sequence[float], value: float) -> float:
    """The median of `ordered` without `value`. `ordered` has at least two values, sorted, and contains `value`."""
    index, count = bisect_left(ordered, value), len(ordered) - 1
    middle = [ordered[at if at < index else at + 1] for at in ((count - 1) // 2, count // 2)]
    return quantile(middle, 0.5)


def _figure_changes(old: Snapshot, new: Snapshot) -> Iterator[Change]:
    old_figures = {figure.name: figure for figure in old.figures}
    for figure in new.figures:
        old_figure = old_figures.get(figure.name)
        shift = figure_shift(old_figure, figure) if old_figure is not None else None
        if shift is None or not shift.is_significant:
            continue
        old_text, new_text = (_value_text(figure, value) for value in (shift.old, shift.new))
        spread = "its spread is not known" if shift.noise is None else f"repeats spread {share_text(shift.noise)}"
        text = f"{figure.title}: {old_text} -> {new_text} ({100 * (shift.new / shift.old - 1):+.0f} %; {spread})"
        yield _change_of_figure(figure.name, text, shift)


def _value_text(figure: Figure, value: float) -> str:
    """The value with its unit: a time, or for a rate bytes per second if the name says so, else a number per second."""
    if not figure.is_rate:
        return time_text(value)
    return quantity(figure.name, value) if figure.name.endswith("_bytes_per_s") else f"{value:,.0f} /s"


def figure_shift(old: Figure, new: Figure) -> Shift | None:
    """The change of one figure. None if the runs sampled it differently, or if values are too few or not positive."""
    min_values = {Sampling.SINGLE: 1, Sampling.SUMMARY: 3, Sampling.REPEATS: _MIN_REPEATS}[old.sampling]
    usable = all(len(each.values) >= min_values and all(0 < v < math.inf for v in each.values) for each in (old, new))
    if not usable or old.sampling is not new.sampling:
        return None
    old_values, new_values = sorted(old.values), sorted(new.values)
    noise: float | None
    match old.sampling:
        case Sampling.SINGLE:
            medians, noise, limit_ratio, is_disjoint = (old_values[0], new_values[0]), None, SINGLE_RATIO, True
        case Sampling.SUMMARY:
            medians = (old_values[1], new_values[1])
            is_disjoint = new_values[0] > old_values[-1] or new_values[-1] < old_values[0]
            noise = max((each[-1] - each[0]) / each[1] for each in (old_values, new_values))
            limit_ratio = max(SUMMARY_RATIO, 1 + SUMMARY_SPREADS * noise)
        case Sampling.REPEATS:
            low, high = ([quantile(each, q) for each in (old_values, new_values)] for q in (0.25, 0.75))
            medians, limit_ratio = (median(old_values), median(new_values)), REPEATS_RATIO
            is_disjoint = low[1] > high[0] or high[1] < low[0]
            noise = max((high[at] - low[at]) / medians[at] for at in (0, 1))
    ratio = medians[0] / medians[1] if old.is_rate else medians[1] / medians[0]
    return Shift(*medians, ratio, noise, is_disjoint and not 1 / limit_ratio < ratio < limit_ratio)


# A loss must exceed this share of the bandwidth, as in SuperBench's rule for a baseline of the same system.
LOSS_SHARE = 0.05
# A loss must also exceed this multiple of the coefficient of variation (cv) of the calls. The limit is not
# cv / sqrt(calls): the calls of one run are disturbed together, so their mean varies almost as much as one call.
LOSS_SPREADS = 2


def compare_curves(old: Sequence[BenchCurve], new: Sequence[BenchCurve]) -> Iterator[Change]:
    """Yield a change for each benchmark curve that became worse or better, or that cannot be compared."""
    for curve in new:
        baseline_curve, name = matching_curve(old, curve), curve_name(curve)
        if isinstance(baseline_curve, str):
            yield _unjudged(name, f"{name} was not compared: {baseline_curve}")
            continue
        # A gain is a loss if the runs are compared in the opposite order.
        loss, gain = worst_loss(baseline_curve, curve), worst_loss(curve, baseline_curve)
        for direction, word, points in (
            (Direction.REGRESSION, "slower", loss),
            (Direction.IMPROVEMENT, "faster", None if loss or gain is None else gain[::-1]),
        ):
            if points is not None:
                old_rate, new_rate = (point.busbw_bytes_per_s for point in points)
                rates = f"{rate_text(old_rate)} -> {rate_text(new_rate)} busbw at {size_text(points[0].size_bytes)}"
                text = f"{name}: {rates} ({share_text(1 - min(old_rate, new_rate) / max(old_rate, new_rate))} {word})"
                ratio = old_rate / new_rate
                yield Change(direction=direction, name=name, text=text, old=old_rate, new=new_rate, ratio=ratio)


def curve_name(curve: BenchCurve) -> str:
    """The name of a curve, such as "all_reduce over gloo (float)"."""
    return f"{curve.collective} over {curve.backend} ({curve.dtype})"


def matching_curve(baseline: Sequence[BenchCurve], new: BenchCurve) -> BenchCurve | str:
    """The baseline's curve to compare `new` with: same name, same hardware, common sizes. Else why there is none."""
    old = next((curve for curve in baseline if curve_name(curve) == curve_name(new)), None)
    if old is None:
        return "the baseline has no such benchmark"
    differences = [
        f"{name} of the baseline: {was}, of this run: {now}"
        for name in dict.fromkeys((*old.fabric, *new.fabric))
        if (was := old.fabric.get(name, "unknown")) != (now := new.fabric.get(name, "unknown"))
    ]
    if differences:
        return "; ".join(differences)
    known_sizes, large = _points_by_size(new), _large_sizes(_points_by_size(old))
    if large and not any(size in known_sizes for size in large):
        return f"none of the sizes that show its bandwidth ({size_text(large[0])} or more) was measured now"
    return old


def worst_loss(old: BenchCurve, new: BenchCurve) -> tuple[BenchPoint, BenchPoint] | None:
    """The old and the new point of the size with the largest loss; None without a loss.

    A loss exceeds LOSS_SHARE, and LOSS_SPREADS times the `cv` of both runs. Only `_large_sizes` are compared, because
    the time of smaller messages depends on the fixed cost of a call.
    """
    new_points, old_points = _points_by_size(new), _points_by_size(old)
    losses = []
    for size in _large_sizes({size: point for size, point in old_points.items() if size in new_points}):
        old_point, new_point = old_points[size], new_points[size]
        share = 1 - new_point.busbw_bytes_per_s / old_point.busbw_bytes_per_s
        # `cv` is the spread of times, so it is compared with the increase of the time.
        time_increase = old_point.busbw_bytes_per_s / new_point.busbw_bytes_per_s - 1
        if share > LOSS_SHARE and time_increase > LOSS_SPREADS * max(old_point.cv, new_point.cv):
            losses.append((share, size))
    _, worst_size = max(losses, default=(0.0, None))
    return None if worst_size is None else (old_points[worst_size], new_points[worst_size])


def _points_by_size(curve: BenchCurve) -> dict[int, BenchPoint]:
    """The points with a positive, finite bus bandwidth by size in bytes, the smallest first."""
    points = sorted(curve.points, key=lambda point: point.size_bytes)
    return {point.size_bytes: point for point in points if 0 < point.busbw_bytes_per_s < math.inf}


def _large_sizes(points: Mapping[int, BenchPoint]) -> list[int]:
    """The smallest size whose bus bandwidth is at least half of the peak, and all larger sizes, in bytes."""
    peak = max((point.busbw_bytes_per_s for point in points.values()), default=0.0)
    first = next((size for size, point in points.items() if 2 * point.busbw_bytes_per_s >= peak), 0)
    return [size for size in points if size >= first]
