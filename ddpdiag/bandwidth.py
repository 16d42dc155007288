"""Bandwidths: nccl-tests' formulas, and the bus bandwidth that this hardware should reach, with its source.

Formulas: NVIDIA/nccl-tests, doc/PERFORMANCE.md, and GetCollByteCount and GetBw in src/*.cu. An expectation is never
another machine's number.

NCCL: the slowest of the links inside a host and the network cards between hosts, each times the share of its figure
that published runs reach (A100 235 of 240, H200 366 of 370.8, B200 682 of 721.8 GB/s busbw on NVLink; 0.90 to 0.93 of
the cards between hosts). Rates of NVLink and PCIe are NCCL's own per-unit figures (src/graph/topo.h, topo.cc).

gloo, for its all-reduce only: there is no shared memory, each byte goes through TCP. So a rank's time is what it sends
at the rate of the loopback plus what it touches in memory besides, both as this run measured them; between hosts, the
network card.

Hosts whose GPUs are in one domain of NVLinks (trays of a GB200 NVL72) count as one host, as they do for NCCL (MNNVL):
8 GPUs of two trays reach 811 GB/s, 72 of a rack 835 to 847 (coreweave/nccl-tests, pull request 43); their cards
carry 200.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.model.bench import Bottleneck, Expectation, Limits
from ddpdiag.nccl_rings import weakest_cut
from ddpdiag.stats import quantile
from ddpdiag.text import rate_text

# What nccl-tests rounds each rank's part down to, so that every part begins where vector loads may.
ALIGNMENT_BYTES = 16
# These split their size between the ranks: it is that of all ranks together.
SPLIT = ("all_gather", "reduce_scatter", "all_to_all")


class Counts(Struct, frozen=True):
    """The bytes and elements of one size. Two wanted sizes that come to the same have equal `Counts`.

    `size_bytes` is what is moved, nccl-tests' first column; `count` is its second, in elements (one part of a
    collective that is split). `send` and `receive` are elements of one rank's buffers.
    """

    size_bytes: int
    count: int
    send: int
    receive: int


def factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: 2(n-1)/n, (n-1)/n or 1. With it, busbw is the rate of the slowest link.

    One rank moves nothing between ranks, so where the factor depends on n it is 0. ValueError for an unknown name.
    """
    n = max(1, ranks)
    match collective:
        case "all_reduce":
            return 2 * (n - 1) / n
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return (n - 1) / n
        case "broadcast" | "reduce" | "send_recv":
            return 1.0
    raise ValueError(f"no such collective: {collective}")


def algbw(size_bytes: float, seconds: float) -> float:
    """Algorithm bandwidth in bytes per second: size over time. 0 where no time was measured."""
    return size_bytes / seconds if seconds > 0 else 0.0


def busbw(collective: str, size_bytes: float, seconds: float, ranks: int) -> float:
    """Bus bandwidth in bytes per second: `algbw` x `factor`, comparable with what a link can do."""
    return algbw(size_bytes, seconds) * factor(collective, ranks)


def counts(collective: str, wanted_bytes: int, element_bytes: int, ranks: int) -> Counts:
    """Count what nccl-tests moves for `wanted_bytes`: at least one element for each rank.

    Of a collective that is split, each rank's part is rounded down to 16 bytes, unless that leaves nothing: nccl-tests
    then moves 0 bytes, and times an empty call.
    """
    n = max(1, ranks)
    elements = wanted_bytes // element_bytes
    if collective not in SPLIT:
        count = max(1, elements)
        return Counts(count * element_bytes, count, count, count)
    part, grain = elements // n, max(1, ALIGNMENT_BYTES // element_bytes)
    part = (part - part % grain) or max(1, part)
    whole = part * n
    send = part if collective == "all_gather" else whole
    receive = part if collective == "reduce_scatter" else whole
    return Counts(whole * element_bytes, part, send, receive)


# What this hardware should reach -------------------------------------------------------------------------------------


NVLINK_SHARE = 0.95
NETWORK_SHARE = 0.92
# TCP payload in Ethernet's bits: 1448 of 1538 bytes of a frame with its gap.
GOODPUT_SHARE = 0.94
# gloo's ring sends 2(n-1) parts of size/n and reduces half of them: each reads two operands and writes one, 3 touches,
# where a copied byte is 2.
_COPIES_PER_SENT = 0.75

# The ranks of each host, and the limits of each rank.
_Hosts = Mapping[str, Sequence[int]]
_Limits = Mapping[int, Limits]


class Bound(NamedTuple):
    """A bus bandwidth that cannot be passed, what sets it, and in words.

    `network_unknown` means that the speed of some host's network cards is not known: the true bound may be lower.
    """

    busbw_bytes_per_s: float
    part: Bottleneck
    source: str
    network_unknown: bool = False

    @property
    def expectation(self) -> Expectation:
        """As the report has it."""
        return Expectation(busbw_bytes_per_s=self.busbw_bytes_per_s, source=self.source)


