"""The bottleneck of one sweep: a table of decisions, from the certain to the likely.

A slow rank explains everything else; more ranks than cores explain away all numbers; a message too short for bandwidth
is bound by latency; then a bandwidth that falls as messages grow, and last the part of the machine whose limit was
reached. Anything else is reported as unknown. `ddpdiag check` finds parts that are missing.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ddpdiag.bandwidth import Bound, busbw, factor
from ddpdiag.model.bench import Bottleneck, Fit
from ddpdiag.stats import quantile
from ddpdiag.text import rate_text, reached_text, size_text, time_text

# At least this much of the expectation counts as reached (stas00, ml-engineering: 80 %).
GOOD_SHARE = 0.8
# Of what copies and loopback allow: gloo's threads hand each segment to each other. Two ranks on an idle host of two
# cores reached 0.59 to 0.68 of it.
GOOD_COPY_SHARE = 0.5
# Up to here the call itself costs more than its bytes on every fabric with known numbers.
SMALL_BYTES = 64 << 10


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


# A line through a sweep -----------------------------------------------------------------------------------------------

# seconds = latency + size / bandwidth: Hockney's model, fitted where each of its terms dominates, so that a change of
# protocol in the middle (NCCL's LL and Simple) bends neither. Half of the bandwidth is reached at latency x bandwidth.

MIN_SIZES = 3
# A narrower sweep lies within one of the two regimes, and shows nothing about the other.
MIN_RANGE = 64
# The slope of the two largest sizes counts while it is within this ratio of the line from the small ones; beyond it
# one of the two times was disturbed. (Measured, gloo from 64 to 256 MiB: 0.96.)
_SLOPE_RATIO = 1.5


def fit(collective: str, ranks: int, points: Sequence[tuple[int, float]]) -> Fit | None:
    """Latency and bandwidth of a sweep of (size in bytes, seconds of the shortest call).

    None where the sweep does not show it: one rank, fewer than 3 sizes, a range below 64x, no size of at most 64 KiB,
    or times that do not grow with the size.
    """
    sweep = usable(points)
    if ranks < 2 or len(sweep) < MIN_SIZES or sweep[-1].size_bytes < MIN_RANGE * sweep[0].size_bytes:
        return None
    small = [point for point in sweep if point.size_bytes <= SMALL_BYTES]
    bandwidth = _bandwidth(small, sweep) if small else None
    if bandwidth is None:
        return None
    # The time without the bytes, in the median of the small sizes whose bytes take less than half of it: elsewhere the
    # rest is noise. The median, not the shortest: each time is the best of its calls already.
    left = [Point(point.size_bytes, point.seconds - point.size_bytes / bandwidth) for point in small]
    latent = sorted(rest.seconds for rest in left if rest.seconds > rest.size_bytes / bandwidth)
    latency = quantile(latent, 0.5) if latent else max(0.0, left[0].seconds)
    return Fit(
        latency_seconds=latency,
        busbw_bytes_per_s=bandwidth * factor(collective, ranks),
        half_bytes=latency * bandwidth,
    )


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


# Its bottleneck -------------------------------------------------------------------------------------------------------


class Slow(NamedTuple):
    """A rank that is called slow, with the reason ("copies 2.1x slower than the median of its peers")."""

    rank: int
    host: str
    reason: str


class Facts(NamedTuple):
    """The facts of one sweep.

    `points` are (size in bytes, seconds of the shortest call), in any order; `peak_busbw_bytes_per_s` and `best_bytes`
    are those of the rows. `oversubscribed` is (ranks, cores) of a host with fewer cores than ranks.
    """

    collective: str
    backend: str
    ranks: int
    hosts: int
    peak_busbw_bytes_per_s: float
    best_bytes: int
    fit: Fit | None
    bound: Bound | None
    points: Sequence[tuple[int, float]]
    oversubscribed: tuple[int, int] | None = None
    slow: tuple[Slow, ...] = ()

    @property
    def share(self) -> float | None:
        """The peak over the expectation."""
        expected = self.bound.busbw_bytes_per_s if self.bound else 0.0
        return self.peak_busbw_bytes_per_s / expected if expected > 0 else None

    @property
    def good_share(self) -> float:
        """The least share of the expectation that counts as reached."""
        return GOOD_COPY_SHARE if self.bound and self.bound.part is Bottleneck.COPY else GOOD_SHARE

    @property
    def subject(self) -> str:
        """Such as "all_reduce over nccl"."""
        return f"{self.collective} over {self.backend}"

    @property
    def peak(self) -> str:
        """Such as "1.31 GB/s busbw at 64 MiB"."""
        return f"{rate_text(self.peak_busbw_bytes_per_s)} busbw at {size_text(self.best_bytes)}"

    @property
    def compared(self) -> str:
        """Such as "1.31 GB/s busbw at 64 MiB, 91 % of 1.44 GB/s expected (source)"."""
        if self.bound is None or self.share is None:
            return self.peak
        reached = reached_text(self.peak_busbw_bytes_per_s, self.bound.busbw_bytes_per_s)
        return f"{self.peak}, {reached.removesuffix(' expected')} expected ({self.bound.source})"


# The table of decisions ----------------------------------------------------------------------------------------------


# Bandwidth must not fall by more than this as size grows (ROCm cvs).
DROP_SHARE = 0.05
# Times that do not even double from the smallest size to one 8 times as large are all latency.
FLAT_RATIO = 2.0
_FLAT_RANGE = 8
# NCCL over TCP sockets instead of InfiniBand is 5 to 20 times slower.
SOCKET_SHARE = 0.2

_PARTS = {Bottleneck.NIC: "the network cards", Bottleneck.NVLINK: "NVLink", Bottleneck.PCIE: "PCIe"}

Verdict = tuple[Bottleneck, str]


def assess(facts: Facts) -> Verdict:
    """The bottleneck, and a sentence that names the subject, the number and the expectation."""
    rules: tuple[Callable[[Facts], Verdict | None], ...] = (
        _slow,
        _not_judged,
        _latency,
        _falls,
        _reached,
        _too_short,
    )
    found = (verdict for rule in rules if (verdict := rule(facts)))
    return next(found, None) or (Bottleneck.UNKNOWN, _unknown(facts))


def _slow(facts: Facts) -> Verdict | None:
    if not facts.slow:
        return None
    names = [f"rank {slow.rank} on {slow.host}" for slow in facts.slow]
    if len(names) == 1:
        return Bottleneck.SLOW_RANK, f"{names[0]} slows the others down: it {facts.slow[0].reason}."
    reasons = "; ".join(f"{name} {slow.reason}" for name, slow in zip(names, facts.slow, strict=True))
    return Bottleneck.SLOW_RANK, f"{len(names)} ranks slow the others down: {reasons}."


def _not_judged(facts: Facts) -> Verdict | None:
    if facts.ranks < 2:
        return (
            Bottleneck.NOT_JUDGED,
            "One rank has no other rank to communicate with: there is no bandwidth to judge.",
        )
    if facts.oversubscribed:
        ranks, cores = facts.oversubscribed
        return (
            Bottleneck.NOT_JUDGED,
            f"More ranks ({ranks}) than cores ({cores}): the numbers do not describe this machine, and are not judged.",
        )
    return None


def _latency(facts: Facts) -> Verdict | None:
    sweep = usable(facts.points)
    if not sweep or not _is_short(sweep, facts.fit):
        return None
    call = facts.fit.latency_seconds if facts.fit else quantile(sorted(point.seconds for point in sweep), 0.5)
    half = f"; half of the bandwidth is reached at {size_text(facts.fit.half_bytes)}" if facts.fit else ""
    largest = size_text(sweep[-1].size_bytes)
    return Bottleneck.LATENCY, f"{facts.subject} is latency-bound up to {largest}: {time_text(call)} a call{half}."


def _is_short(sweep: Sequence[Point], fit: Fit | None) -> bool:
    """Whether no size of the sweep reaches half of the bandwidth."""
    smallest, largest = sweep[0], sweep[-1]
    if fit is not None:
        return largest.size_bytes < fit.half_bytes
    flat = largest.seconds < FLAT_RATIO * smallest.seconds
    return largest.size_bytes <= SMALL_BYTES or (flat and largest.size_bytes >= _FLAT_RANGE * smallest.size_bytes)


def _falls(facts: Facts) -> Verdict | None:
    """Less bandwidth for larger messages. Where gloo copies, that is the end of the caches, and no fault."""
    if (facts.bound and facts.bound.part is Bottleneck.COPY) or (facts.backend == "gloo" and facts.hosts < 2):
        return None
    rates = [(size, busbw(facts.collective, size, seconds, facts.ranks)) for size, seconds in usable(facts.points)]
    best = max(rates, key=lambda point: point[1], default=(0.0, 0.0))
    if not rates or rates[-1][1] >= best[1] * (1 - DROP_SHARE):
        return None
    size, rate = rates[-1]
    # Inside one host no network takes part.
    causes = "congestion, flow control (PFC) or heat" if facts.hosts > 1 else "heat, or other load on the host"
    return (
        Bottleneck.CONGESTION,
        f"{facts.subject} falls from {rate_text(best[1])} busbw at {size_text(best[0])} to {rate_text(rate)} at"
        f" {size_text(size)}, possibly by {causes}: run it again, and check whether p95 is far above the shortest "
        "time.",
    )


def _reached(facts: Facts) -> Verdict | None:
    """The part that sets the expectation, where that was reached."""
    if facts.bound is None or facts.share is None or facts.share < facts.good_share:
        return None
    part = facts.bound.part
    copies = "copies on this host's CPU" if facts.hosts == 1 else "copies on the hosts' CPUs"
    return part, f"{facts.subject} is bound by {_PARTS.get(part, copies)}: {facts.compared}."


def _too_short(facts: Facts) -> Verdict | None:
    """The expectation would be reached, with larger messages than these."""
    if facts.bound is None or facts.fit is None or not facts.points:
        return None
    largest = max(size for size, _ in facts.points)
    # size / (size + half) is below the share that counts as reached.
    good = facts.good_share
    short = largest * (1 - good) < facts.fit.half_bytes * good
    if not short or facts.fit.busbw_bytes_per_s < good * facts.bound.busbw_bytes_per_s:
        return None
    return (
        Bottleneck.LATENCY,
        f"{facts.subject} needs larger messages than {size_text(largest)}: {facts.compared}; half of the bandwidth"
        f" is reached at {size_text(facts.fit.half_bytes)}, and a call costs {time_text(facts.fit.latency_seconds)}.",
    )


def _unknown(facts: Facts) -> str:
    if facts.peak_busbw_bytes_per_s <= 0:
        return f"{facts.subject} was not measured."
    if facts.bound is None or facts.share is None:
        return f"{facts.subject}: {facts.peak}; what this hardware should reach is not known."
    if facts.bound.network_unknown:
        why = "the limit may be the network between the hosts, whose cards do not report their speed"
    elif facts.backend == "nccl" and facts.hosts > 1 and facts.share <= SOCKET_SHARE:
        why = "this is usual where NCCL uses TCP sockets instead of InfiniBand (NCCL_DEBUG=INFO then shows NET/Socket)"
    else:
        why = "the bottleneck is not known"
    return f"{facts.subject} stays below what this hardware should reach: {facts.compared}; {why}."
