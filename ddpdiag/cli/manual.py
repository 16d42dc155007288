"""Manual pages and the list of codes: the checks of `ddpdiag check` and the rules of `ddpdiag lint` side by side."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from ddpdiag.checks.api import Check
from ddpdiag.errors import UsageError, nearest
from ddpdiag.render.manual import CheckRow, ManualPage, explain

# In the place of a stage: no stage of a run has this name.
_LINT = "lint"


def _check_row(check: Check[Any]) -> CheckRow:
    return CheckRow(check.code, check.name, check.stage.value, check.title)


def manual_page(code: str, *, width: int, color: bool) -> str:
    """The page of a check, of a finding (`TRN001.diverged`) or of a rule; UsageError for a code that is neither."""
    if code.upper().startswith("LNT"):
        from ddpdiag.lint.rules import rule_of

        rule = rule_of(code)
        page = f"{rule.manual.rstrip()}\n\nSeverity: {rule.severity.value}. Quiet: # ddpdiag: ignore[{rule.code}]\n"
        return explain(CheckRow(rule.code, rule.name, _LINT, rule.title), page, {}, width=width, color=color)
    from ddpdiag.checks.registry import by_code

    check = by_code(code)
    _, _, word = code.partition(".")
    asked = f"{word}: {_finding(check, word.lower())}" if word else ""
    return explain(_check_row(check), page_of(check), check.thresholds, asked=asked, width=width, color=color)


def _finding(check: Check[Any], word: str) -> str:
    """What the page says of one finding; UsageError if there is none of that name."""
    try:
        return check.explained(word).text
    except KeyError:
        known = f"expected {', '.join(check.findings)}{nearest(word, check.findings)}"
        raise UsageError(f"{check.code}.{word}: unknown finding of {check.code}; {known}") from None


def page_of(check: Check[Any]) -> str:
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

    return [
        *map(_check_row, all_checks()),
        *(CheckRow(rule.code, rule.name, _LINT, rule.title) for rule in all_rules()),
    ]


def code_of(name: str) -> str | None:
    """The code of the check or rule of that name ("pcie-link"), or None."""
    return next((row.code for row in rows() if row.name == name.lower()), None)


def write_manual(path: str) -> int:
    """Write all pages into one Markdown document."""
    from ddpdiag import __version__
    from ddpdiag.render import files
    from ddpdiag.render.manual import as_markdown

    files.write(path, as_markdown(_pages(), __version__))
    return 0


def _pages() -> Iterator[ManualPage]:
    from ddpdiag.checks.registry import all_checks
    from ddpdiag.lint.rules import all_rules

    for check in all_checks():
        yield ManualPage(_check_row(check), page_of(check), check.thresholds)
    for rule in all_rules():
        yield ManualPage(CheckRow(rule.code, rule.name, _LINT, rule.title), rule.manual, {})
