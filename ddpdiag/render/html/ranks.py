"""Ranks: bars with outliers, the parts of a step, and a table to sort."""

from collections.abc import Mapping, Sequence
from heapq import nlargest
from itertools import islice
from math import isclose

from ddpdiag.model import Report, Scalar, Severity
from ddpdiag.render.html.bars import BARS_SHOWN, Figures, bar_figure, number_of, who_of
from ddpdiag.render.html.page import Cell, Column, Figure, Section, Table, words
from ddpdiag.render.plots.charts import draw_stacks
from ddpdiag.render.terminal.ranks import Ranks, Row, blamed
from ddpdiag.stats import quantile
from ddpdiag.text import Unit, byte_count, cell, column_unit, count, figure, label

ROWS_SHOWN = 128
_ARRIVAL = "arrival_seconds"
# In this order; others follow, as far as there is room.
_FIRST = ("busbw_bytes_per_s", "host_busbw_bytes_per_s", "samples_per_second", "latency_seconds", _ARRIVAL)
_MOST_FIGURES = 6
# A longer table is folded: the bars say first what there is to see.
_OPEN_ROWS = 16
_TRAINING = ("data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds")
_STEP = ("work_seconds", "wait_seconds")
_IDENTITY = ("rank", "local_rank", "node", "gpu_uuid")
_TITLES = {
    _ARRIVAL: "Arrival after rank 0 began to wait",
    "samples_per_second": "Training, samples per second",
    "host_busbw_bytes_per_s": "All-reduce of each host's best pair, busbw",
}
_WORDS = {Severity.ERROR: ("error", "bad"), Severity.WARNING: ("warning", "warn")}


def ranks_section(report: Report) -> Section:
    """One figure for each measurement, and the table."""
    marks = blamed(report.findings, report.ranks)
    ranks = Ranks(report.ranks, marks, all_shown=ROWS_SHOWN, worst_shown=ROWS_SHOWN)
    names = [name for name in _FIRST if name in ranks.numbers]
    others = (name for name in ranks.names if name not in (*_FIRST, *_TRAINING, *_STEP))
    names = [*names, *(name for name in others if column_unit(name, (1.0,)).symbol)][:_MOST_FIGURES]
    found = (_bars(_column(name, report.ranks), report, marks, number) for number, name in enumerate(names))
    drawn = tuple(figure for figure in found if figure is not None)
    return Section(
        name="ranks",
        title="Ranks",
        sentence=""
        if not drawn
        else "Hatched bars lie far from the median, for what the others scatter, on the slow side. Ranks that a "
        "finding blames say so wherever they lie.",
        figures=drawn,
        tables=_table(ranks),
    )


def steps_section(report: Report) -> Section:
    """Where the time of training goes, stacked for each rank."""
    titles = (("training", "Training, by its parts", _TRAINING), ("step", "A step: own work, and waiting", _STEP))
    drawn = (_stacked(name, title, parts, report.ranks) for name, title, parts in titles)
    return Section(
        name="steps",
        title="Step time",
        sentence="Ranks leave an all-reduce together: who waits least is the one for whom the others wait.",
        figures=tuple(figure for figure in drawn if figure is not None),
    )


def _column(name: str, rows: Sequence[Row]) -> Figures:
    pairs = [(row, number) for row in rows if (number := number_of(row.get(name))) is not None]
    if name.startswith("host_"):
        # The same for all ranks of a host.
        pairs = list({row.get("node"): (row, number) for row, number in reversed(pairs)}.values())[::-1]
    values = [value for _, value in pairs]
    return Figures(name, column_unit(name, values), [row for row, _ in pairs], values)


def _bars(column: Figures, report: Report, marks: Mapping[int, Severity], number: int) -> Figure | None:
    missing = _missing(report) if column.name == _ARRIVAL else ()
    if not column.values or len(column.values) + len(missing) < 2:
        return None
    title = title_of(column.name, report, column.values)
    return bar_figure(column, title, frozenset(marks), f"bars-{number}", missing=missing)


def _missing(report: Report) -> tuple[tuple[int, str], ...]:
    """Ranks that never came, the first of them, with their hosts as far as those are known."""
    came = {row.get("rank") for row in report.ranks}
    node_of = {lane.rank: lane.node for lane in report.timeline.lanes} if report.timeline is not None else {}
    # A header may claim more ranks than there is time to count.
    never = islice((rank for rank in range(report.world.size) if rank not in came), BARS_SHOWN)
    return tuple((rank, node_of.get(rank, "").strip("?")) for rank in never) if report.timeline is not None else ()


