"""A benchmark and a training by strategies: curves over size, and the tables."""

from ddpdiag.model import Report
from ddpdiag.model.bench import BenchRank, BenchReport, BenchRow, Measured, Series
from ddpdiag.model.train import StrategyRow, TrainReport
from ddpdiag.render.html.page import Cell, Column, Figure, Section, Table, words
from ddpdiag.render.plots.bench import draw_panels
from ddpdiag.render.units import ABSENT, byte_count, bytes_per_s, count, figure, per_second, percent, seconds

_ROWS_SHOWN, _RANKS_SHOWN, _OPEN_RANKS = 400, 128, 16


def bench_section(report: Report) -> Section:
    """Bus bandwidth and latency over size, with what was expected; nothing where no benchmark ran."""
    bench = report.bench
    if bench is None:
        return Section(name="benchmark", title="Benchmark")
    return Section(
        name="benchmark",
        title="Benchmark",
        figures=_curves(bench),
        tables=(_series(bench), _ranks(bench), _rows(bench)),
    )


def _curves(bench: BenchReport) -> tuple[Figure, ...]:
    panels = draw_panels(bench)
    if panels is None:
        return ()
    peaks = "; ".join(
        f"{own.collective} over {own.backend} up to {bytes_per_s(own.peak_busbw_bytes_per_s)} at "
        f"{byte_count(own.best_bytes)}{_expected(own)}"
        for own in bench.series[:8]
    )
    busbw, latency = panels
    said = f"Over {count(len({row.size_bytes for row in bench.rows}), 'size')}: {peaks}."
    return (
        Figure(title="Bus bandwidth over size", svg=busbw, alt=words(said), sentence="Dashed: what is expected."),
        Figure(title="Latency over size", svg=latency, alt="Seconds of a call over the same sizes; see the table."),
    )


def _expected(own: Series) -> str:
    return f" ({bytes_per_s(own.expectation.busbw_bytes_per_s)} expected)" if own.expectation is not None else ""


def _series(bench: BenchReport) -> Table:
    heads = ("collective", "backend", "type", "peak busbw", "at size", "expected", "source", "reached", "what it means")
    return Table(
        name="series",
        caption="What the numbers mean",
        columns=tuple(Column(head, right=head in ("peak busbw", "at size", "expected", "reached")) for head in heads),
        rows=tuple(
            (
                Cell(words(own.collective)),
                Cell(words(own.backend)),
                Cell(words(f"{own.dtype} {own.op}")),
                Cell(bytes_per_s(own.peak_busbw_bytes_per_s)),
                Cell(byte_count(own.best_bytes)),
                Cell(bytes_per_s(own.expectation.busbw_bytes_per_s) if own.expectation else ABSENT),
                Cell(words(own.expectation.source) if own.expectation else ABSENT),
                Cell(percent(own.share)),
                Cell(words(own.sentence)),
            )
            for own in bench.series
        ),
    )


def _ranks(bench: BenchReport) -> Table:
    """The ranks at the size at which they are compared, those that are called slow first."""
    heads = ("rank", "host", "device", "collective", "median", "busbw", "later by", "deviation", "slow")
    ordered = sorted(bench.ranks, key=lambda own: (not own.slow, own.rank))
    left = len(ordered) - _RANKS_SHOWN
    return Table(
        name="bench-ranks",
        caption="Ranks",
        columns=tuple(Column(head, right=number in (0, 4, 5, 6, 7)) for number, head in enumerate(heads)),
        rows=tuple(map(_rank, ordered[:_RANKS_SHOWN])),
        remark=f"{left:,} more are in the JSON report." if left > 0 else "",
        sortable=True,
        folded=len(ordered) > _OPEN_RANKS,
    )


