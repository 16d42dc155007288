"""What one rank gives of the benchmark (COL002), its times in few numbers, the rows of the table over all ranks, and
the line through a sweep.

There may be millions of lines, and they hold no cycles, so the collector of garbage need not look at them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec import Struct, field

from ddpdiag.bandwidth import SPLIT, algbw, busbw, counts, factor
from ddpdiag.bench.bottleneck import SMALL_BYTES, Point, usable
from ddpdiag.checks.api import Seen
from ddpdiag.checks.p2p import transport_judge as transport
from ddpdiag.model import Trial
from ddpdiag.model.bench import Average, Bench, BenchRow, Fit, Limits, Measured, RankTime, Spread
from ddpdiag.probes.gpu.health import GpuUsers
from ddpdiag.stats import quantile


class Cell(Struct, frozen=True, kw_only=True, gc=False):
    """One mode of a line on this rank.

    In each call the rank that started last spends least time in it, since all finish together. `lag_seconds` is the
    median over the calls of the longest time that any rank spent less this rank's own; `last` counts the calls in which
    this rank's was the shortest. `transfer_seconds` and `skew_seconds` are medians of the shortest, and of the longest
    less the shortest; they are the same on all ranks. None where ranks may finish apart. `wrong` is None if not
    checked.
    """

    seconds: Spread
    wrong: int | None = None
    lag_seconds: float | None = None
    last: int | None = None
    transfer_seconds: float | None = None
    skew_seconds: float | None = None
    times: tuple[float, ...] = ()


class Line(Struct, frozen=True, kw_only=True, gc=False):
    """One line of nccl-tests' table on this rank; see `model.bench.BenchRow`.

    `cores` are the processor seconds that this process used per second of its calls.
    """

    cycle: int
    size_bytes: int
    count: int
    dtype: str
    op: str
    root: int
    in_place: Cell | None = None
    out_of_place: Cell | None = None
    cores: float | None = None

    @property
    def key(self) -> tuple[int, str, str, int, int]:
        """What is the same on all ranks."""
        return self.cycle, self.dtype, self.op, self.root, self.size_bytes


def spread(seconds: Sequence[float]) -> Spread:
    """Summary of at least one call; ValueError if there is none."""
    if not seconds:
        raise ValueError("no calls to summarise")
    ordered, mean = sorted(seconds), sum(seconds) / len(seconds)
    return Spread(
        min=ordered[0],
        median=quantile(ordered, 0.5),
        p95=quantile(ordered, 0.95),
        p99=quantile(ordered, 0.99),
        max=ordered[-1],
        mean=mean,
        stdev=math.sqrt(sum((each - mean) ** 2 for each in seconds) / len(seconds)),
        count=len(seconds),
    )


def together(
    own: Sequence[float], shortest: Sequence[float], longest: Sequence[float]
) -> tuple[float, int, float, float]:
    """Lag, calls that this rank started last, transfer and skew, from each call's own, shortest and longest time."""
    lag = sorted(most - mine for mine, most in zip(own, longest, strict=True))
    last = sum(mine <= least for mine, least in zip(own, shortest, strict=True))
    skew = sorted(most - least for least, most in zip(shortest, longest, strict=True))
    return quantile(lag, 0.5), last, quantile(sorted(shortest), 0.5), quantile(skew, 0.5)


# One rank's answer ---------------------------------------------------------------------------------------------------


class Data(Struct, frozen=True, kw_only=True):
    """One rank's part in one trial. `device` is the name of what it ran on; index, UUID and PCI address are a GPU's.

    `copies` are the rates of its own copies, in bytes copied per second, at moments that all ranks share. `notes` say
    what was left out and why, and are the same on all ranks; `unsupported` names what was asked for and is not there.
    `whole`: there was enough time and memory. Of a second measurement `path` is what NCCL chose, and `before` the
    users of this rank's GPU right before it.
    """

    backend: str
    collective: str
    ranks: int
    pid: int
    device: str
    device_index: int | None = None
    gpu_uuid: str | None = None
    pci: str | None = None
    limits: Limits = Limits()
    lines: tuple[Line, ...] = ()
    copies: tuple[float, ...] = ()
    notes: tuple[str, ...] = field(default=(), name="remarks")
    unsupported: tuple[str, ...] = ()
    whole: bool = True
    path: transport.Data | None = None
    before: GpuUsers | None = None


# Sweeps --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """One trial that took all ranks: one collective over one backend."""

    trial: Trial
    backend: str
    collective: str
    ranks: Mapping[int, Data]

    @property
    def size(self) -> int:
        """How many ranks it took."""
        return len(self.trial.ranks)

    @cached_property
    def lines(self) -> Mapping[tuple[int, str, str, int, int], Mapping[int, Line]]:
        """Each line on each rank that has it, by its key, in the order of the first rank that has any."""
        lines: dict[tuple[int, str, str, int, int], dict[int, Line]] = {}
        for rank, data in self.ranks.items():
            for line in data.lines:
                lines.setdefault(line.key, {})[rank] = line
        return lines


# A parameter of trials that measure once more what was far below its expectation.
AGAIN = "again"


def is_sweep(trial: Trial) -> bool:
    """Does it measure all sizes among all ranks? Else one size, in pairs or once more."""
    return "round" not in trial.params and AGAIN not in trial.params


