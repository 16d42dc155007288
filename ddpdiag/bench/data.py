"""The benchmark's data (COL002): the rows of one rank, the sweeps over all ranks, and the rows of the table.

There may be millions of rows. They have no reference cycles, so they are exempt from garbage collection (`gc=False`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec import Struct

from ddpdiag.bandwidth import Counts, algbw, busbw
from ddpdiag.checks.api import Seen
from ddpdiag.model import Trial
from ddpdiag.model.bench import BenchRow, Limits, RankRow
from ddpdiag.stats import quantile


def row_of(
    sizes: Counts,
    dtype: str,
    seconds: Sequence[float],
    wrong: int | None,
    extremes: tuple[Sequence[float], Sequence[float]] | None = None,
) -> RankRow:
    """A rank's row from its calls of a size; `extremes` has the shortest and longest time of any rank in each call."""
    ordered, mean = sorted(seconds), sum(seconds) / len(seconds)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in seconds) / len(seconds))
    lag = last = transfer = None
    if extremes is not None:
        shortest, longest = extremes
        lag = quantile(sorted(most - each for each, most in zip(seconds, longest, strict=True)), 0.5)
        last = sum(each <= least for each, least in zip(seconds, shortest, strict=True))
        transfer = quantile(sorted(shortest), 0.5)
    return RankRow(
        size_bytes=sizes.size_bytes,
        count=sizes.count,
        dtype=dtype,
        calls=len(seconds),
        min_seconds=ordered[0],
        median_seconds=quantile(ordered, 0.5),
        mean_seconds=mean,
        cv=deviation / mean if mean > 0 else 0.0,
        wrong=wrong,
        lag_seconds=lag,
        last=last,
        transfer_seconds=transfer,
    )


class Data(Struct, frozen=True, kw_only=True):
    """One rank's results of one trial, on `device`; index, UUID and PCI address are those of a GPU.

    `copies` has the rates of copies in its memory, in bytes copied per second, at moments at which all ranks copy.
    `notes` give the rows that were left out and the reasons, and are equal on all ranks. `unsupported` has requested
    combinations that torch or the backend lacks. `whole` is False if time or memory was too short for some rows.
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


@dataclass(frozen=True)
class Sweep:
    """The data of all ranks from one trial: one collective over one backend."""

    trial: Trial
    backend: str
    collective: str
    ranks: Mapping[int, Data]

    @property
    def size(self) -> int:
        """The number of ranks in the trial's group."""
        return len(self.trial.ranks)

    @cached_property
    def rows(self) -> Mapping[tuple[str, int], Mapping[int, RankRow]]:
        """For each dtype and size that all ranks measured, the row of each rank. Ranks without any row are left out."""
        rows: dict[tuple[str, int], dict[int, RankRow]] = {}
        for rank, data in self.ranks.items():
            for row in data.rows:
                rows.setdefault((row.dtype, row.size_bytes), {})[rank] = row
        measured = sum(bool(data.rows) for data in self.ranks.values())
        return {key: by_rank for key, by_rank in rows.items() if len(by_rank) == measured}


def sweeps(seen: Seen[Data]) -> tuple[Sweep, ...]:
    """All sweeps in the order of their trials, including the partial data of trials that were cut short."""
    trials: dict[int, Trial] = {}
    ranks: dict[int, dict[int, Data]] = {}
    for row in seen.rows_so_far:
        trials[row.trial.number] = row.trial
        ranks.setdefault(row.trial.number, {})[row.place.rank] = row.data
    return tuple(
        Sweep(trial, str(trial.params["backend"]), str(trial.params["collective"]), dict(sorted(ranks[number].items())))
        for number, trial in trials.items()
    )


def rows(sweep: Sweep) -> Iterator[BenchRow]:
    """Yield the table's row for each dtype and size of a sweep: that of the slowest rank."""
    for by_rank in sweep.rows.values():
        rank, slowest = max(by_rank.items(), key=lambda each: each[1].mean_seconds)
        wrong = [row.wrong for row in by_rank.values() if row.wrong is not None]
        yield BenchRow(
            backend=sweep.backend,
            collective=sweep.collective,
            size_bytes=slowest.size_bytes,
            count=slowest.count,
            dtype=slowest.dtype,
            seconds=slowest.mean_seconds,
            algbw_bytes_per_s=algbw(slowest.size_bytes, slowest.mean_seconds),
            busbw_bytes_per_s=busbw(sweep.collective, slowest.size_bytes, slowest.mean_seconds, sweep.size),
            wrong=sum(wrong) if wrong else None,
            calls=min(row.calls for row in by_rank.values()),
            slowest_rank=rank,
            min_seconds=max(row.min_seconds for row in by_rank.values()),
            cv=slowest.cv,
        )
