"""`ddpdiag lint`: judge scripts by the rules that the command line chooses, and show the findings."""

import ast
import io
import os
import re
import signal
import sys
import threading
import tokenize
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from msgspec import Struct
from rich.cells import cell_len

from ddpdiag.cli.edge import complain, standard_input
from ddpdiag.cli.outputs import LintOptions, is_one_file, show, terminal
from ddpdiag.codec import encode, read_bytes, readable
from ddpdiag.errors import ExitCode, UsageError, nearest
from ddpdiag.lint import Rule
from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rules import all_rules
from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.render import files
from ddpdiag.render.page import Page, one_line
from ddpdiag.text import count

# Folders of generated files and of other projects.
_SKIPPED = ("__pycache__", "site-packages", "node_modules")
# The longest scripts that people train with have half of it.
_LARGEST_BYTES = 512 << 10
_MOST_SECONDS = 5.0
# A line may be the whole of a generated file.
_LONGEST_LINE = 300
_STANDARD_INPUT = "-"
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}
_INDENT = 4
_IGNORE = re.compile(r"#\s*ddpdiag:\s*ignore(?:\[([A-Za-z0-9_,\s]*)\])?")


class Script(Struct, frozen=True, kw_only=True):
    """One script: how many findings its comments ignore, and why it was not judged (None: it was)."""

    path: str
    ignored: int = 0
    not_judged: str | None = None


class LintReport(Struct, frozen=True, kw_only=True):
    """The findings by file and line; `errors` are sentences on files that could not be read.

    The title of a finding is the name of its rule. Its evidence has `path`, `line` and `column`, both from 1, the
    `source` line, and if that calls a function that goes wrong, `helper_line`, `helper_column` and `helper_source`.
    """

    scripts: tuple[Script, ...]
    findings: tuple[Finding, ...]
    errors: tuple[str, ...]
    exit_code: int
    schema: str = "ddpdiag.lint/1"


def run(paths: Sequence[str], how: LintOptions) -> int:
    """Judge and report. Returns the exit code: 0 clean, 1 findings (notes do not count), 2 a file was not readable."""
    json = how.json
    if json is not None:
        if any(is_one_file(json, path) for path in paths):
            raise UsageError(f"--json {json} would overwrite the script that is read; give it another file")
        files.check_writable(json)
    rules = chosen(how.select, how.ignore)
    report = judged(paths, rules, quiet=how.quiet)
    stream = sys.stderr if json == "-" else sys.stdout
    width, has_color = terminal(stream, how.color)
    if json is not None:
        files.write(json, encode(report).decode() + "\n")
    show(page(report, details=how.details, width=width, color=has_color), stream)
    if how.github:
        sys.stdout.write("".join(map(_annotation, report.findings)))
    for sentence in report.errors:
        complain(sentence)
    return report.exit_code


def chosen(select: Sequence[str], ignore: Sequence[str]) -> tuple[Rule, ...]:
    """The rules whose codes begin with one of `select` and with none of `ignore`; UsageError for an unknown code."""
    codes = [rule.code for rule in all_rules()]
    wanted, left_out = (
        tuple(part.strip().upper() for each in texts for part in each.split(",")) for texts in (select, ignore)
    )
    for option, names in (("--select", wanted), ("--ignore", left_out)):
        for name in names:
            if not name or not any(code.startswith(name) for code in codes):
                known = f"expected {codes[0]} to {codes[-1]}, or a prefix{nearest(name, codes)}"
                raise UsageError(f"{option} {name}: unknown code of a lint rule; {known}")
    return tuple(
        rule
        for rule in all_rules()
        if (not wanted or rule.code.startswith(wanted)) and not (left_out and rule.code.startswith(left_out))
    )


def judged(paths: Sequence[str], rules: Sequence[Rule] | None = None, *, quiet: bool = False) -> LintReport:
    """Judge every script. A script that cannot be read becomes an error, and the others are judged all the same."""
    rules = all_rules() if rules is None else rules
    scripts: list[Script] = []
    findings: list[Finding] = []
    errors: list[str] = []
    for path in dict.fromkeys(os.path.normpath(file) for each in paths for file in _walked(each, errors)):
        try:
            source = read_bytes(path, _LARGEST_BYTES) if path != _STANDARD_INPUT else _piped(quiet=quiet)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            errors.append(f"{readable(path)}: cannot be read: {reason}")
            continue
        try:
            script, found = read_findings(source, readable(path), rules)
        except UsageError as error:
            errors.append(str(error))
        else:
            scripts.append(script)
            findings += found
    has_faults = any(finding.severity is not Severity.NOTE for finding in findings)
    code = ExitCode.USAGE if errors else ExitCode.UNFIT if has_faults else ExitCode.FIT
    return LintReport(scripts=tuple(scripts), findings=tuple(findings), errors=tuple(errors), exit_code=code)


