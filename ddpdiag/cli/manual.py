"""Manual pages and the list of codes: the checks of `ddpdiag check` and the rules of `ddpdiag lint` side by side.

Nothing heavy is imported, since a page must be there at once.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping
from inspect import cleandoc
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from ddpdiag.errors import UsageError, nearest

if TYPE_CHECKING:
    from ddpdiag.checks.api import Check
    from ddpdiag.lint import Rule

_LEAST_WIDTH = 40


class CheckRow(NamedTuple):
    """One line of `ddpdiag checks`."""

    code: str
    name: str
    stage: str
    title: str


def explain(
    check: CheckRow, manual: str, settings: Mapping[str, float], *, asked: str = "", width: int, color: bool
) -> str:
    """The manual page of a check, from its docstring: title, then paragraphs. Examples and tables stay as they are.

    `settings` are what --set can change, with their usual values; `asked` is what stands first, on one finding.
    """
    first, _, rest = cleandoc(manual).partition("\n")
    head = f"{check.code} {check.name} (stage: {check.stage})"
    if settings:
        rest += f"\n\nSettings (--set {check.code}.NAME=VALUE): {', '.join(f'{k}={v:g}' for k, v in settings.items())}."
    width = max(width, _LEAST_WIDTH)
    body = "\n\n".join(
        paragraph if _is_block(paragraph) else "\n".join(_fill(part, width) for part in _parts(paragraph))
        for paragraph in _paragraphs(rest)
    )
    lines = [_bold(head, color=color), "", _bold(first, color=color)]
    if asked:
        lines += ["", _fill(asked, width)]
    return "\n".join([*lines, "", body] if body else lines) + "\n"


def _paragraphs(text: str) -> list[str]:
    return [part.strip("\n") for part in text.split("\n\n") if part.strip()]


def _parts(paragraph: str) -> list[str]:
    """The paragraph's items, each begun by a dash, and the text before them."""
    parts: list[str] = []
    for line in paragraph.split("\n"):
        if not parts or line.startswith("- "):
            parts.append(line)
        else:
            parts[-1] += f" {line.strip()}"
    return parts


def _fill(part: str, width: int) -> str:
    hang = "  " if part.startswith("- ") else ""
    words = " ".join(part.split())
    return textwrap.fill(words, width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)


def _is_block(paragraph: str) -> bool:
    """Tables and examples are written line by line; text has every line at the left edge, or at that of its item."""
    lines = paragraph.split("\n")
    listed = any(line.startswith("- ") for line in lines)
    edge = ("   ", "* ", "|", "$ ") if listed else (" ", "* ", "|", "$ ")
    return any(line.startswith(edge) for line in lines)


def checks_table(rows: Iterable[CheckRow], *, tty: bool, width: int, color: bool) -> str:
    """The list of checks: a table for people (`tty`), or one line a check for `grep`."""
    every = list(rows)
    if not tty:
        widths = [max((len(row[column]) for row in every), default=0) for column in range(3)]
        return "".join(
            f"{row.code:<{widths[0]}}  {row.name:<{widths[1]}}  {row.stage:<{widths[2]}}  {row.title}".rstrip() + "\n"
            for row in every
        )
    # Only here, and only for a terminal: rich costs 50 ms.
    from rich.table import Table
    from rich.text import Text

    from ddpdiag.render.page import Page

    page = Page(color=color, width=width)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in CheckRow._fields[:-1]:
        table.add_column(header, no_wrap=True)
    table.add_column("title", overflow="fold")
    for row in every:
        table.add_row(Text(row.code, "bold"), Text(row.name), Text(row.stage, "dim"), Text(row.title))
    page.table(table)
    return page.text()


def _bold(text: str, *, color: bool) -> str:
    # The two escape codes are older than any terminal in use; rich would cost a third of the time that a page may take.
    return f"\x1b[1m{text}\x1b[0m" if color else text


class ManualPage(NamedTuple):
    """A page of the whole manual: a check's, or a lint rule's."""

    row: CheckRow
    manual: str
    settings: Mapping[str, float]


