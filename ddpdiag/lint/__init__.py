"""Find pitfalls of DistributedDataParallel in the source of a training script, which is never run and never imported.

One file is read at a time (`Script`): names are followed through imports, assignments, attributes, and the calls of
its own functions. A rule reports a line if every value that a name can have is known to be wrong, and reports nothing
if one of them is unknown: a correct script must get no report, and a pitfall in several files may be missed.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import cleandoc
from typing import NamedTuple

from ddpdiag.lint.reading import Reading
from ddpdiag.model import Severity


class Hit(NamedTuple):
    """A place, what goes wrong there, and the fix. `severity` is the rule's own if it is None.

    `helper` is the line that goes wrong in a function of the script, where `node` calls that function.
    """

    node: ast.AST
    message: str
    fix: str
    severity: Severity | None = None
    helper: ast.AST | None = None


Look = Callable[[Reading], Iterator[Hit]]


@dataclass(frozen=True)
class Rule:
    """One pitfall. `manual` is its manual page, whose first line is its title."""

    code: str
    name: str
    severity: Severity
    manual: str
    look: Look

    @property
    def title(self) -> str:
        """The first line of the manual page, without its full stop."""
        return self.manual.partition("\n")[0].rstrip(".")


def rule(code: str, severity: Severity) -> Callable[[Look], Rule]:
    """Decorator: make a rule of a function, whose name and docstring become the rule's name and manual page."""
    return lambda look: Rule(code, look.__name__.replace("_", "-"), severity, cleandoc(look.__doc__ or ""), look)
