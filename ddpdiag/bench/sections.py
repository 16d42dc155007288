"""A benchmark in the formats of the report: HTML, with curves over size and bars of its ranks; Markdown; Prometheus."""

from collections.abc import Iterator, Sequence

from ddpdiag.bench.plot import MOST_PANEL_CURVES, curves_of, draw_panels, expectation_of
from ddpdiag.bench.rows import measured, parts, traits
from ddpdiag.bench.terminal import render
from ddpdiag.model import Report
from ddpdiag.model.bench import BenchRank, BenchReport, Measured
from ddpdiag.render import Sample
from ddpdiag.render.html.page import Cell, Column, Figure, Listed, Section, Table, words
from ddpdiag.render.html.ranks import Figures, bar_figure
from ddpdiag.render.markup import Piece, folded, listed, name, said, spaced, tabled
from ddpdiag.render.page import written
from ddpdiag.render.ranks import Row
from ddpdiag.text import (
    ABSENT,
    byte_count,
    bytes_per_s,
    column_unit,
    count,
    percent,
    seconds,
)

__all__ = ["pieces", "render", "samples", "section"]

_ROWS_SHOWN, _RANKS_SHOWN, _OPEN_RANKS = 400, 128, 16
_SAID, _MOST_BARS = 24, 6


def section(report: Report) -> Section:
    """For the HTML page: bus bandwidth and latency over size, with what was expected."""
    bench = report.bench
    if bench is None:
        return Section(name="benchmark", title="Benchmark")
    # What the page begins with is not repeated.
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
        f"{byte_count(own.best_bytes)}"
        + (f" ({bytes_per_s(expected.busbw_bytes_per_s)} expected)" if (expected := expectation_of(own)) else "")
        for own in bench.series[:8]
    )
    times = "; ".join(
        f"{own.label} {seconds(own.seconds[0])} at {byte_count(own.sizes[0])}, {seconds(own.seconds[-1])} at "
        f"{byte_count(own.sizes[-1])}"
        for own in curves_of(bench)[:MOST_PANEL_CURVES]
    )
    busbw, latency = panels
    alt = words(f"Over {count(len({row.size_bytes for row in bench.rows}), 'size')}: {peaks}.")
    return (
        Figure(title="Bus bandwidth over size", svg=busbw, alt=alt, sentence="Dashed: what is expected."),
        Figure(title="Latency over size", svg=latency, alt=words(f"A call takes: {times}.")),
    )


def _rank_bars(bench: BenchReport) -> Iterator[Figure]:
    """Each rank in each series: by how much it started later than the first, or, where that is not known, its time."""
    by_series: dict[str, list[BenchRank]] = {}
    for own in bench.ranks:
        by_series.setdefault(f"{own.collective} over {own.backend}", []).append(own)
    for number, (label, ranks) in enumerate(list(by_series.items())[:_MOST_BARS]):
        late = all(own.lag_seconds is not None for own in ranks)
        timed = [(own, value) for own in ranks if (value := own.lag_seconds if late else own.seconds) is not None]
        values = [value for _, value in timed]
        if len(values) < 2:
            continue
        what = "time behind the first rank" if late else "time of a call"
        title = f"{label}, {byte_count(ranks[0].size_bytes)}: {what}"
        rows: list[Row] = [{"rank": own.rank, "host": own.host} for own, _ in timed]
        column = Figures("bench_seconds", column_unit("_seconds", values), rows, values)
        slow = frozenset(own.rank for own in ranks if own.slow)
        # Slow ranks were judged with more than these values: no other rank stands out.
        drawn = bar_figure(column, title, slow, f"bench-bars-{number}", word="slow", judged=True)
        if drawn is not None:
            yield drawn


def _series(bench: BenchReport) -> Table:
    levels = [expectation_of(own) for own in bench.series]
    rates = [own.peak_busbw_bytes_per_s for own in bench.series]
    expected = [level.busbw_bytes_per_s if level else None for level in levels]
    unit, cells = written("busbw_bytes_per_s", [*rates, *expected], ABSENT)
    heads = ("collective", "backend", "type", f"peak busbw {unit}", "at size", f"expected {unit}", "reached", "source")
    return Table(
        name="series",
        caption="Best of each collective",
        columns=tuple(Column(head, right=2 < number < 7) for number, head in enumerate(heads)),
        rows=tuple(
            (
                Cell(words(own.collective)),
                Cell(words(own.backend)),
                Cell(words(", ".join(traits(own.dtype, own.op, own.root)))),
                Cell(cells[number]),
                Cell(byte_count(own.best_bytes)),
                Cell(cells[len(rates) + number]),
                Cell(percent(own.share if level else None)),
                Cell(words(level.source) if level else ABSENT),
            )
            for number, (own, level) in enumerate(zip(bench.series, levels, strict=True))
        ),
    )


