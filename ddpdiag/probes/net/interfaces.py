"""Network interfaces and addresses of this host, and which of them gloo and NCCL will choose. No packet is sent."""

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from ddpdiag.probes.host.environment import nccl_files
from ddpdiag.probes.host.kernel import PROC, read_text
from ddpdiag.probes.net.tcp_connect import answer_within, is_loopback

# Without NCCL_SOCKET_IFNAME, NCCL tries these rules in turn (src/misc/socket.cc of NCCL 2.30; 2.27 had no virbr).
_NCCL_RULES = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")
# TEST-NET-2 of RFC 5737 has no hosts, so the kernel's route to it is the default route.
_DEFAULT_ROUTE_ADDRESS = "198.51.100.1"
_IP = (socket.AF_INET, socket.AF_INET6)


class Interface(Struct, frozen=True, kw_only=True):
    """One network interface. `addresses` are in the kernel's order, IPv4 first.

    `running` means that the interface is up and has a carrier. `bytes_per_s` is the nominal speed; None if the device
    reports none, and for virtual devices such as bridges, whose reported speed is not real.
    """

    name: str
    addresses: tuple[str, ...] = ()
    running: bool = True
    mtu: int | None = None
    bytes_per_s: float | None = None


def interfaces(sys: Path) -> tuple[Interface, ...] | None:
    """List all interfaces in the order of getifaddrs; None if they cannot be listed. `sys` is the path of /sys."""
    import psutil

    try:
        addresses = psutil.net_if_addrs()
        states = psutil.net_if_stats()
    except OSError:  # no /proc
        return None
    found = []
    for name, entries in addresses.items():
        device, state = sys / "class" / "net" / name, states.get(name)
        # Only the speed of a NIC or a bond is real: veth pairs and tunnels always report 10 Gbit/s.
        real = (device / "device").exists() or (device / "bonding").exists()
        interface = Interface(
            name=name,
            addresses=tuple(a.address for a in entries if a.family in _IP),
            running=state is not None and state.isup,
            mtu=state.mtu if state is not None else None,
            bytes_per_s=state.speed * 125_000.0 if state is not None and real and state.speed > 0 else None,
        )
        found.append(interface)
    return tuple(found)


def interface_of(address: str | None, known: Iterable[Interface]) -> Interface | None:
    return next((i for i in known if address is not None and strip_zone(address) in map(strip_zone, i.addresses)), None)


def strip_zone(address: str) -> str:
    """Remove the zone of an address: fe80::1%eth0 becomes fe80::1."""
    return address.partition("%")[0]


def source_towards(addresses: Iterable[str]) -> str | None:
    """This host's address on the route to the first of `addresses` that is not loopback and has a route.

    Else the address on the default route, or None. Connecting a UDP socket chooses the route, but sends no packet.
    """
    for address in (*(a for a in addresses if not is_loopback(a)), _DEFAULT_ROUTE_ADDRESS):
        with contextlib.suppress(OSError), _udp(address) as sock:
            sock.connect((address, 9))
            return str(sock.getsockname()[0])
    return None


def _udp(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)


def filter_own(addresses: Iterable[str]) -> tuple[str, ...]:
    """Select the addresses that belong to this host, in their order. gloo uses the first of them."""
    return tuple(filter(_can_bind, addresses))


