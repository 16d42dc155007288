"""HST007's findings in words: ports that are missing, down, slow, or that NCCL cannot connect, and what to do."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from shlex import quote

from ddpdiag.checks.api import Seen
from ddpdiag.checks.host.rdma_ports.data import (
    LISTED,
    NAMES,
    Data,
    HostPorts,
    counts_text,
    gid_index,
    levels_text,
    port_rate_text,
    severity_of,
    state_text,
)
from ddpdiag.checks.hosts import leave_out, names_text
from ddpdiag.model import Finding, Severity
from ddpdiag.probes.gpu.paths import Level
from ddpdiag.probes.net.adapters import Port
from ddpdiag.probes.net.rdma import ROCE_V2, Adapter
from ddpdiag.text import count

# What a path crosses, as `nvidia-smi topo -m` explains its names.
_CROSSED = {
    Level.PSB: "nothing beyond the board",
    Level.PIX: "at most one PCIe switch",
    Level.PXB: "several PCIe switches",
    Level.PHB: "the CPU's host bridge",
    Level.NODE: "several host bridges of one NUMA node",
    Level.SYS: "the CPU sockets",
}


def missing_ports(
    seen: Seen[Data],
    own: HostPorts,
    usual: Sequence[HostPorts],
    hosts: int,
    gone: Sequence[str],
    missing: int,
    severity: Severity,
) -> Finding:
    """A host that lacks so many ports; `gone` are the PCI addresses at which other hosts have an adapter."""
    adapters = "an adapter" if len(gone) == 1 else "adapters"
    lacks = f" Most hosts have {adapters} at PCI {', '.join(gone)}, but {own.name} has none there." if gone else ""
    return seen.finding(
        "missing",
        f"{own.name} has {count(missing, 'RDMA port')} fewer than most hosts",
        f"{own.name} has {counts_text(own)}; {len(usual)} of {hosts} hosts have {counts_text(usual[0])}.{lacks}",
        severity=severity,
        nodes=[own.name],
        evidence={
            "ports": [port.name for port in own.ports[:LISTED]],
            "missing": missing,
            "missing_pci": [*gone[:LISTED]],
        },
        fix=f"{_other_layer(own, usual[0]) or _search(own)} Until then {leave_out([own.name])}.",
    )


def _search(own: HostPorts) -> str:
    return (
        f"Run `lspci -nn | grep -i -E 'infiniband|ethernet'` on {own.name}. If the card is not listed, ask the "
        f"administrator to power-cycle {own.name}. If it is listed, `dmesg -T | grep -i mlx5` (as root) shows why the "
        "driver does not use it."
    )


def _other_layer(own: HostPorts, usual: HostPorts) -> str:
    """What to do about a port with another link layer than on most hosts; empty if no port has that."""
    layers = {port.name: port.link_layer for port in usual.ports}
    odd = next((port for port in own.ports if layers.get(port.name) not in (None, port.link_layer)), None)
    if odd is None or len(own.ports) < len(usual.ports):
        return ""
    command = f"mlxconfig -d {quote(odd.adapter)}"
    return (
        f"{odd.name} on {own.name} may be set to the wrong type. As root run `{command} q LINK_TYPE_P1` there (1 is "
        f"InfiniBand, 2 is Ethernet), and set it like the other hosts: `{command} set LINK_TYPE_P1="
        f"{1 if odd.link_layer == 'Ethernet' else 2}`, then reboot."
    )


def _cable(port: Port, own: HostPorts, shown: str) -> str:
    return (
        f"As root run `mlxlink -d {quote(port.adapter)} -m` on {own.name}: it shows {shown}. Ask the administrator to "
        "reseat or replace the cable and the transceiver, then to try another port of the switch."
    )


def _leave_ports_out(own: HostPorts, ports: Sequence[str], them: str) -> str:
    """Such as "leave it out: `export NCCL_IB_HCA=^=mlx5_5:1`"."""
    rule, names = own.data.rule, ",".join(ports)
    if not rule:
        return f"leave {them} out: `export NCCL_IB_HCA={quote(f'^={names}')}`"
    return f"{'add' if rule.startswith('^') else 'remove'} {names} in NCCL_IB_HCA (now {rule})"


def down(seen: Seen[Data], own: HostPorts, ports: Sequence[Port], where: str, severity: Severity) -> Finding:
    named = names_text([f"{own.label(port)} is {state_text(port)}" for port in ports], NAMES)
    first, is_down = ports[0], {port.state for port in ports} == {"DOWN"}
    # By its states (InfiniBand architecture specification, PortInfo).
    if first.state in ("INIT", "ARMED"):
        fix = (
            "The link works, but no subnet manager activates the port. Ask the administrator to start or check the "
            "subnet manager: `sminfo` shows whether one answers."
        )
    elif first.physical_state == "Disabled":
        interface = next(iter(own.data.interfaces.get(first.name, ())), "INTERFACE")
        is_ethernet = first.link_layer == "Ethernet"
        enable = f"`ip link set {quote(interface)} up`" if is_ethernet else f"`mlxlink -d {quote(first.adapter)} -a UP`"
        fix = (
            f"As root enable the port on {own.name}: {enable}. Ask the administrator first why it is disabled: "
            "operators disable ports whose links fail again and again."
        )
    else:
        fix = _cable(first, own, "why the link is down")
    subject = f"RDMA port {first.name} on {own.name} is"
    if len(ports) > 1:
        subject = f"{len(ports)} RDMA ports on {own.name} are"
    return seen.finding(
        "down",
        f"{subject} {'down' if is_down else 'not up'}",
        f"On {own.name} {named}; ACTIVE is expected{where}. {own.name} has {counts_text(own)}.",
        severity=severity,
        nodes=[own.name],
        evidence={
            "ports": [port.name for port in ports[:LISTED]],
            "states": [state_text(port) for port in ports[:LISTED]],
            "ports_up": len(own.up),
        },
        fix=f"{fix} Until then {leave_out([own.name])}.",
    )


def slower(seen: Seen[Data], own: HostPorts, pairs: Sequence[tuple[Port, Port]], where: str) -> Iterator[Finding]:
    """Ports with a lower rate, each with the port that it should be like."""
    # Fewer lanes of InfiniBand; those of Ethernet only follow from the speed (10, 25 and 50 Gbit/s are one lane).
    narrow = [
        (port, like)
        for port, like in pairs
        if port.infiniband and port.lanes is not None and port.lanes < (like.lanes or 0)
    ]
    for word, predicates, shown, some in (
        ("narrow", ("has fewer lanes", "have fewer lanes"), "which lanes work", narrow),
        (
            "slow",
            ("is slower", "are slower"),
            "which rate the port negotiates and why",
            [pair for pair in pairs if pair not in narrow],
        ),
    ):
        if not some:
            continue
        ports, likes = [port for port, _ in some], [like for _, like in some]
        named = names_text([f"{own.label(port)} runs at {port_rate_text(port)}" for port in ports], NAMES)
        expected = " or ".join(dict.fromkeys(map(port_rate_text, likes)))
        other = ""
        if own.by_nccl:
            belongs = "port belongs" if len(ports) == 1 else "ports belong"
            out = _leave_ports_out(own, [port.name for port in ports], "it" if len(ports) == 1 else "them")
            other = f" If the {belongs} to another network, {out}."
        yield seen.finding(
            word,
            f"{_subject(ports, own)} {predicates[len(ports) > 1]} than expected",
            f"On {own.name} {named}; {expected} is expected{where}. A job runs at the rate of its slowest port.",
            nodes=[own.name],
            evidence={
                "ports": [port.name for port in ports[:LISTED]],
                "bytes_per_s": [port.bytes_per_s for port in ports[:LISTED]],
                "lanes": [port.lanes for port in ports[:LISTED]],
                "expected_bytes_per_s": [like.bytes_per_s for like in likes[:LISTED]],
                "expected_lanes": [like.lanes for like in likes[:LISTED]],
            },
            fix=_cable(ports[0], own, shown) + other,
        )


def _subject(ports: Sequence[Port], own: HostPorts) -> str:
    return f"{f'RDMA port {ports[0].name}' if len(ports) == 1 else f'{len(ports)} RDMA ports'} on {own.name}"


def without_gid(seen: Seen[Data], own: HostPorts, ports: Sequence[Port], where: str, severity: Severity) -> Finding:
    """RoCE ports that lack the GID that NCCL looks for."""
    kinds = [sorted({gid.kind or "?" for gid in own.data.gids.get(port.name, ())}) for port in ports]
    interfaces = {port.name: own.data.interfaces.get(port.name, ()) for port in ports}
    named = []
    for port, own_kinds in zip(ports, kinds, strict=True):
        label = own.label(port, *(f"interface {name}" for name in interfaces[port.name]))
        # None of them is routed.
        only = " and ".join("link-local RoCE v2" if kind == ROCE_V2 else kind for kind in own_kinds)
        named.append(f"{label} has only {only} GIDs")
    every = [name for own_names in interfaces.values() for name in own_names]
    first = quote(every[0]) if every else "INTERFACE"
    one = len(ports) == 1
    return seen.finding(
        "gid",
        f"{_subject(ports, own)} {'has' if one else 'have'} no RoCE v2 GID with an IP address",
        f"On {own.name} {names_text(named, NAMES)}. NCCL needs a RoCE v2 GID with an IP address{where}, so it cannot "
        f"connect {'this port' if one else 'these ports'}.",
        severity=severity,
        nodes=[own.name],
        evidence={
            "ports": [port.name for port in ports[:LISTED]],
            "gid_types": [", ".join(own_kinds) for own_kinds in kinds[:LISTED]],
            "interfaces": [*every[:LISTED]],
        },
        fix=f"As root give {'the' if one else 'each'} interface an IP address on {own.name}: `ip link set {first} up; "
        f"ip addr add ADDRESS/PREFIX dev {first}`. `show_gids` then lists it as v2. Or "
        f"{_leave_ports_out(own, [port.name for port in ports], 'the port' if one else 'these ports')}.",
    )


def wrong_gid_index(
    seen: Seen[Data], own: HostPorts, kinds: Mapping[str, str], ports: Sequence[str], expected: str, where: str = ""
) -> Finding:
    """NCCL_IB_GID_INDEX that leads to no GID of these ports, or to another type than is `expected`."""
    index = gid_index(own.data)
    empty = [name for name in ports if kinds[name] == "none"]
    others = [f"{name} has {kinds[name]} at index {index}" for name in ports if name not in empty]
    said = f"{names_text(empty, NAMES)} {'has' if len(empty) == 1 else 'have'} no GID at index {index}"
    if not empty:
        said = f"{names_text(others, NAMES)}; {expected} is expected{where}"
    routed = sorted({gid.index for name in ports for gid in own.data.gids[name] if gid.is_routed})
    places = f"A RoCE v2 GID with an IP address is at index {' or '.join(map(str, routed))}."
    interface = next((name for port in ports for name in own.data.interfaces.get(port, ())), "INTERFACE")
    address = (
        ""
        if routed
        else " If there is none, give the port's interface an IP address, as root: `ip addr add ADDRESS/PREFIX dev "
        f"{quote(interface)}`."
    )
    return seen.finding(
        "gid-index",
        f"NCCL_IB_GID_INDEX={index} does not fit the RDMA ports of {own.name}",
        f"NCCL_IB_GID_INDEX={index} is set on {own.name}, but {said}. "
        f"{places if routed else 'None of the GIDs is RoCE v2 with an IP address.'} Connections over "
        f"{'this port' if len(ports) == 1 else 'these ports'} fail.",
        severity=severity_of(seen),
        nodes=[own.name],
        evidence={
            "NCCL_IB_GID_INDEX": index,
            "ports": [*ports[:LISTED]],
            "gid_types": [kinds[name] for name in ports[:LISTED]],
        },
        fix="Run `unset NCCL_IB_GID_INDEX` in the job script: since version 2.21 NCCL finds the GID itself. For an "
        "older NCCL choose an index at which `show_gids` shows v2 and an IPv4 address on every host." + address,
    )


def other_firmware(seen: Seen[Data], own: HostPorts, odd: Sequence[Adapter], expected: str, where: str) -> Finding:
    named = [f"{adapter.name} ({adapter.model}) has firmware {adapter.firmware}" for adapter in odd]
    subject = f"{odd[0].name} on {own.name} has" if len(odd) == 1 else f"{len(odd)} RDMA adapters on {own.name} have"
    return seen.finding(
        "firmware",
        f"{subject} a different firmware release",
        f"On {own.name} {names_text(named, NAMES)}. Release {expected} is expected{where}.",
        nodes=[own.name],
        evidence={
            "adapters": [adapter.name for adapter in odd[:LISTED]],
            "firmware": [adapter.firmware for adapter in odd[:LISTED]],
            "expected": expected,
        },
        fix=f"If the other checks pass, you can train. Ask the administrator to install firmware {expected} on "
        f"{own.name} (`flint -d {quote(odd[0].name)} query` shows the version, `flint -d {quote(odd[0].name)} -i "
        f"IMAGE burn` installs one), and to reboot {own.name}.",
    )


def far(seen: Seen[Data], own: HostPorts, usual: HostPorts, where: str) -> Finding:
    """GPUs whose nearest ports are farther than on most hosts."""
    levels = sorted({*own.nearest, *usual.nearest}, reverse=True)
    first, *rest = [f"{level.name} {'crosses ' if level is levels[0] else ''}{_CROSSED[level]}" for level in levels]
    return seen.finding(
        "far",
        f"GPUs on {own.name} are far from their RDMA ports",
        f"On {own.name} the path from a GPU to its nearest RDMA port is {levels_text(own)}; {levels_text(usual)} is "
        f"expected{where}. {', '.join([first, *rest])}, so RDMA on {own.name} is slower.",
        nodes=[own.name],
        evidence={
            "nearest": [level.name for level in own.nearest],
            "expected": [level.name for level in usual.nearest],
        },
        fix=f"Run `nvidia-smi topo -m` on {own.name} and on {usual.name}, and compare. If they differ, ask the "
        "administrator to compare PCIe slots and BIOS settings (NUMA nodes per socket); in a virtual machine, the "
        f"passed-through devices. Until then {leave_out([own.name])}, or accept a slower network.",
    )


def uneven(
    seen: Seen[Data],
    what: str,
    groups: Sequence[Sequence[HostPorts]],
    text: Callable[[HostPorts], str],
    command: str,
    severity: Severity = Severity.WARNING,
) -> Iterator[Finding]:
    """Hosts differ, and no majority says which is right. `command` shows it on a host."""
    if groups:
        lines = [f"On {names_text([own.name for own in group])}: {text(group[0])}." for group in groups]
        firsts = " and ".join(group[0].name for group in groups[:NAMES])
        yield seen.finding(
            "uneven",
            f"hosts differ in {what}",
            f"{' '.join(lines[:NAMES])} There is no majority, so no host is blamed.",
            severity=severity,
            evidence={"hosts": [*[own.name for group in groups for own in group][:LISTED]]},
            fix=f"Run `{command}` on {firsts}, and ask the administrator which host is as it should be. On the other "
            "one `mlxlink -d ADAPTER -m` (as root) shows why a link is down or slow. With a third host of the same "
            "kind ddpdiag names the one that differs.",
        )
