"""The learning rate does not know how many ranks there are.

What: each rank has a batch of a fixed size, and neither the learning rate nor the batch is worked out from the number
of ranks. A hint (`--details`).

Why: DistributedDataParallel averages the gradients, so that N ranks with B images each take steps as one process with
N x B images would: N times fewer of them in an epoch, each as large as before. With more ranks an epoch is faster and
teaches less, and a job that was tuned on 8 GPUs stalls on 64.

    lr = args.lr * dist.get_world_size()                              # SGD, with a warm-up of some epochs
    lr = args.lr * math.sqrt(dist.get_world_size())                   # Adam and its kin
    batch_size = args.global_batch_size // dist.get_world_size()      # or: the same steps on any number of ranks

Fix: one of the three, and a warm-up where the learning rate grows.

Source: https://arxiv.org/abs/1706.02677 (SGD: linear, with a warm-up); https://arxiv.org/abs/2205.10287 (Adam: square
root); https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html (gradients are
averaged over the ranks).
"""

import ast
import re
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import words_in
from ddpdiag.model import Severity

_RANKS = re.compile(r"world_?size|num_?replicas|n_?gpus|num_?gpus|n_?procs|num_processes|device_count", re.IGNORECASE)
_SIZED = re.compile(r"(^|_)lrs?($|_)|learning_?rate|batch|accum", re.IGNORECASE)


def look(read: Reading) -> Iterator[Hit]:
    """The first optimizer, if no statement speaks of ranks and of the learning rate or the batch at once."""
    optimizers = [call for call in read.script.calls if _is_optimizer(read.script.callee(call))]
    if read.script.wrappings and optimizers and not any(map(_relates, _statements(read.script.tree))):
        yield Hit(
            optimizers[0],
            "the learning rate is the same for any number of ranks, though all ranks together make one batch",
            "Scale the learning rate with the world size (SGD: linearly, Adam: by its square root), with a warm-up, "
            "or share one global batch out among the ranks.",
        )


def _is_optimizer(name: str) -> bool:
    return re.fullmatch(r"torch\.optim\.(?!lr_scheduler)(\w+\.)?[A-Z]\w*", name) is not None


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """The simple statements, each by itself: a whole function speaks of everything."""
    simple = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)
    return (node for node in ast.walk(tree) if isinstance(node, simple))


def _relates(statement: ast.stmt) -> bool:
    options = (node.arg for node in ast.walk(statement) if isinstance(node, ast.keyword) and node.arg)
    words = [*words_in(statement), *options]
    return any(map(_RANKS.search, words)) and any(map(_SIZED.search, words))


RULE = Rule("LNT025", "learning-rate", Severity.INFO, __doc__ or "", look)
