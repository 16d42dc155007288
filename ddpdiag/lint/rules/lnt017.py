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
    if not read.script.wrappings or any(map(read.is_wrapped, _called_or_passed(read))):
        return
    for call in read.script.calls:
        if _is_bare(read, call) and _is_in_training(read, call):
            yield Hit(
                call,
                f"{path_or_text(call.func)} is the model inside of DistributedDataParallel: its backward pass averages "
                "nothing, and every rank trains a model of its own",
                "Call the model that DistributedDataParallel returned.",
            )


def _called_or_passed(read: Reading) -> Iterator[ast.expr]:
    """What is called, and what goes into functions that this script does not define."""
    for call in read.script.calls:
        yield call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "forward" else call.func
        if not read.script.targets(call) and read.script.callee(call) not in ("isinstance", "print", "len", "type"):
            yield from (each for each in call.args if not isinstance(each, ast.Call))
            yield from (each.value for each in call.keywords if not isinstance(each.value, ast.Call))


def _is_bare(read: Reading, call: ast.Call) -> bool:
    func = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "forward" else call.func
    if not isinstance(func, (ast.Name, ast.Attribute)):
        return False
    if read.values.maybe(func, Kind.INSIDE):
        return True
    scope = read.script.scope_of(call)
    return any(
        bool(wrapping.args) and same(func, wrapping.args[0]) and read.script.scope_of(wrapping) is scope
        for wrapping in read.script.wrappings
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
