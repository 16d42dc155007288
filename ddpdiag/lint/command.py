"""`ddpdiag lint`: files into findings; these as lines for people, editors and `grep`, and as JSON."""

import ast
import io
import os
import re
import signal
import sys
import textwrap
import threading
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from msgspec import Struct, field

from ddpdiag.cli.edge import complain
from ddpdiag.cli.outputs import is_one_file, show, terminal
from ddpdiag.codec import encode, read_bytes, readable
from ddpdiag.errors import ExitCode, UsageError
from ddpdiag.lint.reading import Hit, Reading, Rule
from ddpdiag.lint.rules import all_rules
from ddpdiag.model import Severity
from ddpdiag.render import files
from ddpdiag.render.page import LEAST_WIDTH, one_line

LINT_SCHEMA = "ddpdiag.lint/1"
# What nobody wrote by hand, or wrote for this job.
_SKIPPED = ("__pycache__", "site-packages", "node_modules")
# The longest scripts that people train with have half of it.
_LARGEST_BYTES = 512 << 10
_MOST_SECONDS = 5.0
_IGNORE = re.compile(r"#\s*ddpdiag:\s*ignore(?:\[([A-Za-z0-9_,\s]*)\])?")


class LintFinding(Struct, frozen=True, kw_only=True):
    """One pitfall at one place: `line` and `column` count from 1; `message` is what goes wrong, `fix` what to do."""

    code: str
    name: str
    severity: Severity
    path: str
    line: int
    column: int
    message: str
    fix: str = field(name="remedy")


class ScriptLine(Struct, frozen=True, kw_only=True):
    """One script: how many findings its comments keep quiet, and why it was not judged (None: it was)."""

    path: str
    ignored: int = 0
    not_judged: str | None = None


class LintReport(Struct, frozen=True, kw_only=True):
    """The findings by file and line; `errors` are sentences on files that could not be read."""

    scripts: tuple[ScriptLine, ...]
    findings: tuple[LintFinding, ...] = field(name="remarks")
    errors: tuple[str, ...]
    exit_code: int
    schema: str = LINT_SCHEMA


def run(paths: Sequence[str], json: str | None, *, details: bool) -> int:
    """The exit code: 0 clean, 1 something was found (notes do not count), 2 a file could not be read."""
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


# From the bytes of a file to its findings ----------------------------------------------------------------------------


class Read(NamedTuple):
    """What one file gave."""

    script: ScriptLine
    findings: tuple[LintFinding, ...]


def read_findings(source: bytes, path: str) -> Read:
    """The findings on a script, by line; UsageError, with the line, if it is no Python."""
    text = _decoded(source, path)
    reading = Reading(_parsed(text, path))
    if (reason := reading.not_judged) is not None:
        return Read(ScriptLine(path=path, not_judged=reason), ())
    try:
        with _limited_time(_MOST_SECONDS):
            quiet = dict(_ignored(text))
            found = [(rule, hit) for rule in all_rules() for hit in rule.look(reading)]
    except TimeoutError as error:
        limit = f"{_MOST_SECONDS:g} s of processor time"
        raise UsageError(f"{path}: not judged within {limit}, the most for a file") from error
    except RecursionError as error:
        raise UsageError(f"{path}: this Python is nested too deep to be read") from error
    except tokenize.TokenError as error:
        raise UsageError(f"{path}: this is no Python that can be read: {error.args[0]}") from error
    shown = [(rule, hit) for rule, hit in found if not _is_quiet(rule, hit, quiet)]
    findings = sorted({_finding(rule, hit, path) for rule, hit in shown}, key=lambda r: (r.line, r.column, r.code))
    return Read(ScriptLine(path=path, ignored=len(found) - len(shown)), tuple(findings))


