"""Rules on data sets and what differs between ranks: splits, downloads, lengths, augmentations."""

import ast
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import calls_method, has_unpacking, is_constant, keyword, trains
from ddpdiag.lint.values import RANKS, Kind
from ddpdiag.model import Severity

# LNT012 split-differs ------------------------------------------------------------------------------------------------

_SPLIT_DIFFERS = """Each rank splits the data differently.

What: random_split without a generator (or scikit-learn's train_test_split without random_state) on every rank, while
nothing seeds the random numbers, or every seed contains the rank.

Why: an unseeded process draws random numbers of its own. Each rank then holds out other images, so that what one
validates on, another trains on, and the parts of a DistributedSampler overlap and leave gaps. Nothing fails; the
validation is too good.

    random_split(data, [0.9, 0.1], generator=torch.Generator().manual_seed(0))

Fix: give the split a generator with a fixed seed.

Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.random_split (generator);
https://docs.pytorch.org/docs/stable/notes/randomness.html; https://github.com/TensorAuto/OpenTau/pull/498.
"""
_SPLITS = {
    "torch.utils.data.random_split": ("generator", 2),
    "torch.utils.data.dataset.random_split": ("generator", 2),
    "sklearn.model_selection.train_test_split": ("random_state", None),
}
_GENERATOR = "generator=torch.Generator().manual_seed(0)."


def split_differs(read: Reading) -> Iterator[Hit]:
    """Splits by random numbers that differ between ranks."""
    seeds = [call for call in read.script.calls if "seed" in read.script.callee(call).rpartition(".")[2].lower()]
    if seeds and not all(_has_rank(read, call) for call in seeds):
        return
    for call in read.script.calls_of(*_SPLITS):
        name, position = _SPLITS[read.script.callee(call)]
        drawn = keyword(call, name, position) is None and not is_constant(keyword(call, "shuffle"), False)
        if drawn and not has_unpacking(call) and read.surely_on_all_ranks(call):
            yield Hit(
                call,
                "each rank splits by random numbers of its own: what one validates on, another trains on",
                "Fix the split: " + ("random_state=0." if position is None else _GENERATOR),
            )


def _has_rank(read: Reading, call: ast.Call) -> bool:
    names = [each for arg in call.args for each in ast.walk(arg) if isinstance(each, ast.expr)]
    return any(read.values.surely(each, *RANKS) for each in names)


# LNT013 download-race ------------------------------------------------------------------------------------------------

_DOWNLOAD_RACE = """All ranks download the dataset at once.

What: a dataset of torchvision or torchaudio with download=True on every rank, with one root directory, and no barrier
around it.

Why: the ranks write the same files. One finds another's half-written archive ("File not found or corrupted"), or
unpacks it while it is replaced. It happens on the first run only, on a fresh machine.

    if local_rank == 0:
        MNIST(root, download=True)
    dist.barrier()
    data = MNIST(root)

Fix: download before the job, or on one rank of each host, and let the others wait.

Source: https://github.com/pytorch/examples/issues/1411; https://github.com/pytorch/tutorials/issues/3065.
"""
_LIBRARIES = ("torchvision.datasets.", "torchaudio.datasets.")


def download_race(read: Reading) -> Iterator[Hit]:
    """Datasets that every rank downloads."""
    for call in read.script.calls:
        if _downloads(read, call) and read.surely_on_all_ranks(call) and not _is_ordered(read, call):
            yield Hit(
                call,
                "all ranks download into one directory at once, and read each other's half-written files",
                "Download on local rank 0 only, and let the others wait at a barrier; or before the job.",
            )


def _downloads(read: Reading, call: ast.Call) -> bool:
    if not read.script.callee(call).startswith(_LIBRARIES) or not is_constant(keyword(call, "download"), True):
        return False
    root = keyword(call, "root", 0)
    return root is None or not read.values.may_be_own(root)


def _is_ordered(read: Reading, call: ast.Call) -> bool:
    """Is there a barrier in the same function, or a lock or a context such as local_main_process_first around it?"""
    around = read.script.function_of(call) or read.script.tree
    inside = any(isinstance(outer, ast.With) for outer in read.script.around(call))
    return inside or calls_method(around, "barrier")


# LNT014 uneven-inputs ------------------------------------------------------------------------------------------------

_UNEVEN_INPUTS = """Ranks may train for different numbers of steps.

What: the training loop goes over every n-th element, `items[rank::world_size]` or `range(rank, n, world_size)`, and
nothing evens the shares out: no join, no drop_last.

Why: unless the number of elements divides, some ranks have one more. Their last backward pass waits for an all-reduce
that the others never join: NCCL hangs until its watchdog fires, gloo ends with "Connection closed by peer".

Fix: DistributedSampler pads (or drops) so that all shares are equal; else cut the list to a multiple of the world size,
or train within `with model.join():`.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html#torch.nn.parallel.DistributedDataParallel.join;
https://github.com/pytorch/pytorch/issues/38174.
"""


def uneven_inputs(read: Reading) -> Iterator[Hit]:
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


# LNT015 same-augmentation --------------------------------------------------------------------------------------------

_SAME_AUGMENTATION = """All ranks draw the same random augmentations.

What: every seed in the script is the same on all ranks, and the data are augmented at random. A hint (`--details`).

Why: rank 0's n-th image is cropped and flipped as rank 1's n-th image is. The images differ, so the harm is small, but
there is less variety than the number of ranks suggests. Equal seeds are right for what all ranks must agree on: a
split, a sampler, weights that DistributedDataParallel does not send.

Fix: after the model is made, seed with seed + rank.

Source: https://github.com/facebookresearch/detr/issues/297 (why seed + rank);
https://docs.pytorch.org/docs/stable/data.html#data-loading-randomness (workers take base_seed from the process).
"""
_SEEDS = (
    "torch.manual_seed",
    "torch.cuda.manual_seed",
    "torch.cuda.manual_seed_all",
    "random.seed",
    "numpy.random.seed",
)
_AT_RANDOM = ("Random", "ColorJitter", "AutoAugment", "TrivialAugment")


def same_augmentation(read: Reading) -> Iterator[Hit]:
    """The first seed, if none differs between ranks."""
    seeds = list(read.script.calls_of(*_SEEDS))
    if not seeds or not read.script.wrappings or not _augments(read):
        return
    if not any(read.values.depends_on_rank(arg) for call in seeds for arg in call.args):
        yield Hit(
            seeds[0],
            "all ranks draw the same random numbers, so that their augmentations are alike",
            "After the model is made, seed with seed + rank.",
        )


def _augments(read: Reading) -> bool:
    return any(
        read.script.callee(call).rpartition(".")[2].startswith(_AT_RANDOM)
        and ".transforms." in read.script.callee(call)
        for call in read.script.calls
    )


RULES = (
    Rule("LNT012", "split-differs", Severity.ERROR, _SPLIT_DIFFERS, split_differs),
    Rule("LNT013", "download-race", Severity.WARNING, _DOWNLOAD_RACE, download_race),
    Rule("LNT014", "uneven-inputs", Severity.WARNING, _UNEVEN_INPUTS, uneven_inputs),
    Rule("LNT015", "same-augmentation", Severity.NOTE, _SAME_AUGMENTATION, same_augmentation),
)
