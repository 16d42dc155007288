"""Training goes around DistributedDataParallel.

What: the training loop calls the bare model, `ddp.module(x)` or the variable from before wrapping, and the wrapped one
is never called.

Why: DistributedDataParallel prepares its all-reduce in its own forward pass. Without it the backward pass averages
nothing: every rank trains a model of its own, without an error, and the one that is saved has seen a part of the data.

    output = ddp.module(batch)      # no all-reduce
    output = ddp(batch)

Fix: call the wrapped model. To evaluate with the bare one is right.

Source: https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design (forward pass);
https://github.com/jingyaogong/minimind/issues/853; seen with torch 2.13: gradients differ between the ranks.
"""

import ast
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading, same
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import trains
from ddpdiag.lint.values import Kind, path_or_text
from ddpdiag.model import Severity


def look(read: Reading) -> Iterator[Hit]:
    """Calls of the bare model in training loops, if the wrapped one is never used."""
    if not read.script.wrappings or any(read.is_wrapped(_of_forward(call)) for call in read.script.calls):
        return
    handed_on = [call for call in read.script.calls if _hands_on(read, call)]
    for call in read.script.calls:
        if _is_bare(read, call, named=not handed_on) and _is_in_training(read, call):
            yield Hit(
                call,
                f"{path_or_text(call.func)} is the model inside of DistributedDataParallel: its backward pass averages "
                "nothing, and every rank trains a model of its own",
                "Call the model that DistributedDataParallel returned.",
            )


def _of_forward(call: ast.Call) -> ast.expr:
    """`model` of `model.forward(x)`, which is as good as `model(x)`; else what is called."""
    return call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "forward" else call.func


def _hands_on(read: Reading, call: ast.Call) -> bool:
    """Does the wrapped model go into a function of another file, which may call it?"""
    if read.script.targets(call) or read.script.callee(call) in ("isinstance", "print", "len", "type"):
        return False
    given = (*call.args, *(each.value for each in call.keywords))
    return any(not isinstance(each, ast.Call) and read.is_wrapped(each) for each in given)


def _is_bare(read: Reading, call: ast.Call, *, named: bool) -> bool:
    """Is it `ddp.module(x)`, or (if `named`) a call of the variable that was wrapped?"""
    func = _of_forward(call)
    if not isinstance(func, (ast.Name, ast.Attribute)):
        return False
    if read.values.maybe(func, Kind.INSIDE):
        return not _is_detached(read, call) and not _computes_elsewhere(read, call)
    scope = read.script.scope_of(call)
    return named and any(
        bool(wrapping.args) and same(func, wrapping.args[0]) and read.script.scope_of(wrapping) is scope
        for wrapping in read.script.wrappings
    )


def _is_detached(read: Reading, call: ast.Call) -> bool:
    """`ddp.module(x).detach()`: a target, not what is trained."""
    outer = read.script.parents.get(call)
    return isinstance(outer, ast.Attribute) and outer.attr == "detach"


def _computes_elsewhere(read: Reading, call: ast.Call) -> bool:
    """Does the same function take a result from a function of another file that gets the wrapped model?"""
    scope = read.script.scope_of(call)
    return any(
        read.script.scope_of(other) is scope
        and _hands_on(read, other)
        and not isinstance(read.script.parents.get(other), ast.Expr)
        for other in read.script.calls
    )


def _is_in_training(read: Reading, call: ast.Call) -> bool:
    """Within a loop (of its function) that goes backward, and not under no_grad."""
    looped = False
    for outer in read.script.around(call):
        if isinstance(outer, ast.With) and any("no_grad" in text or "inference" in text for text in _contexts(outer)):
            return False
        looped = looped or (isinstance(outer, (ast.For, ast.While)) and trains(outer))
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            break
    return looped


def _contexts(node: ast.With) -> Iterator[str]:
    return (ast.unparse(item.context_expr) for item in node.items)


RULE = Rule("LNT017", "bypassed-ddp", Severity.ERROR, __doc__ or "", look)
