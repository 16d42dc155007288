"""Compares hosts with each other, or the ports of one host: which are missing, down, slow, or differ in other ways."""

from collections import Counter
from collections.abc import Iterator, Sequence
from operator import methodcaller

from msgspec import structs

from ddpdiag.checks.api import Seen
from ddpdiag.checks.host.rdma_ports.data import (
    Count,
    Data,
    HostPorts,
    compare,
    levels_text,
    rate_of,
    rates_text,
    release,
    roce_version_is_2,
    severity_of,
    states_text,
    unrouted_text,
)
from ddpdiag.checks.host.rdma_ports.findings import (
    down,
    far,
    missing_ports,
    other_firmware,
    slower,
    uneven,
    without_gid,
)
from ddpdiag.model import Finding, Severity
from ddpdiag.probes.net.adapters import Port
from ddpdiag.stats import odd_ones_out

# What every InfiniBand port has, but for split cables, which leave it two (HDR100, NDR200).
_LANES = 4


def compared(seen: Seen[Data], hosts: Sequence[HostPorts]) -> Iterator[Finding]:
    """Findings about hosts of one kind. Where hosts have other numbers of ports, the rest is compared without them."""
    if len(hosts) == 1:
        yield from _alone(seen, hosts[0])
    elif hosts[0].by_nccl:
        usual, odd, groups = compare(hosts, lambda own: own.counts)
        for own in odd:
            yield from _fewer(seen, own, usual, len(hosts))
        yield from uneven(seen, "their RDMA ports", groups, states_text, "ibstat")
        yield from _rates(seen, usual)
        yield from _gids(seen, usual)
        yield from _distances(seen, usual)
        yield from _firmware(seen, hosts)
    else:  # sockets do without RDMA
        yield from _rates(seen, [own for own in hosts if own.ports])


def _where(usual: Sequence[HostPorts], hosts: int) -> str:
    return f", as on {len(usual)} of {hosts} hosts"


def _fewer(seen: Seen[Data], own: HostPorts, usual: Sequence[HostPorts], hosts: int) -> Iterator[Finding]:
    """A host with fewer ports, or fewer that are up; one with more is at no fault."""
    have = {each.layer: each for each in own.counts}
    missing = not_up = 0
    for want in usual[0].counts:
        each = have.get(want.layer, Count(want.layer, 0, 0))
        lacking = max(0, want.ports - each.ports)
        missing += lacking
        not_up += max(0, want.up - each.up - lacking)
    where, severity = _where(usual, hosts), Severity.WARNING if own.up else severity_of(seen)
    if missing:
        # PCI addresses at which most hosts have an adapter, and this one has none.
        places = Counter(adapter.slot.pci for other in usual for adapter in other.adapters if adapter.slot)
        here = {adapter.slot.pci for adapter in own.data.adapters or () if adapter.slot}
        gone = sorted(pci for pci, times in places.items() if 2 * times > len(usual) and pci not in here)
        # Without a card, the addresses behind it may be others.
        gone = gone if len(gone) <= missing else []
        yield missing_ports(seen, own, usual, hosts, gone, missing, severity)
    if not_up:
        # The ports that are down here and up on most hosts; all that are down where names say nothing.
        ports = [port for port in own.ports if not port.active]
        up = Counter(port.name for other in usual for port in other.up)
        yield down(seen, own, [port for port in ports if 2 * up[port.name] > len(usual)] or ports, where, severity)


def _rates(seen: Seen[Data], hosts: Sequence[HostPorts]) -> Iterator[Finding]:
    usual, odd, groups = compare(hosts, lambda own: own.rates)
    for own in odd:
        yield from slower(seen, own, list(_slow(own, usual)), _where(usual, len(hosts)))
    yield from uneven(seen, "the rates of their RDMA ports", groups, rates_text, "ibstat")


def _slow(own: HostPorts, usual: Sequence[HostPorts]) -> Iterator[tuple[Port, Port]]:
    """Ports with a rate that fewer ports have on most hosts, each beside a port that it should be like."""
    surplus, lack = Counter(own.rates) - Counter(usual[0].rates), Counter(usual[0].rates) - Counter(own.rates)
    suspects = [port for port in own.up if port.bytes_per_s and surplus[rate_of(port)]]
    elsewhere = [other for host in usual for other in host.up]
    by_name = [(port, _usual_port([other for other in elsewhere if other.name == port.name])) for port in suspects]
    sure = [(port, like) for port, like in by_name if like and rate_of(like) > rate_of(port)]
    if sure:
        yield from sure
        return
    # Names may mean other cards here.
    for port in suspects:
        better = [like for like in usual[0].up if lack[rate_of(like)] and rate_of(like) > rate_of(port)]
        if like := next((like for like in better if like.link_layer == port.link_layer), None):
            yield port, like


