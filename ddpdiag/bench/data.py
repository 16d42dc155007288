"""The benchmark's data (COL002): the rows of one rank, the sweeps over all ranks, and the rows of the table.

There may be millions of rows. They hold no cycles, so they are exempt from garbage collection (`gc=False`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec import Struct

from ddpdiag.bandwidth import SPLIT, algbw, busbw, counts
from ddpdiag.checks.api import Seen
from ddpdiag.checks.p2p import transport_judge as transport
from ddpdiag.model import Trial
from ddpdiag.model.bench import Bench, BenchRow, Limits, Measured, Spread, Timing
from ddpdiag.probes.gpu.health import GpuUsers
from ddpdiag.stats import quantile


class RankRow(Struct, frozen=True, kw_only=True, gc=False):
    """One line of nccl-tests' table on one rank; see `model.bench.BenchRow`.

    `cores` are the processor seconds that this process used per second of its calls.
    """

    size_bytes: int
    count: int
    dtype: str
    op: str
    root: int
    in_place: Timing | None = None
    out_of_place: Timing | None = None
    cores: float | None = None

    @property
    def key(self) -> tuple[str, str, int, int]:
        """The values that are equal on all ranks."""
        return self.dtype, self.op, self.root, self.size_bytes

    @property
    def modes(self) -> tuple[Timing, ...]:
        """The modes that were measured, in place first."""
        return tuple(mode for mode in (self.in_place, self.out_of_place) if mode is not None)


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
    """Lag, number of calls that this rank started last, transfer and skew, from the times of each call."""
    lag = sorted(most - mine for mine, most in zip(own, longest, strict=True))
    last = sum(mine <= least for mine, least in zip(own, shortest, strict=True))
    skew = sorted(most - least for least, most in zip(shortest, longest, strict=True))
    return quantile(lag, 0.5), last, quantile(sorted(shortest), 0.5), quantile(skew, 0.5)


# One rank's part -----------------------------------------------------------------------------------------------------


class Data(Struct, frozen=True, kw_only=True):
    """One rank's part in one trial, on `device`; index, UUID and PCI address are those of a GPU.

    `copies` are the rates of its own copies, in bytes copied per second, at moments that all ranks share. `notes` name
    the rows that were left out and why, and are equal on all ranks; `unsupported` names requested combinations that do
    not exist. `whole`: there was enough time and memory. Of a second measurement `path` is NCCL's choice, and `before`
    the users of this rank's GPU right before it.
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
    rows: tuple[RankRow, ...] = ()
    copies: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
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
        """The number of ranks that it took."""
        return len(self.trial.ranks)

    @cached_property
    def rows(self) -> Mapping[tuple[str, str, int, int], Mapping[int, RankRow]]:
        """Each row on each rank that has it, by its key, in the order of the first rank that has any."""
        rows: dict[tuple[str, str, int, int], dict[int, RankRow]] = {}
        for rank, data in self.ranks.items():
            for row in data.rows:
                rows.setdefault(row.key, {})[rank] = row
        return rows


# A parameter of trials that measure once more what was far below its expectation.
AGAIN = "again"


def is_sweep(trial: Trial) -> bool:
    """Whether the trial measures all sizes among all ranks, rather than one size in pairs or once more."""
    return "round" not in trial.params and AGAIN not in trial.params


def sweeps(seen: Seen[Data]) -> tuple[Sweep, ...]:
    """The sweeps in the order of their trials, with the partial data of trials that were cut short."""
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


def rows(sweep: Sweep) -> Iterator[BenchRow]:
    """The rows of a sweep that all its ranks measured; a rank without any row was lost and does not count."""
    measured = sum(bool(data.rows) for data in sweep.ranks.values())
    for by_rank in sweep.rows.values():
        if len(by_rank) < measured:
            continue
        first = next(iter(by_rank.values()))
        row = BenchRow(
            backend=sweep.backend,
            collective=sweep.collective,
            size_bytes=first.size_bytes,
            count=first.count,
            dtype=first.dtype,
            op=first.op,
            root=first.root,
            out_of_place=_measured(sweep, first, {rank: row.out_of_place for rank, row in by_rank.items()}),
            in_place=_measured(sweep, first, {rank: row.in_place for rank, row in by_rank.items()}),
        )
        if row.natural() is not None:
            yield row


def missing_sizes(asked: Bench, sweep: Sweep, own: Sequence[BenchRow]) -> list[int]:
    """Requested sizes without a row, of any type, operation and root of the sweep's rows."""
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
    """Requested types and operations without a row; of "all" it is not known which."""
    wanted = ((asked.datatype, {row.dtype for row in own}), (asked.op, {row.op for row in own}))
    # A collective without an operation has "none" in its place.
    missing = [
        name
        for names, measured in wanted
        if {"all", "none"}.isdisjoint({*names, *measured})
        for name in names
        if name not in measured
    ]
    every = "all" in (*asked.datatype, *asked.op) or asked.root < 0
    return missing or (["some types, operations or roots"] if every else [])


def _measured(sweep: Sweep, row: RankRow, found: Mapping[int, Timing | None]) -> Measured | None:
    """One mode over all ranks; None where no rank measured it."""
    timings = {rank: timing for rank, timing in found.items() if timing is not None}
    if not timings:
        return None
    seconds = max(timing.seconds.mean for timing in timings.values())
    wrong = [timing.wrong for timing in timings.values() if timing.wrong is not None]
    return Measured(
        seconds=seconds,
        algbw_bytes_per_s=algbw(row.size_bytes, seconds),
        busbw_bytes_per_s=busbw(sweep.collective, row.size_bytes, seconds, sweep.size),
        wrong=sum(wrong) if wrong else None,
        calls=min(timing.seconds.count for timing in timings.values()),
        ranks=timings,
    )
