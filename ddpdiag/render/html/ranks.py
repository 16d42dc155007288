"""Ranks: bars with outliers, the parts of a step, and a table to sort.

A figure of ranks or hosts as bars shows which are far from the others, which are blamed, and which never joined.
"""

from collections.abc import Collection, Mapping, Sequence
from heapq import nlargest, nsmallest
from itertools import islice
from math import isclose
from typing import NamedTuple

from ddpdiag.model import Report, Scalar, Severity
from ddpdiag.render.html.page import Cell, Column, Figure, Section, Table, columns, words
from ddpdiag.render.page import Format, column_format
from ddpdiag.render.plots import OUTLIER, Bar, Bars, draw_bars, draw_stacks
from ddpdiag.render.terminal.ranks import STEP, Ranks, Row, blamed, meanings
from ddpdiag.stats import outliers, quantile
from ddpdiag.text import Unit, begun, byte_count, column_unit, count, figure, is_number, label, ranks_text

_ARRIVAL = "arrival_seconds"
_BARS_SHOWN = 24
# Ranks that come within a second come together, however little the others scatter: judgement/timings.py.
_LEAST_AWAY = {_ARRIVAL: 1.0}
_ROWS_SHOWN = 128
# In this order; others follow, as far as there is room.
_FIRST = ("busbw_bytes_per_s", "host_busbw_bytes_per_s", "samples_per_second", "latency_seconds", _ARRIVAL)
_MOST_FIGURES = 6
# A longer table is folded: the bars say first what there is to see.
_OPEN_ROWS = 16
_TITLES = {
    _ARRIVAL: "Arrival after rank 0 began to wait",
    "samples_per_second": "Training, samples per second",
    "host_busbw_bytes_per_s": "All-reduce of each host's best pair, busbw",
}
_WORDS = {Severity.ERROR: ("error", "bad"), Severity.WARNING: ("warning", "warn")}


class Figures(NamedTuple):
    """A column of the report: the finite values, each with its row."""

    name: str
    unit: Unit
    rows: Sequence[Row]
    values: Sequence[float]

    @property
    def noun(self) -> str:
        """What each value is of."""
        return "host" if self.name.startswith("host_") else "rank"

    def who(self, place: int) -> str:
        """Such as "3  n1", or a host alone."""
        return str(self.rows[place].get("node")) if self.noun == "host" else _who(self.rows[place])

    @property
    def symbol(self) -> str:
        """The unit behind its numbers."""
        return "samples/s" if self.name == "samples_per_second" else self.unit.symbol

    @property
    def higher_is_better(self) -> bool:
        """Rates; of times less is better."""
        return self.name.endswith(("_per_s", "_per_second"))


def _number(value: Scalar) -> float | None:
    """A number that can be drawn, or None: what no device can mean would only stretch the axes."""
    return float(value) if is_number(value) and abs(value) < 1e30 else None


def bar_figure(
    column: Figures,
    title: str,
    blamed: Collection[int],
    name: str,
    *,
    missing: Sequence[tuple[int, str]] = (),
    word: str = "blamed",
    judged: bool = False,
) -> Figure | None:
    """The figure of at least one value; for ranks that are `blamed`, and those, with hosts, that are `missing`.

    `judged`: who is slow is known, so that nobody else is called an outlier.
    """
    values, size = column.values, column.unit.size
    if max(values) <= 0:
        return None
    median = quantile(sorted(values), 0.5)
    slow = _outliers(column, median)
    if judged:
        slow = {n for n in slow if column.rows[n].get("rank") in blamed}
    many = len(values) > _BARS_SHOWN
    pick = nsmallest if column.higher_is_better else nlargest
    shown = pick(_BARS_SHOWN, range(len(values)), key=values.__getitem__) if many else range(len(values))
    # Where more than half are blamed, what most bars say tells nobody apart.
    found = [rank for row in column.rows if isinstance(rank := row.get("rank"), int) and rank in blamed]
    told = frozenset(found) if 2 * len(found) <= len(column.rows) else frozenset()
    bars = [Bar(f"{rank}  {node}".strip(), 0.0, "never joined") for rank, node in missing]
    for n in shown:
        is_told = column.rows[n].get("rank") in (blamed if n in slow else told)
        bars.append(Bar(column.who(n), values[n] / size, word if is_told else OUTLIER if n in slow else "", n in slow))
    all_values = [value / size for value in values] if many else ()
    absent = f" {ranks_text(rank for rank, _ in missing).capitalize()} never joined." if missing else ""
    return Figure(
        title=words(title),
        svg=draw_bars(Bars(column.symbol, bars, median / size, all_values, f"{column.noun}s"), name),
        alt=words(_in_words(column, title, median, slow, judged=judged)) + absent,
        sentence=f"All {len(values):,} {column.noun}s as a histogram; below, the {len(shown)} worst." if many else "",
    )


