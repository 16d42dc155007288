"""shuffle=True stands beside a sampler.

What: a DataLoader gets a DistributedSampler and shuffle=True.

Why: DataLoader refuses: "sampler option is mutually exclusive with shuffle".

    DataLoader(data, sampler=sampler, shuffle=True)                # ValueError
    DataLoader(data, sampler=sampler, shuffle=sampler is None)     # right

Fix: leave shuffle out; DistributedSampler(shuffle=True), its default, shuffles.

Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader.
"""

from collections.abc import Iterator

from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import is_constant, keyword
from ddpdiag.lint.values import Kind
from ddpdiag.model import Severity


def look(read: Reading) -> Iterator[Hit]:
    """DataLoaders with both."""
    for loader in read.script.loaders:
        both = is_constant(keyword(loader, "shuffle", 2), True) and read.values.maybe(
            keyword(loader, "sampler", 3), Kind.SAMPLER
        )
        if both:
            yield Hit(
                loader,
                "DataLoader refuses shuffle=True beside a sampler",
                "Leave shuffle out: the DistributedSampler shuffles.",
            )


RULE = Rule("LNT008", "shuffle-beside-sampler", Severity.ERROR, __doc__ or "", look)
