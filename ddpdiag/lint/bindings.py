"""`Bindings`: the expressions whose values the names, attributes and parameters of a script may have."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from ddpdiag.lint.script import Function, Script, argument, attribute_path, has_unpacking, scope_nodes

# A name with the function or module in which it is bound, or a dotted attribute with its class (see `_attribute_key`).
Key = tuple[ast.AST | None, str]
# Roles of a source: the number of a process that mp.spawn started; one element of the expression, as in a for loop.
PROCESS_INDEX, ELEMENT = "process index", "element"


class Source(NamedTuple):
    """The origin of a value: `expression`, or element `element_index` of the tuple that the expression gives.

    `role` is PROCESS_INDEX or ELEMENT, else empty. `expression` is None for a PROCESS_INDEX and for an unknown origin.
    """

    expression: ast.expr | None
    element_index: int | None = None
    role: str = ""


UNKNOWN = Source(None)


class Bindings(Script):
    """A script with its assignments. Their order is ignored: a name may have any value that its scope assigns to it."""

    @cached_property
    def _sources_by_key(self) -> dict[Key, list[Source]]:
        """The sources of all names and attributes that the script assigns."""
        sources: dict[Key, list[Source]] = defaultdict(list)
        for scope in self.nodes:
            if isinstance(scope, ast.Module | Function):
                nodes = tuple(scope_nodes(scope))
                global_names = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
                for target, source in (pair for node in nodes for pair in _assignments(node)):
                    for key, bound_source in self._bindings(scope, target, source, global_names):
                        sources[key].append(bound_source)
        return sources

    def sources(self, node: ast.Name | ast.Attribute) -> list[Source]:
        """The possible sources of a name or attribute; empty if the script never binds it."""
        if isinstance(node, ast.Attribute):
            return self._sources_by_key.get(self._attribute_key(node), [])
        for scope in self.ancestors(node):
            if isinstance(scope, ast.Module | Function):
                arguments = self._argument_sources(scope, node.id) if isinstance(scope, Function) else ()
                if sources := [*arguments, *self._sources_by_key.get((scope, node.id), ())]:
                    return sources
        return []

    def _bindings(
        self, scope: ast.AST, target: ast.expr, source: Source, global_names: set[str]
    ) -> Iterator[tuple[Key, Source]]:
        """Yield the key and source of each name or attribute in a target; `global_names` belong to the module."""
        match target:
            case ast.Name(id=name):
                yield (self.tree if name in global_names else scope, name), source
            case ast.Attribute():
                yield self._attribute_key(target), source
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                for number, each in enumerate(elements):
                    yield from self._bindings(scope, each, _unpacked(source, number, len(elements)), global_names)

    def _attribute_key(self, node: ast.Attribute) -> Key:
        """The key of an attribute: (class, "self.x"); or (None, "args.x"), one variable in the whole script."""
        path = attribute_path(node) or ""
        return (self.class_of(node) if path.startswith("self.") else None, path)

    def _argument_sources(self, function: Function, name: str) -> Iterator[Source]:
        """Yield a source of parameter `name`, if it exists, for each call and process start; UNKNOWN without these."""
        arguments = function.args
        parameters = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        if name not in parameters:
            return
        position = parameters.index(name)
        if self.takes_self(function):
            if position == 0:
                yield UNKNOWN
                return
            position -= 1
        call_sites = self.call_sites.get(function, ())
        for call in call_sites:
            value = argument(call, name, position)
            source = _default_source(function, name) if value is None else Source(value)
            yield UNKNOWN if has_unpacking(call) else source
        process_starts = [call for started, call in self.process_starts if started is function]
        for call in process_starts:
            yield self._process_argument(call, position)
        if not call_sites and not process_starts:
            yield UNKNOWN

    def _process_argument(self, start_call: ast.Call, position: int) -> Source:
        """The source of parameter `position` of f in mp.spawn(f, args=(...)) or Process(target=f, args=(...))."""
        is_spawn = self.last_name(start_call) != "Process"
        if is_spawn and position == 0:
            return Source(None, role=PROCESS_INDEX)
        arguments = argument(start_call, "args", 1 if is_spawn else 3)
        if not isinstance(arguments, (ast.Tuple, ast.List)):
            return UNKNOWN
        index = position - is_spawn
        if index >= len(arguments.elts):
            return UNKNOWN
        value = arguments.elts[index]
        return Source(None, role=PROCESS_INDEX) if not is_spawn and self._is_range_variable(value) else Source(value)

    def _is_range_variable(self, node: ast.expr) -> bool:
        """Whether `node` is the variable of `for i in range(...)`."""
        if not isinstance(node, ast.Name):
            return False
        sources = self.sources(node)
        return bool(sources) and all(
            source.role == ELEMENT
            and isinstance(source.expression, ast.Call)
            and attribute_path(source.expression.func) == "range"
            for source in sources
        )

    def origins(self, node: ast.expr) -> tuple[ast.expr | None, ...]:
        """The expressions that may give the value of `node`, through names, attributes and calls (None: unknown)."""
        origins: list[ast.expr | None] = []
        visited: set[ast.expr | None] = set()
        waiting: list[ast.expr | None] = [node]
        while waiting:
            expression = waiting.pop()
            if expression not in visited:
                visited.add(expression)
                direct_origins = list(self._direct_origins(expression)) if expression is not None else []
                waiting += direct_origins
                origins += [] if direct_origins else [expression]
        return tuple(origins)

    def _direct_origins(self, node: ast.expr) -> Iterator[ast.expr | None]:
        """Yield the expressions bound to a name or attribute, or returned by a called function (None: unknown)."""
        if isinstance(node, (ast.Name, ast.Attribute)):
            sources = self.sources(node) or [UNKNOWN]
        elif isinstance(node, ast.Call):
            functions = [function for function in self.callees(node) if function.name != "__init__"]
            sources = [Source(value) for function in functions for value in return_values(function)]
        else:
            return
        for source in sources:
            if source.role or source.expression is None:
                yield None
            elif source.element_index is None:
                yield source.expression
            else:
                items: list[ast.expr | None] = list(self.returned_elements(source.expression, source.element_index))
                yield from items or [None]

    def returned_elements(self, call: ast.expr, index: int) -> Iterator[ast.expr]:
        """Yield element `index` of each tuple that the called function returns, if the script defines that function."""
        for function in self.callees(call) if isinstance(call, ast.Call) else ():
            for value in return_values(function):
                if isinstance(value, ast.Tuple) and index < len(value.elts):
                    yield value.elts[index]


def _default_source(function: Function, name: str) -> Source:
    """The default of parameter `name`; UNKNOWN if it has none."""
    arguments = function.args
    positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    defaults = dict(zip(reversed(positional), reversed(arguments.defaults), strict=False))
    defaults |= {a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None}
    return Source(defaults[name]) if name in defaults else UNKNOWN


def _unpacked(source: Source, number: int, total: int) -> Source:
    """The source of target `number` (from 0) if `source` is unpacked into `total` targets."""
    if source.role or source.expression is None:
        return UNKNOWN
    if isinstance(source.expression, (ast.Tuple, ast.List)):
        elements = source.expression.elts
        return Source(elements[number]) if len(elements) == total else UNKNOWN
    return Source(source.expression, element_index=number)


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, Source]]:
    """Yield each target of an assignment, loop, comprehension or `with` with its source; nothing for other nodes."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield target, Source(value)
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
            yield target, Source(value)
        case ast.AugAssign(target=target):
            yield target, UNKNOWN
        case ast.For(target=target, iter=values) | ast.AsyncFor(target=target, iter=values):
            yield target, Source(values, role=ELEMENT)
        case ast.comprehension(target=target, iter=values):
            yield target, Source(values, role=ELEMENT)
        case ast.With(items=items) | ast.AsyncWith(items=items):
            for item in items:
                if item.optional_vars is not None:
                    yield item.optional_vars, Source(item.context_expr)


def return_values(function: Function) -> Iterator[ast.expr | None]:
    """Yield the value of each return statement of a function; None for a bare `return`."""
    for node in scope_nodes(function):
        if isinstance(node, ast.Return):
            yield node.value
