"""How others look for the slow hosts of a fleet, in the form of `search_pairs`, for fabric.py.

A scheme yields rounds (groups that are tried at the same time), is sent what each group reached as a share of the
nominal rate, and returns the hosts that it blames.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from random import Random

from ddpdiag.checks.fabric.search import search_pairs
from ddpdiag.checks.fabric.search_data import Diagnosis, Domain, Result, Rules, pair_up, pair_with_cleared

# Ours takes rates, and less than a byte in a second is none.
NOMINAL_BYTES_PER_S = 100e9
Group = tuple[int, ...]
Shares = Mapping[Group, float]
Search = Generator[Sequence[Group], Shares, set[int]]
Scheme = Callable[[Sequence[int], int], Search]


def ours(hosts: Sequence[int], seed: int, *, floor: float, leaves: Mapping[int, Domain] | None = None) -> Search:
    """The procedure of FAB001; hosts of a congested part are not blamed."""
    search = search_pairs(hosts, leaves, Rules(floor=floor), seed)
    try:
        step = next(search)
        while True:
            shares = yield step.groups
            step = search.send({group: Result(NOMINAL_BYTES_PER_S * share) for group, share in shares.items()})
    except StopIteration as end:
        found: Diagnosis = end.value
    return {bad.unit for bad in found.bad}


def two_pass(hosts: Sequence[int], seed: int, *, below: float, confirmations: int) -> Search:
    """Google's cluster-health-scanner: random pairs against a fixed threshold, then suspects with good partners.

    Where the good are too few for all suspects at once, the others wait for a round of their own.
    """
    random = Random(seed)
    shares = yield pair_up(hosts, {}, random)
    good = {host for pair, share in shares.items() if share >= 1 - below for host in pair}
    return (yield from _confirm([host for host in hosts if host not in good], good, below, confirmations, random))


def bisection(hosts: Sequence[int], seed: int, *, below: float, confirmations: int) -> Search:
    """All together, then the halves of each group that failed, at the same time; at last single hosts as above."""
    groups, good, suspects = [tuple(hosts)], set[int](), list[int]()
    while groups:
        shares = yield groups
        halves = []
        for group, share in shares.items():
            if share >= 1 - below:
                good.update(group)
            else:
                middle = (len(group) + 1) // 2
                halves += [group[:middle], group[middle:]] if len(group) > 2 else [(host,) for host in group]
        suspects += [host for (host,) in (half for half in halves if len(half) == 1)]
        groups = [half for half in halves if len(half) > 1]
    return (yield from _confirm(suspects, good, below, confirmations, Random(seed)))


def two_rounds(hosts: Sequence[int], seed: int, *, below: float) -> Search:
    """DLRover's check of nodes: adjacent pairs, then the fastest with the slowest; bad is who failed both."""
    del seed
    shares = yield _pairs_with_third(hosts)
    first = {host: share for group, share in shares.items() for host in group}
    ranked = sorted(hosts, key=lambda host: -first[host])
    ends = [host for couple in zip(ranked, reversed(ranked), strict=True) for host in couple]
    shares = yield _pairs_with_third(ends[: len(hosts)])
    second = {host: share for group, share in shares.items() for host in group}
    return {host for host in hosts if max(first[host], second[host]) < 1 - below}


def _pairs_with_third(hosts: Sequence[int]) -> list[Group]:
    """In the order given; the last of an odd number joins the pair before it."""
    pairs = [tuple(hosts[at : at + 2]) for at in range(0, len(hosts) - 1, 2)]
    return [*pairs[:-1], (*pairs[-1], hosts[-1])] if len(hosts) % 2 else pairs


def _confirm(suspects: Iterable[int], good: set[int], below: float, confirmations: int, random: Random) -> Search:
    """Suspects again, each with another good partner each time; who fails all of them is blamed."""
    failed: dict[int, list[int]] = {host: [] for host in suspects}
    for number in range(confirmations):
        waiting = [host for host in failed if len(failed[host]) == number]
        while waiting and good:
            pairs = pair_with_cleared(waiting, sorted(good), {}, failed.__getitem__, random)
            shares = yield pairs
            for pair in pairs:
                suspect, partner = pair if pair[0] in failed else (pair[1], pair[0])
                waiting.remove(suspect)
                if shares[pair] >= 1 - below:
                    del failed[suspect]
                    good.add(suspect)
                else:
                    failed[suspect].append(partner)
    return {host for host, met in failed.items() if len(met) == confirmations}


OURS = "ours, bar by noise, at least 5 % (default on GPUs)"
SCHEMES: dict[str, Scheme] = {
    OURS: partial(ours, floor=0.05),
    "ours, bar by noise, at least 10 %": partial(ours, floor=0.1),
    **{
        f"two passes, bar {percent} % below nominal, {times}x confirmed": partial(
            two_pass, below=percent / 100, confirmations=times
        )
        for percent in (10, 5)
        for times in (1, 3)
    },
    "DLRover's two rounds, bar 5 %": partial(two_rounds, below=0.05),
    **{
        f"bisection, bar 5 %, {times}x confirmed": partial(bisection, below=0.05, confirmations=times)
        for times in (1, 3)
    },
}
