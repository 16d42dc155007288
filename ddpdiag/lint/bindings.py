"""The values that names, attributes and parameters of a script are bound to."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from ddpdiag.lint.script import Function, Script, attribute_path, has_unpacking, is_function, keyword, own_nodes

Key = tuple[ast.AST | None, str]
# The first argument that mp.spawn gives to every process: its number on this host.
SPAWNED = "spawned"


class Source(NamedTuple):
    """The origin of a value: an expression (or the `item`-th of its results), or None if it is unknown."""

    expression: ast.expr | None
    item: int | None = None
    # "spawned", or "each" for one element of the expression, as in a for loop
    how: str = ""


UNKNOWN = Source(None)


class Bindings(Script):
    """A script with its assignments, in any order: a name stands for all values that it ever gets in its scope."""

    @cached_property
    def _bound(self) -> dict[Key, list[Source]]:
        """The sources of each name of a scope, and of each attribute."""
        bound: dict[Key, list[Source]] = defaultdict(list)
        for scope in self.nodes:
            if isinstance(scope, ast.Module) or is_function(scope):
                shared = {name for node in own_nodes(scope) if isinstance(node, ast.Global) for name in node.names}
                for target, source in (pair for node in own_nodes(scope) for pair in _assignments(node)):
                    for key, part in self._keys(scope, target, source, shared):
                        bound[key].append(part)
        return bound

    def sources(self, node: ast.Name | ast.Attribute) -> list[Source]:
        """The possible sources of a name or attribute; empty if the script never binds it."""
        if isinstance(node, ast.Attribute):
            return self._bound.get(self._attribute_key(node), [])
        for scope in self.around(node):
            if isinstance(scope, ast.Module) or is_function(scope):
                given = self._given(scope, node.id) if is_function(scope) else ()
                if sources := [*given, *self._bound.get((scope, node.id), ())]:
                    return sources
        return []

    def _keys(self, scope: ast.AST, target: ast.expr, source: Source, shared: set[str]) -> Iterator[tuple[Key, Source]]:
        """The keys that one target binds (several for a tuple), each with its source."""
        match target:
            case ast.Name(id=name):
                yield (self.tree if name in shared else scope, name), source
            case ast.Attribute():
                yield self._attribute_key(target), source
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for number, each in enumerate(targets):
                    yield from self._keys(scope, each, _part(source, number, len(targets)), shared)

    def _attribute_key(self, node: ast.Attribute) -> Key:
        """The key of an attribute. `self.x` belongs to its class; `args.x` is the same in the whole script."""
        path = attribute_path(node) or ""
        return (self.class_of(node) if path.startswith("self.") else None, path)

    def _given(self, function: Function, name: str) -> Iterator[Source]:
        """The arguments for the parameter `name` at every call in the script, or UNKNOWN; nothing if there is none."""
        arguments = function.args
        names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        if name not in names:
            return
        position = names.index(name)
        if self.takes_self(function):
            if position == 0:
                yield UNKNOWN
                return
            position -= 1
        sites = self.sites.get(function, ())
        for call in sites:
            given = keyword(call, name, position)
            known = _default(function, name) if given is None else Source(given)
            yield UNKNOWN if has_unpacking(call) else known
        starts = [call for started, call in self.starts if started is function]
        for call in starts:
            yield self._passed_to_process(call, position)
        if not sites and not starts:
            yield UNKNOWN

    def _passed_to_process(self, start: ast.Call, position: int) -> Source:
        """The argument that mp.spawn(f, args=(...)) or Process(target=f, args=(...)) passes at that position."""
        spawned = self.callee(start).rpartition(".")[2] != "Process"
        if spawned and position == 0:
            return Source(None, how=SPAWNED)
        arguments = keyword(start, "args", 1 if spawned else 3)
        if not isinstance(arguments, (ast.Tuple, ast.List)):
            return UNKNOWN
        index = position - spawned
        if index >= len(arguments.elts):
            return UNKNOWN
        given = arguments.elts[index]
        return Source(None, how=SPAWNED) if not spawned and self._is_counter(given) else Source(given)

    def _is_counter(self, node: ast.expr) -> bool:
        """Whether `node` is the variable of `for i in range(...)`."""
        if not isinstance(node, ast.Name):
            return False
        sources = self.sources(node)
        return bool(sources) and all(
            source.how == "each"
            and isinstance(source.expression, ast.Call)
            and attribute_path(source.expression.func) == "range"
            for source in sources
        )

    def origins(self, node: ast.expr) -> tuple[ast.expr | None, ...]:
        """The expressions that a name, an attribute or a call of the script's own functions leads to; None: unknown."""
        found: list[ast.expr | None] = []
        seen: set[ast.expr | None] = set()
        waiting: list[ast.expr | None] = [node]
        while waiting:
            each = waiting.pop()
            if each not in seen:
                seen.add(each)
                steps = list(self._steps(each)) if each is not None else []
                waiting += steps
                found += [] if steps else [each]
        return tuple(found)

    def _steps(self, node: ast.expr) -> Iterator[ast.expr | None]:
        """The expressions one step back from a name, attribute or call; nothing for any other expression."""
        if isinstance(node, (ast.Name, ast.Attribute)):
            sources = self.sources(node) or [Source(None)]
        elif isinstance(node, ast.Call):
            own = [function for function in self.targets(node) if function.name != "__init__"]
            sources = [Source(value) for function in own for value in returned(function)]
        else:
            return
        for source in sources:
            if source.how or source.expression is None:
                yield None
            elif source.item is None:
                yield source.expression
            else:
                items: list[ast.expr | None] = list(self.items(source.expression, source.item))
                yield from items or [None]

    def items(self, call: ast.expr, number: int) -> Iterator[ast.expr]:
        """The `number`-th element of the tuples that the script's own function returns."""
        for function in self.targets(call) if isinstance(call, ast.Call) else ():
            for value in returned(function):
                if isinstance(value, ast.Tuple) and number < len(value.elts):
                    yield value.elts[number]


def _default(function: Function, name: str) -> Source:
    arguments = function.args
    positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    pairs = dict(zip(reversed(positional), reversed(arguments.defaults), strict=False))
    pairs |= {a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None}
    return Source(pairs[name]) if name in pairs else UNKNOWN


def _part(source: Source, number: int, total: int) -> Source:
    """The source of the `number`-th of `total` targets to which a source is unpacked."""
    if source.how or source.expression is None:
        return UNKNOWN
    if isinstance(source.expression, (ast.Tuple, ast.List)):
        elements = source.expression.elts
        return Source(elements[number]) if len(elements) == total else UNKNOWN
    return Source(source.expression, item=number)


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, Source]]:
    """The targets that one node binds, with their sources."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield target, Source(value)
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
            yield target, Source(value)
        case ast.AugAssign(target=target):
            yield target, UNKNOWN
        case ast.For(target=target, iter=each) | ast.AsyncFor(target=target, iter=each):
            yield target, Source(each, how="each")
        case ast.comprehension(target=target, iter=each):
            yield target, Source(each, how="each")
        case ast.With(items=items) | ast.AsyncWith(items=items):
            for item in items:
                if item.optional_vars is not None:
                    yield item.optional_vars, Source(item.context_expr)


def returned(function: Function) -> Iterator[ast.expr | None]:
    """The value of each return statement of a function."""
    for node in own_nodes(function):
        if isinstance(node, ast.Return):
            yield node.value
