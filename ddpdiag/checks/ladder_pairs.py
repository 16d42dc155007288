"""Between whom a backend fails: what rounds of pairs, and each host by itself, show. Pure."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from ddpdiag.check import Seen
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.ladder import Ended, Ground, Tried
from ddpdiag.stats import quantile

D = TypeVar("D")
Pair = tuple[int, ...]

# A pair that is slower than this share of the median of all pairs is one of those that slow the others down.
_SLOW_SHARE = 0.5


class Places(NamedTuple):
    """Where it fails: in words (" between ranks 1 and 2"), and whom that blames.

    `concerned` are the ranks on either side, whether or not one of them can be blamed.
    """

    text: str = ""
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    concerned: tuple[int, ...] = ()


def places(seen: Seen[D], first: Tried, end: Ended, ground: Ground) -> Places:
    """From the rounds of pairs, where these differ; else the hosts."""
    bad, good = _sorted_pairs(end.rounds, slow=first.works)
    if bad and good:
        return _between(seen, bad, good)
    hosts = seen.world.nodes_of([ranks[0] for ranks in ground.hosts])
    if len(ground.hosts) == 1:
        every = ", between all pairs of its ranks" if bad and len(bad) > 1 else ""
        alone = ", though each pair of its ranks works by itself" if good else ""
        return Places(f" on {hosts[0]}{every}{alone}", nodes=hosts, concerned=ground.hosts[0] if bad else ())
    if end.inside_works:
        return Places(" between hosts, and works inside each")
    return Places()


def _sorted_pairs(rounds: Sequence[Tried], *, slow: bool) -> tuple[list[Pair], list[Pair]]:
    """Pairs that fail, and pairs that work; where the question is speed, those that are far below the median fail."""
    failed = [pair for tried in rounds for pair in tried.failed]
    rates: Mapping[Pair, float] = {pair: rate for tried in rounds for pair, rate in tried.busbws.items()}
    if not slow or not rates:
        return failed, list(rates)
    least = _SLOW_SHARE * quantile(sorted(rates.values()), 0.5)
    return [*failed, *(pair for pair in rates if rates[pair] < least)], [p for p in rates if rates[p] >= least]


def _between(seen: Seen[D], bad: Sequence[Pair], good: Sequence[Pair]) -> Places:
    """One rank that fails with everybody is to blame; else the ways are, and neither of their ends."""
    cleared = {rank for pair in good for rank in pair}
    alone = tuple(sorted({rank for pair in bad for rank in pair} - cleared))
    nodes = seen.world.nodes_of([rank for pair in bad for rank in pair])
    if len(alone) == 1 and sum(alone[0] in pair for pair in bad) == len(bad) > 1:
        text = f" between {ranks_text(alone)} on {nodes[0]} and all others there, and works between these"
        return Places(text, alone, nodes, concerned=alone)
    concerned = tuple(sorted({rank for pair in bad for rank in pair}))
    said = names_text([f"ranks {pair[0]} and {pair[1]}" for pair in bad], 6)
    links = tuple(f"rank {pair[0]} -> rank {pair[1]}" for pair in bad)
    return Places(f" between {said} on {names_text(nodes)} only", (), nodes, links, concerned)
