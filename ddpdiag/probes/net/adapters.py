"""Network adapters of this host: RDMA ports, GPUDirect RDMA, the card that a collective uses, and fault counters.

Fault counters count lost links, and damaged frames and symbols. They are read from the kernel's files, and are named
as these files. Counters that cannot be read are omitted.
"""

import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.probes.host.environment import nccl_files
from ddpdiag.probes.host.kernel import PROC, read_int, read_text, sys_root
from ddpdiag.probes.net.interfaces import chosen_address, filter_own, ifnames, interface_of, interfaces, source_towards
from ddpdiag.probes.net.tcp_connect import is_loopback, resolve

# Files that exist if nvidia-peermem or a predecessor is loaded, as in NCCL (net_ib/gdr.cc).
_PEER_MEMORY = (
    "module/nvidia_peermem/version",
    "kernel/mm/memory_peers/nvidia-peermem/version",
    "kernel/mm/memory_peers/nv_mem/version",
)

# Matches Gbit/s and lanes in "400 Gb/sec (4X NDR)".
_RATE = re.compile(r"(\d+(?:\.\d+)?)\b(?:.*\((\d+)X)?")


class Port(Struct, frozen=True, kw_only=True):
    """A port of an RDMA adapter. `infiniband` is False for Ethernet (RoCE); `active` says that the link is up.

    `bytes_per_s` is the rate in one direction, over all `lanes`. `link_layer`, `state` ("DOWN") and `physical_state`
    ("Polling") are the kernel's words. A value that the kernel does not show is None.
    """

    adapter: str
    number: str
    infiniband: bool
    active: bool
    bytes_per_s: float | None = None
    lanes: int | None = None
    link_layer: str | None = None
    state: str | None = None
    physical_state: str | None = None

    @property
    def name(self) -> str:
        """The port's name as NCCL writes it: "mlx5_0:1"."""
        return f"{self.adapter}:{self.number}"

    @property
    def needs_plugin(self) -> bool:
        """Whether NCCL needs a plugin for the port: AWS's EFA is neither InfiniBand nor Ethernet (net_ib/init.cc)."""
        return self.link_layer not in ("InfiniBand", "Ethernet", None)


def rdma_ports(sys: Path) -> tuple[Port, ...]:
    """Read all RDMA ports that `sys` (/sys) shows; empty without an RDMA driver."""
    ports = []
    for folder in sorted((sys / "class" / "infiniband").glob("*/ports/*")):
        layer, rate = read_text(folder / "link_layer"), _RATE.match(read_text(folder / "rate") or "")
        # "4: ACTIVE"; "5: ACTIVE_DEFER" is a link that is going down (IBTA, PortState).
        state, physical = ((read_text(folder / name) or "").rpartition(": ")[2] for name in ("state", "phys_state"))
        port = Port(
            adapter=folder.parts[-3],
            number=folder.name,
            infiniband=layer == "InfiniBand",
            active=state == "ACTIVE",
            bytes_per_s=float(rate[1]) * 125e6 if rate else None,
            lanes=int(rate[2]) if rate and rate[2] else None,
            link_layer=layer or None,
            state=state or None,
            physical_state=physical or None,
        )
        ports.append(port)
    return tuple(ports)


def has_peer_memory(sys: Path) -> bool:
    """Whether nvidia-peermem is loaded. GPUDirect RDMA over DMA-BUF does not need it."""
    return any((sys / place).exists() for place in _PEER_MEMORY)


class Card(Struct, frozen=True):
    """One port of a network card, or several ports that are used together.

    `bytes_per_s` is the nominal speed of all `ports` together, `port_bytes_per_s` that of the slowest; None if the
    speed of a port is not known.
    """

    name: str
    bytes_per_s: float | None
    ports: int
    port_bytes_per_s: float | None


def outgoing_card(library: str, env: Mapping[str, str], sys: Path) -> Card | None:
    """Find the card that "gloo" or "nccl" uses: for nccl the RDMA ports, if any; else the interface of its address."""
    if library == "nccl" and nccl_variable(env, "NCCL_IB_DISABLE") in ("", "0"):
        found = rdma_card(sys, nccl_variable(env, "NCCL_IB_HCA"))
        if found is not None:
            return found
    known = interfaces(sys) or ()
    own_addresses = filter_own(resolve(socket.gethostname(), 0, _LOOKUP_SECONDS) or ())
    address = chosen_address(library, ifnames(env), own_addresses, known)
    if address is None or is_loopback(address):
        return None
    interface = interface_of(address, known)
    return Card(interface.name, interface.bytes_per_s, 1, interface.bytes_per_s) if interface else None


