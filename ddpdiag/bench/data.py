"""The benchmark's data (COL002): the rows of one rank, the sweeps over all ranks, and the rows of the table.

There may be millions of rows. They hold no cycles, so they are exempt from garbage collection (`gc=False`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec import Struct

from ddpdiag.bandwidth import algbw, busbw
from ddpdiag.checks.api import Seen
from ddpdiag.model import Trial
from ddpdiag.model.bench import BenchRow, Limits, Measured, Spread, Timing
from ddpdiag.stats import quantile


class RankRow(Struct, frozen=True, kw_only=True, gc=False):
    """One line of nccl-tests' table on one rank; see `model.bench.BenchRow`."""

    size_bytes: int
    count: int
    dtype: str
    op: str
    root: int
    in_place: Timing | None = None
    out_of_place: Timing | None = None

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
        max=ordered[-1],
        mean=mean,
        stdev=math.sqrt(sum((each - mean) ** 2 for each in seconds) / len(seconds)),
        count=len(seconds),
    )


def together(own: Sequence[float], shortest: Sequence[float], longest: Sequence[float]) -> tuple[float, int, float]:
    """Lag, number of calls that this rank started last, and transfer, from the times of each call."""
    lag = sorted(most - mine for mine, most in zip(own, longest, strict=True))
    last = sum(mine <= least for mine, least in zip(own, shortest, strict=True))
    return quantile(lag, 0.5), last, quantile(sorted(shortest), 0.5)


# One rank's part -----------------------------------------------------------------------------------------------------


class Data(Struct, frozen=True, kw_only=True):
    """One rank's part in one trial, on `device`; index, UUID and PCI address are those of a GPU.

    `copies` are the rates of its copies, in bytes copied per second, at moments that all ranks share. `notes` name
    the rows that were left out and why, and are equal on all ranks; `unsupported` names requested combinations that do
    not exist. `whole`: there was enough time and memory.
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


def sweeps(seen: Seen[Data]) -> tuple[Sweep, ...]:
    """The sweeps in the order of their trials, with the partial data of trials that were cut short."""
    trials: dict[int, Trial] = {}
    ranks: dict[int, dict[int, Data]] = {}
    for row in seen.rows_so_far:
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
