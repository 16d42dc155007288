"""Rules on loading checkpoints, and on the learning rate."""

import ast
import re
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import attribute_path, has_unpacking, keyword, own_nodes, words_in
from ddpdiag.model import Severity

# LNT023 load-without-map-location ------------------------------------------------------------------------------------

_UNMAPPED_LOAD = """A checkpoint is loaded without map_location.

What: on every rank, torch.load without map_location gives what load_state_dict takes.

Why: tensors come back on the GPU that they were saved from, which is GPU 0: every rank of the host puts a copy of the
model (and of the optimizer's state) there. "CUDA out of memory" on GPU 0, while the others have room.

    state = torch.load(path, map_location="cpu")
    state = torch.load(path, map_location=f"cuda:{local_rank}")

Weights that are called pretrained are left alone: published files are saved from the CPU, as a rule.

Fix: map_location="cpu"; load_state_dict copies to where the model is.

Source: https://docs.pytorch.org/docs/stable/generated/torch.load.html (the note on GPU RAM surge);
https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html#save-and-load-checkpoints.
"""


def load_without_map_location(read: Reading) -> Iterator[Hit]:
    """Loads of model states on all ranks, where there are GPUs."""
    if not read.script.wrappings or not read.uses_gpus:
        return
    for call in read.script.calls_of("torch.load"):
        if keyword(call, "map_location", 1) is not None or has_unpacking(call):
            continue
        if _is_pretrained(read, call):
            continue
        if _becomes_state(read, call) and read.surely_on_all_ranks(call):
            yield Hit(
                call,
                "every rank loads the tensors to the GPU that they were saved from: GPU 0 runs out of memory",
                'Pass map_location="cpu".',
            )


def _is_pretrained(read: Reading, call: ast.Call) -> bool:
    """Weights that others publish are saved from the CPU, as a rule."""
    parts = [origin for arg in call.args for origin in (arg, *read.values.origins(arg)) if origin is not None]
    return any("pretrain" in word.lower() for part in parts for word in words_in(part))


def _becomes_state(read: Reading, call: ast.Call) -> bool:
    """Does it go into load_state_dict, at once or by a name of the same function?"""
    statement = read.script.statement_of(call)
    names = {attribute_path(target) for target in statement.targets} if isinstance(statement, ast.Assign) else set()
    for node in own_nodes(read.script.scope_of(call)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load_state_dict":
            inner = [each for arg in node.args for each in ast.walk(arg)]
            if call in inner or any(attribute_path(each) in names - {None} for each in inner):
                return True
    return False


# LNT025 learning-rate ------------------------------------------------------------------------------------------------

_LEARNING_RATE = """The learning rate does not know how many ranks there are.

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
_RANKS = re.compile(r"world_?size|num_?replicas|n_?gpus|num_?gpus|n_?procs|num_processes|device_count", re.IGNORECASE)
_SIZED = re.compile(r"(^|_)lrs?($|_)|learning_?rate|batch|accum", re.IGNORECASE)


def learning_rate(read: Reading) -> Iterator[Hit]:
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


RULES = (
    Rule("LNT023", "load-without-map-location", Severity.WARNING, _UNMAPPED_LOAD, load_without_map_location),
    Rule("LNT025", "learning-rate", Severity.NOTE, _LEARNING_RATE, learning_rate),
)
