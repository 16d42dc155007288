"""Draw blocks, and texts of any origin, as Markdown for GitHub, GitLab and chats.

Host names, error texts and backends come from other machines. Nothing of them may become markup, a link, an image or
HTML, end the table or block around it, or notify a person ("@all"). The source of an ASCII text stays ASCII.

Sources: GitHub Flavored Markdown Spec 0.29 (6.1 backslash escapes, 6.9 autolinks, 4.10 tables);
GitHub turns @name, #12 and GH-12 of the rendered text into links, except inside of code.

The document stays short enough for a comment: GitHub takes 65,536 characters. This module counts UTF-8 bytes, which are
never fewer, and counts after escaping, which can turn one character into eight. Wherever a text or list is cut, a note
says how much is missing; the JSON report has all of it.
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
    Items,
    Matrix,
    Section,
    Table,
    Text,
    drawn_columns,
    first_places,
    matrix_table,
)
from ddpdiag.render.page import one_line
from ddpdiag.sanitize import printable
from ddpdiag.text import count

# An invisible break, so that GitHub sees no name, number or address behind it. As an entity it keeps the source ASCII.
_BREAK = "&#8203;"
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;"})
_MARKUP = re.compile(r"[\\`*_\[\]|~!{}]")
_CALLS = re.compile(r"(?<=[@#])(?=[\w-])|(?<=:)(?=//)|(?<=www)(?=\.)|(?<=GH)(?=-\d)", re.IGNORECASE)
_SCHEME = re.compile(r"(?<=mailto|..xmpp)(?=:)", re.IGNORECASE)
# Beginnings of a line that make it a heading, a list or a rule.
_BEGINS = re.compile(r"(?=[-+](?:[-\s]|$)|[#=]|\d{1,9}[.)](?:\s|$))")
_RUNS = re.compile(r"`+")


def words(text: str) -> str:
    """Escape a text of unknown origin, on one line, for any place in a document, a table's cell included."""
    escaped = _MARKUP.sub(r"\\\g<0>", _as_html(text))
    begun = _BEGINS.sub(_BREAK_MARK, escaped.strip(), count=1) if _BEGINS.match(escaped.strip()) else escaped.strip()
    return begun.replace(_BREAK_MARK, _BREAK)


def _as_html(text: str) -> str:
    """The text on one line, with HTML entities. Mentions (@name, #12) and links are broken."""
    broken = _SCHEME.sub(_BREAK_MARK, _CALLS.sub(_BREAK_MARK, one_line(text)))
    return broken.translate(_ENTITIES)


# This character stands for the break while a text is escaped; `one_line` has spelled it out in the text itself.
_BREAK_MARK = "\u200b"


