"""Rules on training: collectives or the model called on some ranks only, and effects of the number of ranks."""

import ast
import re
from collections.abc import Iterator

from ddpdiag.lint import Hit, rule
from ddpdiag.lint.analysis import Analysis, Kind, name_or_code
from ddpdiag.lint.script import argument, has_backward, has_unpacking, is_constant, words_in
from ddpdiag.model import Severity

_COLLECTIVE_NAMES = (
    "new_group barrier monitored_barrier broadcast broadcast_object_list all_reduce reduce all_gather "
    "all_gather_into_tensor all_gather_object gather gather_object scatter scatter_object_list reduce_scatter "
    "reduce_scatter_tensor all_to_all all_to_all_single"
)
_COLLECTIVES = tuple(f"torch.distributed.{name}" for name in _COLLECTIVE_NAMES.split())


@rule("LNT018", Severity.ERROR)
def collective_on_some_ranks(script: Analysis) -> Iterator[Hit]:
    """A collective runs on some ranks only.

    What: a barrier, all_reduce, broadcast or another collective of torch.distributed, or the construction of a
    DistributedDataParallel, is under `if rank == 0:` or after `if rank != 0: return`, and the other ranks have no
    matching call.

    Why: all ranks must call a collective. The ranks that call it wait for the ranks that never do, until the time-out;
    or their call is matched with another call of those ranks, and they get wrong values.

    Fix: move it out of the `if`, so that every rank calls it. For some of the ranks, create a group and pass `group=`.

    Source: https://docs.pytorch.org/docs/stable/distributed.html#collective-functions (all processes of the group).
    """
    for call in (*script.calls_of(*_COLLECTIVES), *script.wrappings):
        group = argument(call, "group") or argument(call, "process_group")
        has_group = has_unpacking(call) or (group is not None and not is_constant(group, None))
        branch = None if has_group or _has_matching_call(script, call) else script.node_under_rank_test(call)
        name = script.last_name(call)
        if branch is call:
            message = f"only some ranks reach this {name}, and all ranks must call it: they will hang"
            yield Hit(call, message, f"Let every rank call {name}, or pass a group of the ranks that call it.")
        elif branch is not None:
            outer = _call_text(branch)
            message = f"only some ranks call {outer}, and all ranks must call the {name} in it: they will hang"
            fix = f"Let every rank call {outer}, or pass a group of the ranks that call {name}."
            yield Hit(branch, message, fix, helper=call)


def _call_text(node: ast.AST) -> str:
    """The called function, as a sentence names it: "save()"; the text of any other node."""
    return f"{name_or_code(node.func)}()" if isinstance(node, ast.Call) else name_or_code(node)


def _has_matching_call(script: Analysis, call: ast.Call) -> bool:
    """Whether this scope calls the same collective under a rank test again, so that the ranks' calls may match."""
    scope = script.scope_of(call)
    name = script.callee_name(call)
    return any(
        other is not call
        and script.callee_name(other) == name
        and script.scope_of(other) is scope
        and any(map(script.is_rank_test, script.conditions(other)))
        for other in script.calls
    )


# The model families of torchvision that contain BatchNorm.
_WITH_BATCHNORM = ("resnet", "resnext", "wide_resnet", "densenet", "mobilenet", "efficientnet", "regnet", "mnasnet")