def _outliers(column: Figures, median: float) -> set[int]:
    """The places of outliers on the slow side: worse than the others is a matter, better is none."""
    values, least = column.values, _LEAST_AWAY.get(column.name, 0.0)
    return {
        n
        for n in outliers(values)
        if (values[n] < median) is column.higher_is_better and abs(values[n] - median) >= least
    }


def _in_words(column: Figures, title: str, median: float, slow: set[int], *, judged: bool) -> str:
    """What the bars show: "busbw: 4 ranks, 0.21 to 1.07 GB/s, median 1.07 GB/s; far from it: rank 3"."""
    size, unit = column.unit.size, column.symbol
    low, high = figure(min(column.values) / size), figure(max(column.values) / size)
    named = ", ".join(column.who(n) for n in sorted(slow)[:8]) + (" and others" if len(slow) > 8 else "")
    rest = f"; far from it: {named}" if slow else "" if judged else "; none is far from it"
    whole = f"{low} to {high} {unit}".rstrip()
    middle = f"{figure(median / size)} {unit}".rstrip()
    return f"{title}: {count(len(column.values), column.noun)}, {whole}, median {middle}{rest}."


def _who(row: Row) -> str:
    """Such as "3  n1"."""
    return f"{row.get('rank')}  {row.get('node')}"


def ranks_section(report: Report) -> Section:
    """One figure for each measurement, and the table."""
    rows = report.ranks
    marks = blamed(report.findings, rows)
    ranks = Ranks(rows, marks, all_shown=_ROWS_SHOWN, worst_shown=_ROWS_SHOWN)
    names = [name for name in _FIRST if name in ranks.numbers]
    others = (name for name in ranks.names if name not in (*_FIRST, *STEP))
    names = [*names, *(name for name in others if column_unit(name, (1.0,)).symbol)][:_MOST_FIGURES]
    found = (_bars(_column(name, rows), report, marks, number) for number, name in enumerate(names))
    drawn = tuple(figure for figure in found if figure is not None)
    sentence = (
        "Hatched bars are far from the median on the slow side, compared with the spread of the others. Ranks that a "
        "finding blames are always marked."
    )
    return Section(
        name="ranks",
        title="Ranks",
        sentence=sentence if drawn else "",
        figures=drawn,
        tables=(_table(ranks, meanings(ranks.names)),) if ranks.shown and ranks.names else (),
    )


def steps_section(report: Report) -> Section:
    """The parts of a training step, stacked for each rank."""
    drawn = _stacked("step", "A training step, by its parts", STEP, report.ranks)
    return Section(
        name="steps",
        title="Step time",
        sentence="An all-reduce ends on all ranks together: the rank that waits least is the one that the others wait "
        "for.",
        figures=() if drawn is None else (drawn,),
    )


def _column(name: str, rows: Sequence[Row]) -> Figures:
    pairs = [(row, number) for row in rows if (number := _number(row.get(name))) is not None]
    if name.startswith("host_"):
        # The same for all ranks of a host.
        pairs = list({row.get("node"): (row, number) for row, number in reversed(pairs)}.values())[::-1]
    values = [value for _, value in pairs]
    return Figures(name, column_unit(name, values), [row for row, _ in pairs], values)


