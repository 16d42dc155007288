"""The table of ranks: who is slow, at a glance.

Up to 16 ranks are all shown; of more, the eight that are worth a look, and the range of all. A table that is wider than
the page goes on below itself, with the names of the ranks repeated. Names are never cut or folded: they are there to be
copied.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeGuard

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from ddpdiag.model import Scalar, Severity
from ddpdiag.render.page import one_line
from ddpdiag.render.rank_lines import IDENTITY, Line, Row, by_host, in_turns, line_of, worst_first
from ddpdiag.render.short_names import Short, shortened
from ddpdiag.render.units import ABSENT, Unit, cell, column_unit, count, figure, label

ALL_SHOWN = 16
WORST_SHOWN = 8
_LONGEST_TEXT = 28
# CUDA_VISIBLE_DEVICES takes a UUID cut to its beginning, so a beginning is a name.
_SHORT_UUID = 12

_MARKS = {Severity.ERROR: ("FAIL", "bold red"), Severity.WARNING: ("warn", "yellow")}


class Column(NamedTuple):
    """One column, ready to be drawn; long texts fold, unless they are to stay `whole`."""

    header: str
    cells: tuple[str, ...]
    right: bool
    styles: tuple[str, ...] = ()
    whole: bool = False

    @property
    def width(self) -> int:
        """Characters that it takes, at most."""
        widest = max(map(cell_len, (*self.header.split("\n"), *self.cells)), default=0)
        return widest if self.right or self.whole else min(widest, _LONGEST_TEXT)


@dataclass(frozen=True)
class Ranks:
    """The rows of a report, and who among them is blamed.

    With `brief`, ranks of a host that all have the same figures share a line, hosts have short names, and of a large
    world in which nobody is looked for (`healthy`) the ranges are enough.
    """

    rows: Sequence[Row]
    marks: Mapping[int, Severity]
    details: bool = False
    all_shown: int = ALL_SHOWN
    worst_shown: int = WORST_SHOWN
    brief: bool = False
    healthy: bool = False

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Columns beyond a rank's identity that have a value, in the order in which they appear."""
        names = dict.fromkeys(name for row in self.rows for name, value in row.items() if value is not None)
        return tuple(name for name in names if name not in IDENTITY)

    @cached_property
    def numbers(self) -> dict[str, list[float]]:
        """The finite values of each column, in rising order."""
        return {name: sorted(filter(_is_number, (row.get(name) for row in self.rows))) for name in self.names}

    @cached_property
    def lines(self) -> Sequence[Line]:
        """All ranks of a small world; of a large one those to look at, the worst first."""
        every = [line_of(row, self.marks) for row in self.rows]
        if self.details or len(every) <= self.all_shown:
            return every
        if not self.brief:
            return worst_first(every, self.names, self.numbers)[: self.worst_shown]
        if self.healthy:
            return ()
        hosts = by_host(every, self.names)
        return in_turns(worst_first(hosts, self.names, self.numbers))[: self.worst_shown]

    @property
    def shown(self) -> Sequence[Row]:
        """The rows of the lines."""
        return [line.row for line in self.lines]

    @cached_property
    def hosts(self) -> Short:
        """The names of the hosts in the table."""
        names = [one_line(node) for row in self.shown if isinstance(node := row.get("node"), str)]
        return shortened(names) if self.brief and not self.details else Short({name: name for name in names})

    @property
    def remark(self) -> str:
        """What a shortened table leaves out: how many ranks, and between which figures all lie."""
        hidden = len(self.rows) - sum(line.ranks for line in self.lines)
        if not hidden or not self.names:
            return ""
        # Where nobody is shown, nobody is seen to be silent either.
        whole = 0 if self.lines else len(self.rows)
        ranges = "; ".join(_range(name, numbers, whole) for name, numbers in self.numbers.items() if numbers)
        if not self.lines:
            return f"{count(whole, 'rank')}: {ranges}." if ranges else ""
        head = f"{count(hidden, 'rank')} more; blamed, silent and slowest ranks come first."
        return f"{head} All {len(self.rows):,}: {ranges}." if ranges else head

    def tables(self, *, color: bool, width: int) -> Iterator[Table]:
        """The table in pieces that fit `width`; nothing if there are no figures."""
        if not self.lines or not (self.names or self.details):
            return
        absent = ABSENT if color else "-"
        who = _identity(self, absent)
        figures = [self._figures(name, absent) for name in self.names]
        if self.details and self.brief and (gpus := _gpus(self, absent)) is not None:
            # Whole UUIDs would take half of each piece.
            figures.insert(0, gpus)
        room = width - sum(column.width for column in (*who, *figures))
        between = len(who) + len(figures) - 1
        # Two spaces read better than one, but one table reads better than two.
        gap = 1 if between <= room < 2 * between else 2
        for piece in pieces(who, figures, width=width, gap=gap):
            yield draw((*who, *piece), len(self.lines), gap)

    def _figures(self, name: str, absent: str) -> Column:
        values = [row.get(name) for row in self.shown]
        # Those looked for may have no figure at all, and what they lack is then in the unit of the others.
        unit: Unit = column_unit(name, self.numbers[name] if self.brief else values)
        cells = tuple(absent if value is None else one_line(cell(value, unit)) for value in values)
        header = f"{one_line(label(name))}\n{unit.symbol}"
        return Column(header, cells, right=not any(isinstance(value, str) for value in values))


