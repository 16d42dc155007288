"""The table of ranks: who is slow, at a glance.

Up to 16 ranks are all shown; of more, the eight that are worth a look, and the range of all. A table that is wider than
the page goes on below itself, with the names of the ranks repeated.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import nsmallest
from typing import NamedTuple, TypeGuard

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.render.page import one_line
from ddpdiag.render.units import ABSENT, Unit, cell, column_unit, count, figure, label
from ddpdiag.stats import quantile

Row = Mapping[str, Scalar]

ALL_SHOWN = 16
WORST_SHOWN = 8
_LONGEST_TEXT = 28
_IDENTITY = ("rank", "local_rank", "node", "gpu_uuid")
# CUDA_VISIBLE_DEVICES takes a UUID cut to its beginning, so a beginning is a name.
_SHORT_UUID = 12

_MARKS = {Severity.ERROR: ("FAIL", "bold red"), Severity.WARNING: ("warn", "yellow")}


class Column(NamedTuple):
    """One column, ready to be drawn."""

    header: str
    cells: tuple[str, ...]
    right: bool
    styles: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Characters that it takes, at most; longer texts fold."""
        widest = max(map(cell_len, (*self.header.split("\n"), *self.cells)), default=0)
        return widest if self.right else min(widest, _LONGEST_TEXT)


@dataclass(frozen=True)
class Ranks:
    """The rows of a report, and who among them is blamed."""

    rows: Sequence[Row]
    marks: Mapping[int, Severity]
    details: bool = False
    all_shown: int = ALL_SHOWN
    worst_shown: int = WORST_SHOWN

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Columns beyond a rank's identity that have a value, in the order in which they appear."""
        names = dict.fromkeys(name for row in self.rows for name, value in row.items() if value is not None)
        return tuple(name for name in names if name not in _IDENTITY)

    @cached_property
    def numbers(self) -> dict[str, list[float]]:
        """The finite values of each column, in rising order."""
        return {name: sorted(filter(_is_number, (row.get(name) for row in self.rows))) for name in self.names}

    @cached_property
    def shown(self) -> Sequence[Row]:
        """All rows of a small world; of a large one those to look at, the worst first."""
        if self.details or len(self.rows) <= self.all_shown:
            return self.rows
        medians = {name: quantile(numbers, 0.5) for name, numbers in self.numbers.items() if numbers}
        order = (Severity.ERROR, Severity.WARNING, None)

        def worth(row: Row) -> tuple[int, int, float]:
            silent = sum(row.get(name) is None for name in self.names)
            slowness = max((_slowness(name, row.get(name), median) for name, median in medians.items()), default=0.0)
            return order.index(_mark_of(row, self.marks)), -silent, -slowness

        return nsmallest(self.worst_shown, self.rows, key=worth)

    @property
    def remark(self) -> str:
        """What a shortened table leaves out: how many ranks, and between which figures all lie."""
        if len(self.shown) == len(self.rows) or not self.names:
            return ""
        hidden = count(len(self.rows) - len(self.shown), "rank")
        ranges = "; ".join(_range(name, numbers) for name, numbers in self.numbers.items() if numbers)
        head = f"{hidden} more; blamed, silent and slowest ranks come first."
        return f"{head} All {len(self.rows):,}: {ranges}." if ranges else head

    def tables(self, *, color: bool, width: int) -> Iterator[Table]:
        """The table in pieces that fit `width`; nothing if there are no figures."""
        if not self.shown or not (self.names or self.details):
            return
        absent = ABSENT if color else "-"
        who = _identity(self, absent)
        figures = [_figure_column(name, self.shown, absent) for name in self.names]
        room = width - sum(column.width for column in (*who, *figures))
        between = len(who) + len(figures) - 1
        # Two spaces read better than one, but one table reads better than two.
        gap = 1 if between <= room < 2 * between else 2
        for piece in pieces(who, figures, width=width, gap=gap):
            yield draw((*who, *piece), len(self.shown), gap)


