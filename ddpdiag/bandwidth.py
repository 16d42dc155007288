"""Bandwidths: nccl-tests' formulas, and the bus bandwidth that this hardware should reach, with its source.

The formulas are those of NVIDIA/nccl-tests (doc/PERFORMANCE.md; GetCollByteCount and GetBw in src/*.cu). An expected
rate is computed from the links of this machine, never from a rate that another machine reached.

For NCCL, the slowest hardware sets the expected rate: the links inside a host, or the network cards between hosts. The
nominal rate of this hardware is multiplied by the share that published runs reach (A100 235 of 240, H200 366 of 370.8,
B200 682 of 721.8 GB/s busbw on NVLink; 0.90 to 0.93 of the cards between hosts). The nominal rates of NVLink and PCIe
are NCCL's rates per link and per lane (src/graph/topo.h, topo.cc).

For gloo, only the all-reduce has an expected rate. gloo uses no shared memory: each byte goes through TCP. So a rank
needs the time to send its bytes over the loopback, and the time to copy them in memory. This run measures both rates.
Between hosts, the network card limits the rate.

Hosts whose GPUs are in one NVLink domain (trays of a GB200 NVL72) count as one host, as they do for NCCL (MNNVL): 8
GPUs of two trays reach 811 GB/s, 72 GPUs of a rack 835 to 847 GB/s (coreweave/nccl-tests, pull request 43), although
their network cards carry only 200 GB/s.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.model.bench import Bottleneck, Expectation, Limits
from ddpdiag.nccl_rings import weakest_cut
from ddpdiag.stats import quantile
from ddpdiag.text import rate_text

# nccl-tests rounds each rank's part down to a multiple of this number, so that each part begins at an aligned address.
ALIGNMENT_BYTES = 16
# For these collectives, the size is the total over all ranks. Each rank has an equal part of it.
SPLIT_COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all")


class MessageSize(Struct, frozen=True):
    """The size of one message, rounded as nccl-tests does. Two requested sizes may round to the same `MessageSize`.

    `size_bytes` is the first column of nccl-tests' table, and `count` the second, in elements: those of one rank's part
    for SPLIT_COLLECTIVES, else of the message. `send` and `receive` are the elements of a rank's buffers.
    """

    size_bytes: int
    count: int
    send: int
    receive: int


def busbw_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth divided by algorithm bandwidth: 2(n-1)/n, (n-1)/n or 1 for n ranks.

    The factor makes busbw comparable with the rate of a link. A factor that depends on n is 0 for one rank, which sends
    nothing. Raises ValueError for an unknown collective.
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
    """Algorithm bandwidth in bytes per second: size divided by time, or 0 if `seconds` is 0."""
    return size_bytes / seconds if seconds > 0 else 0.0


def busbw(collective: str, size_bytes: float, seconds: float, ranks: int) -> float:
    """Bus bandwidth in bytes per second: `algbw` times `busbw_factor`."""
    return algbw(size_bytes, seconds) * busbw_factor(collective, ranks)


def rounded_size(collective: str, requested_bytes: int, element_bytes: int, ranks: int) -> MessageSize:
    """Round `requested_bytes` as nccl-tests does, but to at least one element for each rank.

    For SPLIT_COLLECTIVES, each rank's part is rounded down to a multiple of 16 bytes. A part that would become 0 is not
    rounded: nccl-tests would move 0 bytes, and measure the time of an empty call.
    """
    n = max(1, ranks)
    elements = requested_bytes // element_bytes
    if collective not in SPLIT_COLLECTIVES:
        count = max(1, elements)
        return MessageSize(count * element_bytes, count, count, count)
    elements_per_rank, alignment_elements = elements // n, max(1, ALIGNMENT_BYTES // element_bytes)
    elements_per_rank = (elements_per_rank - elements_per_rank % alignment_elements) or max(1, elements_per_rank)
    total_elements = elements_per_rank * n
    send = elements_per_rank if collective == "all_gather" else total_elements
    receive = elements_per_rank if collective == "reduce_scatter" else total_elements
    return MessageSize(total_elements * element_bytes, elements_per_rank, send, receive)


# Expected bandwidth ---------------------------------------------------------------------------------------------------


NVLINK_SHARE = 0.95
NETWORK_SHARE = 0.92
# The share of an Ethernet link's bits that is TCP payload: 1448 of the 1538 bytes of a frame with its gap.
GOODPUT_SHARE = 0.94
# gloo's ring sends 2(n-1) parts of size/n and reduces half of them. Per byte, a reduction accesses memory 3 times (it
# reads two operands and writes one), a copy twice. So the reductions of each sent byte cost 0.5 x 3/2 copies.
_COPIES_PER_SENT_BYTE = 0.75

_RanksByHost = Mapping[str, Sequence[int]]  # the key is the host's name
_LimitsByRank = Mapping[int, Limits]


class Bound(NamedTuple):
    """An upper bound of the bus bandwidth, the hardware that sets the bound, and its derivation in words (`source`).

    `network_unknown` says that the speed of some network cards is not known, so that the true bound may be lower.
    """

    busbw_bytes_per_s: float
    bottleneck: Bottleneck
    source: str
    network_unknown: bool = False

    @property
    def expectation(self) -> Expectation:
        """This bound as the struct that the report uses."""
        return Expectation(busbw_bytes_per_s=self.busbw_bytes_per_s, source=self.source)


class _Cards(NamedTuple):
    """The network cards of one host: their count, total rate and slowest rate. Each port counts as a card."""

    card_count: int
    bytes_per_s: float
    slowest_bytes_per_s: float


def lowest_bound(collective: str, backend: str, hosts: _RanksByHost, limits: _LimitsByRank) -> Bound | None:
    """The lowest known bound for the ranks of `hosts`, or None if no bound is known or there is only one rank.

    The result's `source` mentions hardware whose bound is not known: network cards, and NVLinks without a switch.
    """
    rank_count = sum(map(len, hosts.values()))
    if rank_count < 2:
        return None
    mnnvl_text = ""
    match backend:
        case "nccl":
            host_count = len(hosts)
            hosts, cards = _merge_nvlink_domains(hosts, limits)
            mnnvl_text = "; NVLinks join the GPUs of several hosts (MNNVL)" if len(hosts) < host_count else ""
            host_bounds = [bound for ranks in hosts.values() if (bound := _link_bound(ranks, limits))]
            network_bounds = _nic_bounds(collective, rank_count, hosts, cards)
        case "gloo" if collective == "all_reduce":
            by_owner = {"this host's" if len(hosts) == 1 else f"{host}'s": ranks for host, ranks in hosts.items()}
            host_bounds = [bound for owner, ranks in by_owner.items() if (bound := _copy_bound(owner, ranks, limits))]
            network_bounds = [
                _nic_bound(GOODPUT_SHARE, cards, _send_rate(hosts[host], rank_count, cards), host)
                for host, cards in _cards_by_host(hosts, limits).items()
            ]
        case _:
            return None
    lowest = min([*host_bounds, *network_bounds], default=None, key=lambda bound: bound.busbw_bytes_per_s)
    if lowest is None:
        return None
    if lowest.bottleneck is Bottleneck.NVLINK:
        lowest = lowest._replace(source=f"{lowest.source}{mnnvl_text}")
    unknown_pairs = backend == "nccl" and any(_has_unknown_pairs(ranks, limits) for ranks in hosts.values())
    if unknown_pairs and len(host_bounds) < len(hosts):
        lowest = lowest._replace(source=f"{lowest.source}; NVLinks without a switch are left out")
    if len(hosts) == len(network_bounds) or len(hosts) == 1:
        return lowest
    source = f"{lowest.source}; network cards of unknown speed are left out"
    return lowest._replace(source=source, network_unknown=True)


def _merge_nvlink_domains(hosts: _RanksByHost, limits: _LimitsByRank) -> tuple[_RanksByHost, dict[str, _Cards]]:
    """Merge the hosts of each NVLink domain into one host. Returns the ranks and the network cards by host.

    NCCL uses NVLinks between hosts only if every rank is in a domain (mnnvl.cc, ncclMnnvlCheck): else none are merged.
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
            counts, totals, slowest = zip(*known, strict=True)
            merged_cards[name] = _Cards(sum(counts), sum(totals), min(slowest))
    return ranks, merged_cards