def _ranks(bench: BenchReport) -> Table:
    """The ranks at the size at which they are compared, those that are called slow first."""
    ordered = sorted(bench.ranks, key=lambda own: (not own.slow, own.rank))
    left, shown = len(ordered) - _RANKS_SHOWN, ordered[:_RANKS_SHOWN]
    medians = written("_seconds", [own.seconds for own in shown], ABSENT)
    rates = written("_bytes_per_s", [own.busbw_bytes_per_s for own in shown], ABSENT)
    lags = written("_seconds", [own.lag_seconds for own in shown], ABSENT)
    units = (f"median {medians[0]}", f"busbw {rates[0]}", f"later by {lags[0]}")
    heads = ("rank", "host", "device", "collective", *units, "deviation", "slow")
    figures = zip(medians[1], rates[1], lags[1], strict=True)
    return Table(
        name="bench-ranks",
        caption="Ranks",
        columns=tuple(Column(head, right=number in (0, 4, 5, 6, 7)) for number, head in enumerate(heads)),
        rows=tuple(
            (
                Cell(str(own.rank), own.rank),
                Cell(words(own.host), words(own.host)),
                Cell(words(own.device), words(own.device)),
                Cell(words(f"{own.collective} over {own.backend}")),
                Cell(median, own.seconds or 0.0),
                Cell(rate, own.busbw_bytes_per_s or 0.0),
                Cell(lag, own.lag_seconds or 0.0),
                Cell(percent(own.spread_share), own.spread_share or 0.0),
                Cell(words(own.slow) or ABSENT, words(own.slow), "warn" if own.slow else ""),
            )
            for own, (median, rate, lag) in zip(shown, figures, strict=True)
        ),
        note=f"{left:,} more are in the JSON report." if left > 0 else "",
        sortable=True,
        folded=len(ordered) > _OPEN_RANKS,
    )


def _rows(bench: BenchReport) -> Table:
    left = len(bench.rows) - _ROWS_SHOWN
    shown = [(row, mode) for row in bench.rows[:_ROWS_SHOWN] if (mode := row.natural()) is not None]
    units, figures = _figures([mode for _, mode in shown])
    heads = ("collective", "backend", "size", *units, "wrong")
    return Table(
        name="sizes",
        caption="Every size",
        columns=tuple(Column(head, right=number > 1) for number, head in enumerate(heads)),
        rows=tuple(
            (
                Cell(words(row.collective), words(row.collective)),
                Cell(words(row.backend), words(row.backend)),
                Cell(byte_count(row.size_bytes), row.size_bytes),
                Cell(time, mode.seconds),
                Cell(algbw, mode.algbw_bytes_per_s),
                Cell(busbw, mode.busbw_bytes_per_s),
                Cell(ABSENT if mode.wrong is None else str(mode.wrong), mode.wrong or 0, "bad" if mode.wrong else ""),
            )
            for (row, mode), (time, algbw, busbw) in zip(shown, figures, strict=True)
        ),
        note=f"{left:,} more rows are in the JSON report." if left > 0 else "",
        sortable=True,
        folded=True,
    )


