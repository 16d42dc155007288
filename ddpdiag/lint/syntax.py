"""Small questions to a syntax tree that need no knowledge of the rest of the script."""

import ast
from collections.abc import Iterator
from typing import TypeGuard

Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def is_function(node: ast.AST) -> TypeGuard[Function]:
    """Is it a `def`?"""
    return isinstance(node, _FUNCTIONS)


def keyword(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """The argument of that name (or, with `position`, at that place among the positional ones); None if left out."""
    for each in call.keywords:
        if each.arg == name:
            return each.value
    return call.args[position] if position is not None and position < len(call.args) else None


def has_unpacking(call: ast.Call) -> bool:
    """`f(*args)` or `f(**options)`: what is passed cannot be read."""
    return any(each.arg is None for each in call.keywords) or any(isinstance(arg, ast.Starred) for arg in call.args)


def is_constant(node: ast.AST | None, value: object) -> bool:
    """Is it written out as this value (True is not 1)?"""
    return isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value


def text_of(node: ast.AST | None) -> str | None:
    """The string that is written there, or None."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def attribute_path(node: ast.AST) -> str | None:
    """ "a.b.c" of that expression; None if it is more than names and dots."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def words_in(node: ast.AST) -> Iterator[str]:
    """Every name, attribute and string in an expression."""
    for each in ast.walk(node):
        match each:
            case ast.Name(id=name):
                yield name
            case ast.Attribute(attr=name):
                yield name
            case ast.Constant(value=str(text)):
                yield text


def names_in(node: ast.AST) -> Iterator[str]:
    """Every name and attribute in an expression."""
    for each in ast.walk(node):
        match each:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield name


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Everything in a function or module, but not in the functions and classes inside of it."""
    stack = list(ast.iter_child_nodes(function))
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
            stack.extend(ast.iter_child_nodes(node))


def leaves(body: list[ast.stmt]) -> bool:
    """Does control never reach what follows these statements?"""
    if not body:
        return False
    last = body[-1]
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return attribute_path(last.value.func) in ("sys.exit", "exit", "quit", "os._exit")
    return isinstance(last, LEAVING)


def calls_method(node: ast.AST, method: str) -> bool:
    """Is there a call `....method(...)` within?"""
    return any(
        isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == method
        for each in ast.walk(node)
    )


def trains(node: ast.AST) -> bool:
    """Is there a backward pass within?"""
    return calls_method(node, "backward")


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
