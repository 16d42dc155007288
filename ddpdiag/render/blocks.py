"""The blocks of a report, stated once and drawn by the terminal, Markdown and HTML.

A feature has one function for all formats, `blocks(report) -> Iterator[Section]`. It states only values. Width, colour,
escaping, cut texts and the number of rows are matters of the painters, which draw the blocks.

    def blocks(report: Report) -> Iterator[Section]:
        table = Table(
            columns=(
                Column("strategy"),
                Column("samples/s", bar=True),
                Column(name="peak_bytes"),  # titled "peak"; its numbers share one unit, such as GiB
                Column("efficiency", "efficiency_share"),  # a share of 1, shown in %
            ),
            rows=tuple(
                (row.name, row.rate, row.peak_bytes, Cell(row.efficiency, Mark.ERROR if row.is_low else Mark.NONE))
                for row in report.train.rows
            ),
            noun="strategy",
            note="Efficiency: the rate of each device over that of one alone.",
        )
        yield Section("Strategies", (table, Fold("Losses", (Chart(...),))), name="strategies")

A value is a number in SI units, a text as it was recorded, or None where it is not known. Painters give numbers a unit,
neutralise texts, and escape them. Words between backticks are code.

| painter | shortens | also has |
|---|---|---|
| terminal (`painter.py`) | tables beyond 16 rows, unless `--details`; leaves out folds and charts | colours |
| Markdown (`markup.py`) | what does not fit a comment on GitHub; leaves out charts | folds |
| HTML (`html/`) | tables beyond 400 rows | sorting, search, bars, coloured matrices, charts |
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.model import Scalar
from ddpdiag.model import report as model
from ddpdiag.render.page import column_format
from ddpdiag.text import column_unit, label


class Mark(Enum):
    """The emphasis of a text; the values are classes of the HTML page."""

    NONE = ""
    GOOD = "good"
    WARNING = "warn"
    ERROR = "bad"
    DIM = "dim"


class Cell(NamedTuple):
    """A marked value of a table. The mark repeats what the value says, for a quick look."""

    value: Scalar
    mark: Mark = Mark.NONE


class Column(Struct, frozen=True):
    """A column. The end of `name` is the unit of its numbers ("peak_bytes"); its beginning is the default of `title`.

    `bar`: HTML shows each number as a bar, too. `whole`: the cells are names to be copied, which are never wrapped.
    """

    title: str = ""
    name: str = ""
    bar: bool = False
    whole: bool = False


class Table(Struct, frozen=True, kw_only=True):
    """A table; `noun` names what one row is. `order`: the indices of the rows, the important ones first.

    `names` is how many columns identify a row. If a terminal has no room for all other columns, it shows the first ones
    that fit; with `--details`, or if `names` is None, it shows all of them, in pieces. `one_unit`: all columns have the
    name of the last one, and share one unit.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Scalar | Cell, ...], ...]
    title: str = ""
    noun: str = "row"
    note: str = ""
    order: tuple[int, ...] | None = None
    names: int | None = None
    one_unit: bool = False


class Text(Struct, frozen=True):
    """A paragraph; `lead` is a word or two before it, such as "Fix"."""

    text: str
    lead: str = ""
    mark: Mark = Mark.NONE


class Items(Struct, frozen=True):
    """A list of sentences or names."""

    items: tuple[str, ...]
    title: str = ""


class Code(Struct, frozen=True):
    """Lines to be copied as they are."""

    text: str
    title: str = ""


class Line(Struct, frozen=True):
    """A curve: its points in rising order of x. A curve that is only expected is `dashed`."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


class Chart(Struct, frozen=True, kw_only=True):
    """Curves over a logarithmic x axis. `x` and `y` are the names of the axes, which end in their unit ("size_bytes").

    Only HTML draws it: its numbers are also in a table.
    """

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]


class Matrix(Struct, frozen=True):
    """A matrix of pairs: rates, which HTML colours, or words; `note` says what stands out or what the words mean."""

    title: str
    matrix: model.Matrix
    note: str = ""


class Fold(Struct, frozen=True):
    """Blocks behind a title, for readers who look for more; the terminal shows them with `--details`."""

    title: str
    blocks: tuple["Block", ...]


class Section(Struct, frozen=True):
    """Blocks under a heading; `name` is its anchor in HTML, where sections are not nested."""

    title: str
    blocks: tuple["Block", ...]
    name: str = ""


_LONGEST_HEAD = 8  # letters of a name above a narrow column

Leaf = Table | Text | Items | Code | Chart | Matrix
Block = Leaf | Fold | Section


class Drawn(NamedTuple):
    """A column as text: its title, its unit, and a text for each row; numbers are aligned `right`."""

    title: str
    symbol: str
    cells: list[str]
    right: bool

    @property
    def head(self) -> str:
        """The title with the unit, on one line."""
        return f"{self.title} {self.symbol}".strip()


def value_of(cell: Scalar | Cell) -> Scalar:
    """The value of a cell, marked or not."""
    return cell.value if isinstance(cell, Cell) else cell


def mark_of(cell: Scalar | Cell) -> Mark:
    return cell.mark if isinstance(cell, Cell) else Mark.NONE


def drawn_columns(table: Table, places: Sequence[int], absent: str) -> list[Drawn]:
    """The columns of the rows at `places` as text, each column in one unit. `absent` is the text of None."""
    columns = []
    unit = None
    if table.one_unit:
        unit = column_unit(table.columns[-1].name, (value_of(cell) for row in table.rows for cell in row))
    for number, column in enumerate(table.columns):
        values = [value_of(table.rows[place][number]) for place in places]
        form = column_format(column.name, values, unit if column.name else None)
        cells = [absent if value is None else form.cell(value) for value in values]
        right = any(not isinstance(value, str | None) for value in values)
        columns.append(Drawn(column.title or label(column.name), form.unit.symbol, cells, right))
    return columns


def matrix_table(block: Matrix) -> Table:
    """The matrix as a table with a row for each source. If column names are long, row numbers replace them."""
    matrix = block.matrix
    names, heads = matrix.rows, matrix.columns
    if names == heads and max(map(len, heads), default=0) > _LONGEST_HEAD:
        wide = len(str(len(names) - 1))
        names = tuple(f"{number:>{wide}}  {name}" for number, name in enumerate(names))
        heads = tuple(map(str, range(len(heads))))
    columns = (Column("from", whole=True), *(Column(head, matrix.unit) for head in heads))
    rows = tuple((name, *cells) for name, cells in zip(names, matrix.cells, strict=True))
    return Table(columns=columns, rows=rows, title=block.title, note=block.note, one_unit=bool(matrix.unit))


def first_places(table: Table, most: int) -> list[int]:
    """The indices of the rows that a painter shows: all of them, or only the first `most` of `order`."""
    every = range(len(table.rows))
    return list(every) if len(table.rows) <= most else list((table.order or every)[:most])
