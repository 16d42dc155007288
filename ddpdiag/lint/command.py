"""`ddpdiag lint`: scripts into findings, by the rules that the command line chooses."""

import ast
import io
import os
import re
import signal
import sys
import threading
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from ddpdiag.cli.edge import complain, standard_input
from ddpdiag.cli.outputs import LintOptions, is_one_file, show, terminal
from ddpdiag.codec import encode, read_bytes, readable
from ddpdiag.errors import ExitCode, UsageError, nearest
from ddpdiag.lint import Rule
from ddpdiag.lint.formats import STANDARD_INPUT, LintFinding, LintReport, ScriptLine, Source, page
from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rules import all_rules
from ddpdiag.model import Severity
from ddpdiag.render import files

# Folders of generated files and of other projects.
_SKIPPED = ("__pycache__", "site-packages", "node_modules")
# The longest scripts that people train with have half of it.
_LARGEST_BYTES = 512 << 10
_MOST_SECONDS = 5.0
# Lines that are shown before and after that of a finding, as ruff does; a line may be the whole of a generated file.
_AROUND = 2
_LONGEST_LINE = 300
_IGNORE = re.compile(r"#\s*ddpdiag:\s*ignore(?:\[([A-Za-z0-9_,\s]*)\])?")


def run(paths: Sequence[str], how: LintOptions) -> int:
    """The exit code: 0 clean, 1 something was found (notes do not count), 2 a file could not be read."""
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
    """The findings on every script; what cannot be read does not keep the others from being judged."""
    rules = all_rules() if rules is None else rules
    scripts: list[ScriptLine] = []
    findings: list[LintFinding] = []
    errors: list[str] = []
    for path in dict.fromkeys(os.path.normpath(file) for each in paths for file in _walked(each, errors)):
        try:
            source = read_bytes(path, _LARGEST_BYTES) if path != STANDARD_INPUT else _piped(quiet=quiet)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            errors.append(f"{readable(path)}: cannot be read: {reason}")
            continue
        try:
            read = read_findings(source, readable(path), rules)
        except UsageError as error:
            errors.append(str(error))
        else:
            scripts.append(read.script)
            findings += read.findings
    found = any(finding.severity is not Severity.NOTE for finding in findings)
    code = ExitCode.USAGE if errors else ExitCode.UNFIT if found else ExitCode.FIT
    return LintReport(scripts=tuple(scripts), findings=tuple(findings), errors=tuple(errors), exit_code=code)


def _piped(*, quiet: bool) -> bytes:
    """Standard input; ValueError for more than a script has."""
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


class Read(NamedTuple):
    """The result for one file."""

    script: ScriptLine
    findings: tuple[LintFinding, ...]


def read_findings(source: bytes, path: str, rules: Sequence[Rule] | None = None) -> Read:
    """The findings on a script, by line; UsageError, with the line, if it is no Python."""
    text = _decoded(source, path)
    reading = Reading(_parsed(text, path))
    if (reason := reading.not_judged) is not None:
        return Read(ScriptLine(path=path, not_judged=reason), ())
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
    findings: set[LintFinding] = set()
    ignored = 0
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")  # the line ends that Python counts
    for rule, hit in found:
        # A comment on any line of what is meant keeps it quiet.
        meant = [*_lines_of(hit.node), *(_lines_of(hit.helper) if hit.helper is not None else ())]
        if any(line in quiet and (not quiet[line] or rule.code in quiet[line]) for line in meant):
            ignored += 1
            continue
        place = _source(lines, hit.node)
        finding = LintFinding(
            code=rule.code,
            name=rule.name,
            severity=hit.severity or rule.severity,
            path=path,
            line=place.line,
            column=place.column,
            message=hit.message,
            fix=hit.fix,
            source=place,
            helper=_source(lines, hit.helper) if hit.helper is not None else None,
        )
        findings.add(finding)
    by_place = sorted(findings, key=lambda finding: (finding.line, finding.column, finding.code))
    return Read(ScriptLine(path=path, ignored=ignored), tuple(by_place))


def _lines_of(node: ast.AST) -> range:
    """The lines of a node; of a block, only the first one."""
    first = getattr(node, "lineno", 1)
    return range(first, (first if hasattr(node, "body") else getattr(node, "end_lineno", first)) + 1)


def _source(lines: Sequence[str], node: ast.AST) -> Source:
    """The lines around a node, and the part of its first line that belongs to it. Python counts columns in bytes."""
    line = getattr(node, "lineno", 1)
    text = lines[line - 1]
    in_bytes = text.encode("utf-8", "surrogatepass")
    begin, end = (len(in_bytes[:at].decode("utf-8", "replace")) for at in _columns(node, len(in_bytes)))
    first, last = max(1, line - _AROUND), min(len(lines), line + _AROUND)
    while first < line and not lines[first - 1].strip():
        first += 1
    while last > line and not lines[last - 1].strip():
        last -= 1
    shown = tuple(each[:_LONGEST_LINE] for each in lines[first - 1 : last])
    return Source(first=first, lines=shown, line=line, column=begin + 1, end_column=end + 1)


def _columns(node: ast.AST, length: int) -> tuple[int, int]:
    """The columns where a node begins in its first line, and where it or the line ends."""
    is_short = getattr(node, "end_lineno", None) == getattr(node, "lineno", 0)
    return getattr(node, "col_offset", 0), getattr(node, "end_col_offset", length) if is_short else length


@contextmanager
def _limited_time(seconds: float) -> Iterator[None]:
    """TimeoutError once the body has taken so much processor time; signals, and so limits, are the main thread's.

    Some rules look at pairs of lines: of some generated scripts, their time grows with the square of the length.
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
    """The codes that a comment keeps quiet on its line; an empty set stands for all. Comments only, never strings."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and (match := _IGNORE.search(token.string)):
            codes = match[1].split(",") if match[1] else ()
            yield token.start[0], frozenset(code.strip().upper() for code in codes)