def _usual_port(ports: Sequence[Port]) -> Port | None:
    """The first with the rate that most of these ports have; None without a majority."""
    odd = odd_ones_out({number: rate_of(port) for number, port in enumerate(ports)})
    return next((port for port in ports if odd is None or rate_of(port) == odd.usual), None)


def _gids(seen: Seen[Data], hosts: Sequence[HostPorts]) -> Iterator[Finding]:
    looking = [own for own in hosts if own.by_nccl and roce_version_is_2(own.data)]
    usual, odd, groups = compare(looking, lambda own: len(own.unrouted))
    for own in odd:
        if len(own.unrouted) > len(usual[0].unrouted):
            alike = {port.name for port in usual[0].unrouted}
            ports = [port for port in own.unrouted if port.name not in alike] or own.unrouted
            yield without_gid(seen, own, ports, _where(usual, len(looking)), severity_of(seen))
    yield from uneven(seen, "their RoCE v2 GIDs", groups, unrouted_text, "show_gids")


def _distances(seen: Seen[Data], hosts: Sequence[HostPorts]) -> Iterator[Finding]:
    known = [own for own in hosts if own.nearest and own.by_nccl]
    usual, odd, groups = compare(known, lambda own: own.nearest)
    for own in odd:
        if len(own.nearest) == len(usual[0].nearest) and sum(own.nearest) > sum(usual[0].nearest):
            yield far(seen, own, usual[0], _where(usual, len(known)))
    yield from uneven(
        seen, "the distance from GPUs to RDMA ports", groups, levels_text, "nvidia-smi topo -m", Severity.NOTE
    )


def _firmware(seen: Seen[Data], hosts: Sequence[HostPorts]) -> Iterator[Finding]:
    """By model of the adapter: the releases of the firmware that each host has."""
    for model in sorted({adapter.model for own in hosts for adapter in own.adapters if adapter.model}):
        known = [own for own in hosts if own.releases(model)]
        usual, odd, groups = compare(known, methodcaller("releases", model))
        for own in odd:
            expected = usual[0].releases(model)
            others = [each for each in own.adapters if each.model == model and release(each) not in (None, *expected)]
            if others:
                yield other_firmware(seen, own, others, " or ".join(expected), _where(usual, len(known)))
        what, text = f"the firmware of their {model} adapters", methodcaller("firmware_text", model)
        yield from uneven(seen, what, groups, text, "mlxfwmanager --query", Severity.NOTE)


def _alone(seen: Seen[Data], own: HostPorts) -> Iterator[Finding]:
    """A host that is compared with no other: with most of its ports that have the same board and link layer."""
    told: set[str] = set()
    for family in own.families():
        up = [port for port in family if port.active]
        not_up = [port for port in family if not port.active]
        if not_up and 2 * len(up) > len(family):
            where = f", as on {len(up)} of {len(family)} ports of this board"
            yield down(seen, own, not_up, where, Severity.WARNING)
        like = _usual_port(up)
        slow = [(port, like) for port in up if like and port.bytes_per_s and rate_of(port) < rate_of(like)]
        told |= {port.name for port, _ in slow}
        yield from slower(seen, own, slow, f", as on {len(up) - len(slow)} of {len(up)} ports of this board")
        without = [port for port in up if own.is_unrouted(port)]
        if own.by_nccl and roce_version_is_2(own.data) and without and 2 * len(without) < len(up):
            where = f", as on {len(up) - len(without)} of {len(up)} ports of this board"
            yield without_gid(seen, own, without, where, Severity.WARNING)
        adapters = list({port.adapter: own.adapter(port) for port in family}.values())
        odd = odd_ones_out({place: name for place, each in enumerate(adapters) if (name := release(each))})
        if odd is not None and odd.ranks:
            where = f", as on {len(adapters) - len(odd.ranks)} of {len(adapters)} adapters of this board"
            yield other_firmware(seen, own, [adapters[place] for place in odd.ranks], str(odd.usual), where)
    # A single lane is what is left of four, whatever other ports have.
    single = [port for port in own.up if port.infiniband and port.lanes == 1 and port.name not in told]
    whole = [None if port.bytes_per_s is None else _LANES * port.bytes_per_s for port in single]
    likes = [structs.replace(port, lanes=_LANES, bytes_per_s=rate) for port, rate in zip(single, whole, strict=True)]
    pairs = [*zip(single, likes, strict=True)]
    yield from slower(seen, own, pairs, ": InfiniBand has 4 lanes, or 2 on a split cable")