def network_namespace() -> int | None:
    """Read the kernel's number of this process's network namespace; None if /proc does not show it."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return None


def gloo_interface_names(variable: str | None) -> tuple[str, ...]:
    """Parse GLOO_SOCKET_IFNAME: exact names, separated by commas. gloo ignores a value of one letter."""
    return tuple(name for name in variable.split(",") if name) if variable and len(variable) > 1 else ()


def nccl_interfaces(variable: str | None, known: Sequence[Interface]) -> tuple[Interface, ...]:
    """The interfaces that NCCL will use, the first one for its bootstrap; empty if NCCL will find none.

    `variable` is NCCL_SOCKET_IFNAME: prefixes of names, or exact names after "="; after "^" they are excluded.
    """
    usable = [i for i in known if i.running and any(a != "::1" for a in i.addresses)]
    for rule in (variable,) if variable and len(variable) > 1 else _NCCL_RULES:
        if found := tuple(i for i in usable if nccl_allows_interface(rule, i.name)):
            return found
    return ()


def nccl_allows_interface(rule: str, name: str) -> bool:
    """Whether a value of NCCL_SOCKET_IFNAME allows this interface."""
    excludes, rule = rule.startswith("^"), rule.removeprefix("^")
    exact, rule = rule.startswith("="), rule.removeprefix("=")
    words = [word.partition(":")[0] for word in rule.split(",") if word]
    is_match = not words or any(name == word if exact else name.startswith(word) for word in words)
    return is_match != excludes


class Ifnames(Struct, frozen=True):
    """The values of GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME for a job; None if unset."""

    gloo: str | None
    nccl: str | None


def ifnames(env: Mapping[str, str]) -> Ifnames:
    """Read both variables from `env`; NCCL_SOCKET_IFNAME, if unset there, from NCCL's configuration files."""
    files = (settings.get("NCCL_SOCKET_IFNAME") for settings in nccl_files(env).values())
    nccl = env.get("NCCL_SOCKET_IFNAME") or next((value for value in files if value), None)
    return Ifnames(env.get("GLOO_SOCKET_IFNAME") or None, nccl)


def library_of(backend: str) -> str:
    """The library whose rules choose a rank's address with this backend: "nccl" for nccl, else "gloo"."""
    return "nccl" if backend == "nccl" else "gloo"


def chosen_address(library: str, names: Ifnames, addresses: Sequence[str], known: Sequence[Interface]) -> str | None:
    """The address that gloo or nccl will offer to its peers; None if the library will find none.

    For nccl, the first address of its first interface. For gloo, the first address of the first interface in
    GLOO_SOCKET_IFNAME; without that variable the first of `addresses` (those of the host's name that belong to the
    host), else loopback (torch 2.6-2.15, ProcessGroupGloo.cpp; gloo's transport/tcp/device.cc).
    """
    if library == "nccl":
        return next((interface.addresses[0] for interface in nccl_interfaces(names.nccl, known)), None)
    named = gloo_interface_names(names.gloo)
    if not named:
        return addresses[0] if addresses else "127.0.0.1"
    return next((i.addresses[0] for i in known if i.name == named[0] and i.addresses), None)


def offered_address(library: str, names: Ifnames, addresses: Sequence[str], known: Sequence[Interface]) -> str | None:
    """The `chosen_address`, but None for an address that other hosts cannot use: loopback, or one with a zone."""
    address = chosen_address(library, names, addresses, known)
    return None if address is None or is_loopback(address) or "%" in address else address


def reverse_lookup_seconds(address: str, seconds: float) -> float | None:
    """Measure how long the resolver needs to look up the name of an address; None after a time-out."""
    begin = time.monotonic()

    def look_up_name() -> float:
        with contextlib.suppress(OSError, ValueError):  # the answer that there is no name also ends the look-up
            socket.getnameinfo((address, 0), 0)
        return time.monotonic() - begin

    return answer_within(seconds, look_up_name)


def own_addresses() -> tuple[str, ...] | None:
    """List all addresses of this host; None if the kernel refuses, as in a sandbox that forbids netlink."""
    import psutil

    try:
        known = psutil.net_if_addrs()
    except OSError:
        return None
    return tuple(entry.address for addresses in known.values() for entry in addresses if entry.family in _IP)


def is_local(address: str) -> bool:
    """Whether a numeric address belongs to this host."""
    known = own_addresses()
    if known is None:
        return _can_bind(address)
    return is_loopback(address) or strip_zone(address) in map(strip_zone, known)


def _can_bind(address: str) -> bool:
    """Whether a socket can be bound to the address: it is this host's, unless net.ipv4.ip_nonlocal_bind is set."""
    with contextlib.suppress(OSError), _udp(address) as sock:
        sock.bind((address, 0))
        return True
    return False


def ephemeral_ports(root: Path = PROC) -> tuple[int, int] | None:
    """Read the first and the last port that the kernel uses for outgoing connections; None if not readable."""
    fields = (read_text(root / "sys" / "net" / "ipv4" / "ip_local_port_range") or "").split()
    return (int(fields[0]), int(fields[1])) if len(fields) == 2 and all(map(str.isdigit, fields)) else None