def nccl_variable(env: Mapping[str, str], name: str) -> str:
    """The value of a variable for NCCL, from the environment or else from NCCL's configuration files; "" if unset."""
    files = (settings[name] for settings in nccl_files(env).values() if name in settings)
    return env[name] if name in env else next(files, "")


def rdma_card(sys: Path, rule: str = "") -> Card | None:
    """All RDMA ports that are up and that `rule` (a value of NCCL_IB_HCA) allows, as one card.

    None if there is no such port, or if none of them shows its speed.
    """
    ports = _usable_ports(sys, rule)
    rates = [port.bytes_per_s for port in ports]
    known = [rate for rate in rates if rate]
    if not known:
        return None
    name = "+".join(dict.fromkeys(port.adapter for port in ports))
    if len(known) < len(rates):
        return Card(name, None, len(rates), None)
    return Card(name, sum(known), len(known), min(known))


def nccl_ports(env: Mapping[str, str], sys: Path) -> tuple[str, ...]:
    """The names ("mlx5_0:1") of the RDMA ports that NCCL would use; empty if NCCL_IB_DISABLE is set."""
    if nccl_variable(env, "NCCL_IB_DISABLE") not in ("", "0"):
        return ()
    return tuple(port.name for port in _usable_ports(sys, nccl_variable(env, "NCCL_IB_HCA")))


def _usable_ports(sys: Path, rule: str) -> list[Port]:
    return [port for port in rdma_ports(sys) if port.active and nccl_allows_port(rule, port.adapter, port.number)]


class PortRule(NamedTuple):
    """A value of NCCL_IB_HCA, parsed as NCCL does (net_ib/init.cc, misc/utils.cc).

    `words` are pairs of an adapter's name and a port ("": all ports). The rule allows the matching ports, or forbids
    them if it `excludes` ("^" in the value). Names are prefixes, unless the rule is `exact` ("=" in the value).
    """

    excludes: bool
    exact: bool
    words: tuple[tuple[str, str], ...]

    def matches(self, word: tuple[str, str], adapter: str, port: str) -> bool:
        """Whether `word`, which is one of the rule's words, matches the port."""
        name, number = word
        return (adapter == name if self.exact else adapter.startswith(name)) and number in ("", port)


def port_rule(value: str) -> PortRule:
    """Parse a value of NCCL_IB_HCA such as "^=mlx5_0:1". A rail and a plane after the port are ignored."""
    excludes, value = value.startswith("^"), value.removeprefix("^")
    exact, value = value.startswith("="), value.removeprefix("=")
    parts = [word.split(":") for word in value.split(",")]
    return PortRule(excludes, exact, tuple((name, number[0] if number else "") for name, *number in parts if name))


def nccl_allows_port(value: str, adapter: str, port: str) -> bool:
    """Whether a value of NCCL_IB_HCA allows this port of this adapter. An empty value allows all ports."""
    rule = port_rule(value)
    return (not rule.words or any(rule.matches(word, adapter, port) for word in rule.words)) != rule.excludes