def _piped(*, quiet: bool) -> bytes:
    """Read a script from standard input. Raises ValueError if it is larger than a script may be."""
    data = standard_input("script", quiet=quiet).read(_LARGEST_BYTES + 1)
    if len(data) > _LARGEST_BYTES:
        raise ValueError(f"it has more than {_LARGEST_BYTES >> 10} KiB, the most that is read")
    return data


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


# From the bytes of a file to its findings ----------------------------------------------------------------------------


def read_findings(source: bytes, path: str, rules: Sequence[Rule] | None = None) -> tuple[Script, tuple[Finding, ...]]:
    """The findings on a script, by line; UsageError, with the line, if it is no Python."""
    text = _decoded(source, path)
    reading = Reading(_parsed(text, path))
    if (reason := reading.not_judged) is not None:
        return Script(path=path, not_judged=reason), ()
    try:
        with _limited_time(_MOST_SECONDS):
            quiet = dict(_ignored(text))
            found = [(rule, hit) for rule in (all_rules() if rules is None else rules) for hit in rule.look(reading)]
    except TimeoutError as error:
        limit = f"{_MOST_SECONDS:g} s of processor time"
        raise UsageError(f"{path}: not judged within {limit}, the most for a file") from error
    except RecursionError as error:
        raise UsageError(f"{path}: not judged, because its code is nested too deep") from error
    except tokenize.TokenError as error:
        raise UsageError(f"{path}: not valid Python: {error.args[0]}") from error
    findings: dict[tuple[int, int, str, str], Finding] = {}  # by place, code and message
    ignored = 0
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")  # the line ends that Python counts
    for rule, hit in found:
        # A comment on any line of the code that is reported silences the rule.
        meant = [*_lines_of(hit.node), *(_lines_of(hit.helper) if hit.helper is not None else ())]
        if any(line in quiet and (not quiet[line] or rule.code in quiet[line]) for line in meant):
            ignored += 1
            continue
        line, column, shown = _place(lines, hit.node)
        evidence: dict[str, Scalar | list[Scalar]] = {"path": path, "line": line, "column": column, "source": shown}
        if hit.helper is not None:
            evidence["helper_line"], evidence["helper_column"], evidence["helper_source"] = _place(lines, hit.helper)
        findings[line, column, rule.code, hit.message] = Finding(
            code=rule.code,
            severity=hit.severity or rule.severity,
            title=rule.name,
            message=hit.message,
            fix=hit.fix,
            evidence=evidence,
        )
    return Script(path=path, ignored=ignored), tuple(findings[place] for place in sorted(findings))


def _lines_of(node: ast.AST) -> range:
    """The lines of a node; of a block, only the first one."""
    first = getattr(node, "lineno", 1)
    return range(first, (first if hasattr(node, "body") else getattr(node, "end_lineno", first)) + 1)


def _place(lines: Sequence[str], node: ast.AST) -> tuple[int, int, str]:
    """The line and column of a node, and the text of that line. Python counts columns in bytes."""
    line = getattr(node, "lineno", 1)
    text = lines[line - 1]
    before = text.encode("utf-8", "surrogatepass")[: getattr(node, "col_offset", 0)].decode("utf-8", "replace")
    return line, len(before) + 1, text.rstrip()[:_LONGEST_LINE]


@contextmanager
def _limited_time(seconds: float) -> Iterator[None]:
    """Raise TimeoutError once the body has taken so much processor time; in the main thread only, as it uses signals.

    Some rules look at pairs of lines, so that for some generated scripts the time grows with the square of the length.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def time_is_over(_signum: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, time_is_over)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _decoded(source: bytes, path: str) -> str:
    """The text of a script, in the encoding that its first lines declare, else UTF-8 (PEP 263)."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        return source.decode(encoding)
    except UnicodeDecodeError as error:
        line = source.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{path}:{line}: byte 0x{source[error.start]:02x} is not {error.encoding.upper()}; expected UTF-8, or the "
            "encoding that a comment in line 1 or 2 declares (# -*- coding: latin-1 -*-)"
        ) from error
    except (SyntaxError, LookupError, ValueError) as error:
        raise UsageError(f"{path}: its encoding cannot be read: {error}") from error


