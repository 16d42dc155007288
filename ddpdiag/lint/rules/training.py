"""Rules on the training: collectives and the model on some ranks only, and effects of the number of ranks."""

import ast
import re
from collections.abc import Iterator

from ddpdiag.lint import Hit, rule
from ddpdiag.lint.reading import Kind, Reading, path_or_text
from ddpdiag.lint.script import has_unpacking, is_constant, keyword, trains, words_in
from ddpdiag.model import Severity

_NAMES = (
    "new_group barrier monitored_barrier broadcast broadcast_object_list all_reduce reduce all_gather "
    "all_gather_into_tensor all_gather_object gather gather_object scatter scatter_object_list reduce_scatter "
    "reduce_scatter_tensor all_to_all all_to_all_single"
)
_COLLECTIVES = tuple(f"torch.distributed.{name}" for name in _NAMES.split())


@rule("LNT018", Severity.ERROR)
def collective_on_some_ranks(read: Reading) -> Iterator[Hit]:
    """A collective runs on some ranks only.

    What: a barrier, all_reduce, broadcast or another collective of torch.distributed, or the construction of a
    DistributedDataParallel, is under `if rank == 0:` or after `if rank != 0: return`, and the other ranks have no
    matching call.

    Why: all ranks must call a collective. The ranks that call it wait for the ranks that never do, until the time-out;
    or their call is matched with another call of those ranks, and they get wrong values.

    Fix: move it out of the `if`, so that every rank calls it. For some of the ranks, create a group and pass `group=`.

    Source: https://docs.pytorch.org/docs/stable/distributed.html#collective-functions (all processes of the group).
    """
    for call in (*read.calls_of(*_COLLECTIVES), *read.wrappings):
        group = keyword(call, "group") or keyword(call, "process_group")
        has_group = has_unpacking(call) or (group is not None and not is_constant(group, None))
        branch = None if has_group or _has_partner(read, call) else read.branch_of_some_ranks(call)
        if branch is None:
            continue
        name = read.last_name(call)
        if branch is call:
            message = f"only some ranks reach this {name}, and all ranks must call it: they will hang"
        else:
            message = (
                f"only some ranks call {_called(branch)}, and all ranks must call the {name} in it: they will hang"
            )
        yield Hit(
            branch,
            message,
            f"Let every rank call {name if branch is call else _called(branch)}, or pass a group of the ranks that "
            f"call {'it' if branch is call else name}.",
            helper=None if branch is call else call,
        )


def _called(node: ast.AST) -> str:
    """The function of a call, as it is named in a sentence: "save()"."""
    return f"{path_or_text(node.func)}()" if isinstance(node, ast.Call) else path_or_text(node)


def _has_partner(read: Reading, call: ast.Call) -> bool:
    """`if rank != 0: barrier() ... if rank == 0: barrier()`, or the same collective in both branches: they match."""
    here = read.scope_of(call)
    name = read.callee(call)
    return any(
        other is not call
        and read.callee(other) == name
        and read.scope_of(other) is here
        and any(map(read.is_rank_test, read.conditions(other)))
        for other in read.calls
    )


# torchvision's families with BatchNorm in them.
_WITH_BATCHNORM = ("resnet", "resnext", "wide_resnet", "densenet", "mobilenet", "efficientnet", "regnet", "mnasnet")


@rule("LNT019", Severity.ERROR)
def model_on_some_ranks(read: Reading) -> Iterator[Hit]:
    """A DistributedDataParallel is called on some ranks only.

    What: under `if rank == 0:`, the wrapped model is trained, or it contains BatchNorm and is called for evaluation.

    Why: a backward pass is an all-reduce of all ranks, and a forward pass first sends rank 0's buffers (BatchNorm's
    statistics) to all ranks, in eval mode and under no_grad, too. The calling rank waits for the others, or its call is
    matched with their next collective, and the job hangs at the next barrier.

        if rank == 0:
            evaluate(model)             # hangs with BatchNorm
            evaluate(model.module)      # the bare model: no communication

    Fix: evaluate model.module, or evaluate on all ranks.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    (broadcast_buffers);
    seen with torch 2.13 over gloo.
    """
    buffers = has_batchnorm(read) and not any(
        is_constant(keyword(wrapping, "broadcast_buffers"), False) for wrapping in read.wrappings
    )
    for call in read.calls:
        if not read.surely(call.func, Kind.WRAPPED, Kind.OTHER, Kind.NONE) or not read.is_wrapped(call.func):
            continue
        branch = read.branch_of_some_ranks(call)
        if branch is not None and (buffers or _goes_backward(read, call)):
            where = "" if branch is call else f", in {_called(branch)}"
            yield Hit(
                branch,
                f"{path_or_text(call.func)} is a DistributedDataParallel, and only some ranks call it{where}: they "
                "will hang",
                "Call the bare model (.module) to evaluate on one rank, or let every rank call it.",
                helper=None if branch is call else call,
            )


