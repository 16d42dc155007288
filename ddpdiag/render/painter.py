"""Draw blocks on a page for the terminal."""

from collections.abc import Iterable
from itertools import islice
from typing import assert_never

from ddpdiag.render.blocks import (
    Block,
    Chart,
    Code,
    Fold,
    HeatMap,
    Items,
    Leaf,
    Mark,
    Matrix,
    Section,
    Table,
    Text,
    draw_columns,
    mark_of,
    matrix_table,
    shown_row_indices,
    strip_table,
)
from ddpdiag.render.page import DETAIL_ROWS_SHOWN, ROWS_SHOWN, Column, Page, fit_tables, one_line
from ddpdiag.text import ABSENT, count

STYLES = {Mark.NONE: "", Mark.GOOD: "green", Mark.WARNING: "bold yellow", Mark.ERROR: "bold red", Mark.DIM: "dim"}
_ITEMS_SHOWN = 8


def paint(page: Page, blocks: Iterable[Block], *, details: bool = False) -> None:
    """Write the blocks on the page. With `details`, folds are shown, and lists and up to 1,000 rows of a table."""
    for block in blocks:
        if isinstance(block, Section) or (isinstance(block, Fold) and details):
            _write_title(page, block.title)
            paint(page, block.blocks, details=details)
        elif not isinstance(block, Fold):
            _write(page, block, details=details)


def _write(page: Page, block: Leaf, *, details: bool) -> None:
    match block:
        case Text(text=text, lead="", mark=mark):
            page.write(text, style=STYLES[mark])
            page.blank()
        case Text(text=text, lead=lead, mark=mark):
            page.write(text, lead=f"{lead}: ", lead_style=STYLES[mark] or "bold")
            page.blank()
        case Items():
            _write_items(page, block, details=details)
        case Code(text=text, title=title):
            _write_title(page, title)
            for line in text.split("\n"):
                page.write_verbatim(line, indent=4)
            page.blank()
        case Table():
            write_table(page, block, details=details)
        case Matrix():
            write_table(page, matrix_table(block), details=details)
        case HeatMap():
            write_table(page, strip_table(block), details=details)
        case Chart():
            pass
        case _:
            assert_never(block)


def _write_items(page: Page, block: Items, *, details: bool) -> None:
    _write_title(page, block.title)
    shown = block.items if details or len(block.items) <= _ITEMS_SHOWN + 1 else block.items[:_ITEMS_SHOWN]
    for item in shown:
        page.write(item, lead="- ")
    _write_omitted(page, len(block.items) - len(shown), "line", details=details)
    page.blank()


def write_table(page: Page, table: Table, *, details: bool = False) -> None:
    """Write a table. A wide one is split; of the parts of one with `key_columns`, only `details` shows all."""
    if not table.rows:
        return
    row_indices = shown_row_indices(table, DETAIL_ROWS_SHOWN if details else ROWS_SHOWN)
    _write_title(page, table.title)
    columns = []
    for number, drawn in enumerate(draw_columns(table, row_indices, ABSENT if page.color else "-")):
        styles = tuple(STYLES[mark_of(table.rows[index][number])] for index in row_indices)
        header = f"{one_line(drawn.title)}\n{drawn.unit_symbol}".rstrip("\n")
        no_wrap = table.columns[number].no_wrap
        columns.append(Column(header, tuple(map(one_line, drawn.cells)), drawn.is_right_aligned, styles, no_wrap))
    names = table.key_columns or 1
    tables = fit_tables(columns[:names], columns[names:], len(row_indices), width=page.width)
    for piece in tables if details or table.key_columns is None else islice(tables, 1):
        page.table(piece)
        shown = len(piece.columns)
    _write_omitted(page, len(table.rows) - len(row_indices), table.noun, details=details)
    omitted = [one_line(column.header.split("\n")[0]) for column in columns[shown:]]
    if omitted and table.key_columns and not details:
        page.write(f"not shown for lack of room (--details): {', '.join(omitted)}", style="dim")
    if table.note:
        page.write(table.note, style="dim")
    page.blank()


def _write_title(page: Page, title: str) -> None:
    if title:
        page.write(one_line(title), style="bold")


def _write_omitted(page: Page, omitted: int, noun: str, *, details: bool) -> None:
    if omitted:
        place = "in the JSON report" if details else "with --details, or in the JSON report"
        page.write(f"{count(omitted, f'more {noun}')}, {place}", style="dim")
