"""What a rule asks: the script, what its values are, and under which conditions and on which ranks a line runs."""

import ast
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ddpdiag.lint.script import BLOCKS, Script
from ddpdiag.lint.syntax import Function, attribute_path, is_function
from ddpdiag.lint.values import Kind, Values
from ddpdiag.model import Severity

_MOVES = ("to", "cuda")


class Reading:
    """One script, read."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.values = Values(script)

    def surely_on_some_ranks(self, node: ast.AST) -> bool:
        """Does a line run on some ranks only, beyond doubt?"""
        return is_under(self.script, node, self.values.is_rank_test, sites=1)

    def maybe_on_some_ranks(self, node: ast.AST) -> bool:
        """May a line run on some ranks only? Then a rule about all ranks says nothing."""
        return is_under(self.script, node, self.values.depends_on_rank)

    def surely_on_all_ranks(self, node: ast.AST) -> bool:
        """Does every rank come by this line, beyond doubt: all its callers are in view, and none asks for the rank?"""
        return (
            runs_here(self.script, node) and self.script.runs_on_all_ranks(node) and not self.maybe_on_some_ranks(node)
        )

    @property
    def wrong_on_several_hosts(self) -> Severity:
        """What is right on one host and wrong on several is an error where the script means several."""
        return Severity.ERROR if self.script.means_several_hosts else Severity.WARNING

    @property
    def uses_gpus(self) -> bool:
        """Does it put anything on a GPU?"""
        backends = {"nccl", "cuda"}
        return bool(backends & self.script.texts) or any(
            self.script.callee(call).startswith("torch.cuda.") or is_bare_cuda(call) for call in self.script.calls
        )

    def is_wrapped(self, node: ast.expr) -> bool:
        """Can it be a DistributedDataParallel?"""
        return self.values.maybe(node, Kind.WRAPPED)


def is_bare_cuda(call: ast.Call) -> bool:
    """Is it `x.cuda()`, which takes the current GPU?"""
    return isinstance(call.func, ast.Attribute) and call.func.attr == "cuda" and not call.args and not call.keywords


def moved(call: ast.Call) -> ast.expr | None:
    """What `x.to(...)` or `x.cuda(...)` moves, or None."""
    return call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr in _MOVES else None


def same(one: ast.AST, other: ast.AST) -> bool:
    """Are both the same name, or the same attribute?"""
    path = attribute_path(one)
    return path is not None and path == attribute_path(other)


# No script by hand has more in one block; of generated ones the time would grow with their square.
_MOST_EXITS = 1000


class Condition(NamedTuple):
    """A test that must hold (or must not, if `holds` is false) for a line to run."""

    test: ast.expr
    holds: bool


def conditions(script: Script, node: ast.AST) -> Iterator[Condition]:
    """The conditions within the function (or module) that a node stands in."""
    child = node
    for outer in script.around(node):
        match outer:
            case ast.If(test=test, body=body) | ast.While(test=test, body=body):
                if child is not test:
                    yield Condition(test, child in body)
            case ast.IfExp(test=test, body=one) if child is not test:
                yield Condition(test, child is one)
            case ast.BoolOp(op=ast.And(), values=values) if child in values[1:]:
                yield from (Condition(each, True) for each in values[: values.index(child)])
        yield from _left_before(script, outer, child)
        if is_function(outer):
            return
        child = outer


def _left_before(script: Script, outer: ast.AST, child: ast.AST) -> Iterator[Condition]:
    """`if rank != 0: return` further up in the same block."""
    for name in BLOCKS:
        block = getattr(outer, name, None)
        if isinstance(block, list) and child in block:
            exits = script.exits.get((outer, name), ())
            before = bisect_left(exits, block.index(child), key=lambda exit: exit.place)
            yield from (Condition(each.test, False) for each in exits[max(0, before - _MOST_EXITS) : before])


def is_under(script: Script, node: ast.AST, matches: Callable[[ast.expr], bool], *, sites: int | None = None) -> bool:
    """Does the line run under a condition that matches, wherever it is called from within the script?

    With `sites`, only functions that are called at so many places at most are followed to their callers.
    """
    return _is_under(script, node, matches, sites, frozenset())


def runs_here(script: Script, node: ast.AST, seen: frozenset[ast.AST] = frozenset()) -> bool:
    """Can the line be reached from the top of the script, so that all its callers are in view?"""
    function = script.function_of(node)
    if function is None or any(function is each for each, _ in script.starts):
        return True
    sites = script.sites.get(function, ())
    return function not in seen and any(runs_here(script, site, seen | {function}) for site in sites)


def _is_under(
    script: Script,
    node: ast.AST,
    matches: Callable[[ast.expr], bool],
    most: int | None,
    seen: frozenset[ast.AST],
) -> bool:
    if any(matches(condition.test) for condition in conditions(script, node)):
        return True
    function: Function | None = script.function_of(node)
    if function is None or function in seen or any(function is each for each, _ in script.starts):
        return False
    sites = script.sites.get(function, ())
    if not sites or (most is not None and len(sites) > most):
        return False
    return all(_is_under(script, site, matches, most, seen | {function}) for site in sites)