def title_of(name: str, report: Report, values: Sequence[float]) -> str:
    """What a figure of ranks is of: "All-reduce busbw over gloo, 4 MiB"."""
    if name not in ("busbw_bytes_per_s", "latency_seconds"):
        return _TITLES.get(name, label(name))
    backend = _backend(name, report, values)
    over = f" over {backend}" if backend else ""
    if name == "latency_seconds":
        return f"All-reduce latency{over}, small message"
    size = report.measurements.get(f"all_reduce.{backend}.bytes")
    return f"All-reduce busbw{over}{f', {byte_count(size)}' if isinstance(size, int | float) else ''}"


def _backend(name: str, report: Report, values: Sequence[float]) -> str:
    """The backend whose figure of the run is that of the slowest of these ranks; nothing if none is."""
    slowest = min(values) if name == "busbw_bytes_per_s" else max(values)
    for key, value in report.measurements.items():
        kind, _, rest = key.partition(".")
        backend, _, what = rest.rpartition(".")
        if kind == "all_reduce" and what == name and isinstance(value, int | float) and isclose(value, slowest):
            return backend
    return ""


def _stacked(name: str, title: str, parts: Sequence[str], rows: Sequence[Row]) -> Figure | None:
    whole = [(row, values) for row in rows if None not in (values := [number_of(row.get(part)) for part in parts])]
    if not whole:
        return None
    sums = [sum(filter(None, values)) for _, values in whole]
    own = [(values[0] or 0.0) for _, values in whole] if name == "step" else sums
    many = len(whole) > BARS_SHOWN
    shown = nlargest(BARS_SHOWN, range(len(whole)), key=own.__getitem__) if many else range(len(whole))
    unit = column_unit(parts[0], [max(sums)])
    stacks = [
        (label(part), [(whole[n][1][place] or 0.0) / unit.size for n in shown]) for place, part in enumerate(parts)
    ]
    medians = ", ".join(
        f"{label(part)} {figure(quantile(sorted((values[place] or 0.0) / unit.size for _, values in whole), 0.5))}"
        for place, part in enumerate(parts)
    )
    return Figure(
        title=title,
        svg=draw_stacks(unit.symbol, [who_of(whole[n][0]) for n in shown], stacks, f"stacks-{name}"),
        alt=f"{title}; {count(len(whole), 'rank')}, medians in {unit.symbol}: {medians}.",
        sentence=f"The {len(shown)} longest of {len(whole):,} ranks." if many else "",
    )


def _table(ranks: Ranks) -> tuple[Table, ...]:
    if not ranks.shown or not ranks.names:
        return ()
    units = {name: column_unit(name, ranks.numbers[name]) for name in ranks.names}
    has_gpus = any(row.get("gpu_uuid") is not None for row in ranks.rows)
    heads = [Column("rank", right=True), Column("state"), Column("host"), *([Column("GPU")] if has_gpus else [])]
    for name in ranks.names:
        texts = any(isinstance(row.get(name), str) for row in ranks.shown)
        symbol = units[name].symbol
        heads.append(
            Column(words(f"{label(name)}{symbol if symbol[:1] == '/' else f' {symbol}'}".strip()), right=not texts)
        )
    return (
        Table(
            name="rank-table",
            caption=count(len(ranks.shown), "rank") + (f" of {len(ranks.rows):,}" if ranks.note else ""),
            columns=tuple(heads),
            rows=tuple(_row(row, ranks, units, has_gpus=has_gpus) for row in ranks.shown),
            note=words(ranks.note),
            sortable=True,
            folded=len(ranks.shown) > _OPEN_ROWS,
        ),
    )


def _row(row: Row, ranks: Ranks, units: Mapping[str, Unit], *, has_gpus: bool) -> tuple[Cell, ...]:
    rank = row.get("rank")
    severity = ranks.marks.get(rank, Severity.NOTE) if isinstance(rank, int) else Severity.NOTE
    word, mark = _WORDS.get(severity, ("not blamed", ""))
    cells = [Cell(words(str(rank)), _sort(rank)), Cell(word, word, mark), _text(row.get("node"))]
    if has_gpus:
        cells.append(_text(row.get("gpu_uuid")))
    for name, unit in units.items():
        value = row.get(name)
        cells.append(_text(None) if value is None else Cell(words(cell(value, unit)), _sort(value)))
    return tuple(cells)


def _text(value: Scalar) -> Cell:
    return Cell("–") if value is None else Cell(words(str(value)), words(str(value)))


def _sort(value: Scalar) -> float | str:
    number = number_of(value)
    return number if number is not None else words(str(value))
