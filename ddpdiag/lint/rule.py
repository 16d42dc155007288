"""A rule of lint (a code, a manual page, a pure function from a script to places in it), and what rules report."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Struct, field

from ddpdiag.lint.reading import Reading
from ddpdiag.model import Severity


class Hit(NamedTuple):
    """A place, what goes wrong there, and how to mend it. `severity` is the rule's own if it is None."""

    node: ast.AST
    message: str
    fix: str
    severity: Severity | None = None


@dataclass(frozen=True)
class Rule:
    """One pitfall. `manual` is its manual page, whose first line is its title."""

    code: str
    name: str
    severity: Severity
    manual: str
    look: Callable[[Reading], Iterator[Hit]]

    @property
    def title(self) -> str:
        """The first line of the manual page, without its full stop."""
        return self.manual.partition("\n")[0].rstrip(".")


LINT_SCHEMA = "ddpdiag.lint/1"


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
