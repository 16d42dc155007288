"""Texts and blocks as the templates need them: texts on one line, rows of a table with what they sort by.

Every text comes from a report, so from other machines: `words` makes it printable, and the templates escape it.
"""

from typing import NamedTuple

from ddpdiag.model import Scalar
from ddpdiag.render.blocks import Column, Items, Mark, Matrix, Table, drawn_columns, first_places, mark_of, value_of
from ddpdiag.render.page import column_format, one_line
from ddpdiag.text import ABSENT, begun, count, is_number

_ROWS_SHOWN, _ROWS_OPEN, _ITEMS_SHOWN = 400, 16, 48
_SEARCHABLE_ROWS, _DENSE_COLUMNS = 9, 13
_LONG, _SHORTEST_WORD, _LONGEST_WORD = 24, 5, 12

# Longer texts are cut, so that a browser can open the page.
_MOST_LETTERS = 4_000


def words(text: str) -> str:
    """`text` on one line, with invisible characters spelled out."""
    text = one_line(text)
    if len(text) <= _MOST_LETTERS:
        return text
    return f"{text[:_MOST_LETTERS]} [{len(text) - _MOST_LETTERS:,} more letters are in the JSON report]"


def more(left: int) -> str:
    """A sentence on how many things are not shown. Empty if all are."""
    return f"{left:,} more are in the JSON report." if left > 0 else ""


class Fact(NamedTuple):
    """A name and its value."""

    name: str
    value: str


class CellView(NamedTuple):
    """A cell: its text, what it sorts by, its CSS classes and its style: the length of a bar, or a heat in percent."""

    text: str
    sort: float | str
    classes: str
    style: str = ""


class TableView(NamedTuple):
    """A table as texts. A long one is `folded` (opened by a click) and `searchable`."""

    caption: str
    heads: list[tuple[str, bool]]
    rows: list[tuple[CellView, ...]]
    note: str
    kinds: str
    folded: bool
    searchable: bool


def view_of(block: Table | Matrix) -> TableView:
    return _table_view(block) if isinstance(block, Table) else _matrix_view(block)


def _table_view(table: Table) -> TableView:
    """The rows that the page shows, and a note that says how many it leaves out."""
    places = first_places(table, _ROWS_SHOWN)
    columns = drawn_columns(table, places, ABSENT)
    drawn = zip(columns, table.columns, strict=True)
    cells = [
        [
            _cell(text, value_of(value), mark_of(value), right=shown.right, longest=longest)
            for text, value in zip(shown.cells, values, strict=True)
        ]
        for number, (shown, column) in enumerate(drawn)
        for values in [[table.rows[place][number] for place in places]]
        for longest in [_longest(column, table, number)]
    ]
    kinds = ["short"] * (len(places) <= _ROWS_OPEN) + ["dense"] * (len(columns) >= _DENSE_COLUMNS)
    return TableView(
        caption=begun(count(len(table.rows), table.noun)),
        heads=[(words(column.head), column.right) for column in columns],
        rows=list(zip(*cells, strict=True)),
        note=" ".join(filter(None, (words(table.note), more(len(table.rows) - len(places))))),
        kinds=" ".join(kinds),
        folded=len(places) > _ROWS_OPEN,
        searchable=len(places) >= _SEARCHABLE_ROWS,
    )


def _longest(column: Column, table: Table, number: int) -> float:
    """The number whose bar takes the whole cell; 0 for a column without bars."""
    values = (value_of(row[number]) for row in table.rows) if column.bar else ()
    return max((value for value in values if is_number(value) and value < 1e30), default=0.0)


def _cell(text: str, value: Scalar, mark: Mark, *, right: bool, longest: float) -> CellView:
    text = words(text)
    short = not right and _SHORTEST_WORD <= len(text) <= _LONGEST_WORD
    classes = ["right"] * right + ["long"] * (len(text) > _LONG) + ["word"] * short
    number = float(value) if is_number(value) and abs(value) < 1e30 else None
    bar = f"{max(0.0, 100 * number / longest):.0f}" if longest > 0 and number is not None else ""
    classes += [mark.value] * (mark is not Mark.NONE) + ["bar"] * bool(bar)
    return CellView(text, text if number is None else number, " ".join(classes), f"--bar: {bar}%" if bar else "")


def _matrix_view(block: Matrix) -> TableView:
    """A table with a row for each source; of rates, the slow ones have the most colour."""
    matrix = block.matrix
    rates = [cell for row in matrix.cells for cell in row if matrix.unit and is_number(cell) and 0 < cell < 1e18]
    form = column_format(matrix.unit, rates)
    high = max(rates, default=0.0)
    low = min(min(rates, default=0.0), high / 2)

    def view(value: Scalar) -> CellView:
        if value == 0 and matrix.unit:
            return CellView("failed", 0, "bad")
        if not matrix.unit or not is_number(value) or value < 0 or high <= low:
            text = ABSENT if value is None else words(str(value))
            return CellView(text, "", "right" if matrix.unit else "long" if len(text) > _LONG else "")
        return CellView(form.cell(value), value, "right heat", f"--heat: {100 * (high - value) / (high - low):.0f}%")

    return TableView(
        caption=words(f"{block.title}, in {form.unit.symbol}" if form.unit.symbol else block.title),
        heads=[("from", False), *((words(name), bool(matrix.unit)) for name in matrix.columns)],
        rows=[
            (CellView(words(name), words(name), "long" if len(name) > _LONG else ""), *map(view, row))
            for name, row in zip(matrix.rows, matrix.cells, strict=True)
        ],
        note=words(block.note),
        kinds="matrix dense" if len(matrix.columns) >= _DENSE_COLUMNS else "short",
        folded=False,
        searchable=False,
    )


def shown_items(items: Items) -> list[str]:
    """The items on one line each, and how many are left out."""
    left = len(items.items) - _ITEMS_SHOWN
    return [*map(words, items.items[:_ITEMS_SHOWN]), *([more(left)] if left > 0 else [])]
