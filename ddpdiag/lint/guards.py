"""Under which conditions a line runs: the ifs around it, early returns before it, and the same for who calls it."""

import ast
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ddpdiag.lint.script import BLOCKS, Script
from ddpdiag.lint.syntax import Function, is_function

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
