"""What a rule is, and what it asks: a script, its values, and under which conditions and on which ranks a line runs."""

import ast
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import cleandoc
from typing import NamedTuple

from ddpdiag.lint.script import BLOCKS, attribute_path, is_function
from ddpdiag.lint.values import Kind, Values
from ddpdiag.model import Severity

# No script by hand has more in one block; of generated ones the time would grow with their square.
_MOST_EXITS = 1000


class Condition(NamedTuple):
    """A test that must hold (or must not, if `holds` is false) for a line to run."""

    test: ast.expr
    holds: bool


class Reading(Values):
    """One script, read."""

    def surely_on_some_ranks(self, node: ast.AST) -> bool:
        """Does a line run on some ranks only, beyond doubt?"""
        return self._is_under(node, self.is_rank_test, most_sites=1)

    def maybe_on_some_ranks(self, node: ast.AST) -> bool:
        """May a line run on some ranks only? Then a rule about all ranks says nothing."""
        return self._is_under(node, self.depends_on_rank)

    def surely_on_all_ranks(self, node: ast.AST) -> bool:
        """Does every rank come by this line, beyond doubt: all its callers are in view, and none asks for the rank?"""
        return self._is_reached(node) and self.runs_on_all_ranks(node) and not self.maybe_on_some_ranks(node)

    @property
    def wrong_on_several_hosts(self) -> Severity:
        """What is right on one host and wrong on several is an error where the script means several."""
        return Severity.ERROR if self.means_several_hosts else Severity.WARNING

    @property
    def uses_gpus(self) -> bool:
        """Does it put anything on a GPU?"""
        return bool({"nccl", "cuda"} & self.texts) or any(
            self.callee(call).startswith("torch.cuda.") or is_bare_cuda(call) for call in self.calls
        )

    def is_wrapped(self, node: ast.expr) -> bool:
        """Can it be a DistributedDataParallel?"""
        return self.maybe(node, Kind.WRAPPED)

    def conditions(self, node: ast.AST) -> Iterator[Condition]:
        """The conditions within the function (or module) that a node stands in."""
        child = node
        for outer in self.around(node):
            match outer:
                case ast.If(test=test, body=body) | ast.While(test=test, body=body):
                    if child is not test:
                        yield Condition(test, child in body)
                case ast.IfExp(test=test, body=one) if child is not test:
                    yield Condition(test, child is one)
                case ast.BoolOp(op=ast.And(), values=values) if child in values[1:]:
                    yield from (Condition(each, True) for each in values[: values.index(child)])
            yield from self._left_before(outer, child)
            if is_function(outer):
                return
            child = outer

    def _left_before(self, outer: ast.AST, child: ast.AST) -> Iterator[Condition]:
        """`if rank != 0: return` further up in the same block."""
        for name in BLOCKS:
            block = getattr(outer, name, None)
            if isinstance(block, list) and child in block:
                exits = self.exits.get((outer, name), ())
                before = bisect_left(exits, block.index(child), key=lambda exit: exit.place)
                yield from (Condition(each.test, False) for each in exits[max(0, before - _MOST_EXITS) : before])

    def _is_under(
        self,
        node: ast.AST,
        matches: Callable[[ast.expr], bool],
        *,
        most_sites: int | None = None,
        seen: frozenset[ast.AST] = frozenset(),
    ) -> bool:
        """Does the line run under a condition that matches, wherever it is called from within the script?

        With `most_sites`, only functions that are called at so many places at most are followed to their callers.
        """
        if any(matches(condition.test) for condition in self.conditions(node)):
            return True
        function = self.function_of(node)
        if function is None or function in seen or self._is_started(function):
            return False
        sites = self.sites.get(function, ())
        if not sites or (most_sites is not None and len(sites) > most_sites):
            return False
        return all(self._is_under(site, matches, most_sites=most_sites, seen=seen | {function}) for site in sites)

    def _is_reached(self, node: ast.AST, seen: frozenset[ast.AST] = frozenset()) -> bool:
        """Can the line be reached from the top of the script, so that all its callers are in view?"""
        function = self.function_of(node)
        if function is None or self._is_started(function):
            return True
        sites = self.sites.get(function, ())
        return function not in seen and any(self._is_reached(site, seen | {function}) for site in sites)

    def _is_started(self, function: ast.AST) -> bool:
        return any(function is each for each, _ in self.starts)


class Hit(NamedTuple):
    """A place, what goes wrong there, and how to mend it. `severity` is the rule's own if it is None."""

    node: ast.AST
    message: str
    fix: str
    severity: Severity | None = None


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
    """The rule for which a function looks: its name and its docstring are the rule's name and manual page."""
    return lambda look: Rule(code, look.__name__.replace("_", "-"), severity, cleandoc(look.__doc__ or ""), look)


def is_bare_cuda(call: ast.Call) -> bool:
    """Is it `x.cuda()`, which takes the current GPU?"""
    return isinstance(call.func, ast.Attribute) and call.func.attr == "cuda" and not call.args and not call.keywords


def moved(call: ast.Call) -> ast.expr | None:
    """What `x.to(...)` or `x.cuda(...)` moves, or None."""
    return call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr in ("to", "cuda") else None


def same(one: ast.AST, other: ast.AST) -> bool:
    """Are both the same name, or the same attribute?"""
    path = attribute_path(one)
    return path is not None and path == attribute_path(other)
