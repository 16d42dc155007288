"""What the page says, as data: no markup, and nothing that is not shown.

Every text here comes from a report, so from other machines; `words` makes it printable, and the templates escape it.
"""

from collections.abc import Container

from msgspec import Struct

from ddpdiag.render import blocks
from ddpdiag.render.page import one_line
from ddpdiag.sanitize import printable

# A text beyond this is no message; a page must stay one that opens.
MOST_LETTERS = 4_000


def words(text: str) -> str:
    """`text` on one line, with what is not seen spelled out, and cut where nobody would read on."""
    return _cut(one_line(text))


def paragraphs(text: str) -> str:
    """`text` with its line ends, likewise."""
    return _cut(printable(text))


def _cut(text: str) -> str:
    if len(text) <= MOST_LETTERS:
        return text
    return f"{text[:MOST_LETTERS]} [{len(text) - MOST_LETTERS:,} more letters are in the JSON report]"


def more(left: int) -> str:
    """A sentence on those that are not shown; nothing if none is left."""
    return f"{left:,} more are in the JSON report." if left > 0 else ""


class Cell(Struct, frozen=True):
    """A cell of a table. `sort` is what it sorts by; `mark` is "bad", "warn" or nothing, and never says it alone."""

    text: str
    sort: float | str = ""
    mark: str = ""


class Column(Struct, frozen=True):
    """A column; `right` for numbers."""

    title: str
    right: bool = False


def columns(*titles: str, right: Container[int] = ()) -> tuple[Column, ...]:
    """The columns of a table; those with numbers, `right`, are counted from 0."""
    return tuple(Column(title, right=number in right) for number, title in enumerate(titles))


class Table(Struct, frozen=True, kw_only=True):
    """A table. `sortable` and searchable where there is script; `folded` behind its caption."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    sortable: bool = False
    folded: bool = False


class Figure(Struct, frozen=True, kw_only=True):
    """A picture: `svg` is markup of our own making, `alt` says in words what it shows, `sentence` what is left out."""

    title: str
    svg: str
    alt: str
    sentence: str = ""


class Fact(Struct, frozen=True):
    """A name and its value."""

    name: str
    value: str


class Listed(Struct, frozen=True):
    """Items under a name; long ones, and stacks, are folded."""

    name: str
    items: tuple[str, ...]
    folded: bool


class Text(Struct, frozen=True):
    """A piece of a text; `target` is the anchor on this page that it leads to, or nothing."""

    text: str
    target: str = ""


class FindingBox(Struct, frozen=True, kw_only=True):
    """A finding. `who` is empty where nobody is blamed, of which `nobody` tells, if that is worth telling.

    `rest` are those of its code without a box, below the last that has one.
    """

    severity: str
    code: str
    title: str
    message: str
    who: tuple[Fact, ...]
    about: str
    nobody: str = ""
    expected: tuple[Fact, ...] = ()
    facts: tuple[Fact, ...] = ()
    lists: tuple[Listed, ...] = ()
    fix: tuple[Text, ...] = ()
    commands: str = ""
    rest: Table | None = None


class Section(Struct, frozen=True, kw_only=True):
    """A part of the page under a heading; `name` is its anchor. `items` are sentences below the figures."""

    name: str
    title: str
    sentence: str = ""
    items: Listed | None = None
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()


class Page(Struct, frozen=True, kw_only=True):
    """The whole page: verdict and sentence, the facts of the run, what to paste and why, findings, sections."""

    verdict: str
    verdict_text: str
    sentence: str
    head: str
    facts: tuple[Fact, ...]
    commands: tuple[Fact, ...]
    findings: tuple[FindingBox, ...]
    sections: tuple[Section | blocks.Section, ...]
    notes: tuple[str, ...]
    foot: str
