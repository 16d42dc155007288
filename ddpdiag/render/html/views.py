"""Prepare texts and tables for the templates: texts on one line, and cells with their sort keys and CSS classes.

Texts in a report come from other machines. `cut_line` makes them printable, and the templates escape them.
"""

from typing import NamedTuple

from ddpdiag.model import Scalar
from ddpdiag.render.blocks import (
    Column,
    HeatMap,
    Items,
    Mark,
    Matrix,
    Table,
    draw_columns,
    mark_of,
    shown_row_indices,
    value_of,
)
from ddpdiag.render.page import column_format, one_line
from ddpdiag.text import ABSENT, begun, count, is_number

_ROWS_SHOWN, _ROWS_OPEN, _ITEMS_SHOWN = 400, 16, 48
_SEARCHABLE_ROWS, _DENSE_COLUMNS = 9, 13
_LONG, _SHORTEST_WORD, _LONGEST_WORD = 24, 5, 12

# Longer texts are cut, so that a browser can open the page.
_MAX_LETTERS = 4_000


def cut_line(text: str) -> str:
    """Put `text` on one line, with invisible characters as escapes, and cut it if it is very long."""
    text = one_line(text)
    if len(text) <= _MAX_LETTERS:
        return text
    return f"{text[:_MAX_LETTERS]} [{len(text) - _MAX_LETTERS:,} more letters are in the JSON report]"


def omitted_sentence(number: int) -> str:
    """A sentence with the number of items that are left out. Empty if `number` is 0 or less."""
    return f"{number:,} more are in the JSON report." if number > 0 else ""


class Fact(NamedTuple):
    """A name and its value at the top of the page."""

    name: str
    value: str


class CellView(NamedTuple):
    """A cell of a table. `sort` is its sort key; `style` sets the length of its bar or the strength of its colour."""

    text: str
    sort: float | str
    classes: str
    style: str = ""


class TableView(NamedTuple):
    """A table as text, closed if `folded`. `heads` are (title, is right-aligned) pairs; `kinds` are CSS classes."""

    caption: str
    heads: list[tuple[str, bool]]
    rows: list[tuple[CellView, ...]]
    note: str
    kinds: str
    folded: bool = False
    searchable: bool = False


def view_of(block: Table | Matrix | HeatMap) -> TableView:
    match block:
        case Table():
            return _table_view(block)
        case Matrix():
            return _matrix_view(block)
        case HeatMap():
            return _heat_map_view(block)


def _table_view(table: Table) -> TableView:
    """Prepare the rows that the page shows, with a note on the number of rows that are left out."""
    row_indices = shown_row_indices(table, _ROWS_SHOWN)
    columns = draw_columns(table, row_indices, ABSENT)
    drawn = zip(columns, table.columns, strict=True)
    cells = [
        [
            _cell_view(text, value_of(value), mark_of(value), right=shown.is_right_aligned, full_bar=full_bar)
            for text, value in zip(shown.cells, values, strict=True)
        ]
        for number, (shown, column) in enumerate(drawn)
        for values in [[table.rows[index][number] for index in row_indices]]
        for full_bar in [_full_bar_value(column, table, number)]
    ]
    kinds = ["short"] * (len(row_indices) <= _ROWS_OPEN) + ["dense"] * (len(columns) >= _DENSE_COLUMNS)
    return TableView(
        caption=begun(count(len(table.rows), table.noun)),
        heads=[(cut_line(column.heading), column.is_right_aligned) for column in columns],
        rows=list(zip(*cells, strict=True)),
        note=" ".join(filter(None, (cut_line(table.note), omitted_sentence(len(table.rows) - len(row_indices))))),
        kinds=" ".join(kinds),
        folded=len(row_indices) > _ROWS_OPEN,
        searchable=len(row_indices) >= _SEARCHABLE_ROWS,
    )


