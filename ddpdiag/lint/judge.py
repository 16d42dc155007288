"""From the bytes of a file to its remarks."""

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Iterator
from typing import NamedTuple

from ddpdiag.errors import UsageError
from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.rules import all_rules
from ddpdiag.lint.script import Script
from ddpdiag.model.remark import Remark, ScriptLine

_IGNORE = re.compile(r"#\s*ddpdiag:\s*ignore(?:\[([A-Za-z0-9_,\s]*)\])?")


class Read(NamedTuple):
    """What one file gave."""

    script: ScriptLine
    remarks: tuple[Remark, ...]


def read_remarks(source: bytes, path: str) -> Read:
    """The remarks on a script, by line; UsageError, with the line, if it is no Python."""
    script = Script(_parsed(source, path), path)
    if (reason := script.not_judged) is not None:
        return Read(ScriptLine(path=path, not_judged=reason), ())
    reading = Reading(script)
    quiet = dict(_ignored(source))
    try:
        found = [(rule, hit) for rule in all_rules() for hit in rule.look(reading)]
    except RecursionError as error:
        raise UsageError(f"{path}: this Python is nested too deep to be read") from error
    heard = [(rule, hit) for rule, hit in found if not _is_quiet(rule, hit, quiet)]
    remarks = sorted({_remark(rule, hit, path) for rule, hit in heard}, key=lambda r: (r.line, r.column, r.code))
    return Read(ScriptLine(path=path, ignored=len(found) - len(heard)), tuple(remarks))


def _parsed(source: bytes, path: str) -> ast.Module:
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


def _remark(rule: Rule, hit: Hit, path: str) -> Remark:
    return Remark(
        code=rule.code,
        name=rule.name,
        severity=hit.severity or rule.severity,
        path=path,
        line=getattr(hit.node, "lineno", 1),
        column=getattr(hit.node, "col_offset", 0) + 1,
        message=hit.message,
        remedy=hit.remedy,
    )


def _ignored(source: bytes) -> Iterator[tuple[int, frozenset[str]]]:
    """The codes that a comment keeps quiet on its line; an empty set stands for all. Comments only, never strings."""
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type == tokenize.COMMENT and (match := _IGNORE.search(token.string)):
            codes = match[1].split(",") if match[1] else ()
            yield token.start[0], frozenset(code.strip().upper() for code in codes)


def _is_quiet(rule: Rule, hit: Hit, quiet: dict[int, frozenset[str]]) -> bool:
    """Does a comment on one of the lines of what is meant keep it quiet? Of a block, only its first line counts."""
    first = getattr(hit.node, "lineno", 1)
    last = first if hasattr(hit.node, "body") else getattr(hit.node, "end_lineno", first)
    return any(line in quiet and (not quiet[line] or rule.code in quiet[line]) for line in range(first, last + 1))
