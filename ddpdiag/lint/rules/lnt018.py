"""A collective runs on some ranks only.

What: a barrier, all_reduce, broadcast or another collective of torch.distributed, or the making of a
DistributedDataParallel, stands under `if rank == 0:` or after `if rank != 0: return`, and the other ranks have no call
that goes with it.

Why: a collective is a meeting of all ranks. Those that come wait for those that never do, until the time-out; or they
meet another call of theirs, and get wrong values.

Fix: move it out of the `if`, so that every rank comes by. For a part of the ranks make a group, and pass `group=`.

Source: https://docs.pytorch.org/docs/stable/distributed.html#collective-functions (all processes of the group).
"""

import ast
from collections.abc import Iterator

from ddpdiag.lint.guards import conditions
from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import has_unpacking, is_constant, keyword
from ddpdiag.model import Severity

_NAMES = (
    "new_group",
    "barrier",
    "monitored_barrier",
    "broadcast",
    "broadcast_object_list",
    "all_reduce",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "gather",
    "gather_object",
    "scatter",
    "scatter_object_list",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
)
_COLLECTIVES = tuple(f"torch.distributed.{name}" for name in _NAMES)


def look(read: Reading) -> Iterator[Hit]:
    """Collectives that some ranks never reach."""
    for call in (*read.script.calls_of(*_COLLECTIVES), *read.script.wrappings):
        if _has_group(call) or not read.surely_on_some_ranks(call) or _has_partner(read, call):
            continue
        name = read.script.callee(call).rpartition(".")[2]
        yield Hit(
            call,
            f"{name} is a meeting of all ranks, and only some of them come by here: they wait for the others for ever",
            f"Let every rank call {name}, or pass a group of those that do.",
        )


def _has_group(call: ast.Call) -> bool:
    group = keyword(call, "group") or keyword(call, "process_group")
    return has_unpacking(call) or (group is not None and not is_constant(group, None))


def _has_partner(read: Reading, call: ast.Call) -> bool:
    """`if rank != 0: barrier() ... if rank == 0: barrier()`, or the same collective in both branches: they meet."""
    here = read.script.scope_of(call)
    name = read.script.callee(call)
    return any(
        other is not call
        and read.script.callee(other) == name
        and read.script.scope_of(other) is here
        and any(read.values.is_rank_test(condition.test) for condition in conditions(read.script, other))
        for other in read.script.calls
    )


RULE = Rule("LNT018", "collective-on-some-ranks", Severity.ERROR, __doc__ or "", look)