def _has_unknown_pairs(ranks: Sequence[int], limits: _LimitsByRank) -> bool:
    """Whether all GPUs of a host have NVLinks without a switch, and it is not known which pairs the NVLinks connect.

    The pairs matter: a ring over 4 GPUs bridged in pairs crosses PCIe twice, a ring over 8 in a cube mesh does not.
    """
    gpus = [limits[rank] for rank in ranks if rank in limits]
    linked = gpus and all(_usable_rates([limit.nvlink_bytes_per_s]) for limit in gpus)
    unknown = len(ranks) > 2 and not all(limit.nvlink_switched for limit in gpus)
    return bool(linked) and unknown and weakest_cut(gpus) is None


def _link_bound(ranks: Sequence[int], limits: _LimitsByRank) -> Bound | None:
    """The bound that the weakest cut of a ring over one host's GPUs sets. A single GPU is limited by its PCIe slot.

    If the paths between the GPUs are not known, NVLink sets the bound if all GPUs have NVLinks, else PCIe does. None if
    no rate is known, or if `_has_unknown_pairs`.
    """
    if _has_unknown_pairs(ranks, limits):
        return None
    gpus = [limits[rank] for rank in ranks if rank in limits]
    nvlink_rates = _usable_rates(limit.nvlink_bytes_per_s for limit in gpus)
    switched = all(limit.nvlink_switched for limit in gpus)
    cut = weakest_cut(gpus) if len(gpus) == len(ranks) and not switched else None
    if nvlink_rates and len(nvlink_rates) == len(gpus) and len(ranks) > 1 and (cut is None or cut.nvlink_bytes_per_s):
        rate = min(nvlink_rates)
        if cut is not None:
            rate = min(rate, cut.nvlink_bytes_per_s)
            source = f"{NVLINK_SHARE:.0%} of the {rate_text(rate)} of the NVLinks between these GPUs, as a ring"
            return Bound(NVLINK_SHARE * rate, Bottleneck.NVLINK, source)
        source = f"{NVLINK_SHARE:.0%} of the {rate_text(rate)} of a GPU's NVLinks, as a ring (NVLS can be faster)"
        return Bound(NVLINK_SHARE * rate, Bottleneck.NVLINK, source)
    if pcie_rates := _usable_rates(limit.pcie_bytes_per_s for limit in gpus):
        rate = min(pcie_rates)
        if cut is None or cut.has_p2p:
            return Bound(rate, Bottleneck.PCIE, f"{rate_text(rate)} of PCIe, NCCL's figure for this slot")
        # Each byte crosses PCIe twice: into the host's memory and out of it.
        source = f"half of {rate_text(rate)} of PCIe, since NCCL uses the host's memory (no P2P here)"
        return Bound(rate / 2, Bottleneck.PCIE, source)
    return None


