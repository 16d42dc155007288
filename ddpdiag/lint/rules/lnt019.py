"""A DistributedDataParallel is called on some ranks only.

What: under `if rank == 0:`, the wrapped model is trained, or is called for evaluation while it holds BatchNorm.

Why: a backward pass is an all-reduce of all ranks, and a forward pass first sends rank 0's buffers (BatchNorm's
statistics) to all, in eval mode and under no_grad, too. The one rank waits for the others, or meets their next
collective: a hang at the next barrier.

    if rank == 0:
        evaluate(model)             # hangs with BatchNorm
        evaluate(model.module)      # the bare model: no communication

Fix: evaluate model.module, or evaluate on all ranks.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
(broadcast_buffers);
seen with torch 2.13 over gloo.
"""

import ast
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import is_constant, keyword, trains, words_in
from ddpdiag.lint.values import Kind, path_or_text
from ddpdiag.model import Severity

# torchvision's families with BatchNorm in them.
_WITH_BATCHNORM = ("resnet", "resnext", "wide_resnet", "densenet", "mobilenet", "efficientnet", "regnet", "mnasnet")


def look(read: Reading) -> Iterator[Hit]:
    """Calls of the wrapped model that some ranks never reach."""
    buffers = has_batchnorm(read) and not any(
        is_constant(keyword(wrapping, "broadcast_buffers"), False) for wrapping in read.script.wrappings
    )
    for call in read.script.calls:
        if not read.values.surely(call.func, Kind.WRAPPED, Kind.OTHER, Kind.NONE) or not read.is_wrapped(call.func):
            continue
        if not read.surely_on_some_ranks(call):
            continue
        if buffers or _goes_backward(read, call):
            yield Hit(
                call,
                f"{path_or_text(call.func)} is a DistributedDataParallel, and only some ranks call it: "
                "they wait for the others for ever",
                "Call the bare model (.module) to evaluate on one rank, or let every rank come by.",
            )


def has_batchnorm(read: Reading) -> bool:
    """Does the script make a model with BatchNorm, for all to see?"""
    for call in read.script.calls:
        name = read.script.callee(call)
        last = name.rpartition(".")[2]
        if last.startswith("BatchNorm") or (name.startswith("torchvision.models.") and _is_family(last)):
            return True
    return "BatchNorm2d" in set(words_in(read.script.tree))


def _is_family(name: str) -> bool:
    return name.lower().startswith(_WITH_BATCHNORM) or name.endswith("_bn")


def _goes_backward(read: Reading, call: ast.Call) -> bool:
    """Is there a backward pass in the block that the call is part of?"""
    function = read.script.function_of(call)
    for outer in read.script.around(call):
        if isinstance(outer, (ast.For, ast.While, ast.If)) and trains(outer):
            return not _is_under_no_grad(read, call)
        if outer is function:
            return False
    return False


def _is_under_no_grad(read: Reading, call: ast.Call) -> bool:
    return any(
        isinstance(outer, ast.With) and any("no_grad" in ast.unparse(item.context_expr) for item in outer.items)
        for outer in read.script.around(call)
    )


RULE = Rule("LNT019", "model-on-some-ranks", Severity.ERROR, __doc__ or "", look)
