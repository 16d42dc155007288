"""The rows of a benchmark as every renderer needs them: by table, by mode, and by call."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

from ddpdiag.model import Report
from ddpdiag.model.bench import Bench, BenchRank, BenchReport, BenchRow, Measured, RankTime, Spread
from ddpdiag.render.page import one_line

_NOTHING = BenchReport(
    asked=Bench(),
    created="",
    rows=(),
    series=(),
    ranks=(),
    notes=(),
    average_busbw_bytes_per_s=None,
    wrong=None,
    complete=False,
    sentence="",
)


class Part(NamedTuple):
    """The rows of one collective over one backend: one table, as one run of nccl-tests prints it."""

    backend: str
    collective: str
    rows: tuple[BenchRow, ...]

    @property
    def name(self) -> str:
        """ "all_reduce over gloo"."""
        return f"{self.collective} over {self.backend}"

    @property
    def modes(self) -> tuple[Measured, ...]:
        """All that was measured, in and out of place."""
        return tuple(mode for row in self.rows for mode in row.modes().values())

    @property
    def wrong(self) -> int | None:
        """Wrong elements in all rows; None if nothing was checked."""
        checked = [mode.wrong for mode in self.modes if mode.wrong is not None]
        return sum(checked) if checked else None

    @property
    def average_busbw_bytes_per_s(self) -> float | None:
        """The mean over all rows and modes, as nccl-tests has it; None without rows."""
        return fmean(mode.busbw_bytes_per_s for mode in self.modes) if self.modes else None


class Calls(NamedTuple):
    """Seconds of the single calls, each that of the rank that took longest; `cv` has no unit."""

    min: float
    max: float
    mean: float
    p50: float
    p95: float
    p99: float
    stdev: float
    cv: float
    times: tuple[float, ...]


def measured(report: Report) -> BenchReport:
    """The benchmark in `report`; one without rows if none was judged."""
    return report.bench or _NOTHING


def parts(bench: BenchReport) -> tuple[Part, ...]:
    """The rows by backend and collective, in the order in which they first appear."""
    rows: dict[tuple[str, str], list[BenchRow]] = {}
    for row in bench.rows:
        rows.setdefault((row.backend, row.collective), []).append(row)
    return tuple(Part(backend, collective, tuple(of)) for (backend, collective), of in rows.items())


def reaches(bench: BenchReport, parts: Sequence[Part]) -> bool | None:
    """Do all series of `parts` reach what `--min-busbw` asks for, at their best size? None if it asks for nothing."""
    least = bench.asked.min_busbw_bytes_per_s
    if least is None or not parts:
        return None
    shown = {(part.backend, part.collective) for part in parts}
    peaks = [s.peak_busbw_bytes_per_s for s in bench.series if (s.backend, s.collective) in shown]
    return bool(peaks) and min(peaks) >= least


def slowest(mode: Measured) -> RankTime | None:
    """The rank with the longest mean time."""
    return max(mode.ranks, key=lambda rank: rank.seconds.mean, default=None)


def devices(bench: BenchReport) -> list[BenchRank]:
    """One line for each rank, in rising order: that with the GPU, if a backend used one."""
    lines: dict[int, BenchRank] = {}
    for line in sorted(bench.ranks, key=lambda line: (line.rank, line.gpu_uuid is None)):
        lines.setdefault(line.rank, line)
    return list(lines.values())


def traits(dtype: str, op: str, root: int) -> tuple[str, ...]:
    """What tells series of one collective apart, without what it does not have: ("float", "sum")."""
    return (dtype, *([] if op == "none" else [op]), *([] if root < 0 else [f"root {root}"]))


def short_pci(pci: str) -> str:
    """ "0000:17:00", as nccl-tests writes what NVML calls "00000000:17:00.0"."""
    domain, _, rest = one_line(pci).partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}" if rest else domain


def calls(mode: Measured) -> Calls | None:
    """Statistics over the calls of a mode, as nccl-tests' `-I` has them; None if no rank says anything.

    nccl-tests takes the longest time of each call over the ranks, then statistics over the calls (src/util.cu,
    `computeIterStats`). Without the single times, each figure is the largest of the ranks' own.
    """
    if not mode.ranks:
        return None
    if all(rank.times for rank in mode.ranks):
        return _over_calls(tuple(map(max, zip(*(rank.times for rank in mode.ranks), strict=False))))
    spreads = [rank.seconds for rank in mode.ranks]

    def most(pick: Callable[[Spread], float]) -> float:
        return max(map(pick, spreads))

    return Calls(
        min=most(lambda s: s.min),
        max=most(lambda s: s.max),
        mean=most(lambda s: s.mean),
        p50=most(lambda s: s.median),
        p95=most(lambda s: s.p95),
        p99=most(lambda s: s.p99),
        stdev=most(lambda s: s.stdev),
        cv=most(lambda s: s.cv),
        times=(),
    )


def _over_calls(times: tuple[float, ...]) -> Calls:
    ordered, mean, stdev = sorted(times), fmean(times), pstdev(times)
    return Calls(
        min=ordered[0],
        max=ordered[-1],
        mean=mean,
        p50=ordered[len(ordered) // 2],
        p95=_percentile(ordered, 95),
        p99=_percentile(ordered, 99),
        stdev=stdev,
        cv=stdev / mean if mean > 0 else 0.0,
        times=times,
    )


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """nccl-tests takes the nearest rank: of 20 calls, p99 is the longest."""
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]
