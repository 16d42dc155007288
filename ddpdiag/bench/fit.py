"""A line through a sweep: seconds = latency + size / bandwidth.

The latency is what a call costs that moves next to nothing, the bandwidth that of an endless message; where half of
it is reached (latency x bandwidth), messages begin to be worth their calls. Hockney's model, fitted where each of its
terms rules alone, so that a change of protocol in the middle (NCCL's LL and Simple) bends neither.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ddpdiag.bandwidth import factor
from ddpdiag.model.bench import Fit
from ddpdiag.stats import quantile

# Up to here the call itself costs more than its bytes on every fabric that we have numbers of.
SMALL_BYTES = 64 << 10
MIN_SIZES = 3
# A narrower sweep lies within one of the two regimes, and says nothing about the other.
MIN_RANGE = 64
# The slope of the two largest sizes counts while it is within this ratio of the line from the small ones; beyond it
# one of the two times was disturbed. (Measured, gloo from 64 to 256 MiB: 0.96.)
_SLOPE_RATIO = 1.5


class Point(NamedTuple):
    """A size, and the shortest time of a call of that size: noise only ever adds."""

    size_bytes: float
    seconds: float


def usable(points: Sequence[tuple[int, float]]) -> tuple[Point, ...]:
    """Measured points in rising order, one a size (the fastest)."""
    best: dict[int, float] = {}
    for size, seconds in points:
        if size > 0 and math.isfinite(seconds) and seconds > 0:
            best[size] = min(seconds, best.get(size, math.inf))
    return tuple(Point(size, best[size]) for size in sorted(best))


def fit(collective: str, ranks: int, points: Sequence[tuple[int, float]]) -> Fit | None:
    """Latency and bandwidth of a sweep of (size in bytes, seconds of the shortest call).

    None when the sweep cannot tell: one rank, fewer than 3 sizes, a range below 64x, no size of at most 64 KiB, or
    times that do not grow with the size.
    """
    sweep = usable(points)
    if ranks < 2 or len(sweep) < MIN_SIZES or sweep[-1].size_bytes < MIN_RANGE * sweep[0].size_bytes:
        return None
    small = [point for point in sweep if point.size_bytes <= SMALL_BYTES]
    bandwidth = _bandwidth(small, sweep) if small else None
    if bandwidth is None:
        return None
    latency = _latency(small, bandwidth)
    share, at = _residual(sweep, latency, bandwidth)
    return Fit(
        latency_seconds=latency,
        busbw_bytes_per_s=bandwidth * factor(collective, ranks),
        half_bytes=latency * bandwidth,
        residual_share=share,
        residual_bytes=at,
    )


def _latency(small: Sequence[Point], bandwidth: float) -> float:
    """What is left without the bytes, in the median of the small sizes whose bytes are less than half of their time.

    The median, not the shortest: each time is the best of its calls already, and the luckiest of a dozen sizes is no
    call that a job would see. Where bytes are most of the time, what is left is noise.
    """
    left = [Point(point.size_bytes, point.seconds - point.size_bytes / bandwidth) for point in small]
    latent = sorted(rest.seconds for rest in left if rest.seconds > rest.size_bytes / bandwidth)
    return quantile(latent, 0.5) if latent else max(0.0, left[0].seconds)


def _bandwidth(small: Sequence[Point], sweep: Sequence[Point]) -> float | None:
    """Bytes per second along the two largest sizes; along the whole sweep where noise makes nonsense of these."""
    floor = min(small, key=lambda point: point.seconds)
    overall = _slope(floor, sweep[-1])
    if overall is None:
        return None
    slope = _slope(sweep[-2], sweep[-1])
    return slope if slope and overall / _SLOPE_RATIO <= slope <= overall * _SLOPE_RATIO else overall


def _slope(low: Point, high: Point) -> float | None:
    """Bytes per second between two points; None if the larger takes no longer."""
    if high.size_bytes <= low.size_bytes or high.seconds <= low.seconds:
        return None
    slope = (high.size_bytes - low.size_bytes) / (high.seconds - low.seconds)
    return slope if math.isfinite(slope) else None


def _residual(sweep: Sequence[Point], latency: float, bandwidth: float) -> tuple[float, int] | tuple[None, None]:
    """The largest share by which a size between the two ends took longer, and that size."""
    middle: Mapping[int, float] = {
        int(point.size_bytes): point.seconds / (latency + point.size_bytes / bandwidth) - 1
        for point in sweep[:-2]
        if point.size_bytes > SMALL_BYTES
    }
    if not middle:
        return None, None
    worst = max(middle, key=lambda size: middle[size])
    return middle[worst], worst