@contextmanager
def _limited_time(seconds: float) -> Iterator[None]:
    """TimeoutError once the body has taken so much processor time; signals, and so limits, are the main thread's.

    Some rules look at pairs of lines: of some generated scripts, their time grows with the square of the length.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _time_is_over)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _time_is_over(_signum: int, _frame: FrameType | None) -> None:
    raise TimeoutError


def _decoded(source: bytes, path: str) -> str:
    """The text of a script, in the encoding that its first lines declare, else UTF-8 (PEP 263)."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        return source.decode(encoding)
    except UnicodeDecodeError as error:
        line = source.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{path}:{line}: byte 0x{source[error.start]:02x} is no {error.encoding.upper()}; expected UTF-8, or the "
            "encoding that a comment in line 1 or 2 declares (# -*- coding: latin-1 -*-)"
        ) from error
    except (SyntaxError, LookupError, ValueError) as error:
        raise UsageError(f"{path}: its encoding cannot be read: {error}") from error


def _parsed(source: str, path: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" in a string: not our business
            return ast.parse(source)
    except SyntaxError as error:
        where = f"{path}:{error.lineno}" if error.lineno else path
        raise UsageError(f"{where}: this is no Python that can be read: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or "it is nested too deep"
        raise UsageError(f"{path}: this is no Python that can be read: {reason}") from error


def _finding(rule: Rule, hit: Hit, path: str) -> LintFinding:
    return LintFinding(
        code=rule.code,
        name=rule.name,
        severity=hit.severity or rule.severity,
        path=path,
        line=getattr(hit.node, "lineno", 1),
        column=getattr(hit.node, "col_offset", 0) + 1,
        message=hit.message,
        fix=hit.fix,
    )


def _ignored(source: str) -> Iterator[tuple[int, frozenset[str]]]:
    """The codes that a comment keeps quiet on its line; an empty set stands for all. Comments only, never strings."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and (match := _IGNORE.search(token.string)):
            codes = match[1].split(",") if match[1] else ()
            yield token.start[0], frozenset(code.strip().upper() for code in codes)


def _is_quiet(rule: Rule, hit: Hit, quiet: dict[int, frozenset[str]]) -> bool:
    """Does a comment on one of the lines of what is meant keep it quiet? Of a block, only its first line counts."""
    first = getattr(hit.node, "lineno", 1)
    last = first if hasattr(hit.node, "body") else getattr(hit.node, "end_lineno", first)
    return any(line in quiet and (not quiet[line] or rule.code in quiet[line]) for line in range(first, last + 1))


# For people ----------------------------------------------------------------------------------------------------------

_COLORS = {Severity.ERROR: "31", Severity.WARNING: "33", Severity.NOTE: "36"}


def page(report: LintReport, *, details: bool, width: int, color: bool) -> str:
    """A paragraph for each finding, then one line that counts; notes with `details` only."""
    shown = [each for each in report.findings if details or each.severity is not Severity.NOTE]
    paragraphs = [_paragraph(each, max(width, LEAST_WIDTH), color=color) for each in shown]
    left_out = [script for script in report.scripts if script.not_judged is not None]
    # Without `details`, only if that is all there is to say.
    is_told = details or len(left_out) == len(report.scripts) == 1
    notes = [f"{one_line(each.path)}: not judged: {each.not_judged}" for each in left_out if is_told]
    return "\n".join([*paragraphs, *notes, *_summary(report, details=details)]) + "\n"


def _paragraph(finding: LintFinding, width: int, *, color: bool) -> str:
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


def _summary(report: LintReport, *, details: bool) -> Iterator[str]:
    judged = sum(script.not_judged is None for script in report.scripts)
    counts = {severity: sum(each.severity is severity for each in report.findings) for severity in Severity}
    faults = (Severity.ERROR, Severity.WARNING)
    said = ", ".join(_count(counts[severity], severity.value) for severity in faults if counts[severity])
    parts = [f"{_count(judged, 'script')} judged" + (f": {said}" if said else ": nothing found" if judged else "")]
    if (others := len(report.scripts) - judged) and not (judged == 0 and others == 1):
        parts.append(f"{_count(others, 'file')} not judged" + ("" if details else " (--details)"))
    if notes := counts[Severity.NOTE]:
        parts.append(_count(notes, "hint") + ("" if details else " (--details)"))
    if ignored := sum(script.ignored for script in report.scripts):
        parts.append(f"{ignored} ignored by comments")
    yield "; ".join(parts)
    first = next((each for each in report.findings if each.severity is not Severity.NOTE or details), None)
    if first is not None:
        yield f"`ddpdiag explain {first.code}` says more, with sources."


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