def _usable_rates(values: Iterable[float | None]) -> list[float]:
    """The rates without None, 0 and infinity: a rate of 0 would mean that no transfer ends."""
    return [value for value in values if value is not None and 0 < value < math.inf]


def _nic_bounds(collective: str, rank_count: int, hosts: _RanksByHost, host_cards: Mapping[str, _Cards]) -> list[Bound]:
    """One bound for each host in `host_cards`. NCCL spreads its rings over all cards of a host."""
    bounds = []
    for host, cards in host_cards.items():
        if collective != "send_recv":
            rate = cards.bytes_per_s * _busbw_per_outgoing_rate(collective, hosts[host], rank_count)
            bounds.append(_nic_bound(NETWORK_SHARE, cards, rate, host))
            continue
        # A rank sends through the card nearest to it. If more ranks than cards send, they share all cards.
        rate = _send_rate(hosts[host], rank_count, cards)
        source = f"{NETWORK_SHARE} x {rate_text(rate)}, a rank's share of {cards.card_count} network cards of {host}"
        rank_share = Bound(NETWORK_SHARE * rate, Bottleneck.NIC, source)
        bounds.append(_nic_bound(NETWORK_SHARE, cards, rate, host) if cards.card_count == 1 else rank_share)
    return bounds


def _send_rate(host_ranks: Sequence[int], rank_count: int, cards: _Cards) -> float:
    """The rate in bytes/s at which a rank of this host can send to the next rank, if that rank is on another host."""
    ranks_of_host = frozenset(host_ranks)
    senders = sum((rank + 1) % rank_count not in ranks_of_host for rank in host_ranks)
    return min(cards.slowest_bytes_per_s, cards.bytes_per_s / max(1, senders))


