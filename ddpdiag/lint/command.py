"""`ddpdiag lint`: apply the rules that the command line selects to scripts, and show the findings."""

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
from ddpdiag.cli.outputs import LintArgs, check_output_files, show, terminal_style
from ddpdiag.codec import encode, read_bytes, readable
from ddpdiag.errors import ExitCode, UsageError, did_you_mean
from ddpdiag.lint import Rule
from ddpdiag.lint.analysis import Analysis
from ddpdiag.lint.rules import all_rules
from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.render import files
from ddpdiag.render.page import Page, one_line
from ddpdiag.text import count

# Folders with generated files or other projects, which are not searched.
_SKIPPED_FOLDERS = ("__pycache__", "site-packages", "node_modules")
# Twice the size of the longest training scripts that are known.
_MAX_BYTES = 512 << 10
_TIME_LIMIT_SECONDS = 5.0
# A generated file may be one long line, of which a report shows this much.
_MAX_SHOWN_CHARACTERS = 300
_STANDARD_INPUT = "-"
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}
_INDENT = 4
_IGNORE_COMMENT = re.compile(r"#\s*ddpdiag:\s*ignore(?:\[([A-Za-z0-9_,\s]*)\])?")


class FileResult(Struct, frozen=True, kw_only=True):
    """One script: how many findings its comments silence, and the reason why it was not judged (None: it was)."""

    path: str
    ignored: int = 0
    not_judged: str | None = None


class LintReport(Struct, frozen=True, kw_only=True):
    """The findings on all scripts, by file and line; `errors` are sentences on files that could not be read.

    The title of a finding is the name of its rule. Its evidence has `path`, `line` and `column` (from 1), `source` (the
    line), and `helper_line`, `helper_column` and `helper_source` if the fault is in a function that the line calls.
    """

    scripts: tuple[FileResult, ...]
    findings: tuple[Finding, ...]
    errors: tuple[str, ...]
    exit_code: int
    schema: str = "ddpdiag.lint/1"


def run(paths: Sequence[str], options: LintArgs) -> int:
    """Judge scripts and show the report. Returns the exit code: 1 for errors or warnings, 2 for unreadable files."""
    json = options.json
    if json is not None:
        check_output_files({"--json": json}, paths)
    rules = select_rules(options.select, options.ignore)
    report = judge_files(paths, rules, quiet=options.quiet)
    stream = sys.stderr if json == "-" else sys.stdout
    width, has_color = terminal_style(stream, options.color)
    if json is not None:
        files.write(json, encode(report).decode() + "\n")
    show(report_text(report, details=options.details, width=width, color=has_color), stream)
    if options.github:
        sys.stdout.write("".join(map(_github_annotation, report.findings)))
    for sentence in report.errors:
        complain(sentence)
    return report.exit_code


def select_rules(select: Sequence[str], ignore: Sequence[str]) -> tuple[Rule, ...]:
    """The rules with a code prefix in `select` (empty: all) and none in `ignore`. UsageError for an unknown code."""
    codes = [rule.code for rule in all_rules()]
    selected, excluded = (
        tuple(part.strip().upper() for each in texts for part in each.split(",")) for texts in (select, ignore)
    )
    for option, names in (("--select", selected), ("--ignore", excluded)):
        for name in names:
            if not name or not any(code.startswith(name) for code in codes):
                known = f"expected {codes[0]} to {codes[-1]}, or a prefix{did_you_mean(name, codes)}"
                raise UsageError(f"{option} {name}: unknown code of a lint rule; {known}")
    rules = (rule for rule in all_rules() if not selected or rule.code.startswith(selected))
    return tuple(rule for rule in rules if not rule.code.startswith(excluded))


def judge_files(paths: Sequence[str], rules: Sequence[Rule] | None = None, *, quiet: bool = False) -> LintReport:
    """Judge all files and folders of `paths` by `rules` (None: all). A file that cannot be read becomes an error."""
    scripts: list[FileResult] = []
    findings: list[Finding] = []
    errors: list[str] = []
    for path in dict.fromkeys(os.path.normpath(file) for each in paths for file in _python_files(each, errors)):
        try:
            source = read_bytes(path, _MAX_BYTES) if path != _STANDARD_INPUT else _read_standard_input(quiet=quiet)
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
    is_faulty = any(finding.severity is not Severity.NOTE for finding in findings)
    code = ExitCode.USAGE if errors else ExitCode.UNFIT if is_faulty else ExitCode.FIT
    return LintReport(scripts=tuple(scripts), findings=tuple(findings), errors=tuple(errors), exit_code=code)