def sweeps(seen: Seen[Data]) -> tuple[Sweep, ...]:
    """The sweeps, in the order in which they were run; the answers of trials that were cut short count as well."""
    trials: dict[int, Trial] = {}
    ranks: dict[int, dict[int, Data]] = {}
    for row in seen.rows_so_far:
        if is_sweep(row.trial):
            trials[row.trial.number] = row.trial
            ranks.setdefault(row.trial.number, {})[row.place.rank] = row.data
    return tuple(
        Sweep(own, str(own.params["backend"]), str(own.params["collective"]), dict(sorted(ranks[number].items())))
        for number, own in trials.items()
    )


# Rows ----------------------------------------------------------------------------------------------------------------


def rows(sweep: Sweep, average: Average) -> Iterator[BenchRow]:
    """The lines of a sweep over all its ranks; without those that have no time of the rank that `average` asks for."""
    # Lines that not every rank has that has any were cut short.
    measured = sum(bool(data.lines) for data in sweep.ranks.values())
    for lines in sweep.lines.values():
        if len(lines) < measured:
            continue
        first = next(iter(lines.values()))
        outside = {rank: cell for rank, line in lines.items() if (cell := line.out_of_place) is not None}
        inside = {rank: cell for rank, line in lines.items() if (cell := line.in_place) is not None}
        row = BenchRow(
            backend=sweep.backend,
            collective=sweep.collective,
            cycle=first.cycle,
            size_bytes=first.size_bytes,
            count=first.count,
            dtype=first.dtype,
            op=first.op,
            root=first.root,
            out_of_place=_measured(sweep, first, outside, average),
            in_place=_measured(sweep, first, inside, average),
        )
        if row.natural() is not None:
            yield row


def missing_sizes(asked: Bench, sweep: Sweep, own: Sequence[BenchRow]) -> list[int]:
    """Sizes that were asked for and have no row, of any type, operation and root of the sweep's rows."""
    kinds: dict[tuple[str, str, int], list[BenchRow]] = {}
    for row in own:
        kinds.setdefault((row.dtype, row.op, row.root), []).append(row)
    parts = sweep.size if sweep.collective in SPLIT else 1
    missing: set[int] = set()
    for alike in kinds.values():
        width = max(1, alike[0].size_bytes // max(1, alike[0].count * parts))
        wanted = {counts(sweep.collective, size, width, sweep.size).size_bytes for size in asked.sizes}
        missing |= wanted - {row.size_bytes for row in alike}
    return sorted(missing)


def missing_kinds(asked: Bench, own: Sequence[BenchRow]) -> list[str]:
    """Types, operations, roots and cycles that were asked for and have no row; of "all" it is not known which."""
    wanted = (
        (asked.dtypes, {row.dtype for row in own}),
        (asked.ops, {row.op for row in own}),
        ([f"root {root}" for root in asked.roots], {f"root {row.root}" for row in own}),
        ([f"cycle {cycle}" for cycle in range(asked.cycles)], {f"cycle {row.cycle}" for row in own}),
    )
    # A collective without an operation or a root has "none" and -1 in their place.
    missing = [
        name
        for names, there in wanted
        if {"all", "none", "root -1"}.isdisjoint({*names, *there})
        for name in names
        if name not in there
    ]
    every = "all" in (*asked.dtypes, *asked.ops) or -1 in asked.roots
    return missing or (["some types, operations or roots"] if every else [])


def _measured(sweep: Sweep, line: Line, cells: Mapping[int, Cell], average: Average) -> Measured | None:
    """One mode over all ranks; None where no rank has it, or not the one whose time is asked for."""
    seconds = _averaged({rank: cell.seconds.mean for rank, cell in cells.items()}, average)
    if seconds is None:
        return None
    wrong = [cell.wrong for cell in cells.values() if cell.wrong is not None]
    first = next(iter(cells.values()))
    return Measured(
        seconds=seconds,
        algbw_bytes_per_s=algbw(line.size_bytes, seconds),
        busbw_bytes_per_s=busbw(sweep.collective, line.size_bytes, seconds, sweep.size),
        wrong=sum(wrong) if wrong else None,
        calls=min(cell.seconds.count for cell in cells.values()),
        transfer_seconds=first.transfer_seconds,
        skew_seconds=first.skew_seconds,
        ranks=tuple(
            RankTime(rank=rank, seconds=own.seconds, lag_seconds=own.lag_seconds, wrong=own.wrong, times=own.times)
            for rank, own in cells.items()
        ),
    )


def _averaged(seconds: Mapping[int, float], average: Average) -> float | None:
    """What -a asks for, of the ranks' times; None where there is none, or none of rank 0, whose time is asked for."""
    if not seconds:
        return None
    match average:
        case Average.RANK_0:
            return seconds.get(0)
        case Average.MEAN:
            return sum(seconds.values()) / len(seconds)
        case Average.FASTEST:
            return min(seconds.values())
        case Average.SLOWEST:
            return max(seconds.values())


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
    # By which share each size between the two ends took longer.
    longer = {
        int(point.size_bytes): point.seconds / (latency + point.size_bytes / bandwidth) - 1
        for point in sweep[:-2]
        if point.size_bytes > SMALL_BYTES
    }
    share, at = max(((share, size) for size, share in longer.items()), default=(None, None))
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
