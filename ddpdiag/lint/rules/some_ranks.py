"""Rules on what runs on some ranks only, or on all where one should."""

import ast
import re
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading, conditions
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import has_unpacking, is_constant, keyword, trains, words_in
from ddpdiag.lint.values import Kind, path_or_text
from ddpdiag.model import Severity

# LNT018 collective-on-some-ranks -------------------------------------------------------------------------------------

_COLLECTIVE_ON_SOME_RANKS = """A collective runs on some ranks only.

What: a barrier, all_reduce, broadcast or another collective of torch.distributed, or the making of a
DistributedDataParallel, stands under `if rank == 0:` or after `if rank != 0: return`, and the other ranks have no call
that goes with it.

Why: a collective is a meeting of all ranks. Those that come wait for those that never do, until the time-out; or they
meet another call of theirs, and get wrong values.

Fix: move it out of the `if`, so that every rank comes by. For a part of the ranks make a group, and pass `group=`.

Source: https://docs.pytorch.org/docs/stable/distributed.html#collective-functions (all processes of the group).
"""
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


def collective_on_some_ranks(read: Reading) -> Iterator[Hit]:
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


# LNT019 model-on-some-ranks ------------------------------------------------------------------------------------------

_MODEL_ON_SOME_RANKS = """A DistributedDataParallel is called on some ranks only.

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
# torchvision's families with BatchNorm in them.
_WITH_BATCHNORM = ("resnet", "resnext", "wide_resnet", "densenet", "mobilenet", "efficientnet", "regnet", "mnasnet")


def model_on_some_ranks(read: Reading) -> Iterator[Hit]:
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


# LNT021 batchnorm-local ----------------------------------------------------------------------------------------------

_BATCHNORM_LOCAL = """BatchNorm sees the batch of its own rank only.

What: a model with BatchNorm is wrapped, and nothing converts it to SyncBatchNorm. A hint (`--details`).

Why: mean and variance come from the images of one rank; with a small batch per GPU they are noisy, and training goes
otherwise than on one GPU with the whole batch. With a large batch per GPU it does no harm and is faster.

Fix: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before wrapping, where the batch of a GPU is below some 16.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html.
"""
_SYNCED = re.compile(r"sync_?(batch|bn)|bn_?sync", re.IGNORECASE)


def batchnorm_local(read: Reading) -> Iterator[Hit]:
    """The first wrapping, if no word is said of SyncBatchNorm."""
    if has_batchnorm(read) and not any(_SYNCED.search(word) for word in words_in(read.script.tree)):
        for wrapping in read.script.wrappings[:1]:
            yield Hit(
                wrapping,
                "BatchNorm takes its statistics from one rank's batch",
                "With few images per GPU, convert the model: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).",
            )


# LNT022 save-on-all-ranks --------------------------------------------------------------------------------------------

_SAVE_ON_ALL_RANKS = """All ranks save to one file.

What: torch.save writes to one path on every rank.

Why: the ranks write into each other's file; where they differ in speed, or the file system is shared between hosts, the
checkpoint is broken ("PytorchStreamReader failed reading zip archive"), which shows when it is loaded.

    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), path)
    dist.barrier()

Fix: save on rank 0 only, or put the rank into the name.

Source: https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html#save-and-load-checkpoints.
"""


def save_on_all_ranks(read: Reading) -> Iterator[Hit]:
    """Saves that every rank comes by."""
    if not read.script.wrappings:
        return
    for call in read.script.calls_of("torch.save"):
        path = keyword(call, "f", 1)
        if path is None or has_unpacking(call) or _is_own(read, path) or not read.surely_on_all_ranks(call):
            continue
        yield Hit(
            call,
            "all ranks write to one file at once, and break it",
            "Save on rank 0 only: if dist.get_rank() == 0.",
        )


def _is_own(read: Reading, path: ast.expr) -> bool:
    """May each rank have a path of its own? Of a buffer, or a path that some function makes, nobody can tell."""
    return isinstance(path, ast.Call) or read.values.may_be_own(path)


RULES = (
    Rule("LNT018", "collective-on-some-ranks", Severity.ERROR, _COLLECTIVE_ON_SOME_RANKS, collective_on_some_ranks),
    Rule("LNT019", "model-on-some-ranks", Severity.ERROR, _MODEL_ON_SOME_RANKS, model_on_some_ranks),
    Rule("LNT021", "batchnorm-local", Severity.NOTE, _BATCHNORM_LOCAL, batchnorm_local),
    Rule("LNT022", "save-on-all-ranks", Severity.WARNING, _SAVE_ON_ALL_RANKS, save_on_all_ranks),
)
