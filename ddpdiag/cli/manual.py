"""Manual pages, and the list of all codes, for the checks of `ddpdiag check` and the rules of `ddpdiag lint`.

Slow imports are avoided, so that a page is shown at once.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping
from inspect import cleandoc
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from ddpdiag.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from ddpdiag.checks.api import Check
    from ddpdiag.lint import Rule

_MIN_WIDTH = 40


class Page(NamedTuple):
    """The manual page of a check or a lint rule. `settings` are the defaults of `--set`, by name."""

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
        """The paragraphs after the title."""
        return _paragraphs(cleandoc(self.manual).partition("\n")[2])


def page_text(page: Page, *, finding_text: str = "", width: int, color: bool) -> str:
    """The page as text for a terminal. If `finding_text` explains one finding, it is the first paragraph."""
    width = max(width, _MIN_WIDTH)
    paragraphs = page.paragraphs
    if page.settings:
        settings = ", ".join(f"{name}={value:g}" for name, value in page.settings.items())
        paragraphs.append(f"Settings (--set {page.code}.NAME=VALUE): {settings}.")
    body = [
        paragraph if _is_preformatted(paragraph) else "\n".join(_fill(part, width) for part in _split_items(paragraph))
        for paragraph in paragraphs
    ]
    head_lines = [f"{page.code} {page.name} (stage: {page.stage})", cleandoc(page.manual).partition("\n")[0]]
    head_lines = [f"\x1b[1m{line}\x1b[0m" for line in head_lines] if color else head_lines
    finding_paragraphs = [_fill(finding_text, width)] if finding_text else []
    return "\n\n".join([*head_lines, *finding_paragraphs, *body]) + "\n"


def _paragraphs(text: str) -> list[str]:
    return [part.strip("\n") for part in text.split("\n\n") if part.strip()]


def _split_items(paragraph: str) -> list[str]:
    """Split a paragraph into its list items, which begin with a dash, and the text before them, each on one line."""
    parts: list[str] = []
    for line in paragraph.split("\n"):
        if not parts or line.startswith("- "):
            parts.append(line)
        else:
            parts[-1] += f" {line.strip()}"
    return parts


def _fill(part: str, width: int) -> str:
    indent = "  " if part.startswith("- ") else ""
    words = " ".join(part.split())
    return textwrap.fill(words, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _is_preformatted(paragraph: str) -> bool:
    """Whether a paragraph is a table or an example, whose lines are kept. In a list, items are indented by two."""
    lines = paragraph.split("\n")
    is_list = any(line.startswith("- ") for line in lines)
    prefixes = ("   " if is_list else " ", "* ", "|", "$ ")
    return any(line.startswith(prefixes) for line in lines)


def checks_table(pages: Iterable[Page]) -> str:
    """The pages as a table, one line for each: code, name, stage and title."""
    rows = [(page.code, page.name, page.stage, page.title) for page in pages]
    code, name, stage = (max((len(row[column]) for row in rows), default=0) for column in range(3))
    return "".join(f"{row[0]:<{code}}  {row[1]:<{name}}  {row[2]:<{stage}}  {row[3]}\n" for row in rows)


def as_markdown(pages: Iterable[Page], version: str) -> str:
    """All pages as one Markdown document, with a table of contents."""
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
    """A paragraph in Markdown. Examples and tables become code blocks."""
    if _is_preformatted(paragraph):
        return f"```text\n{textwrap.dedent(paragraph)}\n```"
    return "\n".join(_escaped(item) for item in _split_items(paragraph))


def _escaped(text: str) -> str:
    """Escape the characters that are markup in Markdown, but not within `code`."""
    pieces = " ".join(text.split()).split("`")
    pieces[::2] = [re.sub(r"([*_<>\[\]|])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(pieces)


# The checks of `ddpdiag check` and the rules of `ddpdiag lint` --------------------------------------------------------


def pages() -> list[Page]:
    """All pages: the checks in the order in which they run, then the rules in the order of their codes."""
    from ddpdiag.checks.registry import all_checks
    from ddpdiag.lint.rules import all_rules

    return [*map(_page_of_check, all_checks()), *map(_page_of_rule, all_rules())]


def code_of(name: str) -> str | None:
    """The code of the check or rule with this name ("pcie-link"), or None."""
    return next((page.code for page in pages() if page.name == name.lower()), None)


def manual_page(code: str, *, width: int, color: bool) -> str:
    """The text of the page of a check, a finding (`TRN001.diverged`) or a rule. UsageError for an unknown code."""
    if code.upper().startswith("LNT"):
        from ddpdiag.lint.rules import rule_of

        return page_text(_page_of_rule(rule_of(code)), width=width, color=color)
    if code.upper().partition(".")[0] == "GRP001":  # made by the Python API, so no check of a run has it
        from ddpdiag.judgement import groups

        return page_text(Page(groups.CODE, "groups", "training", groups.__doc__ or "", {}), width=width, color=color)
    from ddpdiag.checks.registry import check_by_code

    check = check_by_code(code)
    _, _, word = code.partition(".")
    try:
        finding_text = f"{word}: {check.spec_of(word.lower()).text}" if word else ""
    except KeyError:
        known = f"expected {', '.join(check.findings)}{did_you_mean(word.lower(), check.findings)}"
        raise UsageError(f"{check.code}.{word.lower()}: unknown finding of {check.code}; {known}") from None
    return page_text(_page_of_check(check), finding_text=finding_text, width=width, color=color)


def _page_of_check(check: "Check[Any]") -> Page:
    return Page(check.code, check.name, check.stage.value, manual_with_findings(check), check.thresholds)


def _page_of_rule(rule: "Rule") -> Page:
    manual = f"{rule.manual.rstrip()}\n\nSeverity: {rule.severity.value}. Quiet: # ddpdiag: ignore[{rule.code}]"
    return Page(rule.code, rule.name, "lint", manual, {})  # no stage of a run has this name


def manual_with_findings(check: "Check[Any]") -> str:
    """The check's manual text, with a list of its findings added to the paragraph that begins with "Findings"."""
    items = "".join(
        f"{' ' if spec.same_item else f'{chr(10)}- '}{', '.join(word for word, _ in group)}: {spec.text}"
        for spec, group in groupby(check.findings.items(), key=lambda item: item[1])
    )
    paragraphs = check.manual.split("\n\n")
    return "\n\n".join(part + items if part.startswith("Findings") else part for part in paragraphs)
