"""Words as Markdown of GitHub, GitLab and chats shows them, whoever wrote them.

Host names, error texts and backends come from other machines. Nothing of them may become markup, a link, an image or
HTML, end the table or block that it stands in, or call somebody by name ("@all"). Names stand in code spans, in which
nothing is interpreted; sentences are escaped. The source stays ASCII where the text is.

Sources: GitHub Flavored Markdown Spec 0.29 (6.1 backslash escapes, 6.3 code spans, 6.9 autolinks, 4.10 tables);
GitHub turns @name, #12 and GH-12 of the rendered text into links, except inside of code.
"""

import re
from collections.abc import Iterable, Sequence

from ddpdiag.foreign import printable
from ddpdiag.render.page import one_line

# An invisible break: what follows is no name, number or address any more. A reference, so that the source stays ASCII.
_BREAK = "&#8203;"
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;"})
_MARKUP = re.compile(r"[\\`*_\[\]|~!{}]")
_CALLS = re.compile(r"(?<=[@#])(?=[\w-])|(?<=:)(?=//)|(?<=www)(?=\.)|(?<=GH)(?=-\d)", re.IGNORECASE)
_SCHEME = re.compile(r"(?<=mailto|..xmpp)(?=:)", re.IGNORECASE)
# What makes a heading, a list or a rule of the line that it begins.
_BEGINS = re.compile(r"(?=[-+](?:[-\s]|$)|[#=]|\d{1,9}[.)](?:\s|$))")
_RUNS = re.compile(r"`+")


def words(text: str) -> str:
    """A sentence of unknown origin, in one line; it may stand anywhere, a table's cell included."""
    escaped = _MARKUP.sub(r"\\\g<0>", _as_html(text))
    begun = _BEGINS.sub(_BREAK_MARK, escaped.strip(), count=1) if _BEGINS.match(escaped.strip()) else escaped.strip()
    return begun.replace(_BREAK_MARK, _BREAK)


def _as_html(text: str) -> str:
    """One line with entities; calls and links are broken."""
    broken = _SCHEME.sub(_BREAK_MARK, _CALLS.sub(_BREAK_MARK, one_line(text)))
    return broken.translate(_ENTITIES)


# While text is escaped, the break is a character that `one_line` has spelled out wherever it stood.
_BREAK_MARK = "\u200b"


def code(text: str, *, cell: bool = False) -> str:
    """A name of unknown origin as a code span; in a table's `cell` its bars are escaped."""
    line = one_line(text).strip()
    if not line:
        return "-"
    ticks = "`" * (max(map(len, _RUNS.findall(line)), default=0) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    span = f"{ticks}{pad}{line}{pad}{ticks}"
    # In a cell a bar ends it even inside of code, and a backslash before it is taken away.
    return words(text) if cell and "|" in line else span


def block(text: str, language: str = "") -> list[str]:
    """Lines to be copied, as a fenced block."""
    lines = printable(text).split("\n")
    ticks = "`" * max(3, max((len(run) for line in lines for run in _RUNS.findall(line)), default=0) + 1)
    return [f"{ticks}{language}", *lines, ticks]


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, right: int = 0) -> list[str]:
    """A table of cells that are escaped already; columns from number `right` on (1 is the first) stand right."""
    aligned = ["---:" if right and number >= right else "---" for number in range(1, len(headers) + 1)]
    return [_row(headers), _row(aligned), *(_row(row) for row in rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def folded(summary: str, lines: Iterable[str]) -> list[str]:
    """Lines behind a summary of unknown origin, which a click opens; nothing where there are none."""
    body = list(lines)
    if not body:
        return []
    # The line is HTML, where a backslash is one.
    head = _as_html(summary).replace(_BREAK_MARK, _BREAK)
    return ["<details>", f"<summary>{head}</summary>", "", *body, "", "</details>", ""]
