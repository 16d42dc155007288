"""Each rank splits the data differently.

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

import ast
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import has_unpacking, is_constant, keyword
from ddpdiag.lint.values import RANKS
from ddpdiag.model import Severity

_SPLITS = {
    "torch.utils.data.random_split": ("generator", 2),
    "torch.utils.data.dataset.random_split": ("generator", 2),
    "sklearn.model_selection.train_test_split": ("random_state", None),
}
_GENERATOR = "generator=torch.Generator().manual_seed(0)."


def look(read: Reading) -> Iterator[Hit]:
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


RULE = Rule("LNT012", "split-differs", Severity.ERROR, __doc__ or "", look)
