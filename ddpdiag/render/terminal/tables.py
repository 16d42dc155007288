"""Tables that fit the width of a page, and names of hosts that are short enough for them.

In a table each character of a name is taken from a figure: "ip-10-0-12-30" stands for
"ip-10-0-12-30.eu-central-1.compute.internal". What all names share and was left out is said once, beside the table.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Literal, NamedTuple

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from ddpdiag.render.page import Page, one_line

ALL_SHOWN = 16
_LONGEST_TEXT = 28


class Column(NamedTuple):
    """One column, ready to be drawn; long texts fold, unless they are to stay `whole`."""

    header: str
    cells: tuple[str, ...]
    right: bool
    styles: tuple[str, ...] = ()
    whole: bool = False

    @property
    def width(self) -> int:
        """Characters that it takes, at most."""
        widest = max(map(cell_len, (*self.header.split("\n"), *self.cells)), default=0)
        return widest if self.right or self.whole else min(widest, _LONGEST_TEXT)


def pieces(names: Sequence[Column], figures: Sequence[Column], *, width: int, gap: int) -> Iterator[tuple[Column, ...]]:
    """The figures, in as many parts as are needed to stay within `width` beside the names."""
    start = sum(column.width + gap for column in names)
    piece: list[Column] = []
    used = start
    for column in figures:
        if piece and used + column.width > width:
            yield tuple(piece)
            piece, used = [], start
        piece.append(column)
        used += column.width + gap
    yield tuple(piece)


def fitted(
    names: Sequence[Column], figures: Sequence[Column], height: int, *, width: int, gap: int | None = None
) -> Iterator[Table]:
    """Tables that fit `width`, each with the names. Two spaces between columns, or one where only then all fit."""
    if gap is None:
        between = len(names) + len(figures) - 1
        room = width - sum(column.width for column in (*names, *figures))
        gap = 1 if between <= room < 2 * between else 2  # two spaces read better, but one table reads better than two
    for piece in pieces(names, figures, width=width, gap=gap):
        yield draw((*names, *piece), height, gap)


def draw(columns: Sequence[Column], height: int, gap: int) -> Table:
    """A table of these columns, with `height` rows and `gap` spaces between columns."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column in columns:
        least = column.width if column.whole else None
        side: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(Text(column.header), justify=side, overflow="fold", min_width=least)
    for row in range(height):
        table.add_row(*(Text(c.cells[row], c.styles[row] if c.styles else "") for c in columns))
    return table


# Longer names take the room of two figures.
LONG = 16
_ADDRESS = re.compile(r"[\d.]+")
# Where a name can be cut so that what is left is still a name.
_CUT = re.compile(r".*[-_.]")


class Short(NamedTuple):
    """What stands for each whole name; `rule` is what "*" is put into to have it back, empty if nothing is left out."""

    names: Mapping[str, str]
    rule: str = ""

    @property
    def longest(self) -> int:
        """Characters of the longest one."""
        return max(map(len, self.names.values()), default=0)


def write_hosts_rule(page: Page, rule: str) -> None:
    """What stands for "*" in a table's names."""
    if rule:
        page.write(one_line(rule), lead="hosts: ", style="dim", lead_style="dim")


def shortened(names: Iterable[str]) -> Short:
    """The names as they are where they are short, else without their domain, else without their beginning as well."""
    every = [*shorter(names)]
    return next((short for short in every if short.longest <= LONG), every[-1])


def shorter(names: Iterable[str]) -> Iterator[Short]:
    """First whole, then ever shorter, as far as they stay different and nothing is left empty."""
    whole = [*dict.fromkeys(names)]
    yield Short({name: name for name in whole})
    domain = _domain(whole)
    heads = [name.removesuffix(domain) for name in whole]
    if domain:
        yield Short(dict(zip(whole, heads, strict=True)), f"*{domain}")
    if prefix := _prefix(heads):
        yield Short({name: head[len(prefix) :] for name, head in zip(whole, heads, strict=True)}, f"{prefix}*{domain}")


def _domain(names: Sequence[str]) -> str:
    """The labels behind the first dot that all names end in, such as ".example.org"."""
    if not names or any(_ADDRESS.fullmatch(name) for name in names):
        return ""
    shared: list[str] = []
    for labels in zip(*(reversed(name.split(".")[1:]) for name in names), strict=False):
        if len(set(labels)) > 1:
            break
        shared.append(f".{labels[0]}")
    domain = "".join(reversed(shared))
    return domain if all(name != domain for name in names) else ""


def _prefix(names: Sequence[str]) -> str:
    """What all of several names begin with, up to its last separator."""
    if len(names) < 2:
        return ""
    # What the first and the last in order begin with, all between them do.
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(min(names), max(names), strict=False))
    match = _CUT.match("".join(letter for letter, _ in shared))
    return match[0] if match and all(len(name) > len(match[0]) for name in names) else ""
