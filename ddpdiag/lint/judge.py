"""From the bytes of a file to its findings."""

import ast
import io
import re
import signal
import threading
import tokenize
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from ddpdiag.errors import UsageError
from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, LintFinding, Rule, ScriptLine
from ddpdiag.lint.rules import all_rules
from ddpdiag.lint.script import Script

_IGNORE = re.compile(r"#\s*ddpdiag:\s*ignore(?:\[([A-Za-z0-9_,\s]*)\])?")

_MOST_SECONDS = 5.0


class Read(NamedTuple):
    """What one file gave."""

    script: ScriptLine
    findings: tuple[LintFinding, ...]


def read_findings(source: bytes, path: str) -> Read:
    """The findings on a script, by line; UsageError, with the line, if it is no Python."""
    text = _decoded(source, path)
    script = Script(_parsed(text, path), path)
    if (reason := script.not_judged) is not None:
        return Read(ScriptLine(path=path, not_judged=reason), ())
    reading = Reading(script)
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
    heard = [(rule, hit) for rule, hit in found if not _is_quiet(rule, hit, quiet)]
    findings = sorted({_note(rule, hit, path) for rule, hit in heard}, key=lambda r: (r.line, r.column, r.code))
    return Read(ScriptLine(path=path, ignored=len(found) - len(heard)), tuple(findings))


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


def _note(rule: Rule, hit: Hit, path: str) -> LintFinding:
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
