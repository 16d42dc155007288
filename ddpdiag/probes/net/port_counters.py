"""What network ports count of their own faults: links that were lost, frames and symbols that were damaged.

The kernel keeps one number a file, and every name here is the kernel's. What cannot be read is left out.
"""

import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from ddpdiag.probes.host.kernel import PROC, read_int, read_text, sys_root
from ddpdiag.probes.net.interfaces import interface_of, interfaces, source_towards
from ddpdiag.probes.net.rdma import nccl_ports, rdma_ports

# Of an interface (Documentation/ABI/testing/sysfs-class-net and sysfs-class-net-statistics). carrier_down_count came
# with Linux 4.16; carrier_changes, which counts ups as well, with 3.15.
_CARRIER = ("carrier_down_count", "carrier_changes")
_FRAMES = ("rx_crc_errors", "rx_frame_errors")
# Of an RDMA port (Documentation/ABI/stable/sysfs-class-infiniband); soft RDMA counts link_downed in hw_counters.
_COUNTERS = (
    "link_downed",
    "symbol_error",
    "link_error_recovery",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
_HW_COUNTERS = ("rnr_nak_retry_err", "link_downed")
# RFC 4022 has InSegs; InCsumErrors came with Linux 3.10.
_TCP = ("InSegs", "InCsumErrors")
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class PortCounters(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A network interface ("eth0"), or a port of an RDMA adapter ("mlx5_0:1"), and what it counted since it is there.

    `up`: its link is; None where it does not say. `below` are the interfaces that it is made of: members of a bond, the
    card of a VLAN, the interface of a RoCE port. `taken`: NCCL would go over this RDMA port.
    """

    name: str
    rdma: bool = False
    pci: str | None = None
    up: bool | None = None
    taken: bool = False
    below: tuple[str, ...] = ()
    counters: dict[str, int] = {}


class NetworkLook(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The network ports of one host at one moment of its steady clock.

    `route` is the interface that leads to the other hosts (None: none, or one host only); `tcp` holds what all
    connections of this network namespace counted.
    """

    seconds: float
    ports: tuple[PortCounters, ...] = ()
    route: str | None = None
    tcp: dict[str, int] = {}


def network_look(towards: str | None, env: Mapping[str, str], step: Callable[[str], None]) -> NetworkLook:
    """RDMA ports, and if there are other hosts (one at `towards`; empty: not known), interfaces and TCP as well.

    Interfaces count that have an address, and what lies below them and below RDMA ports.
    """
    sys = sys_root(env)
    step("RDMA ports")
    rdma = tuple(rdma_counters(sys, nccl_ports(env, sys)))
    names = [name for port in rdma for name in port.below]
    now = time.monotonic()
    if towards is None:
        return NetworkLook(seconds=now, ports=(*rdma, *interface_counters(sys, names, _own_indices())))
    step("interfaces")
    known = interfaces(sys) or ()
    route = interface_of(source_towards([towards] if towards else []), known)
    names += [interface.name for interface in known if interface.addresses and interface.name != "lo"]
    return NetworkLook(
        seconds=now,
        ports=(*rdma, *interface_counters(sys, names, _own_indices())),
        route=route.name if route is not None else None,
        tcp=tcp_counters(read_text(PROC / "net" / "snmp") or ""),
    )


def _own_indices() -> dict[str, int]:
    return {name: index for index, name in socket.if_nameindex()}


def rdma_counters(sys: Path, taken: Iterable[str]) -> Iterator[PortCounters]:
    """Every RDMA port that `sys` shows; `taken` are the names of those that NCCL would go over."""
    for port in rdma_ports(sys):
        device = sys / "class" / "infiniband" / port.adapter
        folder = device / "ports" / port.number
        yield PortCounters(
            name=port.name,
            rdma=True,
            pci=_pci(device),
            up=port.active,
            taken=port.name in taken,
            below=_names(device / "device" / "net", "*"),
            counters=_numbers(folder / "hw_counters", _HW_COUNTERS) | _numbers(folder / "counters", _COUNTERS),
        )


def interface_counters(sys: Path, names: Iterable[str], indices: Mapping[str, int]) -> Iterator[PortCounters]:
    """These interfaces and all below them, each once.

    `indices` are the kernel's numbers of our own interfaces: /sys may show those of another network namespace.
    """
    todo, done = list(names), set()
    while todo:
        name = todo.pop(0)
        folder = sys / "class" / "net" / name
        if name in done or name not in indices or read_int(folder / "ifindex") != indices[name]:
            continue
        done.add(name)
        below = _names(folder, "lower_*", "lower_")
        todo += below
        yield PortCounters(
            name=name,
            pci=_pci(folder),
            up=_has_carrier(folder),
            below=below,
            counters=_carrier(folder) | _numbers(folder / "statistics", _FRAMES),
        )


def tcp_counters(snmp: str) -> dict[str, int]:
    """What /proc/net/snmp says of TCP: a line of names, and one of numbers."""
    names, *numbers = [line.split()[1:] for line in snmp.splitlines() if line.startswith("Tcp:")] or [[]]
    found = dict(zip(names, *numbers[:1], strict=False)) if numbers else {}
    return {name: int(found[name]) for name in _TCP if found.get(name, "").isdecimal()}


def _carrier(folder: Path) -> dict[str, int]:
    """How often the carrier was lost; where only changes are counted, these."""
    numbers = _numbers(folder, _CARRIER)
    return dict(list(numbers.items())[:1])


def _has_carrier(folder: Path) -> bool | None:
    carrier = read_int(folder / "carrier")  # not readable of an interface that was set down
    if carrier is None:
        return False if read_text(folder / "operstate") == "down" else None
    return carrier == 1


def _numbers(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Those of the files that hold a number; a port that does not count says "N/A (no PMA)"."""
    found = {name: read_int(folder / name) for name in names}
    return {name: number for name, number in found.items() if number is not None}


def _names(folder: Path, pattern: str, prefix: str = "") -> tuple[str, ...]:
    return tuple(sorted(path.name.removeprefix(prefix) for path in folder.glob(pattern)))


def _pci(device: Path) -> str | None:
    """The PCI function that it belongs to; None of what is made of software."""
    parts = os.path.realpath(device / "device").split("/") if (device / "device").exists() else []
    return next((part for part in reversed(parts) if _PCI_ADDRESS.fullmatch(part)), None)