class _Cards(NamedTuple):
    """The network cards of one host: how many, bytes per second together, and of the slowest. Each port counts."""

    number: int
    total: float
    slowest: float


def bound(collective: str, backend: str, hosts: _Hosts, limits: _Limits) -> Bound | None:
    """The lowest of the bounds that are known, for the ranks of each host; None if none is, or nothing is sent.

    A bound that is not known is left out, and `source` names left-out network cards and NVLinks without a switch.
    """
    total = sum(map(len, hosts.values()))
    if total < 2:
        return None
    joined = ""
    match backend:
        case "nccl":
            apart = len(hosts)
            hosts, cards = _nvlink_domains(hosts, limits)
            joined = "; NVLinks join the GPUs of several hosts (MNNVL)" if len(hosts) < apart else ""
            inside = [found for ranks in hosts.values() if (found := _links(ranks, limits))]
            between = _nccl_network(collective, total, hosts, cards)
        case "gloo" if collective == "all_reduce":
            whose = {"this host's" if len(hosts) == 1 else f"{host}'s": ranks for host, ranks in hosts.items()}
            inside = [found for one, own in whose.items() if (found := _copies(one, own, limits))]
            between = [
                _network(GOODPUT_SHARE, own, _stream(hosts[host], total, own), host)
                for host, own in _cards_by_host(hosts, limits).items()
            ]
        case _:
            return None
    lowest = min([*inside, *between], default=None, key=lambda found: found.busbw_bytes_per_s)
    if lowest is None:
        return None
    if lowest.part is Bottleneck.NVLINK:
        lowest = lowest._replace(source=f"{lowest.source}{joined}")
    if backend == "nccl" and len(inside) < len(hosts) and any(_bridged(ranks, limits) for ranks in hosts.values()):
        lowest = lowest._replace(source=f"{lowest.source}; NVLinks without a switch are left out")
    if len(hosts) == len(between) or len(hosts) == 1:
        return lowest
    source = f"{lowest.source}; network cards of unknown speed are left out"
    return lowest._replace(source=source, network_unknown=True)


def _nvlink_domains(hosts: _Hosts, limits: _Limits) -> tuple[_Hosts, dict[str, _Cards]]:
    """The ranks and the cards of each host, or of each group of hosts in one domain of NVLinks.

    NCCL uses NVLinks between hosts only where all ranks are in some domain (mnnvl.cc, ncclMnnvlCheck).
    """
    cards = _cards_by_host(hosts, limits)
    domains = {host: {limits[rank].nvlink_domain if rank in limits else None for rank in hosts[host]} for host in hosts}
    if any(None in own or len(own) > 1 for own in domains.values()):
        return hosts, cards
    groups: dict[str, list[str]] = {}
    for host, (domain,) in domains.items():
        groups.setdefault(str(domain), []).append(host)
    ranks: dict[str, Sequence[int]] = {}
    joined: dict[str, _Cards] = {}
    for names in groups.values():
        name = names[0] if len(names) == 1 else f"{len(names)} hosts ({names[0]}, ...)"
        ranks[name] = sorted(rank for host in names for rank in hosts[host])
        known = [cards[host] for host in names if host in cards]
        if len(groups) > 1 and len(known) == len(names):
            numbers, totals, slowest = zip(*known, strict=True)
            joined[name] = _Cards(sum(numbers), sum(totals), min(slowest))
    return ranks, joined


def _bridged(ranks: Sequence[int], limits: _Limits) -> bool:
    """Whether all GPUs of a host have NVLinks of which it is not known whether they connect each pair.

    Of 4 GPUs that are bridged in pairs, a ring goes over PCIe twice; of 8 in a cube mesh it does not.
    """
    own = [limits[rank] for rank in ranks if rank in limits]
    linked = own and all(_known([limit.nvlink_bytes_per_s]) for limit in own)
    unknown = len(ranks) > 2 and not all(limit.nvlink_switched for limit in own)
    return bool(linked) and unknown and weakest_cut(own) is None


def _links(ranks: Sequence[int], limits: _Limits) -> Bound | None:
    """Bound the rate of the GPUs of one host by the weakest place of a ring over them; of one GPU, by PCIe.

    Where their paths to each other are not known: by NVLink if all have some, else by PCIe; and None where NVLinks may
    not join all of them.
    """
    if _bridged(ranks, limits):
        return None
    own = [limits[rank] for rank in ranks if rank in limits]
    links = _known(limit.nvlink_bytes_per_s for limit in own)
    switched = all(limit.nvlink_switched for limit in own)
    cut = weakest_cut(own) if len(own) == len(ranks) and not switched else None
    if links and len(links) == len(own) and len(ranks) > 1 and (cut is None or cut.nvlink_bytes_per_s):
        rate = min(links)
        if cut is not None:
            rate = min(rate, cut.nvlink_bytes_per_s)
            source = f"{NVLINK_SHARE:.0%} of the {rate_text(rate)} of the NVLinks between these GPUs, as a ring"
            return Bound(NVLINK_SHARE * rate, Bottleneck.NVLINK, source)
        source = f"{NVLINK_SHARE:.0%} of the {rate_text(rate)} of a GPU's NVLinks, as a ring (NVLS can be faster)"
        return Bound(NVLINK_SHARE * rate, Bottleneck.NVLINK, source)
    if slots := _known(limit.pcie_bytes_per_s for limit in own):
        rate = min(slots)
        if cut is None or cut.p2p:
            return Bound(rate, Bottleneck.PCIE, f"{rate_text(rate)} of PCIe, NCCL's figure for this slot")
        # A byte goes into the host's memory and out of it again.
        source = f"half of {rate_text(rate)} of PCIe, since NCCL uses the host's memory (no P2P here)"
        return Bound(rate / 2, Bottleneck.PCIE, source)
    return None


