"""All ranks draw the same random augmentations.

What: every seed in the script is the same on all ranks, and the data are augmented at random. A hint (`--details`).

Why: rank 0's n-th image is cropped and flipped as rank 1's n-th image is. The images differ, so the harm is small, but
there is less variety than the number of ranks suggests. Equal seeds are right for what all ranks must agree on: a
split, a sampler, weights that DistributedDataParallel does not send.

Fix: after the model is made, seed with seed + rank.

Source: https://github.com/facebookresearch/detr/issues/297 (why seed + rank);
https://docs.pytorch.org/docs/stable/data.html#data-loading-randomness (workers take base_seed from the process).
"""

from collections.abc import Iterator

from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.model import Severity

_SEEDS = (
    "torch.manual_seed",
    "torch.cuda.manual_seed",
    "torch.cuda.manual_seed_all",
    "random.seed",
    "numpy.random.seed",
)
_AT_RANDOM = ("Random", "ColorJitter", "AutoAugment", "TrivialAugment")


def look(read: Reading) -> Iterator[Hit]:
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


RULE = Rule("LNT015", "same-augmentation", Severity.INFO, __doc__ or "", look)
