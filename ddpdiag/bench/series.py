"""What the sweeps mean: a line through each, its bottleneck, and how its ranks compare with each other."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import structs

from ddpdiag.bandwidth import algbw, bound, busbw, factor
from ddpdiag.bench.bottleneck import SMALL_BYTES, Facts, Point, Slow, assess, usable
from ddpdiag.bench.data import Data, Sweep
from ddpdiag.bench.slow import standing
from ddpdiag.checks.api import Seen
from ddpdiag.model.bench import BenchRank, BenchRow, Fit, Limits, Measured, Series
from ddpdiag.stats import quantile


def series(seen: Seen[Data], sweep: Sweep, found: Sequence[BenchRow]) -> Iterator[Series]:
    """All sizes of each dtype, op and root, and what they mean."""
    kinds: dict[tuple[str, str, int], list[tuple[BenchRow, Measured]]] = defaultdict(list)
    for row in found:
        if (mode := row.natural()) is not None:
            kinds[row.dtype, row.op, row.root].append((row, mode))
    for own in kinds.values():
        yield _one_series(seen, sweep, own)


def _one_series(seen: Seen[Data], sweep: Sweep, own: Sequence[tuple[BenchRow, Measured]]) -> Series:
    peak, peak_mode = max(own, key=lambda each: each[1].busbw_bytes_per_s)
    peak_lines = sweep.lines[peak.cycle, peak.dtype, peak.op, peak.root, peak.size_bytes].values()
    # The shortest call of the slowest rank.
    points = [(row.size_bytes, max((rank.seconds.min for rank in mode.ranks), default=0.0)) for row, mode in own]
    known = fit(sweep.collective, sweep.size, points)
    among = standing(seen, sweep.backend)
    hosts = hosts_of_ranks(seen, sweep.trial.ranks)
    limits = {rank: data.limits for rank, data in sweep.ranks.items()}
    # What ranks measure that wait for each other's cores is no limit of the machine.
    limit = bound(sweep.collective, sweep.backend, hosts, limits) if among.crowd is None else None
    facts = Facts(
        collective=sweep.collective,
        backend=sweep.backend,
        ranks=sweep.size,
        hosts=len(hosts),
        peak_busbw_bytes_per_s=peak_mode.busbw_bytes_per_s,
        best_bytes=peak.size_bytes,
        fit=known,
        bound=limit,
        points=points,
        limits=lowest(limits.values()),
        links_up=links_up(sweep.ranks.values()),
        oversubscribed=among.crowd,
        cores_used=max((line.cores for line in peak_lines if line.cores is not None), default=None),
        slow=tuple(Slow(rank, seen.world.node_of(rank), why) for rank, why in among.slow.items()),
    )
    part, sentence = assess(facts)
    return Series(
        backend=sweep.backend,
        collective=sweep.collective,
        dtype=peak.dtype,
        op=peak.op,
        root=peak.root,
        peak_busbw_bytes_per_s=facts.peak_busbw_bytes_per_s,
        best_bytes=facts.best_bytes,
        fit=known,
        expectation=limit.expectation if limit else None,
        share=facts.share,
        bottleneck=part,
        sentence=sentence,
    )


def hosts_of_ranks(seen: Seen[Data], ranks: Iterable[int]) -> dict[str, tuple[int, ...]]:
    """These ranks by host; of machines that share a name, the second one is "name (2)"."""
    taking = frozenset(ranks)
    hosts: dict[str, tuple[int, ...]] = {}
    numbers: Counter[str] = Counter()
    for (name, _boot), ranks in seen.world.hosts.items():
        if own := tuple(rank for rank in ranks if rank in taking):
            numbers[name] += 1
            hosts[name if numbers[name] == 1 else f"{name} ({numbers[name]})"] = own
    return hosts


def lowest(limits: Iterable[Limits]) -> Limits:
    """The lowest of what ranks have, which no one card has; `nvlink_switched` only where all are."""
    known = tuple(limits)
    names = [name for name in Limits.__struct_fields__ if name not in ("uuid", "peers", "processor")]
    values = {name: [getattr(own, name) for own in known] for name in names}
    lowest = {name: min((value for value in own if value is not None), default=None) for name, own in values.items()}
    switched = values["nvlink_switched"]
    # False where one rank reports no; None where one reports nothing.
    all_switched = False if False in switched else (None if None in switched else bool(switched) or None)
    return structs.replace(Limits(), **lowest | {"nic": None, "nvlink_switched": all_switched})


def links_up(ranks: Iterable[Data]) -> tuple[int, int] | None:
    """The fewest and the most NVLinks that are up on GPUs of one model, of the model where these differ most.

    None if there are no links. A GPU without any counts only beside one that leads to a switch: some boards bridge
    some of their GPUs.
    """
    models: dict[str, list[Limits]] = defaultdict(list)
    for data in ranks:
        if data.limits.nvlinks is not None:
            models[data.device].append(data.limits)
    ranges = [found for own in models.values() if (found := _range(own))]
    return max(ranges, default=None, key=lambda found: found[1] - found[0])


def _range(own: Sequence[Limits]) -> tuple[int, int] | None:
    switched = any(limits.nvlink_switched for limits in own)
    links = [limits.nvlinks or 0 for limits in own if limits.nvlinks or switched]
    return (min(links), max(links)) if links else None


# Ranks ---------------------------------------------------------------------------------------------------------------


def ranks(seen: Seen[Data], sweep: Sweep, found: Sequence[BenchRow]) -> Iterator[BenchRank]:
    """The table of ranks at the largest size of the sweep's first dtype, op and root."""
    if not found:
        return
    first = found[0]
    alike = [row for row in found if (row.dtype, row.op, row.root) == (first.dtype, first.op, first.root)]
    reference = max(alike, key=lambda row: row.size_bytes)
    mode = reference.natural()
    times = {own.rank: own for own in mode.ranks} if mode else {}
    among = standing(seen, sweep.backend)
    for rank, data in sweep.ranks.items():
        time = times.get(rank)
        median = time.seconds.median if time else None
        yield BenchRank(
            backend=sweep.backend,
            collective=sweep.collective,
            rank=rank,
            local_rank=seen.world.arrivals[rank].place.local_rank,
            node=seen.world.node_of(rank),
            device=data.device,
            gpu_uuid=data.gpu_uuid,
            pci=data.pci,
            pid=data.pid,
            device_index=data.device_index,
            size_bytes=reference.size_bytes,
            seconds=median,
            algbw_bytes_per_s=algbw(reference.size_bytes, median) if median else None,
            busbw_bytes_per_s=busbw(sweep.collective, reference.size_bytes, median, sweep.size) if median else None,
            spread_share=time.seconds.cv if time else None,
            lag_seconds=time.lag_seconds if time else None,
            copy_bytes_per_s=quantile(sorted(data.copies), 0.5) if data.copies else None,
            pair_busbw_bytes_per_s=among.pairs.get(rank),
            slow=among.slow.get(rank, ""),
        )


