"""The table of ranks, blamed and slow ones first.

Up to 16 ranks are all shown; of more, the eight that are worth a look, and the range of all. Where a page has no room
for all columns, the most important ones are shown; with details the table goes on below itself, with the names of the
ranks repeated. Names are never cut or folded: they are there to be copied.
"""

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rich.table import Table

from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.render.page import ALL_SHOWN, Column, Short, column_format, fitted, fitting, one_line, shortened
from ddpdiag.stats import quantile
from ddpdiag.text import ABSENT, column_unit, count, figure, fold_ranks, is_number, label

Row = Mapping[str, Scalar]

# The parts of a training step; their sum is the step.
STEP = ("data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds", "wait_seconds")
# Columns that are shown first where there is no room for all; those that are not listed come before those of `_LEAST`.
_MOST = (
    "samples_per_second",
    "busbw_bytes_per_s",
    "wait_seconds",
    "forward_seconds",
    "backward_seconds",
    "host_busbw_bytes_per_s",
    "latency_seconds",
    "arrival_seconds",
)
_LEAST = ("data_seconds", "optimizer_seconds", "transport", "gpu_name")
_MEANINGS = (
    ("arrival_seconds", "arrival: time until the rank joined, from when rank 0 began to wait"),
    (
        "wait_seconds",
        "data + forward + backward + optimizer + wait: one training step; wait: time in its all-reduce, least on the "
        "slowest rank",
    ),
)

# Columns that are empty on ranks that have nothing to say there.
_OPTIONAL = ("transport",)
_IDENTITY = ("rank", "local_rank", "host", "gpu_uuid")
_ORDER = (Severity.ERROR, Severity.WARNING, None)
WORST_SHOWN = 8
# CUDA_VISIBLE_DEVICES takes a UUID cut to its beginning, so a beginning is a name.
SHORT_UUID = 12
_MARKS = {Severity.ERROR: ("FAIL", "bold red"), Severity.WARNING: ("warn", "yellow")}


class Line(NamedTuple):
    """A line of the table: one rank, or `ranks` of one host of which all figures are the same ("3440-3447")."""

    name: str
    row: Row
    mark: Severity | None
    ranks: int = 1


def meanings(names: Container[str]) -> str:
    """A caption that explains these columns, such as "arrival: when the rank joined"; empty if none needs it."""
    return "; ".join(text for name, text in _MEANINGS if name in names)


def blamed(findings: Sequence[Finding], rows: Iterable[Row]) -> dict[int, Severity]:
    """The worst that each rank is blamed for; a host that is blamed as a whole means each rank of it."""
    marks: dict[int, Severity] = {}
    for severity in (Severity.WARNING, Severity.ERROR):
        own = [finding for finding in findings if finding.severity is severity]
        hosts = {node for finding in own if not finding.ranks for node in finding.hosts}
        theirs = (row.get("rank") for row in rows if row.get("host") in hosts) if hosts else ()
        named = (rank for finding in own for rank in finding.ranks)
        marks.update(dict.fromkeys((*named, *(rank for rank in theirs if isinstance(rank, int))), severity))
    return marks


def _by_host(lines: Iterable[Line], names: Sequence[str]) -> list[Line]:
    """Ranks of one host of which all figures are the same as one line."""
    groups: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.row.get("host"), line.mark, *map(line.row.get, names)), []).append(line)
    together: list[Line] = []
    for first, *others in groups.values():
        ranks = [rank for line in (first, *others) if isinstance(rank := line.row.get("rank"), int)]
        if not others or len(ranks) <= len(others) or first.row.get("host") is None:
            together.append(first)
        else:
            row = {**first.row, "local_rank": None, "gpu_uuid": None}
            together.append(Line(fold_ranks(ranks), row, first.mark, len(ranks)))
    return together


def _worst_first(lines: Iterable[Line], names: Sequence[str], numbers: Mapping[str, Sequence[float]]) -> list[Line]:
    """Blamed, silent and slowest lines first.

    The lines are compared by their figures `names`, of which `numbers` has the finite values in rising order.
    """
    medians = {name: quantile(values, 0.5) for name, values in numbers.items() if values}

    def worth(line: Line) -> tuple[int, int, float]:
        silent = sum(line.row.get(name) is None for name in names)
        slowness = max((_slowness(name, line.row.get(name), median) for name, median in medians.items()), default=0.0)
        return _ORDER.index(line.mark), -silent, -slowness

    return sorted(lines, key=worth)


