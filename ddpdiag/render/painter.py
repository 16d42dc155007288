"""Draw blocks on a page for the terminal."""

from collections.abc import Iterable
from itertools import islice
from typing import assert_never

from ddpdiag.render.blocks import (
    Block,
    Chart,
    Code,
    Fold,
    Items,
    Leaf,
    Mark,
    Matrix,
    Section,
    Table,
    Text,
    drawn_columns,
    first_places,
    mark_of,
    matrix_table,
)
from ddpdiag.render.page import ALL_SHOWN, MOST_SHOWN, Column, Page, fitted, one_line
from ddpdiag.text import ABSENT, count

STYLES = {Mark.NONE: "", Mark.GOOD: "green", Mark.WARNING: "bold yellow", Mark.ERROR: "bold red", Mark.DIM: "dim"}
_ITEMS_SHOWN = 8


def paint(page: Page, blocks: Iterable[Block], *, details: bool = False) -> None:
    """Write the blocks. With `details` nothing is shortened, and folds are shown, too."""
    for block in blocks:
        if isinstance(block, Section) or (isinstance(block, Fold) and details):
            _write_title(page, block.title)
            paint(page, block.blocks, details=details)
        elif not isinstance(block, Fold):
            _write(page, block, details=details)


def _write(page: Page, block: Leaf, *, details: bool) -> None:
    match block:
        case Text():
            _write_text(page, block)
        case Items():
            _write_items(page, block, details=details)
        case Code(text=text, title=title):
            _write_title(page, title)
            for line in text.split("\n"):
                page.verbatim(line, indent=4)
            page.blank()
        case Table():
            write_table(page, block, details=details)
        case Matrix():
            write_table(page, matrix_table(block), details=details)
        case Chart():
            pass
        case _:
            assert_never(block)


def _write_text(page: Page, block: Text) -> None:
    style = STYLES[block.mark]
    if block.lead:
        page.write(block.text, lead=f"{block.lead}: ", lead_style=style or "bold")
    else:
        page.write(block.text, style=style)
    page.blank()


def _write_items(page: Page, block: Items, *, details: bool) -> None:
    _write_title(page, block.title)
    shown = block.items if details or len(block.items) <= _ITEMS_SHOWN + 1 else block.items[:_ITEMS_SHOWN]
    for item in shown:
        page.write(item, lead="- ")
    _write_left(page, len(block.items) - len(shown), "line", details=details)
    page.blank()


def write_table(page: Page, table: Table, *, details: bool = False) -> None:
    """Write a table, in pieces if the page is too narrow. Each piece begins with the columns that name a row."""
    if not table.rows:
        return
    places = first_places(table, MOST_SHOWN if details else ALL_SHOWN)
    _write_title(page, table.title)
    columns = []
    for number, drawn in enumerate(drawn_columns(table, places, ABSENT if page.color else "-")):
        styles = tuple(STYLES[mark_of(table.rows[place][number])] for place in places)
        header = f"{one_line(drawn.title)}\n{drawn.symbol}".rstrip("\n")
        whole = table.columns[number].whole
        columns.append(Column(header, tuple(map(one_line, drawn.cells)), drawn.right, styles, whole))
    names = table.names or 1
    tables = fitted(columns[:names], columns[names:], len(places), width=page.width)
    for piece in tables if details or table.names is None else islice(tables, 1):
        page.table(piece)
        shown = len(piece.columns)
    _write_left(page, len(table.rows) - len(places), table.noun, details=details)
    if not details and (left := [one_line(column.header.split("\n")[0]) for column in columns[shown:]]) and table.names:
        page.write(f"not shown for lack of room (--details): {', '.join(left)}", style="dim")
    if table.note:
        page.write(table.note, style="dim")
    page.blank()


def _write_title(page: Page, title: str) -> None:
    if title:
        page.write(one_line(title), style="bold")


def _write_left(page: Page, left: int, noun: str, *, details: bool) -> None:
    if left:
        place = "in the JSON report" if details else "with --details, or in the JSON report"
        page.write(f"{count(left, f'more {noun}')}, {place}", style="dim")
