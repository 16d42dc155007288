"""Bandwidths: nccl-tests' formulas, and the bus bandwidth that this hardware should reach, with its source.

The formulas are those of NVIDIA/nccl-tests (doc/PERFORMANCE.md; GetCollByteCount and GetBw in src/*.cu). An expected
rate follows from the links of this machine. It is never a rate that another machine reached.

For NCCL, the slowest part sets the expected rate: the links inside a host, or the network cards between hosts. The
nominal rate of a part is multiplied by the share that published runs reach (A100 235 of 240, H200 366 of 370.8, B200
682 of 721.8 GB/s busbw on NVLink; 0.90 to 0.93 of the cards between hosts). The nominal rates of NVLink and PCIe are
NCCL's per-unit figures (src/graph/topo.h, topo.cc).

For gloo, only the all-reduce has an expected rate. gloo uses no shared memory: each byte goes through TCP. So a rank
needs the time to send its bytes over the loopback, and the time to copy them in memory. This run measures both rates.
Between hosts, the network card limits the rate.

Hosts whose GPUs are in one domain of NVLinks (trays of a GB200 NVL72) count as one host, as they do for NCCL (MNNVL): 8
GPUs of two trays reach 811 GB/s, 72 of a rack 835 to 847 (coreweave/nccl-tests, pull request 43). Their network cards
carry 200 GB/s.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.model.bench import Bottleneck, Expectation, Limits
from ddpdiag.nccl_rings import weakest_cut
from ddpdiag.stats import quantile
from ddpdiag.text import rate_text

# nccl-tests rounds each rank's part down to a multiple of this, so that vector loads may begin at every part.
ALIGNMENT_BYTES = 16
# The size of these collectives is the total of all ranks, and is split between them.
SPLIT = ("all_gather", "reduce_scatter", "all_to_all")


class Counts(Struct, frozen=True):
    """The size of one message as nccl-tests rounds it. Two wanted sizes may round to equal `Counts`.

    `size_bytes` is nccl-tests' first column, the bytes that are moved. `count` is its second column, in elements (of
    one rank's part, if the collective splits its size). `send` and `receive` are elements of one rank's buffers.
    """

    size_bytes: int
    count: int
    send: int
    receive: int


def factor(collective: str, ranks: int) -> float:
    """The quotient of bus and algorithm bandwidth: 2(n-1)/n, (n-1)/n or 1. It makes busbw the rate of the slowest link.

    A factor that depends on n is 0 for one rank, which sends nothing. Raises ValueError for an unknown collective.
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
    """Algorithm bandwidth in bytes per second: size over time, or 0 if no time was measured."""
    return size_bytes / seconds if seconds > 0 else 0.0


def busbw(collective: str, size_bytes: float, seconds: float, ranks: int) -> float:
    """Bus bandwidth in bytes per second: `algbw` x `factor`, comparable with the rate of a link."""
    return algbw(size_bytes, seconds) * factor(collective, ranks)


