"""set_epoch is not called in the loop over epochs.

What: a DataLoader with a shuffling DistributedSampler is gone through in every epoch, and nothing in the script calls
set_epoch.

Why: the sampler shuffles by its seed and its epoch. Without set_epoch the epoch stays 0: every epoch has the same
order, the same batches, and each rank sees the same part of the data. Nothing fails; the model is worse.

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in loader:

Fix: sampler.set_epoch(epoch) (or loader.sampler.set_epoch) at the start of every epoch.

Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler (its warning);
https://github.com/pytorch/pytorch/issues/31771.
"""

import ast
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import is_constant, keyword, trains
from ddpdiag.lint.values import Kind
from ddpdiag.model import Severity

_DEPTH = 4


def look(read: Reading) -> Iterator[Hit]:
    """Samplers that shuffle, if a training loop goes through their loader again and again."""
    shuffling = [each for each in read.script.samplers if not is_constant(keyword(each, "shuffle", 3), False)]
    if not shuffling or "set_epoch" in read.script.attributes or not any(_repeats(read)):
        return
    yield Hit(
        shuffling[0],
        "nothing calls set_epoch: the sampler gives the same order in every epoch",
        "Call sampler.set_epoch(epoch) at the start of every epoch.",
    )


def _repeats(read: Reading) -> Iterator[bool]:
    """For each training loop over such a loader: does it run once an epoch?"""
    for loop in read.script.nodes:
        if isinstance(loop, ast.For) and _trains(read, loop) and _is_over_sampled(read, loop.iter):
            yield _is_repeated(read, loop, _DEPTH)


def _trains(read: Reading, loop: ast.For) -> bool:
    if trains(loop) or any(isinstance(node, ast.Yield) for node in ast.walk(loop)):
        return True  # a generator that begins again and again feeds a training
    calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
    return any(trains(function) for call in calls for function in read.script.targets(call))


def _is_over_sampled(read: Reading, iterated: ast.expr) -> bool:
    names = [each for each in ast.walk(iterated) if isinstance(each, (ast.Name, ast.Attribute))]
    return any(read.values.maybe(name, Kind.SAMPLED) for name in names)


def _is_repeated(read: Reading, node: ast.AST, depth: int) -> bool:
    """Is there a loop around it, here or where its function is called?"""
    for outer in read.script.around(node):
        if isinstance(outer, (ast.For, ast.While)):
            return True
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            sites = read.script.sites.get(outer, ())
            return depth > 0 and any(_is_repeated(read, site, depth - 1) for site in sites)
    return False


RULE = Rule("LNT010", "no-set-epoch", Severity.WARNING, __doc__ or "", look)