# A line through a sweep -----------------------------------------------------------------------------------------------

# seconds = latency + size / bandwidth. The latency is what a call costs that moves next to nothing, the bandwidth that
# of an endless message; where half of it is reached (latency x bandwidth), messages begin to be worth their calls.
# Hockney's model, fitted where each of its terms rules alone, so that a change of protocol in the middle (NCCL's LL and
# Simple) bends neither.

MIN_SIZES = 3
# A narrower sweep lies within one of the two regimes, and shows nothing about the other.
MIN_RANGE = 64
# The slope of the two largest sizes counts while it is within this ratio of the line from the small ones; beyond it
# one of the two times was disturbed. (Measured, gloo from 64 to 256 MiB: 0.96.)
_SLOPE_RATIO = 1.5


def fit(collective: str, ranks: int, points: Sequence[tuple[int, float]]) -> Fit | None:
    """Latency and bandwidth of a sweep of (size in bytes, seconds of the shortest call).

    None when the sweep does not show it: one rank, fewer than 3 sizes, a range below 64x, no size of at most 64 KiB, or
    times that do not grow with the size.
    """
    sweep = usable(points)
    if ranks < 2 or len(sweep) < MIN_SIZES or sweep[-1].size_bytes < MIN_RANGE * sweep[0].size_bytes:
        return None
    small = [point for point in sweep if point.size_bytes <= SMALL_BYTES]
    bandwidth = _bandwidth(small, sweep) if small else None
    if bandwidth is None:
        return None
    # What is left without the bytes, in the median of the small sizes whose bytes are less than half of their time:
    # where bytes are most of it, what is left is noise. The median, not the shortest: each time is the best of its
    # calls already, and the luckiest of a dozen sizes is no call that a job would see.
    left = [Point(point.size_bytes, point.seconds - point.size_bytes / bandwidth) for point in small]
    latent = sorted(rest.seconds for rest in left if rest.seconds > rest.size_bytes / bandwidth)
    latency = quantile(latent, 0.5) if latent else max(0.0, left[0].seconds)
    share, at = _residual(sweep, latency, bandwidth)
    return Fit(
        latency_seconds=latency,
        busbw_bytes_per_s=bandwidth * factor(collective, ranks),
        half_bytes=latency * bandwidth,
        residual_share=share,
        residual_bytes=at,
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
