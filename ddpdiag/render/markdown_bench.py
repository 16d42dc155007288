"""Benchmarks and strategies as Markdown tables."""

from collections.abc import Iterator

from ddpdiag.model.bench import BenchReport, BenchRow
from ddpdiag.model.train import StrategyRow, TrainReport
from ddpdiag.render.bench_rows import parts
from ddpdiag.render.markup import code, folded, table, words
from ddpdiag.render.units import byte_count, bytes_per_s, percent, seconds


def bench_lines(bench: BenchReport) -> list[str]:
    """A line for each series, and its sizes folded away."""
    lines = [f"- {words(series.sentence)}" for series in bench.series]
    lines += [f"- {words(remark)}" for remark in bench.remarks]
    lines += [""] if lines else []
    for part in parts(bench):
        rows = [row for row in map(_row, part.rows) if row]
        headers = ("size", "type", "op", "time", "algbw", "busbw", "wrong")
        lines += folded(f"{part.collective} over {part.backend}", table(headers, rows, right=4))
    slow = [(str(r.rank), code(r.node, cell=True), words(r.slow)) for r in bench.ranks if r.slow]
    return lines + ([*table(("slow rank", "host", "why"), slow), ""] if slow else [])


def _row(row: BenchRow) -> tuple[str, ...]:
    measured = row.natural()
    if measured is None:
        return ()
    return (
        byte_count(row.size_bytes),
        words(row.dtype),
        words(row.op),
        seconds(measured.seconds),
        bytes_per_s(measured.algbw_bytes_per_s),
        bytes_per_s(measured.busbw_bytes_per_s),
        "-" if measured.wrong is None else str(measured.wrong),
    )


def train_lines(train: TrainReport) -> list[str]:
    """The table of strategies, and why some do not work."""
    headers = ("strategy", "", "ranks", "samples/s", "speed-up", "efficiency", "communication", "peak")
    lines = [*table(headers, [_strategy(row) for row in train.rows], right=3), ""]
    reasons = list(_reasons(train))
    return lines + ([*reasons, ""] if reasons else [])


def _strategy(row: StrategyRow) -> tuple[str, ...]:
    rate = row.samples_per_second
    return (
        code(row.strategy.value, cell=True),
        row.ended.value,
        str(len(row.ranks)) if row.ranks else "-",
        "-" if rate is None else f"{rate:,.0f}",
        "-" if row.speedup is None else f"{row.speedup:.2f}",
        "-" if row.efficiency is None else percent(row.efficiency),
        "-" if row.communication_share is None else percent(row.communication_share),
        "-" if row.peak_bytes is None else byte_count(row.peak_bytes),
    )


def _reasons(train: TrainReport) -> Iterator[str]:
    for row in train.rows:
        if row.reason:
            yield f"- {code(row.strategy.value)} {row.ended.value}: {words(row.reason)}"
