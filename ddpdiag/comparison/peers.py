"""How each rank stands to the others: from its repeats, or as it was kept of a fleet without them."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import NamedTuple

from ddpdiag.comparison.noise import Standing, standings
from ddpdiag.model.options import Figure, Snapshot, Standings

# Of 10 % that count: a hundredth of a per cent is no difference.
_DIGITS = 4


class Field(NamedTuple):
    """One figure of all ranks: `ranks` are those that have it, of which some may have no standing."""

    name: str
    title: str
    ranks: frozenset[int]
    standings: Mapping[int, Standing]


def kept(figures: Mapping[int, Figure]) -> Iterator[Standings]:
    """What is left of a figure of these ranks when its repeats go; nothing where these are too few."""
    found = standings(figures)
    first = next(iter(figures.values()), None)
    if first is not None and found:
        ranks = sorted(found)
        yield Standings(
            name=first.name,
            title=first.title,
            ranks=tuple(_runs(ranks)),
            ratios=tuple(round(found[rank].ratio, _DIGITS) for rank in ranks),
            errors=tuple(round(found[rank].error, _DIGITS) for rank in ranks),
        )


def _runs(ranks: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return runs


def fields(snapshot: Snapshot) -> dict[str, Field]:
    """The figures of a run that are held against those of the other ranks, by name."""
    by_name: dict[str, dict[int, Figure]] = {}
    for figure in snapshot.figures:
        if figure.within and figure.rank is not None:
            by_name.setdefault(figure.name, {})[figure.rank] = figure
    measured = {
        name: Field(name, next(iter(own.values())).title, frozenset(own), standings(own))
        for name, own in by_name.items()
    }
    return {own.name: _read(own) for own in snapshot.standings} | measured


def ranks_of(own: Standings) -> Iterator[int]:
    """The ranks, at most as many as have a ratio."""
    ranks = chain.from_iterable(range(first, last + 1) for first, last in own.ranks)
    return islice(ranks, len(own.ratios))


def _read(own: Standings) -> Field:
    """Files come from anywhere: numbers that mean nothing are left out."""
    found = {
        rank: Standing(ratio, error)
        for rank, ratio, error in zip(ranks_of(own), own.ratios, own.errors, strict=False)
        if 0 < ratio < float("inf") and 0 <= error < float("inf")
    }
    return Field(own.name, own.title, frozenset(found), found)