def fence(text: str) -> list[str]:
    """Lines for a shell as a fenced code block, to be copied."""
    lines = printable(text).split("\n")
    ticks = "`" * max(3, max((len(run) for line in lines for run in _RUNS.findall(line)), default=0) + 1)
    return [f"{ticks}sh", *lines, ticks]


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[bool] = ()) -> list[str]:
    """A table of cells that are escaped already; the columns where `right` is true are aligned to the right."""
    aligned = ["---:" if own else "---" for own in right or (False,) * len(headers)]
    return [_row(headers), _row(aligned), *(_row(row) for row in rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def folded(summary: str, lines: Iterable[str]) -> list[str]:
    """Lines that a click on a summary of unknown origin opens. Empty if there are no lines."""
    body = list(lines)
    while body and not body[-1]:
        body.pop()
    if not body:
        return []
    # This line is HTML, in which a backslash escapes nothing.
    head = _as_html(summary).replace(_BREAK_MARK, _BREAK)
    return ["<details>", f"<summary>{head}</summary>", "", *body, "", "</details>", ""]


# Below the limit of GitHub, so that a sentence can be written before it.
MOST_BYTES = 60_000
_REST_BYTES, _NOUN_BYTES = 1_000, 100
_ELSEWHERE = "in the JSON report"


class Piece(NamedTuple):
    """Lines that are shown or left out together, and the noun that names them if they are left out."""

    noun: str
    lines: Sequence[str]


def size(lines: Iterable[str]) -> int:
    """Bytes of these lines, with the ends of the lines."""
    return sum(len(line.encode("utf-8", "surrogatepass")) + 1 for line in lines)


def fitting(pieces: Iterable[Piece], most: int = MOST_BYTES) -> list[str]:
    """The lines of the first pieces that fit into `most` bytes, and a sentence on the pieces that are left out."""
    lines: list[str] = []
    left: Counter[str] = Counter()
    room = most - _REST_BYTES
    for piece in pieces:
        if (own := size(piece.lines)) <= room:
            lines += piece.lines
            room -= own
        else:
            left[said(piece.noun, _NOUN_BYTES)] += 1
    if left:
        nouns = ", ".join(noun if number == 1 else f"{noun} ({number} times)" for noun, number in left.items())
        lines += [f"Left out here, since it is too long for a comment, and {_ELSEWHERE}: {nouns}.", ""]
    return lines


def said(text: str, most: int) -> str:
    """Escape a text of unknown origin, cut to about `most` bytes, and say how many characters are missing."""
    length = min(len(text), most)
    while length and (own := size((words(text[:length]),))) > most:
        length = length * most // own
    left = len(text) - length
    return words(text[:length]) + (f" ... ({count(left, 'more character')}, {_ELSEWHERE})" if left else "")


def listed(lines: Sequence[str], noun: str, *, total: int, most: int) -> list[str]:
    """The first items of a list of `total` items, in at most `most` bytes, and how many more there are."""
    shown, more = _first(lines, noun, total, most)
    return [*shown, *(f"- {sentence}" for sentence in more)]


def tabled(
    headers: Sequence[str],
    cells: Sequence[Sequence[str]],
    noun: str,
    *,
    total: int,
    most: int,
    right: Sequence[bool] = (),
) -> list[str]:
    """The first rows of a table of `total` rows, in at most `most` bytes, and how many more there are."""
    if not cells:
        return []
    lines = table(headers, cells, right=right)
    shown, more = _first(lines[2:], noun, total, most - size(lines[:2]))
    return [*lines[:2], *shown, *(["", *more] if more else [])] if shown else more


def _first(lines: Sequence[str], noun: str, total: int, most: int) -> tuple[list[str], list[str]]:
    """The lines that fit into `most` bytes, and a sentence on the other ones if there are any."""
    sums = accumulate(size((line,)) for line in lines)
    shown = [line for line, used in zip(lines, sums, strict=True) if used <= most]
    left = total - len(shown)
    return shown, [f"{count(left, f'more {noun}')}, {_ELSEWHERE}"] if left else []


def spaced(lines: list[str]) -> list[str]:
    """`lines` with an empty line behind them. Empty if there are none."""
    return [*lines, ""] if lines else []


_PARAGRAPH_BYTES, _CELL_BYTES, _TABLE_BYTES, _LIST_BYTES = 2_000, 600, 8_000, 6_000
_ROWS_SHOWN, _COLUMNS_SHOWN, _TITLE_LETTERS = 64, 16, 400


def painted(blocks: Iterable[Block]) -> Iterator[Piece]:
    """Draw the blocks as Markdown, in pieces that are shown or left out as a whole."""
    for block in blocks:
        match block:
            case Section(title=title, blocks=inner):
                pieces = [*painted(inner)]
                yield Piece(_noun(title), [f"### {_noun(title)}", ""] if any(piece.lines for piece in pieces) else [])
                yield from pieces
            case Fold(title=title, blocks=inner):
                yield Piece(
                    _noun(title),
                    folded(title[:_TITLE_LETTERS], (line for piece in painted(inner) for line in piece.lines)),
                )
            case Text(text=text, lead=lead):
                strong = f"**{_noun(lead)}:** " if lead else ""
                yield Piece("a sentence", [f"{strong}{said(text, _PARAGRAPH_BYTES)}", ""])
            case Items(items=items, title=title):
                lines = [f"- {said(item, _CELL_BYTES)}" for item in items[:_ROWS_SHOWN]]
                lines = spaced(listed(lines, "line", total=len(items), most=_LIST_BYTES))
                yield Piece(_noun(title) or "a list", [*_titled(title), *lines] if lines else [])
            case Code(text=text, title=title):
                yield Piece(_noun(title) or "commands", [*_titled(title), *fence(text), ""])
            case Table():
                lines = spaced(_painted_table(block))
                yield Piece(_noun(block.title) or f"a table of {block.noun}s", lines)
            case Matrix():
                yield from painted(_matrix_blocks(block))
            case Chart():
                pass
            case _:
                assert_never(block)


def _matrix_blocks(own: Matrix) -> Iterator[Block]:
    """The matrix as a table, or its note alone if it has too many columns for a reader."""
    if len(own.matrix.columns) > _COLUMNS_SHOWN:
        yield Text(own.note, own.title)
        return
    yield matrix_table(own)


def _noun(title: str) -> str:
    """Escape a title of unknown origin, and cut it for the sentence on parts that are left out."""
    return said(title, _TITLE_LETTERS)


def _titled(title: str) -> list[str]:
    return [f"**{_noun(title)}:**", ""] if title else []


def _painted_table(own: Table) -> list[str]:
    places = first_places(own, _ROWS_SHOWN)
    columns = drawn_columns(own, places, "-")
    cells = zip(*(column.cells for column in columns), strict=True)
    rows = [tuple("-" if text == "-" else said(text, _CELL_BYTES) for text in row) for row in cells]
    heads = [_noun(column.head) for column in columns]
    right = [column.right for column in columns]
    lines = tabled(heads, rows, own.noun, total=len(own.rows), most=_TABLE_BYTES, right=right)
    note = ["", said(own.note, _PARAGRAPH_BYTES)] if lines and own.note else []
    return [*(_titled(own.title) if lines else []), *lines, *note]
