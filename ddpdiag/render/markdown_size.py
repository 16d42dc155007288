"""Markdown that stays short enough for a comment, whatever is in the report; what is left out is said.

GitHub takes comments of 65,536 characters. Here UTF-8 bytes are counted, of which there are never fewer, and after
escaping, which can make eight of one. Whatever is cut says how much is missing; the JSON report has all of it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ddpdiag.render.markup import code, table, words
from ddpdiag.text import count

# Below what GitHub takes, so that somebody can write a sentence before it.
MOST_BYTES = 60_000
_REST_BYTES = 1_000
_ELSEWHERE = "in the JSON report"


class Piece(NamedTuple):
    """Lines that make sense only together, and the noun for what is missing without them."""

    noun: str
    lines: Sequence[str]


def size(lines: Iterable[str]) -> int:
    """Bytes of these lines, with the ends of the lines."""
    return sum(len(line.encode("utf-8", "surrogatepass")) + 1 for line in lines)


def fitting(pieces: Iterable[Piece], most: int = MOST_BYTES) -> list[str]:
    """The lines of the pieces that fit into `most` bytes, the first ones first, and a sentence on the others."""
    lines: list[str] = []
    left: Counter[str] = Counter()
    room = most - _REST_BYTES
    for piece in pieces:
        if (own := size(piece.lines)) <= room:
            lines += piece.lines
            room -= own
        else:
            left[piece.noun] += 1
    if left:
        nouns = ", ".join(noun if number == 1 else f"{noun} ({number} times)" for noun, number in left.items())
        lines += [f"Left out here, since it is too long for a comment, and {_ELSEWHERE}: {nouns}.", ""]
    return lines


def said(text: str, most: int) -> str:
    """A sentence of unknown origin in about `most` bytes, and how many of its characters are missing."""
    length = _fitting_length(text, most, words)
    left = len(text) - length
    return words(text[:length]) + (f" ... ({count(left, 'more character')}, {_ELSEWHERE})" if left else "")


def name(text: str, most: int = 200, *, cell: bool = False) -> str:
    """A name of unknown origin as a code span of about `most` bytes; dots stand for the rest."""
    length = _fitting_length(text, most, lambda part: code(part, cell=cell))
    return code(text if length == len(text) else f"{text[:length]}...", cell=cell)


def _fitting_length(text: str, most: int, show: Callable[[str], str]) -> int:
    """How much of the text can be shown in `most` bytes; what it becomes grows about evenly with it."""
    length = min(len(text), most)
    while length and (own := size((show(text[:length]),))) > most:
        length = length * most // own
    return length


def listed(lines: Sequence[str], noun: str, *, total: int, most: int) -> list[str]:
    """The first items of a list that has `total`, and how many more there are."""
    shown = _first(lines, most)
    left = total - len(shown)
    return [*shown, *([f"- {count(left, f'more {noun}')}, {_ELSEWHERE}"] if left else [])]


def tabled(
    headers: Sequence[str], cells: Sequence[Sequence[str]], noun: str, *, total: int, most: int, right: int = 0
) -> list[str]:
    """The first rows of a table that has `total`, and how many more there are; nothing where there are none."""
    if not cells:
        return []
    lines = table(headers, cells, right=right)
    head = lines[:2]
    shown = _first(lines[2:], most - size(head))
    left = total - len(shown)
    more = [f"{count(left, f'more {noun}')}, {_ELSEWHERE}"] if left else []
    return [*head, *shown, *(["", *more] if more else [])] if shown else more


def _first(lines: Sequence[str], most: int) -> list[str]:
    shown: list[str] = []
    for line in lines:
        most -= size((line,))
        if most < 0:
            break
        shown.append(line)
    return shown


def spaced(lines: list[str]) -> list[str]:
    """Lines with an empty one behind them; nothing where there are none."""
    return [*lines, ""] if lines else []
