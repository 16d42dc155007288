"""`ddpdiag lint`: files into findings; these as lines for people, editors and `grep`, and as JSON."""

import os
import sys
import textwrap
from collections.abc import Iterator, Sequence

from ddpdiag.cli.edge import complain
from ddpdiag.cli.outputs import is_one_file, show, terminal
from ddpdiag.codec import encode, read_bytes, readable
from ddpdiag.errors import ExitCode, UsageError
from ddpdiag.lint import read_findings
from ddpdiag.lint.rule import LintFinding, LintReport, ScriptLine
from ddpdiag.model import Severity
from ddpdiag.render import files
from ddpdiag.render.page import LEAST_WIDTH, one_line

# What nobody wrote by hand, or wrote for this job.
_SKIPPED = ("__pycache__", "site-packages", "node_modules")
# The longest scripts that people train with have half of it.
_LARGEST_BYTES = 512 << 10


def run(paths: Sequence[str], json: str | None, *, details: bool) -> int:
    """The exit code: 0 clean, 1 something was found (hints do not count), 2 a file could not be read."""
    if json is not None:
        if any(is_one_file(json, path) for path in paths):
            raise UsageError(f"--json {json} would overwrite the script that is read; give it another file")
        files.check_writable(json)
    report = judged(paths)
    stream = sys.stderr if json == "-" else sys.stdout
    width, color = terminal(stream)
    if json is not None:
        files.write(json, encode(report) + b"\n")
    show(page(report, details=details, width=width, color=color), stream)
    for sentence in report.errors:
        complain(sentence)
    return report.exit_code


def judged(paths: Sequence[str]) -> LintReport:
    """The findings on every script; what cannot be read does not keep the others from being judged."""
    scripts: list[ScriptLine] = []
    findings: list[LintFinding] = []
    errors: list[str] = []
    for path in dict.fromkeys(os.path.normpath(file) for each in paths for file in _walked(each, errors)):
        try:
            read = read_findings(_bytes_of(path), readable(path))
        except UsageError as error:
            errors.append(str(error))
        else:
            scripts.append(read.script)
            findings += read.findings
    found = any(finding.severity is not Severity.NOTE for finding in findings)
    code = ExitCode.USAGE if errors else ExitCode.UNFIT if found else ExitCode.FIT
    return LintReport(scripts=tuple(scripts), findings=tuple(findings), errors=tuple(errors), exit_code=code)


def _walked(path: str, errors: list[str]) -> Iterator[str]:
    """The file itself, or the Python files of a directory, in the order of their names."""
    if not os.path.isdir(path):
        yield path
        return
    found = False
    for folder, inner, names in os.walk(path):
        inner[:] = sorted(each for each in inner if not each.startswith(".") and each not in _SKIPPED)
        for name in sorted(names):
            if name.endswith(".py"):
                found = True
                yield os.path.join(folder, name)
    if not found:
        errors.append(f"{readable(path)}: no Python file (*.py) in this directory")


def _bytes_of(path: str) -> bytes:
    try:
        return read_bytes(path, _LARGEST_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{readable(path)}: cannot be read: {reason}") from error


_COLORS = {Severity.ERROR: "31", Severity.WARNING: "33", Severity.NOTE: "36"}


def page(report: LintReport, *, details: bool, width: int, color: bool) -> str:
    """A paragraph for each finding, then one line that counts; notes with `details` only."""
    shown = [each for each in report.findings if details or each.severity is not Severity.NOTE]
    paragraphs = [_note(each, max(width, LEAST_WIDTH), color=color) for each in shown]
    notes = [f"{one_line(each.path)}: not judged: {each.not_judged}" for each in _left_out(report, details=details)]
    return "\n".join([*paragraphs, *notes, *_summary(report, details=details)]) + "\n"


def _note(finding: LintFinding, width: int, *, color: bool) -> str:
    """The place, the code and what goes wrong; below it what to do. The first line is not broken before its code."""
    severity = finding.severity.value
    if color:
        severity = f"\x1b[1;{_COLORS[finding.severity]}m{severity}\x1b[0m"
    place = f"{one_line(finding.path)}:{finding.line}:{finding.column}"
    body = [
        *textwrap.wrap(one_line(finding.message), width - 4, break_long_words=False, break_on_hyphens=False),
        *textwrap.wrap("-> " + one_line(finding.fix), width - 4, break_long_words=False, break_on_hyphens=False),
    ]
    return "\n".join([f"{place}: {severity} {finding.code} {finding.name}", *(f"    {line}" for line in body)])


def _left_out(report: LintReport, *, details: bool) -> Iterator[ScriptLine]:
    """Scripts that were not judged: all of them with `details`, else only if that is all there is to say."""
    left_out = [script for script in report.scripts if script.not_judged is not None]
    if details or (len(left_out) == len(report.scripts) and len(left_out) == 1):
        yield from left_out


def _summary(report: LintReport, *, details: bool) -> Iterator[str]:
    judged = sum(script.not_judged is None for script in report.scripts)
    counts = {severity: sum(r.severity is severity for r in report.findings) for severity in Severity}
    faults = (Severity.ERROR, Severity.WARNING)
    said = ", ".join(_count(counts[severity], severity.value) for severity in faults if counts[severity])
    parts = [f"{_count(judged, 'script')} judged" + (f": {said}" if said else ": nothing found" if judged else "")]
    if (others := len(report.scripts) - judged) and not (judged == 0 and others == 1):
        parts.append(f"{_count(others, 'file')} not judged" + ("" if details else " (--details)"))
    if hints := counts[Severity.NOTE]:
        parts.append(_count(hints, "hint") + ("" if details else " (--details)"))
    if ignored := sum(script.ignored for script in report.scripts):
        parts.append(f"{ignored} ignored by comments")
    yield "; ".join(parts)
    if any(r.severity is not Severity.NOTE or details for r in report.findings):
        first = next(r for r in report.findings if r.severity is not Severity.NOTE or details)
        yield f"`ddpdiag explain {first.code}` says more, with sources."


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