def counts(collective: str, wanted_bytes: int, element_bytes: int, ranks: int) -> Counts:
    """Round `wanted_bytes` as nccl-tests does, but to at least one element for each rank.

    If the collective splits its size, each rank's part is rounded down to a multiple of 16 bytes, unless that leaves
    nothing: nccl-tests would then move 0 bytes, and time an empty call.
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


# Expected bandwidth ---------------------------------------------------------------------------------------------------


NVLINK_SHARE = 0.95
NETWORK_SHARE = 0.92
# TCP payload in Ethernet's bits: 1448 of 1538 bytes of a frame with its gap.
GOODPUT_SHARE = 0.94
# gloo's ring sends 2(n-1) parts of size/n and reduces half of them. A reduction accesses 3 bytes of memory (it reads
# two operands and writes one), a copy 2. So the reductions of each sent byte cost 0.5 x 3/2 copies.
_COPIES_PER_SENT = 0.75

# `_Hosts`: the ranks of each host, by its name. `_Limits`: the limits of each rank.
_Hosts = Mapping[str, Sequence[int]]
_Limits = Mapping[int, Limits]


class Bound(NamedTuple):
    """An upper bound of the bus bandwidth, the hardware (`part`) that sets it, and its derivation in words (`source`).

    `network_unknown`: the speed of some host's network cards is not known, so the true bound may be lower.
    """

    busbw_bytes_per_s: float
    part: Bottleneck
    source: str
    network_unknown: bool = False

    @property
    def expectation(self) -> Expectation:
        """This bound in the form of the report."""
        return Expectation(busbw_bytes_per_s=self.busbw_bytes_per_s, source=self.source)


class _Cards(NamedTuple):
    """The network cards of one host: their number, and bytes per second of all and of the slowest. A port is a card."""

    number: int
    total: float
    slowest: float


def bound(collective: str, backend: str, hosts: _Hosts, limits: _Limits) -> Bound | None:
    """The lowest known bound for the ranks of `hosts`, or None if no bound is known or there is only one rank.

    Unknown bounds are left out. `source` names left-out network cards and NVLinks without a switch.
    """
    total = sum(map(len, hosts.values()))
    if total < 2:
        return None
    mnnvl_text = ""
    match backend:
        case "nccl":
            host_count = len(hosts)
            hosts, cards = _nvlink_domains(hosts, limits)
            mnnvl_text = "; NVLinks join the GPUs of several hosts (MNNVL)" if len(hosts) < host_count else ""
            in_hosts = [found for ranks in hosts.values() if (found := _links(ranks, limits))]
            between = _nccl_network(collective, total, hosts, cards)
        case "gloo" if collective == "all_reduce":
            owners = {"this host's" if len(hosts) == 1 else f"{host}'s": ranks for host, ranks in hosts.items()}
            in_hosts = [found for owner, ranks in owners.items() if (found := _copies(owner, ranks, limits))]
            between = [
                _network(GOODPUT_SHARE, cards, _stream(hosts[host], total, cards), host)
                for host, cards in _cards_by_host(hosts, limits).items()
            ]
        case _:
            return None
    lowest = min([*in_hosts, *between], default=None, key=lambda found: found.busbw_bytes_per_s)
    if lowest is None:
        return None
    if lowest.part is Bottleneck.NVLINK:
        lowest = lowest._replace(source=f"{lowest.source}{mnnvl_text}")
    if backend == "nccl" and len(in_hosts) < len(hosts) and any(_bridged(ranks, limits) for ranks in hosts.values()):
        lowest = lowest._replace(source=f"{lowest.source}; NVLinks without a switch are left out")
    if len(hosts) == len(between) or len(hosts) == 1:
        return lowest
    source = f"{lowest.source}; network cards of unknown speed are left out"
    return lowest._replace(source=source, network_unknown=True)


def _nvlink_domains(hosts: _Hosts, limits: _Limits) -> tuple[_Hosts, dict[str, _Cards]]:
    """The ranks and the network cards of each host, after the hosts of one NVLink domain are merged into one.

    NCCL uses NVLinks between hosts only if every rank is in a domain (mnnvl.cc, ncclMnnvlCheck).
    """
    cards = _cards_by_host(hosts, limits)
    domains = {host: {limits[rank].nvlink_domain if rank in limits else None for rank in hosts[host]} for host in hosts}
    if any(None in host_domains or len(host_domains) > 1 for host_domains in domains.values()):
        return hosts, cards
    groups: dict[str, list[str]] = {}
    for host, (domain,) in domains.items():
        groups.setdefault(str(domain), []).append(host)
    ranks: dict[str, Sequence[int]] = {}
    merged_cards: dict[str, _Cards] = {}
    for names in groups.values():
        name = names[0] if len(names) == 1 else f"{len(names)} hosts ({names[0]}, ...)"
        ranks[name] = sorted(rank for host in names for rank in hosts[host])
        known = [cards[host] for host in names if host in cards]
        if len(groups) > 1 and len(known) == len(names):
            numbers, totals, slowest = zip(*known, strict=True)
            merged_cards[name] = _Cards(sum(numbers), sum(totals), min(slowest))
    return ranks, merged_cards


def _bridged(ranks: Sequence[int], limits: _Limits) -> bool:
    """Whether all GPUs of a host have NVLinks, but it is not known which pairs of GPUs these connect.

    With 4 GPUs that are bridged in pairs, a ring crosses PCIe twice. With 8 GPUs in a cube mesh it does not.
    """
    known = [limits[rank] for rank in ranks if rank in limits]
    linked = known and all(_known([limit.nvlink_bytes_per_s]) for limit in known)
    unknown = len(ranks) > 2 and not all(limit.nvlink_switched for limit in known)
    return bool(linked) and unknown and weakest_cut(known) is None


def _links(ranks: Sequence[int], limits: _Limits) -> Bound | None:
    """Bound the rate of one host's GPUs by the weakest cut of a ring over them; one GPU is bound by its PCIe slot.

    If the paths between the GPUs are not known, NVLink is the bound if all GPUs have NVLinks, else PCIe. None if no
    rate is known, or if NVLinks may not join all GPUs (`_bridged`).
    """
    if _bridged(ranks, limits):
        return None
    known = [limits[rank] for rank in ranks if rank in limits]
    links = _known(limit.nvlink_bytes_per_s for limit in known)
    switched = all(limit.nvlink_switched for limit in known)
    cut = weakest_cut(known) if len(known) == len(ranks) and not switched else None
    if links and len(links) == len(known) and len(ranks) > 1 and (cut is None or cut.nvlink_bytes_per_s):
        rate = min(links)
        if cut is not None:
            rate = min(rate, cut.nvlink_bytes_per_s)
            source = f"{NVLINK_SHARE:.0%} of the {rate_text(rate)} of the NVLinks between these GPUs, as a ring"
            return Bound(NVLINK_SHARE * rate, Bottleneck.NVLINK, source)
        source = f"{NVLINK_SHARE:.0%} of the {rate_text(rate)} of a GPU's NVLinks, as a ring (NVLS can be faster)"
        return Bound(NVLINK_SHARE * rate, Bottleneck.NVLINK, source)
    if slots := _known(limit.pcie_bytes_per_s for limit in known):
        rate = min(slots)
        if cut is None or cut.p2p:
            return Bound(rate, Bottleneck.PCIE, f"{rate_text(rate)} of PCIe, NCCL's figure for this slot")
        # Each byte crosses PCIe twice: into the host's memory and out of it.
        source = f"half of {rate_text(rate)} of PCIe, since NCCL uses the host's memory (no P2P here)"
        return Bound(rate / 2, Bottleneck.PCIE, source)
    return None


def _known(values: Iterable[float | None]) -> list[float]:
    """The values that were measured. None, 0 and infinity are left out: at a rate of 0 no transfer would end."""
    return [value for value in values if value is not None and 0 < value < math.inf]


def _nccl_network(collective: str, ranks: int, hosts: _Hosts, known: Mapping[str, _Cards]) -> list[Bound]:
    """One bound for each host whose network cards are known. NCCL spreads its rings over all cards of a host."""
    bounds = []
    for host, cards in known.items():
        if collective != "send_recv":
            rate = cards.total * _leaving(collective, hosts[host], ranks)
            bounds.append(_network(NETWORK_SHARE, cards, rate, host))
            continue
        # A rank sends to one other rank through the nearest card, or with a share of all if more ranks than cards send.
        rate = _stream(hosts[host], ranks, cards)
        source = f"{NETWORK_SHARE} x {rate_text(rate)}, a rank's share of {cards.number} network cards of {host}"
        share = Bound(NETWORK_SHARE * rate, Bottleneck.NIC, source)
        bounds.append(_network(NETWORK_SHARE, cards, rate, host) if cards.number == 1 else share)
    return bounds


def _stream(host_ranks: Sequence[int], ranks: int, cards: _Cards) -> float:
    """Bytes per second that a rank can send to the next rank if that is on another host."""
    inside = frozenset(host_ranks)
    senders = sum((rank + 1) % ranks not in inside for rank in host_ranks)
    return min(cards.slowest, cards.total / max(1, senders))


def _network(share: float, cards: _Cards, busbw: float, host: str) -> Bound:
    subject = "the network card" if cards.number == 1 else f"{cards.number} network cards"
    return Bound(share * busbw, Bottleneck.NIC, f"{share} x {rate_text(cards.total)} of {subject} of {host}")


def _cards_by_host(hosts: _Hosts, limits: _Limits) -> dict[str, _Cards]:
    """The network cards of each host whose cards all have a known speed; empty if there is one host."""
    if len(hosts) < 2:
        return {}
    cards = {host: _cards([limits[rank] for rank in ranks if rank in limits]) for host, ranks in hosts.items()}
    return {host: known for host, known in cards.items() if known is not None}


def _cards(host_limits: Sequence[Limits]) -> _Cards | None:
    """The network cards that a host's ranks use, each name once (one port at least); None if a speed is not known."""
    cards = {limit.nic: limit for limit in host_limits}
    known = _known(card.nic_bytes_per_s for card in cards.values())
    if not known or len(known) < len(cards):
        return None
    number = sum(card.nic_ports or 1 for card in cards.values())
    slowest = min(_known([*(card.nic_port_bytes_per_s for card in cards.values()), *known]))
    return _Cards(number, sum(known), slowest)


