"""The blocks of a report: a feature describes its tables and texts once, and three painters draw them.

A feature has one function for all formats, `blocks(report) -> Iterator[Section]`, which gives only values. The painters
decide on width, colour, escaping, cutting of texts and the number of rows.

    def blocks(report: Report) -> Iterator[Section]:
        table = Table(
            columns=(
                Column("strategy"),
                Column("samples/s", bar=True),
                Column(name="peak_bytes"),  # titled "peak"; its numbers share one unit, such as GiB
                Column("efficiency", "efficiency_share"),  # a share of 1, shown in %
            ),
            rows=tuple((row.name, row.rate, row.peak_bytes, row.efficiency) for row in report.train.rows),
            noun="strategy",
            note="Efficiency: the rate of each device over that of one alone.",
        )
        yield Section("Strategies", (table, Fold("Losses", (Chart(...),))), name="strategies")

A value is a number in SI units, a text as it was recorded, or None if it is not known. Painters show numbers in a
suitable unit, and escape texts. Words between backticks are shown as code.

| painter | leaves out | adds |
|---|---|---|
| terminal (`painter.py`) | rows after the first 16, and folds, both unless `--details`; charts | colours |
| Markdown (`markup.py`) | all that does not fit into a comment on GitHub; charts | folds |
| HTML (`html/`) | rows after the first 400 | folds, sorting, search, bars, coloured matrices and heat maps, charts |
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
    """The emphasis of a text. The values are the names of CSS classes."""

    NONE = ""
    GOOD = "good"
    WARNING = "warn"
    ERROR = "bad"
    DIM = "dim"


class Cell(NamedTuple):
    """A value of a table with emphasis. The mark only repeats what the value says, for readers who skim."""

    value: Scalar
    mark: Mark = Mark.NONE


class Column(Struct, frozen=True):
    """A column of a table. `name` is a name with a unit at its end, such as "peak_bytes", for a column of numbers.

    Without a `title`, the rest of `name` is the title. `bar`: HTML also shows each number as a bar. `no_wrap`: cells
    are not wrapped, because readers copy them.
    """

    title: str = ""
    name: str = ""
    bar: bool = False
    no_wrap: bool = False


class Table(Struct, frozen=True, kw_only=True):
    """A table. `noun` says what a row stands for, such as "rank". `order` has the indices of the rows by importance.

    The first `key_columns` columns identify a row. If a terminal is too narrow, it shows these and as many others as
    fit; with `--details`, or if `key_columns` is None, it shows all others, in several tables below each other. With
    `shares_unit`, all numbers of the table have one unit, that of the last column's name.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Scalar | Cell, ...], ...]
    title: str = ""
    noun: str = "row"
    note: str = ""
    order: tuple[int, ...] | None = None
    key_columns: int | None = None
    shares_unit: bool = False


class Text(Struct, frozen=True):
    """A paragraph. `lead` is a short label in front of it, such as "Fix"."""

    text: str
    lead: str = ""
    mark: Mark = Mark.NONE


class Items(Struct, frozen=True):
    """A list of sentences or names."""

    items: tuple[str, ...]
    title: str = ""


class Code(Struct, frozen=True):
    """Lines of code, which readers copy unchanged. Markdown colours it as `language`."""

    text: str
    title: str = ""
    language: str = "sh"


class Line(Struct, frozen=True):
    """A curve of a chart, with its (x, y) points in rising order of x. A dashed line shows expected values."""

    name: str
    points: tuple[tuple[float, float], ...]
    is_dashed: bool = False


class Chart(Struct, frozen=True, kw_only=True):
    """Curves over a logarithmic x axis. The names of the axes end in their unit, such as "size_bytes".

    Only HTML draws charts, so a table must have the same numbers.
    """

    title: str
    x_name: str
    y_name: str
    lines: tuple[Line, ...]


class Matrix(Struct, frozen=True):
    """Rates (coloured in HTML) or words for pairs, such as GPUs or hosts. `note` explains these rates or words."""

    title: str
    matrix: model.Matrix
    note: str = ""


class HeatMap(Struct, frozen=True, kw_only=True):
    """Failures by row and column, such as those of hosts by day. A cell is (failures, trials).

    `noun` says what a row stands for, and `column_noun` what a column does. HTML colours each cell by its share of
    failures. The other painters write a letter for each cell, or for some neighbouring cells if there are many.
    """

    noun: str
    column_noun: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]


