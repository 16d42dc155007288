"""Compares hosts with each other, or the ports of one host: which are missing, down, slow, or differ in other ways."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller

from msgspec import structs

from ddpdiag.checks.api import Seen
from ddpdiag.checks.host.rdma_ports.data import (
    LISTED,
    NAMES,
    Count,
    Data,
    HostPorts,
    compare,
    counts_text,
    levels_text,
    port_rate_text,
    rate_of,
    rates_text,
    release,
    roce_version_is_2,
    severity_of,
    state_text,
    states_text,
    unrouted_text,
)
from ddpdiag.checks.hosts import names_text
from ddpdiag.model import Finding, Severity
from ddpdiag.probes.net.adapters import Port
from ddpdiag.probes.net.rdma import Adapter
from ddpdiag.stats import odd_ones_out
from ddpdiag.text import count

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
        yield from _uneven(seen, "their RDMA ports", groups, states_text)
        yield from _rates(seen, usual)
        yield from _gids(seen, usual)
        yield from _distances(seen, usual)
        yield from _firmware(seen, hosts)
    else:  # sockets do without RDMA
        yield from _rates(seen, [own for own in hosts if own.ports])


def _where(usual: Sequence[HostPorts], hosts: int) -> str:
    return f"as on {len(usual)} of {hosts} hosts"


def _fewer(seen: Seen[Data], own: HostPorts, usual: Sequence[HostPorts], hosts: int) -> Iterator[Finding]:
    """A host with fewer ports, or fewer that are up; one with more is at no fault."""
    have = {each.layer: each for each in own.counts}
    missing = not_up = 0
    for want in usual[0].counts:
        each = have.get(want.layer, Count(want.layer, 0, 0))
        lacking = max(0, want.ports - each.ports)
        missing += lacking
        not_up += max(0, want.up - each.up - lacking)
    where = _where(usual, hosts)
    severity = Severity.WARNING if own.up else severity_of(seen)
    if missing:
        # PCI addresses at which most hosts have an adapter, and this one has none.
        places = Counter(adapter.slot.pci for other in usual for adapter in other.adapters if adapter.slot)
        here = {adapter.slot.pci for adapter in own.data.adapters or () if adapter.slot}
        gone = sorted(pci for pci, times in places.items() if 2 * times > len(usual) and pci not in here)
        # Without a card, the addresses behind it may be others.
        gone = gone if len(gone) <= missing else []
        lacks = f" Most hosts have an adapter at PCI {', '.join(gone)}, this one has none." if gone else ""
        yield seen.finding(
            "missing",
            f"{own.name} lacks {count(missing, 'RDMA port')}",
            f"{own.name}: {counts_text(own)}; {counts_text(usual[0])} expected ({where}).{lacks}",
            severity=severity,
            nodes=[own.name],
            evidence={
                "ports": [port.name for port in own.ports[:LISTED]],
                "missing": missing,
                "missing_pci": [*gone[:LISTED]],
            },
            fix=f"Look at `lspci -nn | grep -i -E 'infiniband|ethernet'` and `dmesg -T | grep -i mlx5` on {own.name}: "
            "power-cycle the host if a card is not on the bus, reload the driver if it is; `mlxconfig -d ADAPTER q "
            "LINK_TYPE_P1` shows whether a port is set to InfiniBand or Ethernet.",
        )
    if not_up:
        # The ports that are down here and up on most hosts; all that are down where names say nothing.
        ports = [port for port in own.ports if not port.active]
        up = Counter(port.name for other in usual for port in other.up)
        yield _down(seen, own, [port for port in ports if 2 * up[port.name] > len(usual)] or ports, where, severity)


def _rates(seen: Seen[Data], hosts: Sequence[HostPorts]) -> Iterator[Finding]:
    usual, odd, groups = compare(hosts, lambda own: own.rates)
    for own in odd:
        yield from _slower(seen, own, list(_slow(own, usual)), _where(usual, len(hosts)))
    yield from _uneven(seen, "the rates of their RDMA ports", groups, rates_text)


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
            yield _without_gid(seen, own, ports, _where(usual, len(looking)), severity_of(seen))
    yield from _uneven(seen, "their GIDs of RoCE v2", groups, unrouted_text)


def _distances(seen: Seen[Data], hosts: Sequence[HostPorts]) -> Iterator[Finding]:
    known = [own for own in hosts if own.nearest and own.by_nccl]
    usual, odd, groups = compare(known, lambda own: own.nearest)
    for own in odd:
        if len(own.nearest) == len(usual[0].nearest) and sum(own.nearest) > sum(usual[0].nearest):
            yield seen.finding(
                "far",
                f"GPUs on {own.name} are farther from their RDMA ports than on most hosts",
                f"{own.name}: from each GPU to its nearest port {levels_text(own)}; {levels_text(usual[0])} expected "
                f"({_where(usual, len(known))}).",
                nodes=[own.name],
                evidence={
                    "nearest": [level.name for level in own.nearest],
                    "expected": [level.name for level in usual[0].nearest],
                },
                fix="Compare `nvidia-smi topo -m` and the BIOS (slots, NUMA nodes per socket) with another host; in a "
                "virtual machine, how its devices are passed through.",
            )
    yield from _uneven(seen, "the distance from GPUs to RDMA ports", groups, levels_text, Severity.NOTE)


def _firmware(seen: Seen[Data], hosts: Sequence[HostPorts]) -> Iterator[Finding]:
    """By model of the adapter: the releases of the firmware that each host has."""
    for model in sorted({adapter.model for own in hosts for adapter in own.adapters if adapter.model}):
        known = [own for own in hosts if own.releases(model)]
        usual, odd, groups = compare(known, methodcaller("releases", model))
        for own in odd:
            expected = usual[0].releases(model)
            others = [each for each in own.adapters if each.model == model and release(each) not in (None, *expected)]
            if others:
                yield _other_firmware(seen, own, others, " or ".join(expected), _where(usual, len(known)))
        what, text = f"the firmware of their {model} adapters", methodcaller("firmware_text", model)
        yield from _uneven(seen, what, groups, text, Severity.NOTE)


def _alone(seen: Seen[Data], own: HostPorts) -> Iterator[Finding]:
    """A host that is compared with no other: with most of its ports that have the same board and link layer."""
    told: set[str] = set()
    for family in own.families():
        up = [port for port in family if port.active]
        down = [port for port in family if not port.active]
        if down and 2 * len(up) > len(family):
            where = f"as {len(up)} of {len(family)} ports of this board"
            yield _down(seen, own, down, where, Severity.WARNING)
        like = _usual_port(up)
        slow = [(port, like) for port in up if like and port.bytes_per_s and rate_of(port) < rate_of(like)]
        told |= {port.name for port, _ in slow}
        yield from _slower(seen, own, slow, f"as {len(up) - len(slow)} of {len(up)} ports of this board")
        without = [port for port in up if own.is_unrouted(port)]
        if own.by_nccl and roce_version_is_2(own.data) and without and 2 * len(without) < len(up):
            where = f"as on {len(up) - len(without)} of {len(up)} ports of this board"
            yield _without_gid(seen, own, without, where, Severity.WARNING)
        adapters = list({port.adapter: own.adapter(port) for port in family}.values())
        odd = odd_ones_out({place: name for place, each in enumerate(adapters) if (name := release(each))})
        if odd is not None and odd.ranks:
            where = f"as on {len(adapters) - len(odd.ranks)} of {len(adapters)} adapters of this board"
            yield _other_firmware(seen, own, [adapters[place] for place in odd.ranks], str(odd.usual), where)
    # A single lane is what is left of four, whatever other ports have.
    single = [port for port in own.up if port.infiniband and port.lanes == 1 and port.name not in told]
    whole = [None if port.bytes_per_s is None else _LANES * port.bytes_per_s for port in single]
    likes = [structs.replace(port, lanes=_LANES, bytes_per_s=rate) for port, rate in zip(single, whole, strict=True)]
    pairs = [*zip(single, likes, strict=True)]
    yield from _slower(seen, own, pairs, "InfiniBand has 4 lanes, on a split cable 2")


# What is written ------------------------------------------------------------------------------------------------------


def _cable(port: Port) -> str:
    return (
        "Reseat or replace the cable and the transceiver, then try another port of the switch; "
        f"`mlxlink -d {port.adapter} -m` shows what the port negotiates and why."
    )


def _down(seen: Seen[Data], own: HostPorts, ports: Sequence[Port], where: str, severity: Severity) -> Finding:
    named = names_text([f"{own.label(port)} is {state_text(port)}" for port in ports], NAMES)
    one, first = len(ports) == 1, ports[0]
    # By its states (InfiniBand architecture specification, PortInfo).
    if first.state in ("INIT", "ARMED"):
        fix = "Look at the subnet manager (`sminfo`, `ibdiagnet`): the link is up, and no subnet manager activates it."
    elif first.physical_state == "Disabled":
        interface = next(iter(own.data.interfaces.get(first.name, ())), "INTERFACE")
        is_ethernet = first.link_layer == "Ethernet"
        enable = f"`ip link set {interface} up`" if is_ethernet else f"`mlxlink -d {first.adapter} -a UP`"
        fix = f"Enable the port ({enable}), but look first why it was disabled: operators disable links that flap."
    else:
        fix = _cable(first)
    return seen.finding(
        "down",
        f"{f'RDMA port {ports[0].name} is' if one else f'{len(ports)} RDMA ports are'} not up on {own.name}",
        f"{own.name}: {named}, ACTIVE expected ({where}); {counts_text(own)}.",
        severity=severity,
        nodes=[own.name],
        evidence={
            "ports": [port.name for port in ports[:LISTED]],
            "states": [state_text(port) for port in ports[:LISTED]],
            "ports_up": len(own.up),
        },
        fix=fix,
    )


def _slower(seen: Seen[Data], own: HostPorts, pairs: Sequence[tuple[Port, Port]], where: str) -> Iterator[Finding]:
    """Ports with a lower rate, each with the port that it should be like."""
    # Fewer lanes of InfiniBand; those of Ethernet only follow from the speed (10, 25 and 50 Gbit/s are one lane).
    narrow = [
        (port, like)
        for port, like in pairs
        if port.infiniband and port.lanes is not None and port.lanes < (like.lanes or 0)
    ]
    for word, what, some in (
        ("narrow", "has fewer lanes", narrow),
        ("slow", "has a lower rate", [pair for pair in pairs if pair not in narrow]),
    ):
        if some:
            named = [
                f"{own.label(port)} runs at {port_rate_text(port)}, {port_rate_text(like)} expected"
                for port, like in some
            ]
            subject = f"RDMA port {some[0][0].name}" if len(some) == 1 else f"each of {len(some)} RDMA ports"
            yield seen.finding(
                word,
                f"{subject} on {own.name} {what} than expected",
                f"{own.name}: {names_text(named, NAMES)} ({where}). A job runs at the rate of its slowest port.",
                nodes=[own.name],
                evidence={
                    "ports": [port.name for port, _ in some[:LISTED]],
                    "bytes_per_s": [port.bytes_per_s for port, _ in some[:LISTED]],
                    "lanes": [port.lanes for port, _ in some[:LISTED]],
                    "expected_bytes_per_s": [like.bytes_per_s for _, like in some[:LISTED]],
                    "expected_lanes": [like.lanes for _, like in some[:LISTED]],
                },
                fix=f"{_cable(some[0][0])} If the port belongs to another network, leave it out with NCCL_IB_HCA.",
            )


def _without_gid(seen: Seen[Data], own: HostPorts, ports: Sequence[Port], where: str, severity: Severity) -> Finding:
    """RoCE ports that lack the GID that NCCL looks for."""
    kinds = [", ".join(sorted({gid.kind or "?" for gid in own.data.gids.get(port.name, ())})) for port in ports]
    labels = zip(map(own.label, ports), kinds, strict=True)
    named = [f"{label} has link-local GIDs or older ones only ({kind})" for label, kind in labels]
    interfaces = [name for port in ports for name in own.data.interfaces.get(port.name, ())]
    subject = f"RDMA port {ports[0].name}" if len(ports) == 1 else f"each of {len(ports)} RDMA ports"
    return seen.finding(
        "gid",
        f"{subject} on {own.name} has no GID of RoCE v2 with an address",
        f"{own.name}: {names_text(named, NAMES)}; a GID of RoCE v2 with an IP address expected ({where}). NCCL cannot "
        "connect it with ports that have one.",
        severity=severity,
        nodes=[own.name],
        evidence={
            "ports": [port.name for port in ports[:LISTED]],
            "gid_types": [*kinds[:LISTED]],
            "interfaces": [*interfaces[:LISTED]],
        },
        fix=f"Give {names_text(interfaces, NAMES) or 'its interface'} an address and set it up (`ip -br addr`); "
        "`show_gids` then shows v2 with that address. Or leave the port out with NCCL_IB_HCA.",
    )


def _other_firmware(seen: Seen[Data], own: HostPorts, odd: Sequence[Adapter], expected: str, where: str) -> Finding:
    named = [f"{adapter.name} ({adapter.model}) has {adapter.firmware}" for adapter in odd]
    subject = odd[0].name if len(odd) == 1 else f"each of {len(odd)} RDMA adapters"
    return seen.finding(
        "firmware",
        f"{subject} on {own.name} has firmware of another release",
        f"{own.name}: {names_text(named, NAMES)}; firmware of release {expected} expected ({where}).",
        nodes=[own.name],
        evidence={
            "adapters": [adapter.name for adapter in odd[:LISTED]],
            "firmware": [adapter.firmware for adapter in odd[:LISTED]],
            "expected": expected,
        },
        fix="Install one release on all adapters of that model (`mlxfwmanager --query`), and reboot.",
    )


def _uneven(
    seen: Seen[Data],
    what: str,
    groups: Sequence[Sequence[HostPorts]],
    text: Callable[[HostPorts], str],
    severity: Severity = Severity.WARNING,
) -> Iterator[Finding]:
    """Hosts differ, and no majority says which is right."""
    if groups:
        lines = [f"{names_text([own.name for own in group])}: {text(group[0])}" for group in groups]
        yield seen.finding(
            "uneven",
            f"hosts differ in {what}",
            f"{'; '.join(lines[:NAMES])}. No majority says which is right, so no host is blamed.",
            severity=severity,
            evidence={"hosts": [*[own.name for group in groups for own in group][:LISTED]]},
            fix="Compare `ibstat`, `show_gids` and `nvidia-smi topo -m` of these hosts with how they should be; three "
            "hosts of a kind or more let a majority decide.",
        )
