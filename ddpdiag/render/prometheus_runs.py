"""Benchmarks and trainings by strategies as Prometheus samples."""

from collections.abc import Iterator
from typing import NamedTuple

from ddpdiag.model.bench import BenchReport, BenchRow, Measured, Series
from ddpdiag.model.train import TrainReport
from ddpdiag.render.bench_rows import modes


class Sample(NamedTuple):
    """One number of the metric `name`, which what it `says` explains."""

    name: str
    says: str
    value: float
    labels: dict[str, str]


def bench_samples(bench: BenchReport) -> Iterator[Sample]:
    """Every row and mode, the peak of every series, and the ranks."""
    yield Sample("bench_complete", "0 for a benchmark that was cut short.", bench.complete, {})
    for row in bench.rows:
        for mode, measured in modes(row):
            yield from _row(row, mode, measured)
    for series in bench.series:
        yield from _series(series)
    for rank in bench.ranks:
        who = {"rank": str(rank.rank), "host": rank.node, "gpu_uuid": rank.gpu_uuid or ""}
        labels = {"backend": rank.backend, "collective": rank.collective, "size_bytes": str(rank.size_bytes), **who}
        figures = {
            "seconds": (rank.seconds, "Median of a rank's calls."),
            "busbw_bytes_per_second": (rank.busbw_bytes_per_s, "Bus bandwidth of a rank."),
            "pair_busbw_bytes_per_second": (rank.pair_busbw_bytes_per_s, "Best of a rank alone with one other."),
            "copy_bytes_per_second": (rank.copy_bytes_per_s, "What a rank copies in its own memory."),
        }
        for name, (value, says) in figures.items():
            if value is not None:
                yield Sample(f"bench_rank_{name}", says, value, labels)


def _row(row: BenchRow, mode: str, measured: Measured) -> Iterator[Sample]:
    labels = {
        "backend": row.backend,
        "collective": row.collective,
        "dtype": row.dtype,
        "op": row.op,
        "root": str(row.root),
        "cycle": str(row.cycle),
        "size_bytes": str(row.size_bytes),
        "mode": mode,
    }
    yield Sample("bench_seconds", "Time of one call, as nccl-tests has it.", measured.seconds, labels)
    algbw, busbw = measured.algbw_bytes_per_s, measured.busbw_bytes_per_s
    yield Sample("bench_algbw_bytes_per_second", "Algorithm bandwidth, as nccl-tests has it.", algbw, labels)
    yield Sample("bench_busbw_bytes_per_second", "Bus bandwidth, as nccl-tests has it.", busbw, labels)
    if measured.wrong is not None:
        yield Sample("bench_wrong_elements", "Elements with a wrong value, on all ranks.", measured.wrong, labels)


def _series(series: Series) -> Iterator[Sample]:
    labels = {
        "backend": series.backend,
        "collective": series.collective,
        "dtype": series.dtype,
        "op": series.op,
        "root": str(series.root),
    }
    peak = series.peak_busbw_bytes_per_s
    yield Sample("bench_peak_busbw_bytes_per_second", "Best bus bandwidth over all sizes.", peak, labels)
    if series.expectation is not None:
        expected = series.expectation.busbw_bytes_per_s
        says = "Bus bandwidth that this hardware should reach."
        yield Sample("bench_expected_busbw_bytes_per_second", says, expected, labels)
    if series.fit is not None:
        yield Sample("bench_latency_seconds", "Time of an empty message.", series.fit.latency_seconds, labels)


def train_samples(train: TrainReport) -> Iterator[Sample]:
    """What each strategy came to, and the points of the curves."""
    for row in train.rows:
        labels = {"strategy": row.strategy.value}
        ended = "1, with what a strategy came to as a label."
        yield Sample("train_ended", ended, 1, labels | {"ended": row.ended.value})
        figures = {
            "samples_per_second": (row.samples_per_second, "Images a second, over all ranks."),
            "speedup_ratio": (row.speedup, "Its rate over that of single."),
            "peak_bytes": (row.peak_bytes, "Peak of the memory of the rank that holds most."),
            "state_bytes": (row.state_bytes, "Parameters, gradients and optimizer state of the rank that holds most."),
            "communication_ratio": (row.communication_share, "Share of a step in which it communicated."),
            "loss_deviation": (row.deviation, "How far the loss was from that of single, at most."),
        }
        for name, (value, says) in figures.items():
            if value is not None:
                yield Sample(f"train_{name}", says, value, labels)
    for point in train.scaling:
        if point.samples_per_second is not None:
            labels = {"curve": point.curve.value, "ranks": str(point.ranks), "batch_size": str(point.batch_size)}
            rate = point.samples_per_second
            yield Sample("train_scaling_samples_per_second", "Images a second of ddp on so many ranks.", rate, labels)