def _full_bar_value(column: Column, table: Table, number: int) -> float:
    """The largest number of a column, whose bar fills its cell. 0 for a column without bars."""
    values = (value_of(row[number]) for row in table.rows) if column.bar else ()
    return max((value for value in values if is_number(value) and value < 1e30), default=0.0)


def _cell_view(text: str, value: Scalar, mark: Mark, *, right: bool, full_bar: float) -> CellView:
    text = cut_line(text)
    is_word = not right and _SHORTEST_WORD <= len(text) <= _LONGEST_WORD
    classes = ["right"] * right + ["long"] * (len(text) > _LONG) + ["word"] * is_word
    number = float(value) if is_number(value) and abs(value) < 1e30 else None
    bar = f"{max(0.0, 100 * number / full_bar):.0f}" if full_bar > 0 and number is not None else ""
    classes += [mark.value] * (mark is not Mark.NONE) + ["bar"] * bool(bar)
    return CellView(text, text if number is None else number, " ".join(classes), f"--bar: {bar}%" if bar else "")


def _matrix_view(block: Matrix) -> TableView:
    """Prepare a matrix as a table with a row for each source. Slow rates have the strongest colour."""
    matrix = block.matrix
    rates = [cell for row in matrix.cells for cell in row if matrix.unit and is_number(cell) and 0 < cell < 1e18]
    form = column_format(matrix.unit, rates)
    high = max(rates, default=0.0)
    low = min(min(rates, default=0.0), high / 2)

    def cell_view(value: Scalar) -> CellView:
        if value == 0 and matrix.unit:
            return CellView("failed", 0, "bad")
        if not matrix.unit or not is_number(value) or value < 0 or high <= low:
            text = ABSENT if value is None else cut_line(str(value))
            return CellView(text, "", "right" if matrix.unit else "long" if len(text) > _LONG else "")
        return CellView(form.cell(value), value, "right heat", f"--heat: {100 * (high - value) / (high - low):.0f}%")

    return TableView(
        caption=cut_line(f"{block.title}, in {form.unit.symbol}" if form.unit.symbol else block.title),
        heads=[("from", False), *((cut_line(name), bool(matrix.unit)) for name in matrix.columns)],
        rows=[
            (CellView(cut_line(name), cut_line(name), "long" if len(name) > _LONG else ""), *map(cell_view, row))
            for name, row in zip(matrix.rows, matrix.cells, strict=True)
        ],
        note=cut_line(block.note),
        kinds="matrix dense" if len(matrix.columns) >= _DENSE_COLUMNS else "short",
    )


def _heat_map_view(block: HeatMap) -> TableView:
    """Prepare a heat map. The number in a cell is that of its failures, and an empty cell had no trial."""

    def cell_view(failures: int, trials: int) -> CellView:
        text = str(failures) if failures else "." if trials else ""
        heat = f"--heat: {100 * failures / trials:.0f}%" if failures and trials else ""
        return CellView(text, failures if trials else -1, "heat" if heat else "dim", heat)

    shown = block.rows[:_ROWS_SHOWN]
    note = (
        f"The runs of a {block.column_noun} in which the {block.noun} was blamed, coloured by their share. Empty cell: "
        f"no run that says anything. {omitted_sentence(len(block.rows) - len(shown))}"
    )
    return TableView(
        caption=begun(count(len(block.rows), block.noun)),
        heads=[(block.noun, False), *((cut_line(name), False) for name in block.columns)],
        rows=[
            (CellView(cut_line(name), cut_line(name), ""), *(cell_view(*cell) for cell in cells))
            for name, cells in shown
        ],
        note=note.rstrip(),
        kinds="heat-map matrix",
    )


def shown_items(items: Items) -> list[str]:
    """The items that are shown, each on one line, and a sentence if more are left out."""
    shown = map(cut_line, items.items[:_ITEMS_SHOWN])
    return [*shown, *filter(None, [omitted_sentence(len(items.items) - _ITEMS_SHOWN)])]
