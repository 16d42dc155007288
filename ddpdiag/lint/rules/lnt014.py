"""Ranks may train for different numbers of steps.

What: the training loop goes over every n-th element, `items[rank::world_size]` or `range(rank, n, world_size)`, and
nothing evens the shares out: no join, no drop_last.

Why: unless the number of elements divides, some ranks have one more. Their last backward pass waits for an all-reduce
that the others never join: NCCL hangs until its watchdog fires, gloo ends with "Connection closed by peer".

Fix: DistributedSampler pads (or drops) so that all shares are equal; else cut the list to a multiple of the world size,
or train within `with model.join():`.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html#torch.nn.parallel.DistributedDataParallel.join;
https://github.com/pytorch/pytorch/issues/38174.
"""

import ast
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import is_constant, keyword, trains
from ddpdiag.lint.values import Kind
from ddpdiag.model import Severity


def look(read: Reading) -> Iterator[Hit]:
    """Training loops over shares of possibly different sizes."""
    if not read.script.wrappings or _is_evened_out(read):
        return
    for loop in read.script.nodes:
        if not isinstance(loop, ast.For) or not trains(loop):
            continue
        names = [each for each in ast.walk(loop.iter) if isinstance(each, ast.expr)]
        if any(read.values.surely(each, Kind.SHARD) for each in names):
            yield Hit(
                loop,
                "this loop trains on every n-th element: where the number does not divide, some ranks have a step more "
                "than others, and wait for them for ever",
                "Use a DistributedSampler, which evens the shares out, or `with model.join():`.",
            )


def _is_evened_out(read: Reading) -> bool:
    joined = any("Join" in each or each.endswith(".join") for each in _contexts(read))
    return joined or any(is_constant(keyword(loader, "drop_last"), True) for loader in read.script.loaders)


def _contexts(read: Reading) -> Iterator[str]:
    for node in read.script.nodes:
        if isinstance(node, ast.With):
            yield from (ast.unparse(i.context_expr.func) for i in node.items if isinstance(i.context_expr, ast.Call))


RULE = Rule("LNT014", "uneven-inputs", Severity.WARNING, __doc__ or "", look)
