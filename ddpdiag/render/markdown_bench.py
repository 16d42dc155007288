"""Benchmarks and strategies as Markdown tables."""

from collections.abc import Iterator

from ddpdiag.model.bench import BenchReport, BenchRow
from ddpdiag.model.train import StrategyRow, TrainReport
from ddpdiag.render.bench_rows import parts
from ddpdiag.render.markdown_size import Piece, listed, name, said, tabled
from ddpdiag.render.markup import folded
from ddpdiag.render.units import byte_count, bytes_per_s, percent, seconds

# Rows of a table, or lines of a list, and bytes of these and of one sentence.
_ROWS, _TABLE, _LIST, _SENTENCE = 64, 6_000, 4_000, 600


def bench_pieces(bench: BenchReport) -> Iterator[Piece]:
    """A line for each series, and its sizes folded away."""
    sentences = [*(series.sentence for series in bench.series), *bench.remarks]
    lines = [f"- {said(sentence, _SENTENCE)}" for sentence in sentences[:_ROWS]]
    yield Piece("what the benchmark means", _spaced(listed(lines, "line", total=len(sentences), most=_LIST)))
    slow = [(str(r.rank), name(r.node, cell=True), said(r.slow, _SENTENCE)) for r in bench.ranks if r.slow]
    table = tabled(("slow rank", "host", "why"), slow[:_ROWS], "slow rank", total=len(slow), most=_TABLE)
    yield Piece("slow ranks", _spaced(table))
    for part in parts(bench):
        rows = [row for row in map(_row, part.rows) if row]
        headers = ("size", "type", "op", "time", "algbw", "busbw", "wrong")
        table = tabled(headers, rows[:_ROWS], "row", total=len(rows), most=_TABLE, right=4)
        yield Piece("table of a benchmark", folded(f"{part.collective} over {part.backend}"[:_SENTENCE], table))


def _spaced(lines: list[str]) -> list[str]:
    return [*lines, ""] if lines else []


def _row(row: BenchRow) -> tuple[str, ...]:
    measured = row.natural()
    if measured is None:
        return ()
    return (
        byte_count(row.size_bytes),
        said(row.dtype, _SENTENCE),
        said(row.op, _SENTENCE),
        seconds(measured.seconds),
        bytes_per_s(measured.algbw_bytes_per_s),
        bytes_per_s(measured.busbw_bytes_per_s),
        "-" if measured.wrong is None else str(measured.wrong),
    )


def train_pieces(train: TrainReport) -> Iterator[Piece]:
    """The table of strategies, and why some do not work."""
    headers = ("strategy", "", "ranks", "samples/s", "speed-up", "efficiency", "communication", "peak")
    rows = [_strategy(row) for row in train.rows[:_ROWS]]
    table = tabled(headers, rows, "row", total=len(train.rows), most=_TABLE, right=3)
    yield Piece("strategies", _spaced(table))
    reasons = list(_reasons(train))
    listing = listed(reasons[:_ROWS], "reason", total=len(reasons), most=_LIST)
    yield Piece("why strategies do not work", _spaced(listing))


def _strategy(row: StrategyRow) -> tuple[str, ...]:
    rate = row.samples_per_second
    return (
        name(row.strategy.value, cell=True),
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
            yield f"- {name(row.strategy.value)} {row.ended.value}: {said(row.reason, _SENTENCE)}"