def as_markdown(pages: Iterable[ManualPage], version: str) -> str:
    """The whole manual as one document for GitHub and its like: a list of all pages, then the pages."""
    every = list(pages)
    lines = [f"# ddpdiag {version}: manual", "", "| code | name | stage | question |", "|---|---|---|---|"]
    lines += [
        f"| [{p.row.code}](#{p.row.code.lower()}) | {p.row.name} | {p.row.stage} | {_escaped(p.row.title)} |"
        for p in every
    ]
    for page in every:
        title, _, rest = cleandoc(page.manual).partition("\n")
        code = page.row.code
        lines += ["", f'<a id="{code.lower()}"></a>', f"## {code} {page.row.name}", "", f"**{title}**"]
        lines += ["", "\n\n".join(map(_as_markdown, _paragraphs(rest)))] if rest.strip() else [""]
        if page.settings:
            values = ", ".join(f"`{page.row.code}.{name}={value:g}`" for name, value in page.settings.items())
            lines += ["", f"Settings (`--set`): {values}"]
    return "\n".join(lines) + "\n"


def _as_markdown(paragraph: str) -> str:
    """A paragraph as it is; examples and tables of the text as code, items of lists apart from their heading."""
    if _is_block(paragraph):
        return f"```text\n{textwrap.dedent(paragraph)}\n```"
    return "\n".join(_escaped(item) for item in _parts(paragraph))


def _escaped(text: str) -> str:
    """Words that Markdown would take for markup outside of code: angle brackets, stars, underscores."""
    pieces = " ".join(text.split()).split("`")
    pieces[::2] = [re.sub(r"([*_<>\[\]|])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(pieces)


# The checks of `ddpdiag check` and the rules of `ddpdiag lint` --------------------------------------------------------


def _check_row(check: "Check[Any]") -> CheckRow:
    return CheckRow(check.code, check.name, check.stage.value, check.title)


def _rule_row(rule: "Rule") -> CheckRow:
    return CheckRow(rule.code, rule.name, "lint", rule.title)  # no stage of a run has this name


def manual_page(code: str, *, width: int, color: bool) -> str:
    """The page of a check, of a finding (`TRN001.diverged`) or of a rule; UsageError for a code that is neither."""
    if code.upper().startswith("LNT"):
        from ddpdiag.lint.rules import rule_of

        rule = rule_of(code)
        page = f"{rule.manual.rstrip()}\n\nSeverity: {rule.severity.value}. Quiet: # ddpdiag: ignore[{rule.code}]\n"
        return explain(_rule_row(rule), page, {}, width=width, color=color)
    from ddpdiag.checks.registry import by_code

    check = by_code(code)
    _, _, word = code.partition(".")
    try:
        asked = f"{word}: {check.explained(word.lower()).text}" if word else ""
    except KeyError:
        known = f"expected {', '.join(check.findings)}{nearest(word.lower(), check.findings)}"
        raise UsageError(f"{check.code}.{word.lower()}: unknown finding of {check.code}; {known}") from None
    return explain(_check_row(check), page_of(check), check.thresholds, asked=asked, width=width, color=color)


def page_of(check: "Check[Any]") -> str:
    """The check's text with its findings listed in the paragraph that begins with "Findings"."""
    items = "".join(
        f"{' ' if explained.same_item else f'{chr(10)}- '}{', '.join(word for word, _ in group)}: {explained.text}"
        for explained, group in groupby(check.findings.items(), key=lambda item: item[1])
    )
    return "\n\n".join(part + items if part.startswith("Findings") else part for part in check.manual.split("\n\n"))


def rows() -> list[CheckRow]:
    """Checks in the order in which they run, then rules in the order of their codes."""
    from ddpdiag.checks.registry import all_checks
    from ddpdiag.lint.rules import all_rules

    return [*map(_check_row, all_checks()), *map(_rule_row, all_rules())]


def code_of(name: str) -> str | None:
    """The code of the check or rule of that name ("pcie-link"), or None."""
    return next((row.code for row in rows() if row.name == name.lower()), None)


def write_manual(path: str) -> int:
    """Write all pages into one Markdown document."""
    from ddpdiag import __version__
    from ddpdiag.checks.registry import all_checks
    from ddpdiag.lint.rules import all_rules
    from ddpdiag.render import files

    pages = [
        *(ManualPage(_check_row(check), page_of(check), check.thresholds) for check in all_checks()),
        *(ManualPage(_rule_row(rule), rule.manual, {}) for rule in all_rules()),
    ]
    files.write(path, as_markdown(pages, __version__))
    return 0