def _rank(own: BenchRank) -> tuple[Cell, ...]:
    return (
        Cell(str(own.rank), own.rank),
        Cell(words(own.node), words(own.node)),
        Cell(words(own.device), words(own.device)),
        Cell(words(f"{own.collective} over {own.backend}")),
        Cell(seconds(own.seconds), own.seconds or 0.0),
        Cell(bytes_per_s(own.busbw_bytes_per_s), own.busbw_bytes_per_s or 0.0),
        Cell(seconds(own.lag_seconds), own.lag_seconds or 0.0),
        Cell(percent(own.spread_share), own.spread_share or 0.0),
        Cell(words(own.slow) or ABSENT, words(own.slow), "warn" if own.slow else ""),
    )


def _rows(bench: BenchReport) -> Table:
    heads = ("collective", "backend", "size", "time", "algbw", "busbw", "wrong")
    left = len(bench.rows) - _ROWS_SHOWN
    return Table(
        name="sizes",
        caption="Every size",
        columns=tuple(Column(head, right=number > 1) for number, head in enumerate(heads)),
        rows=tuple(_size(row, mode) for row in bench.rows[:_ROWS_SHOWN] if (mode := row.natural()) is not None),
        remark=f"{left:,} more rows are in the JSON report." if left > 0 else "",
        sortable=True,
        folded=True,
    )


def _size(row: BenchRow, mode: Measured) -> tuple[Cell, ...]:
    return (
        Cell(words(row.collective), words(row.collective)),
        Cell(words(row.backend), words(row.backend)),
        Cell(byte_count(row.size_bytes), row.size_bytes),
        Cell(seconds(mode.seconds), mode.seconds),
        Cell(bytes_per_s(mode.algbw_bytes_per_s), mode.algbw_bytes_per_s),
        Cell(bytes_per_s(mode.busbw_bytes_per_s), mode.busbw_bytes_per_s),
        Cell(ABSENT if mode.wrong is None else str(mode.wrong), mode.wrong or 0, "bad" if mode.wrong else ""),
    )


def train_section(report: Report) -> Section:
    """The strategies side by side; nothing where none was tried."""
    train = report.train
    if train is None:
        return Section(name="strategies", title="Strategies")
    return Section(
        name="strategies",
        title="Strategies",
        tables=(_strategies(train), *_scaling(train)),
    )


def _strategies(train: TrainReport) -> Table:
    heads = ("strategy", "outcome", "rate", "speed-up", "efficiency", "peak memory", "communication", "last loss")
    return Table(
        name="strategy-table",
        caption=f"{train.asked.steps} steps of {train.batch_size} images on {words(train.device)}",
        columns=tuple(Column(head, right=number > 1) for number, head in enumerate(heads)),
        rows=tuple(map(_strategy, train.rows)),
    )


def _strategy(row: StrategyRow) -> tuple[Cell, ...]:
    why = f": {row.reason}" if row.reason else ""
    return (
        Cell(row.strategy.value),
        Cell(words(f"{row.ended.value}{why}"), mark="bad" if row.ended.value in ("wrong", "hangs", "fails") else ""),
        Cell(per_second(row.samples_per_second)),
        Cell(ABSENT if row.speedup is None else figure(row.speedup)),
        Cell(percent(row.efficiency)),
        Cell(byte_count(row.peak_bytes)),
        Cell(percent(row.communication_share)),
        Cell(ABSENT if row.last_loss is None else figure(row.last_loss)),
    )


def _scaling(train: TrainReport) -> tuple[Table, ...]:
    if not train.scaling:
        return ()
    return (
        Table(
            name="scaling",
            caption="DDP on 1, 2, 4, ... ranks",
            columns=(
                Column("curve"),
                Column("ranks", right=True),
                Column("rate", right=True),
                Column("efficiency", right=True),
            ),
            rows=tuple(
                (
                    Cell(row.curve.value),
                    Cell(str(row.ranks)),
                    Cell(per_second(row.samples_per_second)),
                    Cell(percent(row.efficiency)),
                )
                for row in train.scaling
            ),
        ),
    )
