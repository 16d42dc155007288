"""Between whom a backend fails: what rounds of pairs, and each host by itself, show."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.p2p.fallback.search import Ended, Ground, Part, Tried
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


def places(seen: Seen[D], tried: Sequence[Tried], first: Tried, end: Ended, ground: Ground) -> Places:
    """From the rounds of pairs, where these differ; else the hosts."""
    bad, good = _sorted_pairs(end.rounds, slow=first.works)
    if bad and good:
        return _between(seen, bad, good, whole=not end.pairs_left)
    hosts = seen.world.nodes_of([ranks[0] for ranks in ground.hosts])
    if len(ground.hosts) == 1:
        every = f", between all {len(bad)} pairs of its ranks that were tried" if bad and len(bad) > 1 else ""
        alone = ", though each pair of its ranks works by itself" if good and not end.pairs_left else ""
        return Places(f" on {hosts[0]}{every}{alone}", nodes=hosts, concerned=ground.hosts[0] if bad else ())
    if end.inside_works:
        return Places(" between hosts, and works inside each")
    if max(map(len, ground.hosts)) == 1:
        return Places(" between hosts")
    return _inside_some(seen, tried)


def _inside_some(seen: Seen[D], tried: Sequence[Tried]) -> Places:
    """Hosts that fail by themselves as it is, where others do not."""
    alone = next((own for own in tried if own.step.part is Part.HOSTS and not own.step.members), None)
    if alone is None or not alone.failed or not alone.busbws:
        return Places()
    ranks = tuple(sorted(rank for group in alone.failed for rank in group))
    nodes = seen.world.nodes_of(ranks)
    return Places(f" inside {names_text(nodes)}, and works inside the other hosts", (), nodes, concerned=ranks)


def _sorted_pairs(rounds: Sequence[Tried], *, slow: bool) -> tuple[list[Pair], list[Pair]]:
    """Pairs that fail, and pairs that work; where the question is speed, those that are far below the median fail."""
    failed = [pair for tried in rounds for pair in tried.failed]
    rates: Mapping[Pair, float] = {pair: rate for tried in rounds for pair, rate in tried.busbws.items()}
    if not slow or not rates:
        return failed, list(rates)
    least = _SLOW_SHARE * quantile(sorted(rates.values()), 0.5)
    return [*failed, *(pair for pair in rates if rates[pair] < least)], [p for p in rates if rates[p] >= least]


def _between(seen: Seen[D], bad: Sequence[Pair], good: Sequence[Pair], *, whole: bool) -> Places:
    """One rank that fails with everybody is to blame; else the ways are, and neither of their ends.

    Where not the `whole` of the pairs was tried, more of them may fail.
    """
    cleared = {rank for pair in good for rank in pair}
    alone = tuple(sorted({rank for pair in bad for rank in pair} - cleared))
    nodes = seen.world.nodes_of([rank for pair in bad for rank in pair])
    if whole and len(alone) == 1 and sum(alone[0] in pair for pair in bad) == len(bad) > 1:
        text = f" between {ranks_text(alone)} on {nodes[0]} and all others there, and works between these"
        return Places(text, alone, nodes, concerned=alone)
    concerned = tuple(sorted({rank for pair in bad for rank in pair}))
    said = names_text([f"ranks {pair[0]} and {pair[1]}" for pair in bad], 6)
    links = tuple(f"rank {pair[0]} -> rank {pair[1]}" for pair in bad)
    only = "only" if whole else f"({len(bad)} of {len(bad) + len(good)} pairs that were tried)"
    return Places(f" between {said} on {names_text(nodes)} {only}", (), nodes, links, concerned)
