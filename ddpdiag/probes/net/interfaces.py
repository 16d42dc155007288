"""Network interfaces and addresses of this host, and those that gloo and NCCL will choose. No packet is sent."""

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

# Rules that NCCL tries in turn without NCCL_SOCKET_IFNAME (src/misc/socket.cc of NCCL 2.30; 2.27 had no virbr).
_NCCL_RULES = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")
# TEST-NET-2 of RFC 5737 has no hosts, so the kernel's route to it is the default route.
_ELSEWHERE = "198.51.100.1"
_IP = (socket.AF_INET, socket.AF_INET6)


class Interface(Struct, frozen=True, kw_only=True):
    """One network interface. `addresses` are in the kernel's order, IPv4 first.

    `running` means up with a carrier. `bytes_per_s` is the nominal speed, None if the device reports none or an
    invented one, as bridges and veth pairs do.
    """

    name: str
    addresses: tuple[str, ...] = ()
    running: bool = True
    mtu: int | None = None
    bytes_per_s: float | None = None


def interfaces(sys: Path) -> tuple[Interface, ...] | None:
    """List all interfaces in the order of getifaddrs, with data from `sys` (/sys); None if they cannot be listed."""
    import psutil

    try:
        addresses = psutil.net_if_addrs()
        states = psutil.net_if_stats()
    except OSError:  # no /proc
        return None
    found = []
    for name, entries in addresses.items():
        device, state = sys / "class" / "net" / name, states.get(name)
        # Only the speed of a NIC or a bond is real: veth pairs and tunnels claim 10 Gbit/s in any case.
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
    return next((i for i in known if address is not None and bare(address) in map(bare, i.addresses)), None)


def bare(address: str) -> str:
    """The address without its zone: fe80::1 for fe80::1%eth0."""
    return address.partition("%")[0]


def source_towards(addresses: Iterable[str]) -> str | None:
    """This host's address on the route to the first address but loopback, else on the default route; or None.

    Connecting a UDP socket makes the kernel choose the route, and sends no packet.
    """
    for address in (*(a for a in addresses if not is_loopback(a)), _ELSEWHERE):
        with contextlib.suppress(OSError), _udp(address) as sock:
            sock.connect((address, 9))
            return str(sock.getsockname()[0])
    return None


def _udp(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)


def bindable(addresses: Iterable[str]) -> tuple[str, ...]:
    """The addresses that belong to this host, in order; gloo uses the first of them."""
    return tuple(filter(_can_bind, addresses))


def network_namespace() -> int | None:
    """The kernel's number of this process's network namespace; None if /proc does not show it."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return None


def gloo_names(variable: str | None) -> tuple[str, ...]:
    """The interfaces in GLOO_SOCKET_IFNAME: exact names, separated by commas. A value of one letter counts as unset."""
    return tuple(name for name in variable.split(",") if name) if variable and len(variable) > 1 else ()


def nccl_choice(variable: str | None, known: Sequence[Interface]) -> tuple[Interface, ...]:
    """The interfaces that NCCL will use, the first one for its bootstrap; empty if NCCL will find none.

    NCCL_SOCKET_IFNAME holds prefixes, exact names after "=", or excluded names after "^".
    """
    usable = [i for i in known if i.running and any(a != "::1" for a in i.addresses)]
    for rule in (variable,) if variable and len(variable) > 1 else _NCCL_RULES:
        if found := tuple(i for i in usable if nccl_takes(rule, i.name)):
            return found
    return ()


def nccl_takes(rule: str, name: str) -> bool:
    """Whether a value of NCCL_SOCKET_IFNAME allows this interface."""
    others, rule = rule.startswith("^"), rule.removeprefix("^")
    exact, rule = rule.startswith("="), rule.removeprefix("=")
    words = [word.partition(":")[0] for word in rule.split(",") if word]
    hit = not words or any(name == word if exact else name.startswith(word) for word in words)
    return hit != others


class Wanted(Struct, frozen=True):
    """GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME as a job would read them; None if unset."""

    gloo: str | None
    nccl: str | None


def wanted(env: Mapping[str, str]) -> Wanted:
    """Read the two variables from `env`; NCCL's also from its configuration files."""
    files = (settings.get("NCCL_SOCKET_IFNAME") for settings in nccl_files(env).values())
    nccl = env.get("NCCL_SOCKET_IFNAME") or next((value for value in files if value), None)
    return Wanted(env.get("GLOO_SOCKET_IFNAME") or None, nccl)


def library_of(backend: str) -> str:
    """The library whose rule selects the address that a job offers over this backend: nccl for nccl, else gloo."""
    return "nccl" if backend == "nccl" else "gloo"


def chosen_address(library: str, names: Wanted, addresses: Sequence[str], known: Sequence[Interface]) -> str | None:
    """The address that gloo or nccl will offer to its peers; None if it will find none.

    nccl: that of its first interface. gloo: the first address of the first interface that GLOO_SOCKET_IFNAME names;
    without that variable the first of `addresses` (those of the host's name that can be bound), else loopback (torch
    2.6-2.15, ProcessGroupGloo.cpp; gloo's transport/tcp/device.cc).
    """
    if library == "nccl":
        return next((interface.addresses[0] for interface in nccl_choice(names.nccl, known)), None)
    named = gloo_names(names.gloo)
    if not named:
        return addresses[0] if addresses else "127.0.0.1"
    return next((i.addresses[0] for i in known if i.name == named[0] and i.addresses), None)


def offered_address(library: str, names: Wanted, addresses: Sequence[str], known: Sequence[Interface]) -> str | None:
    """As `chosen_address`, but None also for an address without use on other hosts: loopback, or one with a zone."""
    address = chosen_address(library, names, addresses, known)
    return None if address is None or is_loopback(address) or "%" in address else address


def reverse_seconds(address: str, seconds: float) -> float | None:
    """Measure the seconds of the resolver's look-up of an address's name, found or not; None after a time-out."""
    begin = time.monotonic()

    def look_back() -> float:
        with contextlib.suppress(OSError, ValueError):  # the answer that there is no name also ends the look-up
            socket.getnameinfo((address, 0), 0)
        return time.monotonic() - begin

    return answer_within(seconds, look_back)


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
    return _can_bind(address) if known is None else is_loopback(address) or bare(address) in map(bare, known)


def _can_bind(address: str) -> bool:
    """Whether the address is this host's. With net.ipv4.ip_nonlocal_bind (routers, proxies) every address is."""
    with contextlib.suppress(OSError), _udp(address) as sock:
        sock.bind((address, 0))
        return True
    return False


def ephemeral_ports(root: Path = PROC) -> tuple[int, int] | None:
    """The first and last port that the kernel gives to outgoing connections; None if the kernel does not say."""
    fields = (read_text(root / "sys" / "net" / "ipv4" / "ip_local_port_range") or "").split()
    return (int(fields[0]), int(fields[1])) if len(fields) == 2 and all(map(str.isdigit, fields)) else None
