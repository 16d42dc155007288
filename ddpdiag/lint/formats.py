"""The report of lint, and its text for people, editors and `grep`."""

from msgspec import Struct
from rich.cells import cell_len

from ddpdiag.model import Severity
from ddpdiag.render.page import Page, one_line
from ddpdiag.text import count

LINT_SCHEMA = "ddpdiag.lint/1"
STANDARD_INPUT = "-"


class Source(Struct, frozen=True, kw_only=True):
    """Lines of a script, from line `first` on, around a place in one of them; all numbers count from 1."""

    first: int
    lines: tuple[str, ...]
    line: int
    column: int
    end_column: int


class LintFinding(Struct, frozen=True, kw_only=True):
    """One pitfall at one place: `line` and `column` count from 1; `message` is the problem.

    `helper` is the line that goes wrong in a function of the script, where the place is a call of that function.
    """

    code: str
    name: str
    severity: Severity
    path: str
    line: int
    column: int
    message: str
    fix: str
    source: Source
    helper: Source | None = None


class ScriptLine(Struct, frozen=True, kw_only=True):
    """One script: how many findings its comments ignore, and why it was not judged (None: it was)."""

    path: str
    ignored: int = 0
    not_judged: str | None = None


class LintReport(Struct, frozen=True, kw_only=True):
    """The findings by file and line; `errors` are sentences on files that could not be read."""

    scripts: tuple[ScriptLine, ...]
    findings: tuple[LintFinding, ...]
    errors: tuple[str, ...]
    exit_code: int
    schema: str = LINT_SCHEMA


# For people ----------------------------------------------------------------------------------------------------------

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}
_INDENT = 4


def page(report: LintReport, *, details: bool, width: int, color: bool) -> str:
    """A paragraph for each finding, then one line that counts; notes with `details` only."""
    shown = [each for each in report.findings if details or each.severity is not Severity.NOTE]
    drawn = Page(color=color, width=width)
    for finding in shown:
        _write_finding(drawn, finding)
        drawn.blank()
    not_judged = [script for script in report.scripts if script.not_judged is not None]
    # Without `details`, only if there is nothing else to report.
    are_shown = details or len(not_judged) == len(report.scripts) == 1
    notes = [f"{one_line(each.path)}: not judged: {each.not_judged}" for each in not_judged if are_shown]
    lines = [*notes, _counts(report, details=details)]
    if shown:
        lines.append(f"`ddpdiag explain {shown[0].code}` gives the reason and sources.")
    return drawn.text() + "\n".join(lines) + "\n"


def _write_finding(drawn: Page, finding: LintFinding) -> None:
    """The place and the code on one line; below it the message, the source lines and the fix."""
    place = f"{one_line(finding.path)}:{finding.line}:{finding.column}: "
    drawn.verbatim(place, (finding.severity.value, _STYLES[finding.severity]), f" {finding.code} {finding.name}")
    drawn.write(one_line(finding.message), indent=_INDENT)
    _write_source(drawn, finding.source, style=_STYLES[finding.severity])
    if finding.helper is not None:
        drawn.write(f"in line {finding.helper.line}:", indent=_INDENT, lead="Note: ", lead_style="bold")
        _write_source(drawn, finding.helper, style="bold cyan")
    drawn.write(one_line(finding.fix), indent=_INDENT, lead="Fix: ", lead_style="bold")


def _write_source(drawn: Page, source: Source, *, style: str) -> None:
    """The lines with their numbers, and a caret below each column of the place."""
    last = source.first + len(source.lines) - 1
    for number, line in enumerate(source.lines, source.first):
        drawn.verbatim((f"{number:>{len(str(last))}} | ", "dim"), _drawn(line), indent=_INDENT)
        if number == source.line:
            begin, end = (cell_len(_drawn(line[: column - 1])) for column in (source.column, source.end_column))
            gutter = " " * len(str(last)) + " | "
            drawn.verbatim((gutter, "dim"), " " * begin, ("^" * max(1, end - begin), style), indent=_INDENT)


def _drawn(text: str) -> str:
    return one_line(text.replace("\t", "    ").replace("\f", ""))


def _counts(report: LintReport, *, details: bool) -> str:
    judged = sum(script.not_judged is None for script in report.scripts)
    counts = {severity: sum(each.severity is severity for each in report.findings) for severity in Severity}
    faults = (Severity.ERROR, Severity.WARNING)
    said = ", ".join(count(counts[severity], severity.value) for severity in faults if counts[severity])
    parts = [f"{count(judged, 'script')} judged" + (f": {said}" if said else ": no problems found" if judged else "")]
    if (others := len(report.scripts) - judged) and not (judged == 0 and others == 1):
        parts.append(f"{count(others, 'file')} not judged" + ("" if details else " (--details)"))
    if notes := counts[Severity.NOTE]:
        parts.append(count(notes, "note") + ("" if details else " (--details)"))
    if ignored := sum(script.ignored for script in report.scripts):
        parts.append(f"{ignored} ignored by comments")
    return "; ".join(parts)
