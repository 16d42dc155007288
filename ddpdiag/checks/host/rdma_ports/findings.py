"""What is written of a host whose RDMA ports are not as expected."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ddpdiag.checks.api import Seen
from ddpdiag.checks.host.rdma_ports.data import Data, HostPorts
from ddpdiag.checks.hosts import names_text
from ddpdiag.model import Finding, Severity
from ddpdiag.probes.net.adapters import Port
from ddpdiag.probes.net.rdma import Adapter
from ddpdiag.text import count

_NAMES, _LISTED = 4, 16


def _cable(port: Port) -> str:
    return (
        "Reseat or replace the cable and the transceiver, then try another port of the switch; "
        f"`mlxlink -d {port.adapter} -m` shows what the port negotiates and why."
    )


def counts_text(own: HostPorts) -> str:
    """Such as "8 InfiniBand ports", or "7 of 8 InfiniBand ports up"."""
    parts = [
        count(each.ports, f"{each.layer} port")
        if each.up == each.ports
        else f"{each.up} of {count(each.ports, f'{each.layer} port')} up"
        for each in own.counts
    ]
    return " and ".join(parts) or "no RDMA port"


def states_text(own: HostPorts) -> str:
    """The same, with the ports that are not up: "7 of 8 InfiniBand ports up (mlx5_3:1 is DOWN)"."""
    named = [f"{port.name} is {_state(port)}" for port in own.ports if not port.active]
    return counts_text(own) + (f" ({names_text(named, _NAMES)})" if named else "")


def missing(
    seen: Seen[Data], own: HostPorts, number: int, gone: Sequence[str], expected: str, severity: Severity
) -> Finding:
    """A host has fewer ports than most; `gone` are the PCI addresses where others have an adapter."""
    where = f" Most hosts have an adapter at PCI {', '.join(gone)}, this one has none." if gone else ""
    return seen.finding(
        "missing",
        f"{own.name} lacks {count(number, 'RDMA port')}",
        f"{own.name}: {counts_text(own)}; {expected}.{where}",
        severity=severity,
        nodes=[own.name],
        evidence={
            "ports": [port.name for port in own.ports[:_LISTED]],
            "missing": number,
            "missing_pci": [*gone[:_LISTED]],
        },
        fix=f"Look at `lspci -nn | grep -i -E 'infiniband|ethernet'` and `dmesg -T | grep -i mlx5` on {own.name}: "
        "power-cycle the host if a card is not on the bus, reload the driver if it is; `mlxconfig -d ADAPTER q "
        "LINK_TYPE_P1` shows whether a port is set to InfiniBand or Ethernet.",
    )


def down(seen: Seen[Data], own: HostPorts, ports: Sequence[Port], where: str, severity: Severity) -> Finding:
    """Ports that are not up."""
    named = names_text([f"{own.label(port)} is {_state(port)}" for port in ports], _NAMES)
    one = len(ports) == 1
    return seen.finding(
        "down",
        f"{f'RDMA port {ports[0].name} is' if one else f'{len(ports)} RDMA ports are'} not up on {own.name}",
        f"{own.name}: {named}, ACTIVE expected ({where}); {counts_text(own)}.",
        severity=severity,
        nodes=[own.name],
        evidence={
            "ports": [port.name for port in ports[:_LISTED]],
            "states": [_state(port) for port in ports[:_LISTED]],
            "ports_up": len(own.up),
        },
        fix=_bring_up(ports[0], own),
    )


def _state(port: Port) -> str:
    """Such as "DOWN (Polling)"."""
    return (port.state or "in an unknown state") + (f" ({port.physical_state})" if port.physical_state else "")


def _bring_up(port: Port, own: HostPorts) -> str:
    """What to do about a port that is not up, by its states (InfiniBand architecture specification, PortInfo)."""
    if port.state in ("INIT", "ARMED"):
        return "Look at the subnet manager (`sminfo`, `ibdiagnet`): the link is up, and no subnet manager activates it."
    if port.physical_state == "Disabled":
        interface = next(iter(own.data.interfaces.get(port.name, ())), "INTERFACE")
        enable = (
            f"`ip link set {interface} up`" if port.link_layer == "Ethernet" else f"`mlxlink -d {port.adapter} -a UP`"
        )
        return f"Enable the port ({enable}), but look first why it was disabled: operators disable links that flap."
    return _cable(port)


def slower(seen: Seen[Data], own: HostPorts, pairs: Sequence[tuple[Port, Port]], where: str) -> Iterator[Finding]:
    """Ports with a lower rate, each with the port that it should be like."""
    narrow = [pair for pair in pairs if _is_narrow(*pair)]
    for word, what, some in (
        ("narrow", "has fewer lanes", narrow),
        ("slow", "has a lower rate", [pair for pair in pairs if pair not in narrow]),
    ):
        if some:
            named = [f"{own.label(port)} runs at {_rate(port)}, {_rate(like)} expected" for port, like in some]
            subject = f"RDMA port {some[0][0].name}" if len(some) == 1 else f"each of {len(some)} RDMA ports"
            yield seen.finding(
                word,
                f"{subject} on {own.name} {what} than expected",
                f"{own.name}: {names_text(named, _NAMES)} ({where}). A job runs at the rate of its slowest port.",
                nodes=[own.name],
                evidence={
                    "ports": [port.name for port, _ in some[:_LISTED]],
                    "bytes_per_s": [port.bytes_per_s for port, _ in some[:_LISTED]],
                    "lanes": [port.lanes for port, _ in some[:_LISTED]],
                    "expected_bytes_per_s": [like.bytes_per_s for _, like in some[:_LISTED]],
                    "expected_lanes": [like.lanes for _, like in some[:_LISTED]],
                },
                fix=f"{_cable(some[0][0])} If the port belongs to another network, leave it out with NCCL_IB_HCA.",
            )


def _is_narrow(port: Port, like: Port) -> bool:
    """Fewer lanes of InfiniBand; those of Ethernet only follow from the speed (10, 25 and 50 Gbit/s are one lane)."""
    return port.infiniband and port.lanes is not None and like.lanes is not None and port.lanes < like.lanes


def _rate(port: Port) -> str:
    """Such as "400 Gbit/s (4X)", as ibstat and the kernel write it."""
    rate = f"{port.bytes_per_s * 8 / 1e9:g} Gbit/s" if port.bytes_per_s else "an unknown rate"
    return rate + (f" ({port.lanes}X)" if port.lanes else "")


def rates_text(own: HostPorts) -> str:
    """Such as "7 x 400 Gbit/s (4X), 1 x 200 Gbit/s (4X) (mlx5_3:1)"; a few that differ are named."""
    known: dict[str, list[str]] = {}
    for port in own.up:
        known.setdefault(_rate(port), []).append(port.name)
    parts = [
        f"{len(names)} x {rate}" + (f" ({', '.join(names)})" if 4 * len(names) <= len(own.up) else "")
        for rate, names in known.items()
    ]
    return ", ".join(parts) or "no port that is up"


def without_gid(seen: Seen[Data], own: HostPorts, ports: Sequence[Port], where: str, severity: Severity) -> Finding:
    """RoCE ports that lack the GID that NCCL looks for."""
    kinds = [", ".join(sorted({gid.kind or "?" for gid in own.data.gids.get(port.name, ())})) for port in ports]
    labels = zip(map(own.label, ports), kinds, strict=True)
    named = [f"{label} has link-local GIDs or older ones only ({kind})" for label, kind in labels]
    interfaces = [name for port in ports for name in own.data.interfaces.get(port.name, ())]
    subject = f"RDMA port {ports[0].name}" if len(ports) == 1 else f"each of {len(ports)} RDMA ports"
    return seen.finding(
        "gid",
        f"{subject} on {own.name} has no GID of RoCE v2 with an address",
        f"{own.name}: {names_text(named, _NAMES)}; a GID of RoCE v2 with an IP address expected ({where}). NCCL cannot "
        "connect it with ports that have one.",
        severity=severity,
        nodes=[own.name],
        evidence={
            "ports": [port.name for port in ports[:_LISTED]],
            "gid_types": [*kinds[:_LISTED]],
            "interfaces": [*interfaces[:_LISTED]],
        },
        fix=f"Give {names_text(interfaces, _NAMES) or 'its interface'} an address and set it up (`ip -br addr`); "
        "`show_gids` then shows v2 with that address. Or leave the port out with NCCL_IB_HCA.",
    )


def unrouted_text(own: HostPorts) -> str:
    """Ports that lack the GID that NCCL looks for."""
    names = names_text([port.name for port in own.unrouted], _NAMES)
    return f"none with an address on {names}" if names else "every RoCE port has one with an address"


def other_firmware(seen: Seen[Data], own: HostPorts, odd: Sequence[Adapter], expected: str, where: str) -> Finding:
    """Adapters with firmware of another release."""
    named = [f"{adapter.name} ({adapter.model}) has {adapter.firmware}" for adapter in odd]
    subject = odd[0].name if len(odd) == 1 else f"each of {len(odd)} RDMA adapters"
    return seen.finding(
        "firmware",
        f"{subject} on {own.name} has firmware of another release",
        f"{own.name}: {names_text(named, _NAMES)}; firmware of release {expected} expected ({where}).",
        nodes=[own.name],
        evidence={
            "adapters": [adapter.name for adapter in odd[:_LISTED]],
            "firmware": [adapter.firmware for adapter in odd[:_LISTED]],
            "expected": expected,
        },
        fix="Install one release on all adapters of that model (`mlxfwmanager --query`), and reboot.",
    )


def far(seen: Seen[Data], own: HostPorts, usual: HostPorts, where: str) -> Finding:
    """GPUs that are farther from their ports than those of other hosts."""
    return seen.finding(
        "far",
        f"GPUs on {own.name} are farther from their RDMA ports than on most hosts",
        f"{own.name}: from each GPU to its nearest port {levels_text(own)}; {levels_text(usual)} expected ({where}).",
        nodes=[own.name],
        evidence={
            "nearest": [level.name for level in own.nearest],
            "expected": [level.name for level in usual.nearest],
        },
        fix="Compare `nvidia-smi topo -m` and the BIOS (slots, NUMA nodes per socket) with another host; in a virtual "
        "machine, how its devices are passed through.",
    )


def levels_text(own: HostPorts) -> str:
    """Such as "7 x PIX, 1 x SYS"."""
    return ", ".join(f"{number} x {level.name}" for level, number in Counter(own.nearest).items())


def uneven(
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
            f"{'; '.join(lines[:_NAMES])}. No majority says which is right, so no host is blamed.",
            severity=severity,
            evidence={"hosts": [*[own.name for group in groups for own in group][:_LISTED]]},
            fix="Compare `ibstat`, `show_gids` and `nvidia-smi topo -m` of these hosts with how they should be; three "
            "hosts of a kind or more let a majority decide.",
        )