_LOOKUP_SECONDS = 2.0
# Counters of an interface (Documentation/ABI/testing/sysfs-class-net, since Linux 4.16, and -net-statistics).
_CARRIER = ("carrier_down_count",)
_FRAMES = ("rx_crc_errors", "rx_frame_errors")
# Counters of an RDMA port (Documentation/ABI/stable/sysfs-class-infiniband). Software RDMA has some in hw_counters.
_COUNTERS = (
    "link_downed",
    "symbol_error",
    "link_error_recovery",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
_HW_COUNTERS = ("link_downed",)
# TCP's counters. RFC 4022 defines all but InCsumErrors (since Linux 3.10). OutSegs does not count retransmissions.
# TCPDSACKRecv counts messages of receivers that had a segment already when it arrived again (RFC 2883), and
# TCPDSACKRecvSegs, which older kernels lack, counts these segments.
_TCP = ("InSegs", "OutSegs", "RetransSegs", "InCsumErrors", "TCPDSACKRecv", "TCPDSACKRecvSegs")
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class PortCounters(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The counters of a network interface ("eth0") or of a port of an RDMA adapter ("mlx5_0:1").

    `up` says that the link is up (None: the kernel does not say). `below` are the interfaces on which this one is
    based: members of a bond, the card of a VLAN, the interface of a RoCE port. `used_by_nccl`: NCCL would use the port.
    """

    name: str
    rdma: bool = False
    pci: str | None = None
    up: bool | None = None
    used_by_nccl: bool = False
    below: tuple[str, ...] = ()
    counters: dict[str, int] = {}


class NetworkReading(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One reading of a host's network ports, at the time `seconds` of the host's monotonic clock.

    `route` is the interface that leads to the other hosts (None: no route, or a single host). `tcp` contains the
    counters of all TCP connections of this network namespace.
    """

    seconds: float
    ports: tuple[PortCounters, ...] = ()
    route: str | None = None
    tcp: dict[str, int] = {}


def read_network(peer_address: str | None, env: Mapping[str, str], step: Callable[[str], None]) -> NetworkReading:
    """Read the counters of RDMA ports and, unless `peer_address` is None (a single host), of interfaces and TCP.

    `peer_address` is that of another host ("": not known). Interfaces are read if they have an address, or are below
    such an interface or below an RDMA port.
    """
    sys = sys_root(env)
    step("RDMA ports")
    rdma = tuple(rdma_counters(sys, nccl_ports(env, sys)))
    names = [name for port in rdma for name in port.below]
    now, route, tcp = time.monotonic(), None, dict[str, int]()
    if peer_address is not None:
        step("interfaces")
        known = interfaces(sys) or ()
        route = interface_of(source_towards([peer_address] if peer_address else []), known)
        names += [interface.name for interface in known if interface.addresses and interface.name != "lo"]
        tcp = tcp_counters("\n".join(read_text(PROC / "net" / name) or "" for name in ("snmp", "netstat")))
    indices = {name: index for index, name in socket.if_nameindex()}
    return NetworkReading(
        seconds=now,
        ports=(*rdma, *interface_counters(sys, names, indices)),
        route=route.name if route is not None else None,
        tcp=tcp,
    )


def rdma_counters(sys: Path, nccl_names: Iterable[str]) -> Iterator[PortCounters]:
    """Yield the counters of every RDMA port that `sys` shows. `nccl_names` name the ports that NCCL would use."""
    for port in rdma_ports(sys):
        device = sys / "class" / "infiniband" / port.adapter
        folder = device / "ports" / port.number
        yield PortCounters(
            name=port.name,
            rdma=True,
            pci=pci_of(device),
            up=port.active,
            used_by_nccl=port.name in nccl_names,
            below=_names(device / "device" / "net", "*"),
            counters=_numbers_in(folder / "hw_counters", _HW_COUNTERS) | _numbers_in(folder / "counters", _COUNTERS),
        )


def interface_counters(sys: Path, names: Iterable[str], indices: Mapping[str, int]) -> Iterator[PortCounters]:
    """Yield the counters of these interfaces and of all interfaces below them, each once.

    `indices` are the interfaces' numbers in this network namespace: /sys may show another one, which is skipped.
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
        carrier = read_int(folder / "carrier")  # not readable if an administrator has disabled the interface
        is_down = carrier is None and read_text(folder / "operstate") == "down"
        yield PortCounters(
            name=name,
            pci=pci_of(folder),
            up=False if is_down else None if carrier is None else carrier == 1,
            below=below,
            counters=_numbers_in(folder, _CARRIER) | _numbers_in(folder / "statistics", _FRAMES),
        )


def tcp_counters(text: str) -> dict[str, int]:
    """Parse TCP's counters in the text of /proc/net/snmp and netstat: a line of names, then one of their numbers."""
    found: dict[str, str] = {}
    for names, numbers in pairwise(line.split() for line in text.splitlines()):
        if names[:1] == numbers[:1] and names[:1] in (["Tcp:"], ["TcpExt:"]):
            found |= zip(names, numbers, strict=False)
    return {name: int(found[name]) for name in _TCP if found.get(name, "").isdecimal()}


def _numbers_in(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Read the numbers in the named files. Files without a number, such as "N/A (no PMA)", are omitted."""
    found = {name: read_int(folder / name) for name in names}
    return {name: number for name, number in found.items() if number is not None}


def _names(folder: Path, pattern: str, prefix: str = "") -> tuple[str, ...]:
    return tuple(sorted(path.name.removeprefix(prefix) for path in folder.glob(pattern)))


def pci_of(device: Path) -> str | None:
    """Find the address of a device's PCI function; None for a device in software."""
    parts = os.path.realpath(device / "device").split("/") if (device / "device").exists() else []
    return next((part for part in reversed(parts) if _PCI_ADDRESS.fullmatch(part)), None)