def _is_number(value: Scalar) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _range(name: str, numbers: Sequence[float], of: int) -> str:
    """From the least to the largest; of how many, if those are fewer than `of`."""
    unit = column_unit(name, numbers)
    low, high = figure(numbers[0] / unit.size), figure(numbers[-1] / unit.size)
    span = low if low == high else f"{low} to {high}"
    some = f" ({len(numbers):,} of {of:,})" if len(numbers) < of else ""
    return f"{one_line(label(name))} {span} {unit.symbol}".rstrip() + some


def _identity(ranks: Ranks, absent: str) -> list[Column]:
    """Who the lines are: a mark for those blamed, rank, host, GPU; without what nobody has."""
    lines, whole = ranks.lines, ranks.brief
    seen = [_MARKS[line.mark] if line.mark else ("", "") for line in lines]
    together = any(line.ranks > 1 for line in lines)
    columns = [Column("ranks" if together else "rank", tuple(line.name or absent for line in lines), right=True)]
    if any(mark for mark, _ in seen):
        columns.insert(0, Column("", tuple(m for m, _ in seen), right=False, styles=tuple(s for _, s in seen)))
    if ranks.details:
        columns.append(Column("local", tuple(_word(line.row.get("local_rank"), absent) for line in lines), right=True))
    hosts = (_word(line.row.get("node"), absent) for line in lines)
    short = ranks.hosts.names
    columns.append(Column("host", tuple(short.get(host, host) for host in hosts), right=False, whole=whole))
    if not (ranks.details and ranks.brief) and (gpus := _gpus(ranks, absent)) is not None:
        columns.append(gpus)
    return columns


def _gpus(ranks: Ranks, absent: str) -> Column | None:
    """The GPUs' UUIDs, with `details` whole; None if nobody has one."""
    if all(row.get("gpu_uuid") is None for row in ranks.shown):
        return None
    short = {} if ranks.details else short_uuids(ranks.rows)
    uuids = (_word(row.get("gpu_uuid"), absent) for row in ranks.shown)
    return Column("gpu", tuple(short.get(uuid, uuid) for uuid in uuids), right=False, whole=ranks.brief)


def short_uuids(rows: Sequence[Row]) -> dict[str, str]:
    """The beginning of each GPU's UUID, as far as those are all different; else nothing."""
    uuids = {one_line(uuid) for row in rows if isinstance(uuid := row.get("gpu_uuid"), str)}
    short = {uuid: uuid[:_SHORT_UUID] for uuid in uuids}
    return short if len(set(short.values())) == len(short) else {}


def _word(value: Scalar, absent: str) -> str:
    return absent if value is None else one_line(str(value))


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
        least = column.width if column.whole else None
        side: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(Text(column.header), justify=side, overflow="fold", min_width=least)
    for row in range(height):
        table.add_row(*(Text(c.cells[row], c.styles[row] if c.styles else "") for c in columns))
    return table