def _read_standard_input(*, quiet: bool) -> bytes:
    """Read a script from standard input. Raises ValueError if the script has more than _MAX_BYTES."""
    data = standard_input("script", quiet=quiet).read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES >> 10} KiB, the most that is read")
    return data


def _python_files(folder_or_file: str, errors: list[str]) -> list[str]:
    """The file, or the Python files below the folder by name. If there are none, add a sentence to `errors`."""
    if not os.path.isdir(folder_or_file):
        return [folder_or_file]
    files: list[str] = []
    for folder, subfolders, names in os.walk(folder_or_file):
        subfolders[:] = sorted(each for each in subfolders if not each.startswith(".") and each not in _SKIPPED_FOLDERS)
        files += [os.path.join(folder, name) for name in sorted(names) if name.endswith(".py")]
    if not files:
        errors.append(f"{readable(folder_or_file)}: no Python file (*.py) in this directory")
    return files


def read_findings(
    data: bytes, path: str, rules: Sequence[Rule] | None = None
) -> tuple[FileResult, tuple[Finding, ...]]:
    """The result and the findings of one script, by line. UsageError if it is not valid, or takes too long to judge."""
    text = _decode(data, path)
    analysis = Analysis(_parse(text, path))
    if (reason := analysis.why_not_judged) is not None:
        return FileResult(path=path, not_judged=reason), ()
    try:
        with _time_limit(_TIME_LIMIT_SECONDS):
            ignored_codes = dict(_ignore_comments(text))
            rules = all_rules() if rules is None else rules
            hits = [(rule, hit) for rule in rules for hit in rule.find_hits(analysis)]
    except TimeoutError as error:
        limit = f"{_TIME_LIMIT_SECONDS:g} s of processor time"
        raise UsageError(f"{path}: not judged within {limit}, the most for a file") from error
    except RecursionError as error:
        raise UsageError(f"{path}: not judged, because its code is nested too deep") from error
    except tokenize.TokenError as error:
        raise UsageError(f"{path}: not valid Python: {error.args[0]}") from error
    findings: dict[tuple[int, int, str, str], Finding] = {}  # by line, column, code and message
    ignored = 0
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")  # the line ends that Python counts
    for rule, hit in hits:
        # A comment silences a rule on any line of the code that the rule reports.
        hit_lines = [*_lines_of(hit.node), *(_lines_of(hit.helper) if hit.helper is not None else ())]
        code_sets = [ignored_codes[line] for line in hit_lines if line in ignored_codes]
        if any(not codes or rule.code in codes for codes in code_sets):
            ignored += 1
            continue
        line, column, source = _position(lines, hit.node)
        evidence: dict[str, Scalar | list[Scalar]] = {"path": path, "line": line, "column": column, "source": source}
        if hit.helper is not None:
            evidence["helper_line"], evidence["helper_column"], evidence["helper_source"] = _position(lines, hit.helper)
        findings[line, column, rule.code, hit.message] = Finding(
            code=rule.code,
            severity=hit.severity or rule.severity,
            title=rule.name,
            message=hit.message,
            fix=hit.fix,
            evidence=evidence,
        )
    return FileResult(path=path, ignored=ignored), tuple(findings[place] for place in sorted(findings))


def _lines_of(node: ast.AST) -> range:
    """The numbers of the lines of a node; only the first one if the node has a block of statements."""
    first = getattr(node, "lineno", 1)
    return range(first, (first if hasattr(node, "body") else getattr(node, "end_lineno", first)) + 1)


def _position(lines: Sequence[str], node: ast.AST) -> tuple[int, int, str]:
    """The line and column of a node, and the text of the line. The column is in characters; Python counts bytes."""
    line = getattr(node, "lineno", 1)
    text = lines[line - 1]
    before = text.encode("utf-8", "surrogatepass")[: getattr(node, "col_offset", 0)].decode("utf-8", "replace")
    return line, len(before) + 1, text.rstrip()[:_MAX_SHOWN_CHARACTERS]


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the `with` block after `seconds` of processor time. Outside the main thread do nothing.

    Some rules compare pairs of lines, so that for some generated scripts the time grows with the square of the length.
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


def _decode(source: bytes, path: str) -> str:
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