def has_batchnorm(read: Reading) -> bool:
    """Whether the script itself makes a model with BatchNorm."""
    for call in read.calls:
        last = read.last_name(call)
        is_family = last.lower().startswith(_WITH_BATCHNORM) or last.endswith("_bn")
        if last.startswith("BatchNorm") or (is_family and read.callee(call).startswith("torchvision.models.")):
            return True
    return "BatchNorm2d" in set(words_in(read.tree))


def _goes_backward(read: Reading, call: ast.Call) -> bool:
    """Whether the block of the call has a backward pass."""
    function = read.function_of(call)
    for outer in read.around(call):
        if isinstance(outer, (ast.For, ast.While, ast.If)) and trains(outer):
            contexts = [item for each in read.around(call) if isinstance(each, ast.With) for item in each.items]
            return not any("no_grad" in ast.unparse(item.context_expr) for item in contexts)
        if outer is function:
            return False
    return False


_SYNCED = re.compile(r"sync_?(batch|bn)|bn_?sync", re.IGNORECASE)


@rule("LNT021", Severity.NOTE)
def batchnorm_local(read: Reading) -> Iterator[Hit]:
    """BatchNorm sees the batch of its own rank only.

    What: a model with BatchNorm is wrapped, and nothing converts it to SyncBatchNorm. This is a note (`--details`).

    Why: mean and variance are computed from the images of one rank. With a small batch per GPU they are noisy, and
    training behaves differently than on one GPU with the whole batch. With a large batch per GPU this does no harm and
    is faster.

    Fix: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before wrapping, if the batch of a GPU is below about 16.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html.
    """
    if has_batchnorm(read) and not any(_SYNCED.search(word) for word in words_in(read.tree)):
        for wrapping in read.wrappings[:1]:
            yield Hit(
                wrapping,
                "BatchNorm computes its statistics from one rank's batch only",
                "With few images per GPU, convert the model: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).",
            )


_OPTIMIZER = re.compile(r"torch\.optim\.(?!lr_scheduler)(\w+\.)?[A-Z]\w*")
_SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)
_RANKS = re.compile(r"world_?size|num_?replicas|n_?gpus|num_?gpus|n_?procs|num_processes|device_count", re.IGNORECASE)
_SIZED = re.compile(r"(^|_)lrs?($|_)|learning_?rate|batch|accum", re.IGNORECASE)


@rule("LNT025", Severity.NOTE)
def learning_rate(read: Reading) -> Iterator[Hit]:
    """The learning rate does not depend on the number of ranks.

    What: each rank has a batch of a fixed size, and neither the learning rate nor the batch is computed from the number
    of ranks. This is a note (`--details`).

    Why: DistributedDataParallel averages the gradients. N ranks with B images each therefore take the steps of one
    process with N x B images: N times fewer steps in an epoch, each as large as before. With more ranks an epoch is
    faster and the model learns less in it, and a job that was tuned on 8 GPUs stalls on 64.

        lr = args.lr * dist.get_world_size()                              # SGD, with a warm-up of some epochs
        lr = args.lr * math.sqrt(dist.get_world_size())                   # Adam and its variants
        batch_size = args.global_batch_size // dist.get_world_size()      # or: the same steps on any number of ranks

    Fix: use one of the three, and a warm-up if the learning rate grows.

    Source: https://arxiv.org/abs/1706.02677 (SGD: linear, with a warm-up); https://arxiv.org/abs/2205.10287 (Adam:
    square root); https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    (gradients are averaged over the ranks).
    """
    optimizers = [call for call in read.calls if _OPTIMIZER.fullmatch(read.callee(call))]
    # The simple statements, one at a time: a whole function names everything.
    for statement in (node for node in read.nodes if isinstance(node, _SIMPLE)):
        options = (node.arg for node in ast.walk(statement) if isinstance(node, ast.keyword) and node.arg)
        words = [*words_in(statement), *options]
        if any(map(_RANKS.search, words)) and any(map(_SIZED.search, words)):
            return
    if read.wrappings and optimizers:
        yield Hit(
            optimizers[0],
            "the learning rate is the same for any number of ranks, although the batches of all ranks add up",
            "Scale the learning rate with the world size (SGD: linearly, Adam: by its square root), with a warm-up, "
            "or split one global batch among the ranks.",
        )


RULES = (collective_on_some_ranks, model_on_some_ranks, batchnorm_local, learning_rate)