@rule("LNT019", Severity.ERROR)
def model_on_some_ranks(script: Analysis) -> Iterator[Hit]:
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
    (broadcast_buffers); seen with torch 2.13 over gloo.
    """
    sends_buffers = has_batchnorm(script) and not any(
        is_constant(argument(wrapping, "broadcast_buffers"), False) for wrapping in script.wrappings
    )
    for call in script.calls:
        is_ddp = script.may_be(call.func, Kind.WRAPPED)
        if not is_ddp or not script.is_surely(call.func, Kind.WRAPPED, Kind.OTHER, Kind.NONE):
            continue
        branch = script.node_under_rank_test(call)
        if branch is not None and (sends_buffers or _is_trained(script, call)):
            where = "" if branch is call else f", in {_call_text(branch)}"
            yield Hit(
                branch,
                f"{name_or_code(call.func)} is a DistributedDataParallel, and only some ranks call it{where}: they "
                "will hang",
                "Call the bare model (.module) to evaluate on one rank, or let every rank call it.",
                helper=None if branch is call else call,
            )


def has_batchnorm(script: Analysis) -> bool:
    """Whether the script makes a model or layer with BatchNorm."""
    for call in script.calls:
        last = script.last_name(call)
        is_family = last.lower().startswith(_WITH_BATCHNORM) or last.endswith("_bn")
        if last.startswith("BatchNorm") or (is_family and script.callee_name(call).startswith("torchvision.models.")):
            return True
    return "BatchNorm2d" in set(words_in(script.tree))


def _is_trained(script: Analysis, call: ast.Call) -> bool:
    """Whether a loop or `if` around the call, in its function, has a backward pass, and no_grad does not enclose it."""
    function = script.function_of(call)
    for outer in script.ancestors(call):
        if isinstance(outer, (ast.For, ast.While, ast.If)) and has_backward(outer):
            contexts = [item for each in script.ancestors(call) if isinstance(each, ast.With) for item in each.items]
            return not any("no_grad" in ast.unparse(item.context_expr) for item in contexts)
        if outer is function:
            return False
    return False


_SYNC_BATCHNORM_NAME = re.compile(r"sync_?(batch|bn)|bn_?sync", re.IGNORECASE)


@rule("LNT021", Severity.NOTE)
def batchnorm_local(script: Analysis) -> Iterator[Hit]:
    """BatchNorm sees the batch of its own rank only.

    What: a model with BatchNorm is wrapped, and nothing converts it to SyncBatchNorm. This is a note (`--details`).

    Why: mean and variance are computed from the images of one rank. With a small batch per GPU they are noisy, and
    training behaves differently than on one GPU with the whole batch. With a large batch per GPU this does no harm and
    is faster.

    Fix: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before wrapping, if the batch of a GPU is below about 16.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html.
    """
    if has_batchnorm(script) and not any(_SYNC_BATCHNORM_NAME.search(word) for word in words_in(script.tree)):
        fix = "With few images per GPU, convert the model: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)."
        for wrapping in script.wrappings[:1]:
            yield Hit(wrapping, "BatchNorm computes its statistics from one rank's batch only", fix)


_OPTIMIZER = re.compile(r"torch\.optim\.(?!lr_scheduler)(\w+\.)?[A-Z]\w*")
_SIMPLE_STATEMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)
_COUNTS = re.compile(r"world_?size|num_?replicas|n_?gpus|num_?gpus|n_?procs|num_processes|device_count", re.IGNORECASE)
_SCALED_NAME = re.compile(r"(^|_)lrs?($|_)|learning_?rate|batch|accum", re.IGNORECASE)


@rule("LNT025", Severity.NOTE)
def learning_rate(script: Analysis) -> Iterator[Hit]:
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
    optimizers = [call for call in script.calls if _OPTIMIZER.fullmatch(script.callee_name(call))]
    # Only single statements are searched, because a function contains both words by chance.
    for statement in (node for node in script.nodes if isinstance(node, _SIMPLE_STATEMENTS)):
        options = (node.arg for node in ast.walk(statement) if isinstance(node, ast.keyword) and node.arg)
        words = [*words_in(statement), *options]
        if any(map(_COUNTS.search, words)) and any(map(_SCALED_NAME.search, words)):
            return
    if script.wrappings and optimizers:
        yield Hit(
            optimizers[0],
            "the learning rate is the same for any number of ranks, although the batches of all ranks add up",
            "Scale the learning rate with the world size (SGD: linearly, Adam: by its square root), with a warm-up, "
            "or split one global batch among the ranks.",
        )


RULES = (collective_on_some_ranks, model_on_some_ranks, batchnorm_local, learning_rate)