def _parse(source: str, path: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no rule is about warnings of the parser, such as on "\d" in a string
            return ast.parse(source)
    except SyntaxError as error:
        where = f"{path}:{error.lineno}" if error.lineno else path
        raise UsageError(f"{where}: not valid Python: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or "it is nested too deep"
        raise UsageError(f"{path}: not valid Python: {reason}") from error


def _ignore_comments(source: str) -> Iterator[tuple[int, frozenset[str]]]:
    """Yield the line and the codes of each comment that silences rules. An empty set of codes stands for all rules."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and (match := _IGNORE_COMMENT.search(token.string)):
            codes = match[1].split(",") if match[1] else ()
            yield token.start[0], frozenset(code.strip().upper() for code in codes)


def report_text(report: LintReport, *, details: bool, width: int, color: bool) -> str:
    """The report as text: a paragraph for each finding, then a line with the counts. Notes only with `details`."""
    findings = [finding for finding in report.findings if details or finding.severity is not Severity.NOTE]
    page = Page(color=color, width=width)
    for finding in findings:
        _write_finding(page, finding)
        page.blank()
    not_judged = [script for script in report.scripts if script.not_judged is not None]
    # Without `details`, the reason is shown only if there is a single script.
    shows_not_judged = details or len(not_judged) == len(report.scripts) == 1
    notes = [f"{one_line(script.path)}: not judged: {script.not_judged}" for script in not_judged if shows_not_judged]
    lines = [*notes, _counts_text(report, details=details)]
    if findings:
        lines.append(f"`ddpdiag explain {findings[0].code}` gives the reason and sources.")
    return page.text() + "\n".join(lines) + "\n"


def _write_finding(page: Page, finding: Finding) -> None:
    """Write the place and code on one line, in the form that editors parse; then the message, the source, the fix."""
    evidence: Mapping[str, Any] = finding.evidence
    place = f"{one_line(evidence['path'])}:{evidence['line']}:{evidence['column']}: "
    page.write_verbatim(place, (finding.severity.value, _STYLES[finding.severity]), f" {finding.code} {finding.title}")
    page.write(one_line(finding.message), indent=_INDENT)
    _write_source(page, evidence["line"], evidence["column"], evidence["source"], _STYLES[finding.severity])
    if "helper_line" in evidence:
        page.write(f"in line {evidence['helper_line']}:", indent=_INDENT, lead="Note: ", lead_style="bold")
        inner = evidence["helper_line"], evidence["helper_column"], evidence["helper_source"]
        _write_source(page, *inner, _STYLES[Severity.NOTE])
    page.write(one_line(finding.fix), indent=_INDENT, lead="Fix: ", lead_style="bold")


def _write_source(page: Page, line: int, column: int, source: str, style: str) -> None:
    """Write a source line with its number, and a caret below the column."""
    text, before = (one_line(part.replace("\t", "    ").replace("\f", "")) for part in (source, source[: column - 1]))
    page.write_verbatim((f"{line} | ", "dim"), text, indent=_INDENT)
    page.write_verbatim((f"{' ' * len(str(line))} | ", "dim"), " " * cell_len(before), ("^", style), indent=_INDENT)


def _github_annotation(finding: Finding) -> str:
    """The annotation of a finding, as in docs.github.com/actions/reference/workflow-commands-for-github-actions."""
    evidence: Mapping[str, Any] = finding.evidence
    level = "notice" if finding.severity is Severity.NOTE else finding.severity.value
    names = {"file": evidence["path"], "line": evidence["line"], "col": evidence["column"]}
    names["title"] = f"{finding.code} {finding.title}"
    place = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in names.items())
    return f"::{level} {place}::{_escaped(finding.message)}%0AFix: {_escaped(finding.fix)}\n"


def _escaped(value: object, separators: str = "") -> str:
    """`value` as one line of text, with percent signs and `separators` as percent codes ("%25")."""
    return "".join(f"%{ord(letter):02X}" if letter in f"%{separators}" else letter for letter in one_line(str(value)))


def _counts_text(report: LintReport, *, details: bool) -> str:
    judged = sum(script.not_judged is None for script in report.scripts)
    counts = {severity: sum(finding.severity is severity for finding in report.findings) for severity in Severity}
    faults = ", ".join(count(counts[each], each.value) for each in (Severity.ERROR, Severity.WARNING) if counts[each])
    result = f": {faults}" if faults else ": no problems found" if judged else ""
    parts = [f"{count(judged, 'script')} judged{result}"]
    hidden = "" if details else " (--details)"
    if (others := len(report.scripts) - judged) and not (judged == 0 and others == 1):
        parts.append(f"{count(others, 'file')} not judged{hidden}")
    if notes := counts[Severity.NOTE]:
        parts.append(f"{count(notes, 'note')}{hidden}")
    if ignored := sum(script.ignored for script in report.scripts):
        parts.append(f"{ignored} ignored by comments")
    return "; ".join(parts)
