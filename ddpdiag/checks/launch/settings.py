"""What ranks run with, and where they differ: a setting and who has which value of it."""

from collections.abc import Iterator, Mapping
from itertools import islice

from ddpdiag.model.report import Setting, Value

# Values of one setting, and ranks of one value: more are counted only.
MOST_VALUES, MOST_RANKS = 8, 16


def setting(kind: str, name: str, values: Mapping[int, str | None]) -> Iterator[Setting]:
    """The setting with its most frequent value first; nothing where no rank has it."""
    ranks: dict[str | None, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    if ranks.keys() <= {None}:
        return
    groups = sorted(ranks.items(), key=lambda group: (-len(group[1]), group[0] or ""))
    shown = tuple(
        Value(value=value, count=len(own), ranks=tuple(islice(sorted(own), MOST_RANKS)))
        for value, own in groups[:MOST_VALUES]
    )
    yield Setting(kind=kind, name=name, values=shown, more=max(0, len(groups) - MOST_VALUES))
