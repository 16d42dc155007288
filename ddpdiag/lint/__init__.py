"""Find pitfalls of DistributedDataParallel in the source of a training script, which is never run and never imported.

Each file is analysed alone (`Analysis`): names are followed through imports, assignments, attributes, and calls of the
functions that the file defines. A rule reports a line only if every value that a name can have is known to be wrong,
so a correct script gets no report. A pitfall that spans several files may be missed.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import cleandoc
from typing import NamedTuple

from ddpdiag.lint.analysis import Analysis
from ddpdiag.model import Severity


class Hit(NamedTuple):
    """One fault: the faulty code (`node`), what goes wrong, and the fix. `severity`, if set, replaces the rule's.

    If `node` is a call of a function in the script, `helper` may be the code in that function that goes wrong.
    """

    node: ast.AST
    message: str
    fix: str
    severity: Severity | None = None
    helper: ast.AST | None = None


FindHits = Callable[[Analysis], Iterator[Hit]]


@dataclass(frozen=True)
class Rule:
    """One pitfall, and the function that finds it. `manual` is the manual page, whose first line is the title."""

    code: str
    name: str
    severity: Severity
    manual: str
    find_hits: FindHits

    @property
    def title(self) -> str:
        """The first line of the manual page, without its full stop."""
        return self.manual.partition("\n")[0].rstrip(".")


def rule(code: str, severity: Severity) -> Callable[[FindHits], Rule]:
    """Return a decorator that makes a `Rule` of a function, from the name and docstring of the function."""
    return lambda find: Rule(code, find.__name__.replace("_", "-"), severity, cleandoc(find.__doc__ or ""), find)