class Fold(Struct, frozen=True):
    """Blocks that readers open by a click on the title. A terminal shows them only with `--details`."""

    title: str
    blocks: tuple["Block", ...]


class Section(Struct, frozen=True):
    """Blocks under a heading. `name` is the section's id in HTML, where sections are not nested."""

    title: str
    blocks: tuple["Block", ...]
    name: str = ""


_MAX_HEADING_LETTERS = 8  # of a matrix, whose columns are narrow

_MAX_STRIP_LETTERS = 60  # of a row of a heat map, beside its name in 80 columns

Leaf = Table | Text | Items | Code | Chart | Matrix | HeatMap
Block = Leaf | Fold | Section


class DrawnColumn(NamedTuple):
    """A column as text: its title, the symbol of its unit, and the text of each cell."""

    title: str
    unit_symbol: str
    cells: list[str]
    is_right_aligned: bool

    @property
    def heading(self) -> str:
        """The title and the unit on one line, such as "peak GiB"."""
        return f"{self.title} {self.unit_symbol}".strip()


def value_of(cell: Scalar | Cell) -> Scalar:
    return cell.value if isinstance(cell, Cell) else cell


def mark_of(cell: Scalar | Cell) -> Mark:
    return cell.mark if isinstance(cell, Cell) else Mark.NONE


def draw_columns(table: Table, row_indices: Sequence[int], absent_text: str) -> list[DrawnColumn]:
    """Convert the rows at `row_indices` to columns of text, each in one unit. `absent_text` stands for None."""
    columns = []
    unit = None
    if table.shares_unit:
        unit = column_unit(table.columns[-1].name, (value_of(cell) for row in table.rows for cell in row))
    for number, column in enumerate(table.columns):
        values = [value_of(table.rows[index][number]) for index in row_indices]
        number_format = column_format(column.name, values, unit if column.name else None)
        cells = [absent_text if value is None else number_format.cell(value) for value in values]
        right_aligned = any(not isinstance(value, str | None) for value in values)
        columns.append(DrawnColumn(column.title or label(column.name), number_format.unit.symbol, cells, right_aligned))
    return columns


def matrix_table(block: Matrix) -> Table:
    """The matrix as a table with a row for each source. Long names of columns are replaced by the numbers of rows."""
    matrix = block.matrix
    names, headings = matrix.rows, matrix.columns
    if names == headings and max(map(len, headings), default=0) > _MAX_HEADING_LETTERS:
        digits = len(str(len(names) - 1))
        names = tuple(f"{number:>{digits}}  {name}" for number, name in enumerate(names))
        headings = tuple(map(str, range(len(headings))))
    columns = (Column("from", no_wrap=True), *(Column(head, matrix.unit) for head in headings))
    rows = tuple((name, *cells) for name, cells in zip(names, matrix.cells, strict=True))
    return Table(columns=columns, rows=rows, title=block.title, note=block.note, shares_unit=bool(matrix.unit))


def strip_table(block: HeatMap) -> Table:
    """The heat map as a table with a text for each row: "x" is a cell with failures, "." one without, "-" no trial."""
    size = max(1, -(-len(block.columns) // _MAX_STRIP_LETTERS))

    def letter(cells: Sequence[tuple[int, int]]) -> str:
        return "x" if any(failures for failures, _ in cells) else "." if any(trials for _, trials in cells) else "-"

    rows = tuple(
        (name, "".join(letter(cells[begin : begin + size]) for begin in range(0, len(cells), size)))
        for name, cells in block.rows
    )
    columns = (Column(block.noun, no_wrap=True), Column(f"{block.column_noun}s", no_wrap=True))
    span = f"a {block.column_noun}" if size == 1 else f"{size} {block.column_noun}s"
    note = f"A letter for {span}, from {block.columns[0]} on: x blamed, . healthy, - no run that says anything."
    return Table(columns=columns, rows=rows, noun=block.noun, note=note)


def shown_row_indices(table: Table, max_rows: int) -> list[int]:
    """The indices of the rows that a painter shows: all rows, or the first `max_rows` of `table.order`."""
    row_indices = range(len(table.rows))
    return list(row_indices) if len(table.rows) <= max_rows else list((table.order or row_indices)[:max_rows])