def _leaving(collective: str, host_ranks: Sequence[int], ranks: int) -> float:
    """The quotient of bus bandwidth and the rate at which data leave a host. A ring leaves each host once, so it is 1.

    In an all-to-all, each of the l ranks of a host sends 1/n of its size to each of the n - l ranks of other hosts: l
    (n-l)/n leaves the host, and (n-1)/n counts as moved.
    """
    if collective != "all_to_all":
        return 1.0
    return (ranks - 1) / max(1, len(host_ranks) * (ranks - len(host_ranks)))


def _copies(owner: str, inside: Sequence[int], limits: _Limits) -> Bound | None:
    """Bound gloo's rate inside one host: seconds = sent bytes / loopback rate + copied bytes / copy rate.

    Both rates are medians of the host's ranks, so that one slow rank does not lower them. None without a loopback rate.
    """
    known = [limits[rank] for rank in inside if rank in limits]
    loopback = _median(limit.loopback_bytes_per_s for limit in known)
    copies = _median(limit.copy_bytes_per_s for limit in known)
    if loopback is None:
        return None
    also = f" and copies {rate_text(copies)}" if copies else ""
    source = f"{owner} loopback {rate_text(loopback)}{also}, measured in this run"
    seconds_per_byte = 1 / loopback + (_COPIES_PER_SENT / copies if copies else 0.0)
    return Bound(1 / seconds_per_byte, Bottleneck.COPY, source)


def _median(values: Iterable[float | None]) -> float | None:
    known = sorted(_known(values))
    return quantile(known, 0.5) if known else None
