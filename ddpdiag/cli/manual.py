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


class Page(NamedTuple):
    """The manual page of a check or a lint rule: a title, then paragraphs. `settings` are those of --set."""

    code: str
    name: str
    stage: str
    manual: str
    settings: Mapping[str, float]

    @property
    def title(self) -> str:
        """The first line of the manual page, without its full stop."""
        return cleandoc(self.manual).partition("\n")[0].rstrip(".")

    @property
    def paragraphs(self) -> list[str]:
        """The paragraphs behind the title."""
        return _paragraphs(cleandoc(self.manual).partition("\n")[2])


def text_of(page: Page, *, asked: str = "", width: int, color: bool) -> str:
    """The page for a terminal. Examples and tables stay as they are. `asked`, on one finding, comes first."""
    width = max(width, _LEAST_WIDTH)
    paragraphs = page.paragraphs
    if page.settings:
        settings = ", ".join(f"{name}={value:g}" for name, value in page.settings.items())
        paragraphs.append(f"Settings (--set {page.code}.NAME=VALUE): {settings}.")
    body = [
        paragraph if _is_block(paragraph) else "\n".join(_fill(part, width) for part in _parts(paragraph))
        for paragraph in paragraphs
    ]
    head = [f"{page.code} {page.name} (stage: {page.stage})", cleandoc(page.manual).partition("\n")[0]]
    head = [f"\x1b[1m{line}\x1b[0m" for line in head] if color else head
    asked_first = [_fill(asked, width)] if asked else []
    return "\n\n".join([*head, *asked_first, *body]) + "\n"


def _paragraphs(text: str) -> list[str]:
    return [part.strip("\n") for part in text.split("\n\n") if part.strip()]


def _parts(paragraph: str) -> list[str]:
    """The items of a paragraph, each begun by a dash, and the text before them."""
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
    """Whether a paragraph is a table or an example: text has every line at the left edge, or at that of its item."""
    lines = paragraph.split("\n")
    listed = any(line.startswith("- ") for line in lines)
    edge = ("   ", "* ", "|", "$ ") if listed else (" ", "* ", "|", "$ ")
    return any(line.startswith(edge) for line in lines)


def checks_table(pages: Iterable[Page]) -> str:
    """One line for each check or rule: code, name, stage and title."""
    rows = [(page.code, page.name, page.stage, page.title) for page in pages]
    code, name, stage = (max((len(row[column]) for row in rows), default=0) for column in range(3))
    return "".join(f"{row[0]:<{code}}  {row[1]:<{name}}  {row[2]:<{stage}}  {row[3]}\n" for row in rows)


def as_markdown(pages: Iterable[Page], version: str) -> str:
    """The whole manual as one document for GitHub and its like: a list of all pages, then the pages."""
    pages = list(pages)
    lines = [f"# ddpdiag {version}: manual", "", "| code | name | stage | title |", "|---|---|---|---|"]
    lines += [f"| [{p.code}](#{p.code.lower()}) | {p.name} | {p.stage} | {_escaped(p.title)} |" for p in pages]
    for page in pages:
        lines += ["", f'<a id="{page.code.lower()}"></a>', f"## {page.code} {page.name}", "", f"**{page.title}.**"]
        lines += ["", "\n\n".join(map(_as_markdown, page.paragraphs))]
        if page.settings:
            values = ", ".join(f"`{page.code}.{name}={value:g}`" for name, value in page.settings.items())
            lines += ["", f"Settings (`--set`): {values}"]
    return "\n".join(lines) + "\n"


def _as_markdown(paragraph: str) -> str:
    """A paragraph in Markdown: examples and tables as code, items of lists apart from their heading."""
    if _is_block(paragraph):
        return f"```text\n{textwrap.dedent(paragraph)}\n```"
    return "\n".join(_escaped(item) for item in _parts(paragraph))


def _escaped(text: str) -> str:
    """The text with everything escaped that Markdown would take for markup outside of code."""
    pieces = " ".join(text.split()).split("`")
    pieces[::2] = [re.sub(r"([*_<>\[\]|])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(pieces)


# The checks of `ddpdiag check` and the rules of `ddpdiag lint` --------------------------------------------------------


def pages() -> list[Page]:
    """Checks in the order in which they run, then rules in the order of their codes."""
    from ddpdiag.checks.registry import all_checks
    from ddpdiag.lint.rules import all_rules

    return [*map(_page_of_check, all_checks()), *map(_page_of_rule, all_rules())]


def code_of(name: str) -> str | None:
    """The code of the check or rule of that name ("pcie-link"), or None."""
    return next((page.code for page in pages() if page.name == name.lower()), None)


def manual_page(code: str, *, width: int, color: bool) -> str:
    """The page of a check, of a finding (`TRN001.diverged`) or of a rule; UsageError for a code that is neither."""
    if code.upper().startswith("LNT"):
        from ddpdiag.lint.rules import rule_of

        return text_of(_page_of_rule(rule_of(code)), width=width, color=color)
    from ddpdiag.checks.registry import by_code

    check = by_code(code)
    _, _, word = code.partition(".")
    try:
        asked = f"{word}: {check.explained(word.lower()).text}" if word else ""
    except KeyError:
        known = f"expected {', '.join(check.findings)}{nearest(word.lower(), check.findings)}"
        raise UsageError(f"{check.code}.{word.lower()}: unknown finding of {check.code}; {known}") from None
    return text_of(_page_of_check(check), asked=asked, width=width, color=color)


def _page_of_check(check: "Check[Any]") -> Page:
    return Page(check.code, check.name, check.stage.value, page_of(check), check.thresholds)


def _page_of_rule(rule: "Rule") -> Page:
    manual = f"{rule.manual.rstrip()}\n\nSeverity: {rule.severity.value}. Quiet: # ddpdiag: ignore[{rule.code}]"
    return Page(rule.code, rule.name, "lint", manual, {})  # no stage of a run has this name


def page_of(check: "Check[Any]") -> str:
    """The check's text with its findings listed in the paragraph that begins with "Findings"."""
    items = "".join(
        f"{' ' if explained.same_item else f'{chr(10)}- '}{', '.join(word for word, _ in group)}: {explained.text}"
        for explained, group in groupby(check.findings.items(), key=lambda item: item[1])
    )
    return "\n\n".join(part + items if part.startswith("Findings") else part for part in check.manual.split("\n\n"))