def _bars(column: Figures, report: Report, marks: Mapping[int, Severity], number: int) -> Figure | None:
    missing: list[tuple[int, str]] = []
    if column.name == _ARRIVAL and report.timeline is not None:
        # Ranks that never joined; a header may claim more than there is time to count.
        came = {row.get("rank") for row in report.ranks}
        host_of = {lane.rank: lane.node.strip("?") for lane in report.timeline.lanes}
        never = islice((rank for rank in range(report.world.size) if rank not in came), _BARS_SHOWN)
        missing = [(rank, host_of.get(rank, "")) for rank in never]
    if not column.values or len(column.values) + len(missing) < 2:
        return None
    title = _title(column.name, report, column.values)
    return bar_figure(column, title, frozenset(marks), f"bars-{number}", missing=missing)


def _title(name: str, report: Report, values: Sequence[float]) -> str:
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
    whole = [
        (row, values)
        for row in rows
        if len(values := [number for part in parts if (number := _number(row.get(part))) is not None]) == len(parts)
    ]
    if not whole:
        return None
    sums = [sum(values) for _, values in whole]
    own = [sum(values) - values[-1] for _, values in whole]  # without the wait
    many = len(whole) > _BARS_SHOWN
    shown = nlargest(_BARS_SHOWN, range(len(whole)), key=own.__getitem__) if many else range(len(whole))
    unit = column_unit(parts[0], [max(sums)])
    stacks = [(label(part), [whole[n][1][place] / unit.size for n in shown]) for place, part in enumerate(parts)]
    medians = ", ".join(
        f"{label(part)} {figure(quantile(sorted(values[place] / unit.size for _, values in whole), 0.5))}"
        for place, part in enumerate(parts)
    )
    return Figure(
        title=title,
        svg=draw_stacks(unit.symbol, [_who(whole[n][0]) for n in shown], stacks, f"stacks-{name}"),
        alt=f"{title}; {count(len(whole), 'rank')}, medians in {unit.symbol}: {medians}.",
        sentence=f"The {len(shown)} longest of {len(whole):,} ranks." if many else "",
    )


def _table(ranks: Ranks, meaning: str) -> Table:
    formats = {name: column_format(name, ranks.numbers[name]) for name in ranks.names}
    has_gpus = any(row.get("gpu_uuid") is not None for row in ranks.rows)
    heads = [*columns("rank", "state", "host", *["GPU"] * has_gpus, right=(0,))]
    for name in ranks.names:
        texts = any(isinstance(row.get(name), str) for row in ranks.shown)
        symbol = formats[name].unit.symbol
        heads.append(
            Column(words(f"{label(name)}{symbol if symbol[:1] == '/' else f' {symbol}'}".strip()), right=not texts)
        )
    return Table(
        name="rank-table",
        caption=count(len(ranks.shown), "rank") + (f" of {len(ranks.rows):,}" if ranks.note else ""),
        columns=tuple(heads),
        rows=tuple(_row(row, ranks, formats, has_gpus=has_gpus) for row in ranks.shown),
        note=words(" ".join(filter(None, (f"{begun(meaning)}." if meaning else "", ranks.note)))),
        sortable=True,
        folded=len(ranks.shown) > _OPEN_ROWS,
    )


def _row(row: Row, ranks: Ranks, formats: Mapping[str, Format], *, has_gpus: bool) -> tuple[Cell, ...]:
    rank = row.get("rank")
    severity = ranks.marks.get(rank, Severity.NOTE) if isinstance(rank, int) else Severity.NOTE
    word, mark = _WORDS.get(severity, ("not blamed", ""))
    cells = [Cell(words(str(rank)), _sort(rank)), Cell(word, word, mark), _text(row.get("node"))]
    if has_gpus:
        cells.append(_text(row.get("gpu_uuid")))
    for name, own in formats.items():
        value = row.get(name)
        cells.append(_text(None) if value is None else Cell(words(own.cell(value)), _sort(value)))
    return tuple(cells)


def _text(value: Scalar) -> Cell:
    return Cell("–") if value is None else Cell(words(str(value)), words(str(value)))


def _sort(value: Scalar) -> float | str:
    number = _number(value)
    return number if number is not None else words(str(value))