def _known(values: Iterable[float | None]) -> list[float]:
    """Those that were measured; a rate of 0 would mean that nothing ever ends."""
    return [value for value in values if value is not None and 0 < value < math.inf]


def _nccl_network(collective: str, ranks: int, hosts: _Hosts, known: Mapping[str, _Cards]) -> list[Bound]:
    """One bound for each host whose cards are known: NCCL spreads its rings over all of them."""
    bounds = []
    for host, cards in known.items():
        if collective != "send_recv":
            rate = cards.total * _leaving(collective, hosts[host], ranks)
            bounds.append(_network(NETWORK_SHARE, cards, rate, host))
            continue
        # A rank sends to one other, through the card next to it, or its share of all where more ranks than cards send.
        rate = _stream(hosts[host], ranks, cards)
        source = f"{NETWORK_SHARE} x {rate_text(rate)}, a rank's share of {cards.number} network cards of {host}"
        share = Bound(NETWORK_SHARE * rate, Bottleneck.NIC, source)
        bounds.append(_network(NETWORK_SHARE, cards, rate, host) if cards.number == 1 else share)
    return bounds


def _stream(own: Sequence[int], ranks: int, cards: _Cards) -> float:
    """Bytes per second that a rank at the edge of its host may send to other hosts."""
    inside = frozenset(own)
    exits = sum((rank + 1) % ranks not in inside for rank in own)
    return min(cards.slowest, cards.total / max(1, exits))


def _network(share: float, cards: _Cards, busbw: float, host: str) -> Bound:
    whose = "the network card" if cards.number == 1 else f"{cards.number} network cards"
    return Bound(share * busbw, Bottleneck.NIC, f"{share} x {rate_text(cards.total)} of {whose} of {host}")


def _cards_by_host(hosts: _Hosts, limits: _Limits) -> dict[str, _Cards]:
    """The cards of each host, where there are several hosts and the speed of every card is known."""
    if len(hosts) < 2:
        return {}
    cards = {host: _cards([limits[rank] for rank in ranks if rank in limits]) for host, ranks in hosts.items()}
    return {host: own for host, own in cards.items() if own is not None}


def _cards(own: Sequence[Limits]) -> _Cards | None:
    """Those of one name are the same for all ranks; one without a number of ports is one port."""
    cards = {limit.nic: limit for limit in own}
    known = _known(card.nic_bytes_per_s for card in cards.values())
    if not known or len(known) < len(cards):
        return None
    number = sum(card.nic_ports or 1 for card in cards.values())
    slowest = min(_known([*(card.nic_port_bytes_per_s for card in cards.values()), *known]))
    return _Cards(number, sum(known), slowest)


def _leaving(collective: str, own: Sequence[int], ranks: int) -> float:
    """Bus bandwidth over what leaves a host: a ring crosses its edge once, an all-to-all with each pair of ranks.

    Of an all-to-all, each of l own ranks sends 1/n of its size to each of n - l others: l (n-l)/n leaves, and (n-1)/n
    counts as moved.
    """
    if collective != "all_to_all":
        return 1.0
    return (ranks - 1) / max(1, len(own) * (ranks - len(own)))


def _copies(whose: str, inside: Sequence[int], limits: _Limits) -> Bound | None:
    """Bound the rate of the ranks inside one host: seconds = sent / loopback + copied / copies.

    The medians of its ranks: these are measured, not promised, and a slow rank must not lower what is asked of all.
    """
    own = [limits[rank] for rank in inside if rank in limits]
    loopback = _median(limit.loopback_bytes_per_s for limit in own)
    copies = _median(limit.copy_bytes_per_s for limit in own)
    if loopback is None:
        return None
    also = f" and copies {rate_text(copies)}" if copies else ""
    source = f"{whose} loopback {rate_text(loopback)}{also}, measured in this run"
    seconds_per_byte = 1 / loopback + (_COPIES_PER_SENT / copies if copies else 0.0)
    return Bound(1 / seconds_per_byte, Bottleneck.COPY, source)


def _median(values: Iterable[float | None]) -> float | None:
    known = sorted(_known(values))
    return quantile(known, 0.5) if known else None