def _nic_bound(share: float, cards: _Cards, busbw: float, host: str) -> Bound:
    subject = "the network card" if cards.card_count == 1 else f"{cards.card_count} network cards"
    return Bound(share * busbw, Bottleneck.NIC, f"{share} x {rate_text(cards.bytes_per_s)} of {subject} of {host}")


def _cards_by_host(hosts: _RanksByHost, limits: _LimitsByRank) -> dict[str, _Cards]:
    """The network cards by host, for hosts whose cards all have a known speed; empty for a single host."""
    if len(hosts) < 2:
        return {}
    cards = {host: _cards([limits[rank] for rank in ranks if rank in limits]) for host, ranks in hosts.items()}
    return {host: known for host, known in cards.items() if known is not None}


def _cards(host_limits: Sequence[Limits]) -> _Cards | None:
    """The network cards that a host's ranks use, each once (at least one port); None if a card's speed is not known."""
    cards = {limit.nic: limit for limit in host_limits}
    card_rates = _usable_rates(card.nic_bytes_per_s for card in cards.values())
    if not card_rates or len(card_rates) < len(cards):
        return None
    port_count = sum(card.nic_ports or 1 for card in cards.values())
    slowest = min(_usable_rates([*(card.nic_port_bytes_per_s for card in cards.values()), *card_rates]))
    return _Cards(port_count, sum(card_rates), slowest)


def _busbw_per_outgoing_rate(collective: str, host_ranks: Sequence[int], rank_count: int) -> float:
    """Bus bandwidth divided by the rate at which data leave a host. It is 1 for a ring, which leaves each host once.

    In an all-to-all, each of the l ranks of a host sends 1/n of its data to each of the n - l ranks of other hosts. So
    l(n-l)/n of a rank's size leaves the host, and busbw counts (n-1)/n of it.
    """
    if collective != "all_to_all":
        return 1.0
    return (rank_count - 1) / max(1, len(host_ranks) * (rank_count - len(host_ranks)))


def _copy_bound(owner: str, host_ranks: Sequence[int], limits: _LimitsByRank) -> Bound | None:
    """The bound for gloo inside one host: seconds = sent bytes / loopback rate + copied bytes / copy rate.

    Each rate is the median of the host's ranks, so that one slow rank does not lower it. None without a loopback rate.
    `owner` is the host as the text of `source` names it.
    """
    known_limits = [limits[rank] for rank in host_ranks if rank in limits]
    loopback_rate = _median(limit.loopback_bytes_per_s for limit in known_limits)
    copy_rate = _median(limit.copy_bytes_per_s for limit in known_limits)
    if loopback_rate is None:
        return None
    copy_text = f" and copies {rate_text(copy_rate)}" if copy_rate else ""
    source = f"{owner} loopback {rate_text(loopback_rate)}{copy_text}, measured in this run"
    seconds_per_byte = 1 / loopback_rate + (_COPIES_PER_SENT_BYTE / copy_rate if copy_rate else 0.0)
    return Bound(1 / seconds_per_byte, Bottleneck.COPY, source)


def _median(values: Iterable[float | None]) -> float | None:
    known = sorted(_usable_rates(values))
    return quantile(known, 0.5) if known else None
