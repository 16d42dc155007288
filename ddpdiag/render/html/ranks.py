"""Ranks: bars with outliers, the parts of a step, and a table to sort."""

from collections.abc import Mapping, Sequence
from heapq import nlargest, nsmallest
from typing import NamedTuple

from ddpdiag.model import Report, Scalar, Severity
from ddpdiag.render.html.page import Cell, Column, Figure, Section, Table, words
from ddpdiag.render.plots.bars import Bar, Bars, draw_bars, draw_stacks
from ddpdiag.render.rank_lines import Row, blamed
from ddpdiag.render.tables import Ranks
from ddpdiag.render.units import Unit, cell, column_unit, count, figure, label
from ddpdiag.stats import outliers, quantile

BARS_SHOWN, ROWS_SHOWN = 24, 128
# In this order; others follow, as far as there is room.
_FIRST = ("busbw_bytes_per_s", "host_busbw_bytes_per_s", "samples_per_second", "latency_seconds", "arrival_seconds")
_MOST_FIGURES = 6
# A longer table is folded: the bars say first what there is to see.
_OPEN_ROWS = 16
_TRAINING = ("data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds")
_STEP = ("work_seconds", "wait_seconds")
_IDENTITY = ("rank", "local_rank", "node", "gpu_uuid")
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
    def higher_is_better(self) -> bool:
        """Rates; of times less is better."""
        return self.name.endswith(("_per_s", "_per_second"))


def ranks_section(report: Report) -> Section:
    """One figure for each measurement, and the table."""
    marks = blamed(report.findings, report.ranks)
    ranks = Ranks(report.ranks, marks, all_shown=ROWS_SHOWN, worst_shown=ROWS_SHOWN)
    names = [name for name in _FIRST if name in ranks.numbers]
    others = (name for name in ranks.names if name not in (*_FIRST, *_TRAINING, *_STEP))
    names = [*names, *(name for name in others if column_unit(name, (1.0,)).symbol)][:_MOST_FIGURES]
    found = (_bars(_column(name, report.ranks), marks, number) for number, name in enumerate(names))
    drawn = tuple(figure for figure in found if figure is not None)
    return Section(
        name="ranks",
        title="Ranks",
        sentence=""
        if not drawn
        else "Hatched bars lie far from the median, for what the others scatter, on the slow side; those that a "
        "finding blames say so.",
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
    pairs = [(row, number) for row in rows if (number := _number(row.get(name))) is not None]
    if name.startswith("host_"):
        # The same for all ranks of a host.
        pairs = list({row.get("node"): (row, number) for row, number in reversed(pairs)}.values())[::-1]
    values = [value for _, value in pairs]
    return Figures(name, column_unit(name, values), [row for row, _ in pairs], values)


def _number(value: Scalar) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # What no device can mean would only stretch the axes.
    return float(value) if abs(value) < 1e30 else None


def _bars(column: Figures, marks: Mapping[int, Severity], number: int) -> Figure | None:
    values = column.values
    if len(values) < 2 or max(values) <= 0:
        return None
    median = quantile(sorted(values), 0.5)
    # Worse than the others is a matter; better is none.
    far = {n for n in outliers(values) if (values[n] < median) is column.higher_is_better}
    many = len(values) > BARS_SHOWN
    pick = nsmallest if column.higher_is_better else nlargest
    shown = pick(BARS_SHOWN, range(len(values)), key=values.__getitem__) if many else range(len(values))
    size = column.unit.size
    bars = [Bar(column.who(n), values[n] / size, _mark(column.rows[n], marks, n in far)) for n in shown]
    everybody = [value / size for value in values] if many else ()
    title = label(column.name)
    return Figure(
        title=words(title),
        svg=draw_bars(Bars(column.unit.symbol, bars, median / size, everybody, f"{column.noun}s"), f"bars-{number}"),
        alt=words(_said(column, title, median, far)),
        sentence=f"All {len(values):,} {column.noun}s as a histogram; below, the {len(shown)} worst." if many else "",
    )


def _mark(row: Row, marks: Mapping[int, Severity], far: bool) -> str:
    rank = row.get("rank")
    return "blamed" if far and isinstance(rank, int) and rank in marks else "outlier" if far else ""


def _said(column: Figures, title: str, median: float, far: set[int]) -> str:
    """What the bars show: "busbw of 4 ranks in GB/s: 0.21 to 1.07, median 1.07; far from it: rank 3"."""
    size, unit = column.unit
    low, high = figure(min(column.values) / size), figure(max(column.values) / size)
    named = ", ".join(column.who(n) for n in sorted(far)[:8]) + (" and others" if len(far) > 8 else "")
    rest = f"; far from it: {named}" if far else "; none is far from it"
    head = f"{title} of {count(len(column.values), column.noun)}{f' in {unit}' if unit else ''}"
    return f"{head}: {low} to {high}, median {figure(median / size)}{rest}."


def _stacked(name: str, title: str, parts: Sequence[str], rows: Sequence[Row]) -> Figure | None:
    whole = [(row, values) for row in rows if None not in (values := [_number(row.get(part)) for part in parts])]
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
        svg=draw_stacks(unit.symbol, [_who(whole[n][0]) for n in shown], stacks, f"stacks-{name}"),
        alt=f"{title} of {count(len(whole), 'rank')}, medians in {unit.symbol}: {medians}.",
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
        heads.append(Column(words(f"{label(name)} {units[name].symbol}".strip()), right=not texts))
    return (
        Table(
            name="rank-table",
            caption=count(len(ranks.shown), "rank") + (f" of {len(ranks.rows):,}" if ranks.remark else ""),
            columns=tuple(heads),
            rows=tuple(_row(row, ranks, units, has_gpus=has_gpus) for row in ranks.shown),
            remark=words(ranks.remark),
            sortable=True,
            folded=len(ranks.shown) > _OPEN_ROWS,
        ),
    )


def _row(row: Row, ranks: Ranks, units: Mapping[str, Unit], *, has_gpus: bool) -> tuple[Cell, ...]:
    rank = row.get("rank")
    severity = ranks.marks.get(rank, Severity.INFO) if isinstance(rank, int) else Severity.INFO
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
    number = _number(value)
    return number if number is not None else words(str(value))


def _who(row: Row) -> str:
    return f"{row.get('rank')}  {row.get('node')}"
