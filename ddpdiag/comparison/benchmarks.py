"""Benchmarks of two runs: the curves that are comparable, and the sizes that became worse.

Only the same collective on the same hardware is compared; else a sentence states the difference. `figures` compares
the shapes of the worlds.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ddpdiag.model.bench import BenchCurve, BenchPoint
from ddpdiag.stats import quantile
from ddpdiag.text import size_text

# SuperBench's rule for one's own baseline.
WORSE_SHARE = 0.05
# Chosen, not measured: small messages differ more between two runs (where the processes lie) than within one.
SLOWER_SHARE = 0.2
# Not cv / sqrt(calls): the calls of one run are disturbed together, so their mean is not that much steadier than they.
SPREADS = 2
_SHOWN = 4


class Loss(NamedTuple):
    """A size that became worse: its bus bandwidth then and now (bytes per second), and by which share.

    The share is that of the bandwidth lost, or, with `is_small`, of the time that calls of small messages take longer,
    in the median of their sizes.
    """

    size_bytes: int
    old_bytes_per_s: float
    new_bytes_per_s: float
    share: float
    is_small: bool = False


def name_of(curve: BenchCurve) -> str:
    """Such as "all_reduce over gloo (float sum)"."""
    op = "" if curve.op == "none" else f" {curve.op}"
    return f"{curve.collective} over {curve.backend} ({curve.dtype}{op})"


def find(baseline: Sequence[BenchCurve], new: BenchCurve) -> BenchCurve | str:
    """The curve of the baseline that `new` is comparable with, or the reason why there is none."""
    old = next((curve for curve in baseline if name_of(curve) == name_of(new)), None)
    if old is None:
        known = [name_of(curve) for curve in baseline]
        more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
        return f"the baseline has no {name_of(new)}, it has {', '.join(known[:_SHOWN]) or 'no benchmark'}{more}"
    differences = [
        f"{name} of the baseline: {was}, of this run: {now}"
        for name in dict.fromkeys((*old.fabric, *new.fabric))
        if (was := old.fabric.get(name, "unknown")) != (now := new.fabric.get(name, "unknown"))
    ]
    if differences:
        return "; ".join(differences)
    known_sizes, points = _measured(new), _measured(old)
    large = [size for size, point in points.items() if 2 * point.busbw_bytes_per_s >= _peak(points.values())]
    if large and not any(size in known_sizes for size in large):
        sizes = " to ".join(dict.fromkeys(size_text(size) for size in (large[0], large[-1])))
        return f"none of the sizes that show its bandwidth ({sizes}) was measured now"
    return old


def worst_loss(old: BenchCurve, new: BenchCurve) -> Loss | None:
    """The size with the largest loss beyond noise, of those that show the bandwidth; else that of small messages.

    A loss is more than 5 % of the bandwidth, and more than the calls of either run spread. Only sizes from that on
    which reached half of the old peak count: below it a call's own cost counts. These small messages count together,
    since each of them is noisy, and by 20 %.
    """
    now = _measured(new)
    pairs = [_Pair(was, now[size]) for size, was in _measured(old).items() if size in now]
    peak = _peak(pair.old for pair in pairs)
    first = next((at for at, pair in enumerate(pairs) if 2 * pair.old.busbw_bytes_per_s >= peak), 0)
    small, large = pairs[:first], pairs[first:]
    # The spread is one of times, so it is compared with how much longer a call takes.
    lost = [pair for pair in large if pair.share > WORSE_SHARE and pair.ratio - 1 > SPREADS * pair.cv]
    if lost:
        worst = max(lost, key=lambda pair: pair.share)
        return Loss(worst.old.size_bytes, worst.old.busbw_bytes_per_s, worst.new.busbw_bytes_per_s, worst.share)
    longer = quantile(sorted(pair.ratio for pair in small), 0.5) - 1 if small else 0.0
    spread = quantile(sorted(pair.cv for pair in small), 0.5) if small else 0.0
    if longer <= max(SLOWER_SHARE, SPREADS * spread):
        return None
    middle = small[len(small) // 2]
    rates = middle.old.busbw_bytes_per_s, middle.new.busbw_bytes_per_s
    return Loss(middle.old.size_bytes, *rates, longer, is_small=True)


def _measured(curve: BenchCurve) -> dict[int, BenchPoint]:
    """The point of each size, in rising order, where there was any bus bandwidth."""
    points = sorted(curve.points, key=lambda point: point.size_bytes)
    return {point.size_bytes: point for point in points if 0 < point.busbw_bytes_per_s < math.inf}


def _peak(points: Iterable[BenchPoint]) -> float:
    return max((point.busbw_bytes_per_s for point in points), default=0.0)


class _Pair(NamedTuple):
    """A size in both runs."""

    old: BenchPoint
    new: BenchPoint

    @property
    def ratio(self) -> float:
        """The time in the new run as a multiple of that in the old one."""
        return self.old.busbw_bytes_per_s / self.new.busbw_bytes_per_s

    @property
    def share(self) -> float:
        """The lost share of the bandwidth."""
        return 1 - self.new.busbw_bytes_per_s / self.old.busbw_bytes_per_s

    @property
    def cv(self) -> float:
        """The larger variation of both runs."""
        return max(self.old.cv, self.new.cv)
