"""The data of the benchmark (COL002): what one rank measured, the sweeps over all ranks, and the rows of the table.

A sweep is one collective over one backend, measured at every size and dtype. A row is one size and dtype of a sweep.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec import Struct

from ddpdiag.bandwidth import MessageSize, algbw, busbw
from ddpdiag.checks.api import Seen
from ddpdiag.model import Trial
from ddpdiag.model.bench import BenchRow, Limits, RankRow
from ddpdiag.stats import quantile


def rank_row(
    counts: MessageSize,
    dtype: str,
    seconds: Sequence[float],
    wrong: int | None,
    extremes: tuple[Sequence[float], Sequence[float]] | None = None,
) -> RankRow:
    """Make one rank's row for one size from the `seconds` of each call. `wrong` is None if values were not checked.
    `extremes` has the shortest and the longest time of any rank for each call. If None, the row has no lag."""
    ordered, mean = sorted(seconds), sum(seconds) / len(seconds)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in seconds) / len(seconds))
    lag_seconds = last_starts = transfer_seconds = None
    if extremes is not None:
        shortest, longest = extremes
        lag_seconds = quantile(sorted(of_any - own for own, of_any in zip(seconds, longest, strict=True)), 0.5)
        last_starts = sum(own <= of_any for own, of_any in zip(seconds, shortest, strict=True))
        transfer_seconds = quantile(sorted(shortest), 0.5)
    return RankRow(
        size_bytes=counts.size_bytes,
        count=counts.count,
        dtype=dtype,
        calls=len(seconds),
        min_seconds=ordered[0],
        median_seconds=quantile(ordered, 0.5),
        mean_seconds=mean,
        cv=deviation / mean if mean > 0 else 0.0,
        wrong=wrong,
        lag_seconds=lag_seconds,
        calls_started_last=last_starts,
        transfer_seconds=transfer_seconds,
    )


class Data(Struct, frozen=True, kw_only=True):
    """One rank's results of one trial.

    `rank_count` ranks took part in the trial. `device` is the name of this rank's CPU or GPU; `device_index`,
    `gpu_uuid` and `pci` are None for a CPU. `copy_rates` are the rates, in bytes per second, at which the rank copied
    within the memory of its device while all other ranks copied as well. `notes` are sentences about sizes that were
    left out or had fewer calls than requested, with the reason. `unsupported` has a sentence for each requested
    combination that torch or the backend lacks. `is_complete` is False if time or memory was too short for some rows.
    """

    backend: str
    collective: str
    rank_count: int
    pid: int
    device: str
    device_index: int | None = None
    gpu_uuid: str | None = None
    pci: str | None = None
    limits: Limits = Limits()
    rows: tuple[RankRow, ...] = ()
    copy_rates: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()
    is_complete: bool = True


@dataclass(frozen=True)
class Sweep:
    """The data of all ranks from one trial, which measured one collective over one backend."""

    trial: Trial
    backend: str
    collective: str
    data_by_rank: Mapping[int, Data]

    @cached_property
    def rank_count(self) -> int:
        return len(self.trial.ranks)

    @cached_property
    def rank_rows(self) -> Mapping[tuple[str, int], Mapping[int, RankRow]]:
        """Maps (dtype, size in bytes) to the row of each rank. A size counts if all ranks with any row have it."""
        rows: dict[tuple[str, int], dict[int, RankRow]] = {}
        for rank, data in self.data_by_rank.items():
            for row in data.rows:
                rows.setdefault((row.dtype, row.size_bytes), {})[rank] = row
        measuring_ranks = sum(bool(data.rows) for data in self.data_by_rank.values())
        return {key: by_rank for key, by_rank in rows.items() if len(by_rank) == measuring_ranks}


def sweeps(seen: Seen[Data]) -> tuple[Sweep, ...]:
    """All sweeps in the order of their trials, including partial data of trials that were cut short."""
    trials: dict[int, Trial] = {}
    data: dict[int, dict[int, Data]] = {}
    for row in seen.all_rows:
        trials[row.trial.number] = row.trial
        data.setdefault(row.trial.number, {})[row.place.rank] = row.data
    return tuple(
        Sweep(trial, str(trial.params["backend"]), str(trial.params["collective"]), dict(sorted(data[number].items())))
        for number, trial in trials.items()
    )


def table_rows(sweep: Sweep) -> Iterator[BenchRow]:
    """Yield a row for each dtype and size: the mean time of the slowest rank, and the wrong elements of all ranks."""
    for by_rank in sweep.rank_rows.values():
        rank, slowest = max(by_rank.items(), key=lambda each: each[1].mean_seconds)
        wrong_counts = [row.wrong for row in by_rank.values() if row.wrong is not None]
        yield BenchRow(
            backend=sweep.backend,
            collective=sweep.collective,
            size_bytes=slowest.size_bytes,
            count=slowest.count,
            dtype=slowest.dtype,
            seconds=slowest.mean_seconds,
            algbw_bytes_per_s=algbw(slowest.size_bytes, slowest.mean_seconds),
            busbw_bytes_per_s=busbw(sweep.collective, slowest.size_bytes, slowest.mean_seconds, sweep.rank_count),
            wrong=sum(wrong_counts) if wrong_counts else None,
            calls=min(row.calls for row in by_rank.values()),
            slowest_rank=rank,
            min_seconds=max(row.min_seconds for row in by_rank.values()),
            cv=slowest.cv,
        )