def _figures(modes: Sequence[Measured]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Time and bandwidths of each, one unit for each of the three, with their heads."""
    columns = (
        ("time", "_seconds", [mode.seconds for mode in modes]),
        ("algbw", "_bytes_per_s", [mode.algbw_bytes_per_s for mode in modes]),
        ("busbw", "_bytes_per_s", [mode.busbw_bytes_per_s for mode in modes]),
    )
    own = [(head, *written(name, values, ABSENT)) for head, name, values in columns]
    return tuple(f"{head} {unit}" for head, unit, _ in own), list(zip(*(cells for *_, cells in own), strict=True))


# Markdown ------------------------------------------------------------------------------------------------------------


# Rows of a table, or lines of a list, and bytes of these and of one sentence.
_MARKDOWN_ROWS, _TABLE, _LIST, _SENTENCE = 64, 6_000, 4_000, 600


def pieces(report: Report) -> Iterator[Piece]:
    """For Markdown: a line for each series, and its sizes folded away."""
    bench = measured(report)
    sentences = [*(series.sentence for series in bench.series), *bench.notes]
    lines = [f"- {said(sentence, _SENTENCE)}" for sentence in sentences[:_MARKDOWN_ROWS]]
    yield Piece("what the benchmark means", spaced(listed(lines, "line", total=len(sentences), most=_LIST)))
    slow = [(str(r.rank), name(r.host, cell=True), said(r.slow, _SENTENCE)) for r in bench.ranks if r.slow]
    table = tabled(("slow rank", "host", "why"), slow[:_MARKDOWN_ROWS], "slow rank", total=len(slow), most=_TABLE)
    yield Piece("slow ranks", spaced(table))
    for part in parts(bench):
        known = [(row, mode) for row in part.rows if (mode := row.natural()) is not None]
        units, figures = _figures([mode for _, mode in known])
        rows = [
            (
                byte_count(row.size_bytes),
                said(row.dtype, _SENTENCE),
                said(row.op, _SENTENCE),
                *texts,
                "-" if mode.wrong is None else str(mode.wrong),
            )
            for (row, mode), texts in zip(known, figures, strict=True)
        ]
        headers = ("size", "type", "op", *units, "wrong")
        table = tabled(headers, rows[:_MARKDOWN_ROWS], "row", total=len(rows), most=_TABLE, right=4)
        yield Piece("table of a benchmark", folded(part.name[:_SENTENCE], table))


# Prometheus ----------------------------------------------------------------------------------------------------------


_SERIES_LABELS = ("backend", "collective", "dtype", "op", "root")


def samples(report: Report) -> Iterator[Sample]:
    """For Prometheus: every row and mode, the peak of every series, and the ranks."""
    bench = measured(report)
    yield Sample("bench_complete", "0 for a benchmark that was cut short.", bench.complete, {})
    for row in bench.rows:
        for place, mode in row.modes().items():
            labels = {name: str(getattr(row, name)) for name in (*_SERIES_LABELS, "size_bytes")}
            labels["mode"] = place
            yield Sample("bench_seconds", "Time of one call, as nccl-tests has it.", mode.seconds, labels)
            algbw, busbw = mode.algbw_bytes_per_s, mode.busbw_bytes_per_s
            yield Sample("bench_algbw_bytes_per_second", "Algorithm bandwidth, as nccl-tests has it.", algbw, labels)
            yield Sample("bench_busbw_bytes_per_second", "Bus bandwidth, as nccl-tests has it.", busbw, labels)
            if mode.wrong is not None:
                yield Sample("bench_wrong_elements", "Elements with a wrong value, on all ranks.", mode.wrong, labels)
    for series in bench.series:
        labels = {name: str(getattr(series, name)) for name in _SERIES_LABELS}
        peak = series.peak_busbw_bytes_per_s
        yield Sample("bench_peak_busbw_bytes_per_second", "Best bus bandwidth over all sizes.", peak, labels)
        if series.expectation is not None:
            expected = series.expectation.busbw_bytes_per_s
            says = "Bus bandwidth that this hardware should reach."
            yield Sample("bench_expected_busbw_bytes_per_second", says, expected, labels)
        if series.fit is not None:
            yield Sample("bench_latency_seconds", "Time of an empty message.", series.fit.latency_seconds, labels)
    for rank in bench.ranks:
        who = {"rank": str(rank.rank), "host": rank.host, "gpu_uuid": rank.gpu_uuid or ""}
        labels = {"backend": rank.backend, "collective": rank.collective, "size_bytes": str(rank.size_bytes), **who}
        figures = {
            "seconds": (rank.seconds, "Median of a rank's calls."),
            "busbw_bytes_per_second": (rank.busbw_bytes_per_s, "Bus bandwidth of a rank."),
            "pair_busbw_bytes_per_second": (
                rank.pair_busbw_bytes_per_s,
                "Best bus bandwidth of a rank alone with one other.",
            ),
            "copy_bytes_per_second": (rank.copy_bytes_per_s, "Rate at which a rank copies in its own memory."),
        }
        for figure, (value, says) in figures.items():
            if value is not None:
                yield Sample(f"bench_rank_{figure}", says, value, labels)