def _is_number(value: Scalar) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def blamed(findings: Sequence[Finding]) -> dict[int, Severity]:
    """The worst that each rank is blamed for."""
    marks: dict[int, Severity] = {}
    for severity in (Severity.WARNING, Severity.ERROR):
        for finding in findings:
            if finding.severity is severity:
                marks.update(dict.fromkeys(finding.ranks, severity))
    return marks


def _mark_of(row: Row, marks: Mapping[int, Severity]) -> Severity | None:
    rank = row.get("rank")
    return marks.get(rank) if isinstance(rank, int) else None


def _slowness(name: str, value: Scalar, median: float) -> float:
    """How many times slower than the median; 0 for what has no better and worse."""
    if isinstance(value, bool) or not isinstance(value, int | float) or median <= 0:
        return 0.0
    if not math.isfinite(value):
        return math.inf
    if name.endswith(("_per_s", "_per_second")):
        return median / value if value > 0 else math.inf
    # Who is fast waits in backward for who is slow, so a long backward says nothing against a rank.
    return value / median if name.endswith("_seconds") and name != "backward_seconds" else 0.0


def _range(name: str, numbers: Sequence[float]) -> str:
    unit = column_unit(name, numbers)
    low, high = figure(numbers[0] / unit.size), figure(numbers[-1] / unit.size)
    span = low if low == high else f"{low} to {high}"
    return f"{one_line(label(name))} {span} {unit.symbol}".rstrip()


def _identity(ranks: Ranks, absent: str) -> list[Column]:
    """Who the rows are: a mark for those blamed, rank, host, GPU; without what nobody has."""
    rows, details = ranks.shown, ranks.details
    seen = [_MARKS[mark] if (mark := _mark_of(row, ranks.marks)) else ("", "") for row in rows]
    columns = [Column("rank", tuple(_word(row.get("rank"), absent) for row in rows), right=True)]
    if any(mark for mark, _ in seen):
        columns.insert(0, Column("", tuple(m for m, _ in seen), right=False, styles=tuple(s for _, s in seen)))
    if details:
        columns.append(Column("local", tuple(_word(row.get("local_rank"), absent) for row in rows), right=True))
    columns.append(Column("host", tuple(_word(row.get("node"), absent) for row in rows), right=False))
    if any(row.get("gpu_uuid") is not None for row in rows):
        short = {} if details else short_uuids(ranks.rows)
        uuids = (_word(row.get("gpu_uuid"), absent) for row in rows)
        columns.append(Column("gpu", tuple(short.get(uuid, uuid) for uuid in uuids), right=False))
    return columns


def short_uuids(rows: Sequence[Row]) -> dict[str, str]:
    """The beginning of each GPU's UUID, as far as those are all different; else nothing."""
    uuids = {one_line(uuid) for row in rows if isinstance(uuid := row.get("gpu_uuid"), str)}
    short = {uuid: uuid[:_SHORT_UUID] for uuid in uuids}
    return short if len(set(short.values())) == len(short) else {}


def _word(value: Scalar, absent: str) -> str:
    return absent if value is None else one_line(str(value))


def _figure_column(name: str, rows: Sequence[Row], absent: str) -> Column:
    values = [row.get(name) for row in rows]
    unit: Unit = column_unit(name, values)
    cells = tuple(absent if value is None else one_line(cell(value, unit)) for value in values)
    header = f"{one_line(label(name))}\n{unit.symbol}"
    return Column(header, cells, right=not any(isinstance(value, str) for value in values))


def pieces(names: Sequence[Column], figures: Sequence[Column], *, width: int, gap: int) -> Iterator[tuple[Column, ...]]:
    """The figures, in as many parts as are needed to stay within `width` beside the names."""
    start = sum(column.width + gap for column in names)
    piece: list[Column] = []
    used = start
    for column in figures:
        if piece and used + column.width > width:
            yield tuple(piece)
            piece, used = [], start
        piece.append(column)
        used += column.width + gap
    yield tuple(piece)


def draw(columns: Sequence[Column], height: int, gap: int) -> Table:
    """A table of these columns, with `height` rows and `gap` spaces between columns."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(Text(column.header), justify="right" if column.right else "left", overflow="fold")
    for row in range(height):
        table.add_row(*(Text(c.cells[row], c.styles[row] if c.styles else "") for c in columns))
    return table
