"""Draw blocks as Markdown for GitHub, GitLab and chats, and escape texts of unknown origin.

Host names, error texts and backends come from other machines. They must not become markup, a link, an image or HTML,
end the table or block around them, or notify a person ("@all"). An ASCII text stays ASCII.

Sources: GitHub Flavored Markdown Spec 0.29 (6.1 backslash escapes, 6.9 autolinks, 4.10 tables);
GitHub turns @name, #12 and GH-12 of the rendered text into links, except inside of code.

GitHub allows 65,536 characters in a comment. This module limits the bytes of the escaped text in UTF-8, which are never
fewer than the characters; escaping can turn one character into eight. After each cut, a note says how much is missing;
the JSON report has everything.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, assert_never

from ddpdiag.render.blocks import (
    Block,
    Chart,
    Code,
    Fold,
    HeatMap,
    Items,
    Matrix,
    Section,
    Table,
    Text,
    draw_columns,
    matrix_table,
    shown_row_indices,
    strip_table,
)
from ddpdiag.render.page import one_line
from ddpdiag.sanitize import printable
from ddpdiag.text import count

# An invisible character, written in ASCII. GitHub makes no link of a name, number or address that contains it.
_BREAK = "&#8203;"
_ENTITIES = str.maketrans({"<": "&lt;", ">": "&gt;", "$": "&#36;"})
_AMPERSANDS = re.compile(r"&(?=[#\w])")  # those that may begin an entity
_MARKUP = re.compile(r"[\\`*_\[\]|~!{}]")
_MENTIONS = re.compile(r"(?<=[@#])(?=[\w-])|(?<=:)(?=//)|(?<=www)(?=\.)|(?<=GH)(?=-\d)", re.IGNORECASE)
_SCHEME = re.compile(r"(?<=mailto|..xmpp)(?=:)", re.IGNORECASE)
# Characters that make a line a heading, a list or a rule.
_LINE_STARTS = re.compile(r"(?=[-+](?:[-\s]|$)|[#=]|\d{1,9}[.)](?:\s|$))")
_BACKTICK_RUNS = re.compile(r"`+")
_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def escape(text: str, *, has_code: bool = False) -> str:
    """Escape a text of unknown origin and put it on one line, for any place in a document, also a table's cell.

    With `has_code`, words between single backticks become code, in which nothing is markup. In a cell, "|" would be.
    """
    parts = _CODE.split(one_line(text)) if has_code else [text]  # those with odd numbers are code
    escaped = "".join(
        f"`{part}`" if number % 2 else _MARKUP.sub(r"\\\g<0>", _as_html(part)) for number, part in enumerate(parts)
    ).strip()
    if _LINE_STARTS.match(escaped):
        escaped = _LINE_STARTS.sub(_BREAK_MARK, escaped, count=1)
    return escaped.replace(_BREAK_MARK, _BREAK)


def _as_html(text: str) -> str:
    """Put the text on one line, with HTML entities, and with marks that disable mentions (@name, #12) and links."""
    unlinked = _SCHEME.sub(_BREAK_MARK, _MENTIONS.sub(_BREAK_MARK, one_line(text)))
    return _AMPERSANDS.sub("&amp;", unlinked).translate(_ENTITIES)


# Stands for `_BREAK` while a text is escaped. The text itself has none, because `one_line` replaces it.
_BREAK_MARK = "\u200b"


def fence(text: str, language: str = "sh") -> list[str]:
    """A fenced code block, which readers copy."""
    lines = printable(text).split("\n")
    ticks = "`" * max(3, max((len(run) for line in lines for run in _BACKTICK_RUNS.findall(line)), default=0) + 1)
    return [f"{ticks}{language}", *lines, ticks]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def fold_lines(summary: str, lines: Iterable[str]) -> list[str]:
    """Fold lines behind a summary, which is escaped here. Empty if there are no lines."""
    content = list(lines)
    while content and not content[-1]:
        content.pop()
    if not content:
        return []
    # This line is HTML, in which a backslash escapes nothing.
    head = _as_html(summary).replace(_BREAK_MARK, _BREAK)
    return ["<details>", f"<summary>{head}</summary>", "", *content, "", "</details>", ""]


# Less than GitHub's limit, so that users can add text.
MAX_BYTES = 60_000
_REST_BYTES, _NOUN_BYTES = 1_000, 100
_ELSEWHERE = "in the JSON report"


class Piece(NamedTuple):
    """Lines that are shown or left out together. `noun` names them in the sentence about omitted pieces."""

    noun: str
    lines: Sequence[str]


def byte_size(lines: Iterable[str]) -> int:
    """The bytes of the lines in UTF-8, with their line ends."""
    return sum(len(line.encode("utf-8", "surrogatepass")) + 1 for line in lines)


def fit_pieces(pieces: Iterable[Piece], max_bytes: int = MAX_BYTES) -> list[str]:
    """The lines of the pieces that fit into `max_bytes`, and a sentence about the pieces that are left out."""
    lines: list[str] = []
    omitted: Counter[str] = Counter()
    room = max_bytes - _REST_BYTES
    for piece in pieces:
        if (piece_bytes := byte_size(piece.lines)) <= room:
            lines += piece.lines
            room -= piece_bytes
        else:
            omitted[escape_and_cut(piece.noun, _NOUN_BYTES)] += 1
    if omitted:
        nouns = ", ".join(noun if number == 1 else f"{noun} ({number} times)" for noun, number in omitted.items())
        lines += [f"Left out here, since it is too long for a comment, and {_ELSEWHERE}: {nouns}.", ""]
    return lines


def escape_and_cut(text: str, max_bytes: int, *, has_code: bool = False) -> str:
    """Escape a text as `escape` does, cut to about `max_bytes`, with a note on the missing characters."""
    length = min(len(text), max_bytes)
    while length and (used := byte_size((escape(text[:length], has_code=has_code),))) > max_bytes:
        length = length * max_bytes // used
    left = len(text) - length
    return escape(text[:length], has_code=has_code) + (
        f" ... ({count(left, 'more character')}, {_ELSEWHERE})" if left else ""
    )


def _lines_that_fit(lines: Sequence[str], noun: str, total: int, max_bytes: int) -> tuple[list[str], list[str]]:
    """The first lines that fit into `max_bytes`, and a list with one sentence if any of `total` lines are left out."""
    used_bytes = accumulate(byte_size((line,)) for line in lines)
    shown = [line for line, used in zip(lines, used_bytes, strict=True) if used <= max_bytes]
    omitted = total - len(shown)
    return shown, [f"{count(omitted, f'more {noun}')}, {_ELSEWHERE}"] if omitted else []


_PARAGRAPH_BYTES, _CELL_BYTES, _TABLE_BYTES, _LIST_BYTES = 2_000, 600, 8_000, 6_000
_ROWS_SHOWN, _COLUMNS_SHOWN, _TITLE_LETTERS = 64, 16, 400


def draw_pieces(blocks: Iterable[Block]) -> Iterator[Piece]:
    """Draw the blocks as Markdown, and yield one or more pieces for each block; none for a chart."""
    for block in blocks:
        match block:
            case Section(title=title, blocks=inner):
                pieces = [*draw_pieces(inner)]
                heading = [f"### {_cut_title(title)}", ""] if any(piece.lines for piece in pieces) else []
                yield Piece(_cut_title(title), heading)
                yield from pieces
            case Fold(title=title, blocks=inner):
                yield Piece(
                    _cut_title(title),
                    fold_lines(title[:_TITLE_LETTERS], (line for piece in draw_pieces(inner) for line in piece.lines)),
                )
            case Text(text=text, lead=lead):
                strong = f"**{_cut_title(lead)}:** " if lead else ""
                yield Piece("a sentence", [f"{strong}{escape_and_cut(text, _PARAGRAPH_BYTES, has_code=True)}", ""])
            case Items(items=items, title=title):
                lines = [f"- {escape_and_cut(item, _CELL_BYTES, has_code=True)}" for item in items[:_ROWS_SHOWN]]
                shown, more = _lines_that_fit(lines, "line", len(items), _LIST_BYTES)
                lines = [*_title_lines(title), *shown, *(f"- {sentence}" for sentence in more), ""]
                yield Piece(_cut_title(title) or "a list", lines if items else [])
            case Code(text=text, title=title, language=language):
                yield Piece(_cut_title(title) or "commands", [*_title_lines(title), *fence(text, language), ""])
            case Table():
                yield Piece(_cut_title(block.title) or f"a table of {block.noun}s", _table_lines(block))
            case Matrix() | HeatMap():
                yield from draw_pieces([_table_of(block)])
            case Chart():
                pass
            case _:
                assert_never(block)


def _table_of(block: Matrix | HeatMap) -> Table | Text:
    if isinstance(block, HeatMap):
        return strip_table(block)
    return Text(block.note, block.title) if len(block.matrix.columns) > _COLUMNS_SHOWN else matrix_table(block)


def _cut_title(title: str) -> str:
    return escape_and_cut(title, _TITLE_LETTERS)


def _title_lines(title: str) -> list[str]:
    return [f"**{_cut_title(title)}:**", ""] if title else []


def _table_lines(block: Table) -> list[str]:
    """The lines of a table with its title and note, in about `_TABLE_BYTES`; empty if the table has no rows."""
    if not block.rows:
        return []
    columns = draw_columns(block, shown_row_indices(block, _ROWS_SHOWN), "-")
    cells = zip(*(column.cells for column in columns), strict=True)
    rows = [_row("-" if text == "-" else escape_and_cut(text, _CELL_BYTES) for text in row) for row in cells]
    alignments = _row("---:" if column.is_right_aligned else "---" for column in columns)
    head = [_row(_cut_title(column.heading) for column in columns), alignments]
    shown, more = _lines_that_fit(rows, block.noun, len(block.rows), _TABLE_BYTES - byte_size(head))
    lines = [*head, *shown, *(["", *more] if more else [])] if shown else more
    note = ["", escape_and_cut(block.note, _PARAGRAPH_BYTES)] if block.note else []
    return [*_title_lines(block.title), *lines, *note, ""]