def _parsed(source: str, path: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" in a string is no subject of these rules
            return ast.parse(source)
    except SyntaxError as error:
        where = f"{path}:{error.lineno}" if error.lineno else path
        raise UsageError(f"{where}: not valid Python: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or "it is nested too deep"
        raise UsageError(f"{path}: not valid Python: {reason}") from error


def _ignored(source: str) -> Iterator[tuple[int, frozenset[str]]]:
    """The line and codes of each comment that silences rules; an empty set stands for all codes. Strings never do."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and (match := _IGNORE.search(token.string)):
            codes = match[1].split(",") if match[1] else ()
            yield token.start[0], frozenset(code.strip().upper() for code in codes)


# For people ----------------------------------------------------------------------------------------------------------


def page(report: LintReport, *, details: bool, width: int, color: bool) -> str:
    """A paragraph for each finding, then one line that counts; notes with `details` only."""
    shown = [finding for finding in report.findings if details or finding.severity is not Severity.NOTE]
    drawn = Page(color=color, width=width)
    for finding in shown:
        _write_finding(drawn, finding)
        drawn.blank()
    not_judged = [script for script in report.scripts if script.not_judged is not None]
    # Without `details`, only if there is nothing else to report.
    are_shown = details or len(not_judged) == len(report.scripts) == 1
    notes = [f"{one_line(script.path)}: not judged: {script.not_judged}" for script in not_judged if are_shown]
    lines = [*notes, _counts(report, details=details)]
    if shown:
        lines.append(f"`ddpdiag explain {shown[0].code}` gives the reason and sources.")
    return drawn.text() + "\n".join(lines) + "\n"


def _write_finding(drawn: Page, finding: Finding) -> None:
    """The place and the code on one line, as editors read it; below it the message, the source and the fix."""
    found: Mapping[str, Any] = finding.evidence
    place = f"{one_line(found['path'])}:{found['line']}:{found['column']}: "
    drawn.verbatim(place, (finding.severity.value, _STYLES[finding.severity]), f" {finding.code} {finding.title}")
    drawn.write(one_line(finding.message), indent=_INDENT)
    _write_source(drawn, found["line"], found["column"], found["source"], _STYLES[finding.severity])
    if "helper_line" in found:
        drawn.write(f"in line {found['helper_line']}:", indent=_INDENT, lead="Note: ", lead_style="bold")
        helper = found["helper_line"], found["helper_column"], found["helper_source"]
        _write_source(drawn, *helper, _STYLES[Severity.NOTE])
    drawn.write(one_line(finding.fix), indent=_INDENT, lead="Fix: ", lead_style="bold")


def _write_source(drawn: Page, line: int, column: int, source: str, style: str) -> None:
    """A source line with its number, and a caret below the column."""
    text, before = (one_line(part.replace("\t", "    ").replace("\f", "")) for part in (source, source[: column - 1]))
    drawn.verbatim((f"{line} | ", "dim"), text, indent=_INDENT)
    drawn.verbatim((f"{' ' * len(str(line))} | ", "dim"), " " * cell_len(before), ("^", style), indent=_INDENT)


def _annotation(finding: Finding) -> str:
    """A workflow command of GitHub (docs.github.com/actions/reference/workflow-commands-for-github-actions)."""
    found: Mapping[str, Any] = finding.evidence
    level = "notice" if finding.severity is Severity.NOTE else finding.severity.value
    names = {"file": found["path"], "line": found["line"], "col": found["column"]}
    names["title"] = f"{finding.code} {finding.title}"
    place = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in names.items())
    return f"::{level} {place}::{_escaped(finding.message)}%0AFix: {_escaped(finding.fix)}\n"


def _escaped(value: object, more: str = "") -> str:
    return "".join(f"%{ord(letter):02X}" if letter in f"%{more}" else letter for letter in one_line(str(value)))


def _counts(report: LintReport, *, details: bool) -> str:
    judged = sum(script.not_judged is None for script in report.scripts)
    counts = {severity: sum(finding.severity is severity for finding in report.findings) for severity in Severity}
    faults = ", ".join(
        count(counts[severity], severity.value) for severity in (Severity.ERROR, Severity.WARNING) if counts[severity]
    )
    parts = [
        f"{count(judged, 'script')} judged" + (f": {faults}" if faults else ": no problems found" if judged else "")
    ]
    hidden = "" if details else " (--details)"
    if (others := len(report.scripts) - judged) and not (judged == 0 and others == 1):
        parts.append(f"{count(others, 'file')} not judged{hidden}")
    if notes := counts[Severity.NOTE]:
        parts.append(f"{count(notes, 'note')}{hidden}")
    if ignored := sum(script.ignored for script in report.scripts):
        parts.append(f"{ignored} ignored by comments")
    return "; ".join(parts)
