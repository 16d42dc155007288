"""What the ranks run with, and where they differ."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from ddpdiag.checks.api import Seen
from ddpdiag.checks.launch import variables
from ddpdiag.checks.launch import versions as lch003
from ddpdiag.model.setting import Setting, Value

# Values of one setting, and ranks of one value: more are counted only.
MOST_VALUES, MOST_RANKS = 8, 16
_VERSIONS = ("torch", "cuda", "hip", "nccl", "driver", "python")


def settings_of(seen: Seen[Any], readable: frozenset[str]) -> tuple[Setting, ...]:
    """Versions, variables and lines of files, as LCH002 and LCH003 recorded them, where their data are `readable`."""
    found: list[Setting] = []
    if lch003.CHECK.code in readable:
        versions = seen.of(lch003.CHECK).by_rank
        for name in _VERSIONS:
            found += _setting("version", name, {rank: getattr(own, name) for rank, own in versions.items()})
    if variables.CHECK.code in readable:
        rows = seen.of(variables.CHECK).by_rank
        found += _all("variable", {rank: own.variables for rank, own in rows.items()})
        found += _all("file", {rank: variables.settings(own) for rank, own in rows.items()})
    return tuple(found)


def _all(kind: str, rows: Mapping[int, Mapping[str, str]]) -> Iterator[Setting]:
    """Every name that some rank has, but for those that tell ranks apart on purpose."""
    for name in sorted({name for own in rows.values() for name in own} - variables.OWN):
        yield from _setting(kind, name, {rank: own.get(name) for rank, own in rows.items()})


def _setting(kind: str, name: str, values: Mapping[int, str | None]) -> Iterator[Setting]:
    """Nothing, where nobody has it."""
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
