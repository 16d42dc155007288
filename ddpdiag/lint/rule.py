"""What a rule is: a code, a manual page, and a pure function from a script to the places that it means."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ddpdiag.lint.reading import Reading
from ddpdiag.model import Severity


class Hit(NamedTuple):
    """A place, what goes wrong there, and how to mend it. `severity` is the rule's own if it is None."""

    node: ast.AST
    message: str
    remedy: str
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