def _in_turns(lines: Iterable[Line]) -> list[Line]:
    """Of those blamed, one of each host before the next of any, or one host alone would fill the table."""
    seen: Counter[tuple[object, ...]] = Counter()
    turns: list[tuple[int, int, Line]] = []
    for line in lines:
        own = (line.mark, line.row.get("host"))
        turns.append((_ORDER.index(line.mark), seen[own] if line.mark else 0, line))
        seen[own] += 1
    return [line for *_, line in sorted(turns, key=lambda turn: turn[:2])]


def _slowness(name: str, value: Scalar, median: float) -> float:
    """The factor by which it is slower than the median; 0 for values without better and worse."""
    if isinstance(value, bool) or not isinstance(value, int | float) or median <= 0:
        return 0.0
    if not math.isfinite(value):
        return math.inf
    if name.endswith(("_per_s", "_per_second")):
        return median / value if value > 0 else math.inf
    # Fast ranks wait in backward for slow ones, so a long backward is no sign of a slow rank.
    return value / median if name.endswith("_seconds") and name != "backward_seconds" else 0.0


@dataclass(frozen=True)
class Ranks:
    """The rows of a report, and which of them are blamed.

    With `brief`, ranks of a host that all have the same figures share a line, and hosts have short names.
    """

    rows: Sequence[Row]
    marks: Mapping[int, Severity]
    details: bool = False
    all_shown: int = ALL_SHOWN
    worst_shown: int = WORST_SHOWN
    brief: bool = False

    @cached_property
    def alike(self) -> bool:
        """Whether findings blame all ranks or none, and all ranks have the same columns."""
        marks = {self.mark_of(row) for row in self.rows}
        columns = {tuple(row.get(name) is None for name in self.names if name not in _OPTIONAL) for row in self.rows}
        return len(marks) <= 1 and len(columns) <= 1

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Columns beyond a rank's identity that have a value, in the order in which they appear."""
        names = dict.fromkeys(name for row in self.rows for name, value in row.items() if value is not None)
        return tuple(name for name in names if name not in _IDENTITY)

    @cached_property
    def numbers(self) -> dict[str, list[float]]:
        """The finite values of each column, in rising order."""
        return {name: sorted(filter(is_number, (row.get(name) for row in self.rows))) for name in self.names}

    @cached_property
    def lines(self) -> Sequence[Line]:
        """All ranks of a small world; of a large one those to look at, the worst first."""
        every = []
        for row in self.rows:
            name = "" if row.get("rank") is None else one_line(str(row["rank"]))
            every.append(Line(name, row, self.mark_of(row)))
        if self.details or len(every) <= self.all_shown:
            return every
        if not self.brief:
            return _worst_first(every, self.names, self.numbers)[: self.worst_shown]
        hosts = _by_host(every, self.names)
        return _in_turns(_worst_first(hosts, self.names, self.numbers))[: self.worst_shown]

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The places of the rows, blamed, silent and slowest ranks first."""
        places = {id(row): place for place, row in enumerate(self.rows)}
        lines = (Line("", row, self.mark_of(row)) for row in self.rows)
        return tuple(places[id(line.row)] for line in _worst_first(lines, self.names, self.numbers))

    def mark_of(self, row: Row) -> Severity | None:
        """The worst that the rank of a row is blamed for."""
        return self.marks.get(rank) if isinstance(rank := row.get("rank"), int) else None

    @property
    def shown(self) -> Sequence[Row]:
        """The rows of the lines."""
        return [line.row for line in self.lines]

    @cached_property
    def hosts(self) -> Short:
        """The names of the hosts in the table."""
        names = [one_line(node) for row in self.shown if isinstance(node := row.get("host"), str)]
        return shortened(names) if self.brief and not self.details else Short(dict(zip(names, names, strict=True)))

    @property
    def note(self) -> str:
        """The ranks that a shortened table omits: their number, and the range of each column."""
        hidden = len(self.rows) - sum(line.ranks for line in self.lines)
        if not hidden or not self.names:
            return ""
        ranges = "; ".join(_range(name, numbers) for name, numbers in self.numbers.items() if numbers)
        head = f"{count(hidden, 'rank')} more; blamed, silent and slowest ranks come first."
        return f"{head} All {len(self.rows):,}: {ranges}." if ranges else head

    def tables(self, *, color: bool, width: int) -> Iterator[Table]:
        """The table, in pieces that fit `width` unless it is `brief`; nothing if there are no figures."""
        if not self.lines or not (self.names or self.details):
            return
        absent = ABSENT if color else "-"
        who = _identity(self, absent)
        figures = [self._figures(name, absent) for name in self.fitting(color=color, width=width)]
        if self.details and self.brief and (gpus := _gpus(self, absent)) is not None:
            # Whole UUIDs would take half of each piece.
            figures.insert(0, gpus)
        yield from fitted(who, figures, len(self.lines), width=width)

    def fitting(self, *, color: bool, width: int) -> tuple[str, ...]:
        """The columns that the table has: all of them, or those for which a single brief table has room."""
        if self.details or not self.brief or not self.lines:
            return self.names
        absent = ABSENT if color else "-"
        figures = {name: self._figures(name, absent) for name in self.names}
        others = (name for name in self.names if name not in (*_MOST, *_LEAST))
        return fitting(_identity(self, absent), figures, (*_MOST, *others, *_LEAST), width=width)

    def _figures(self, name: str, absent: str) -> Column:
        values = [row.get(name) for row in self.shown]
        # Those looked for may have no figure at all, and what they lack is then in the unit of the others.
        own = column_format(name, values, column_unit(name, self.numbers[name]) if self.brief else None)
        cells = tuple(absent if value is None else one_line(own.cell(value)) for value in values)
        header = f"{one_line(label(name))}\n{own.unit.symbol}"
        texts = any(isinstance(value, str) for value in values)
        return Column(header, cells, right=not texts, whole=texts and self.brief and not self.details)


def _range(name: str, numbers: Sequence[float]) -> str:
    """From the least to the largest."""
    unit = column_unit(name, numbers)
    low, high = figure(numbers[0] / unit.size), figure(numbers[-1] / unit.size)
    span = low if low == high else f"{low} to {high}"
    return f"{one_line(label(name))} {span} {unit.symbol}".rstrip()


def _identity(ranks: Ranks, absent: str) -> list[Column]:
    """The columns that identify the lines: a mark for blamed ones, rank, host, and GPU if any rank has one."""
    lines, whole = ranks.lines, ranks.brief
    seen = [_MARKS[line.mark] if line.mark else ("", "") for line in lines]
    together = any(line.ranks > 1 for line in lines)
    columns = [Column("ranks" if together else "rank", tuple(line.name or absent for line in lines), right=True)]
    if any(mark for mark, _ in seen):
        columns.insert(0, Column("", tuple(m for m, _ in seen), right=False, styles=tuple(s for _, s in seen)))
    if ranks.details:
        columns.append(Column("local", tuple(_word(line.row.get("local_rank"), absent) for line in lines), right=True))
    hosts = (_word(line.row.get("host"), absent) for line in lines)
    short = ranks.hosts.names
    columns.append(Column("host", tuple(short.get(host, host) for host in hosts), right=False, whole=whole))
    if not (ranks.details and ranks.brief) and (gpus := _gpus(ranks, absent)) is not None:
        columns.append(gpus)
    return columns


def _gpus(ranks: Ranks, absent: str) -> Column | None:
    """The GPUs' UUIDs, with `details` whole; None if no rank has one."""
    if all(row.get("gpu_uuid") is None for row in ranks.shown):
        return None
    whole = {one_line(uuid) for row in ranks.rows if isinstance(uuid := row.get("gpu_uuid"), str)}
    short = {uuid: uuid[:SHORT_UUID] for uuid in whole}
    if ranks.details or len(set(short.values())) < len(short):
        short = {}
    uuids = (_word(row.get("gpu_uuid"), absent) for row in ranks.shown)
    return Column("gpu", tuple(short.get(uuid, uuid) for uuid in uuids), right=False, whole=ranks.brief)


def _word(value: Scalar, absent: str) -> str:
    return absent if value is None else one_line(str(value))
