"""A benchmark: curves over size, bars of its ranks, and the tables."""

from collections.abc import Iterator

from ddpdiag.model import Report
from ddpdiag.model.bench import BenchRank, BenchReport, BenchRow, Measured, Series
from ddpdiag.render.bench_rows import traits
from ddpdiag.render.html.bars import Figures, bar_figure
from ddpdiag.render.html.page import Cell, Column, Figure, Listed, Section, Table, words
from ddpdiag.render.plots.bench import draw_panels, panel_curves
from ddpdiag.render.terminal.ranks import Row
from ddpdiag.render.units import (
    ABSENT,
    byte_count,
    bytes_per_s,
    column_unit,
    count,
    percent,
    seconds,
)

_ROWS_SHOWN, _RANKS_SHOWN, _OPEN_RANKS = 400, 128, 16
_SAID, _MOST_BARS = 24, 6


def bench_section(report: Report) -> Section:
    """Bus bandwidth and latency over size, with what was expected; nothing where no benchmark ran."""
    bench = report.bench
    if bench is None:
        return Section(name="benchmark", title="Benchmark")
    # What the page begins with is not said again.
    said = [words(own.sentence) for own in bench.series if own.sentence and own.sentence not in report.sentence]
    left = len(said) - _SAID
    said = list(dict.fromkeys(said))[:_SAID] + ([f"{left:,} more are in the JSON report."] if left > 0 else [])
    return Section(
        name="benchmark",
        title="Benchmark",
        figures=(*_curves(bench), *_rank_bars(bench)),
        items=Listed("What the numbers mean", tuple(said), folded=False) if said else None,
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
    times = "; ".join(
        f"{own.label} {seconds(own.seconds[0])} at {byte_count(own.sizes[0])}, {seconds(own.seconds[-1])} at "
        f"{byte_count(own.sizes[-1])}"
        for own in panel_curves(bench)
    )
    busbw, latency = panels
    sizes = count(len({row.size_bytes for row in bench.rows}), "size")
    return (
        Figure(
            title="Bus bandwidth over size",
            svg=busbw,
            alt=words(f"Over {sizes}: {peaks}."),
            sentence="Dashed: what is expected.",
        ),
        Figure(title="Latency over size", svg=latency, alt=words(f"A call takes: {times}.")),
    )


def _rank_bars(bench: BenchReport) -> Iterator[Figure]:
    """Each rank in each series: by how much it came later than the first, or, where that is not known, its time."""
    series: dict[tuple[str, str], list[BenchRank]] = {}
    for own in bench.ranks:
        series.setdefault((own.collective, own.backend), []).append(own)
    for number, ((collective, backend), ranks) in enumerate(list(series.items())[:_MOST_BARS]):
        late = all(own.lag_seconds is not None for own in ranks)
        timed = [(own, value) for own in ranks if (value := own.lag_seconds if late else own.seconds) is not None]
        values = [value for _, value in timed]
        if len(values) < 2:
            continue
        title = f"{collective} over {backend}, {byte_count(ranks[0].size_bytes)}: "
        title += "how much later than the first rank" if late else "time of a call"
        rows: list[Row] = [{"rank": own.rank, "node": own.node} for own, _ in timed]
        column = Figures("bench_seconds", column_unit("_seconds", values), rows, values)
        slow = frozenset(own.rank for own in ranks if own.slow)
        # Who is slow was judged with more than these values: nobody else stands out.
        drawn = bar_figure(column, title, slow, f"bench-bars-{number}", word="slow", judged=True)
        if drawn is not None:
            yield drawn


def _expected(own: Series) -> str:
    return f" ({bytes_per_s(own.expectation.busbw_bytes_per_s)} expected)" if own.expectation is not None else ""


def _series(bench: BenchReport) -> Table:
    heads = ("collective", "backend", "type", "peak busbw", "at size", "expected", "reached", "source")
    return Table(
        name="series",
        caption="Best of each collective",
        columns=tuple(Column(head, right=2 < number < 7) for number, head in enumerate(heads)),
        rows=tuple(
            (
                Cell(words(own.collective)),
                Cell(words(own.backend)),
                Cell(words(", ".join(traits(own.dtype, own.op, own.root)))),
                Cell(bytes_per_s(own.peak_busbw_bytes_per_s)),
                Cell(byte_count(own.best_bytes)),
                Cell(bytes_per_s(own.expectation.busbw_bytes_per_s) if own.expectation else ABSENT),
                Cell(percent(own.share)),
                Cell(words(own.expectation.source) if own.expectation else ABSENT),
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
