"""BatchNorm sees the batch of its own rank only.

What: a model with BatchNorm is wrapped, and nothing converts it to SyncBatchNorm. A hint (`--details`).

Why: mean and variance come from the images of one rank; with a small batch per GPU they are noisy, and training goes
otherwise than on one GPU with the whole batch. With a large batch per GPU it does no harm and is faster.

Fix: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before wrapping, where the batch of a GPU is below some 16.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html.
"""

import re
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.rules.lnt019 import has_batchnorm
from ddpdiag.lint.syntax import words_in
from ddpdiag.model import Severity

_SYNCED = re.compile(r"sync_?(batch|bn)|bn_?sync", re.IGNORECASE)


def look(read: Reading) -> Iterator[Hit]:
    """The first wrapping, if no word is said of SyncBatchNorm."""
    if has_batchnorm(read) and not any(_SYNCED.search(word) for word in words_in(read.script.tree)):
        for wrapping in read.script.wrappings[:1]:
            yield Hit(
                wrapping,
                "BatchNorm takes its statistics from one rank's batch",
                "With few images per GPU, convert the model: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).",
            )


RULE = Rule("LNT021", "batchnorm-local", Severity.INFO, __doc__ or "", look)
