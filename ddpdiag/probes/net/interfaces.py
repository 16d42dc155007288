"""Network interfaces and addresses of this host, and which of them gloo and NCCL will choose. Nothing is sent."""

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

# What NCCL tries in turn without NCCL_SOCKET_IFNAME (src/misc/socket.cc of NCCL 2.30; 2.27 did not exclude virbr).
_NCCL_RULES = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")
# TEST-NET-2 of RFC 5737 has no hosts, so the way to it is the default route.
_ELSEWHERE = "198.51.100.1"
_IP = (socket.AF_INET, socket.AF_INET6)


class Interface(Struct, frozen=True, kw_only=True):
    """One interface; its addresses are in the kernel's order, IPv4 first.

    `running` is up with a carrier. `bytes_per_s` is the nominal speed, None where the device does not say or makes it
    up, as bridges and veth pairs do.
    """

    name: str
    addresses: tuple[str, ...] = ()
    running: bool = True
    mtu: int | None = None
    bytes_per_s: float | None = None


def interfaces(sys: Path) -> tuple[Interface, ...] | None:
    """All interfaces in the order of getifaddrs, with what `sys` (/sys) says; None if they cannot be listed."""
    import psutil

    try:
        addresses = psutil.net_if_addrs()
        states = psutil.net_if_stats()
    except OSError:  # no /proc
        return None
    found = []
    for name, own in addresses.items():
        device, state = sys / "class" / "net" / name, states.get(name)
        # Of a NIC or a bond; veth pairs and tunnels claim 10 Gbit/s whatever they carry.
        real = (device / "device").exists() or (device / "bonding").exists()
        interface = Interface(
            name=name,
            addresses=tuple(a.address for a in own if a.family in _IP),
            running=state is not None and state.isup,
            mtu=state.mtu if state is not None else None,
            bytes_per_s=state.speed * 125_000.0 if state is not None and real and state.speed > 0 else None,
        )
        found.append(interface)
    return tuple(found)


def interface_of(address: str | None, known: Iterable[Interface]) -> Interface | None:
    return next((i for i in known if address is not None and bare(address) in map(bare, i.addresses)), None)


def bare(address: str) -> str:
    """The address without its zone: fe80::1%eth0 is fe80::1."""
    return address.partition("%")[0]


def source_towards(addresses: Iterable[str]) -> str | None:
    """Our own address on the way to the first of these that is no loopback, else on the default route; None if none.

    Connecting a UDP socket asks the kernel for its route, and sends nothing.
    """
    for address in (*(a for a in addresses if not is_loopback(a)), _ELSEWHERE):
        with contextlib.suppress(OSError), _udp(address) as sock:
            sock.connect((address, 9))
            return str(sock.getsockname()[0])
    return None


def _udp(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)


def bindable(addresses: Iterable[str]) -> tuple[str, ...]:
    """The addresses that belong to this host; gloo takes the first of them."""
    return tuple(filter(_can_bind, addresses))


def network_namespace() -> int | None:
    """The kernel's number of our network namespace, None where /proc does not say."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return None


def gloo_names(variable: str | None) -> tuple[str, ...]:
    """The interfaces that GLOO_SOCKET_IFNAME names: exact names, separated by commas; one letter counts as unset."""
    return tuple(name for name in variable.split(",") if name) if variable and len(variable) > 1 else ()


def nccl_choice(variable: str | None, known: Sequence[Interface]) -> tuple[Interface, ...]:
    """The interfaces that NCCL will use; the first one is for its bootstrap. Empty if it will find none.

    NCCL_SOCKET_IFNAME holds prefixes, or exact names after "=", or what not to take after "^".
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
    """GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME as a job would find them."""

    gloo: str | None
    nccl: str | None


def wanted(env: Mapping[str, str]) -> Wanted:
    """The variables; NCCL also reads its configuration files."""
    files = (settings.get("NCCL_SOCKET_IFNAME") for settings in nccl_files(env).values())
    nccl = env.get("NCCL_SOCKET_IFNAME") or next((value for value in files if value), None)
    return Wanted(env.get("GLOO_SOCKET_IFNAME") or None, nccl)


def library_of(backend: str) -> str:
    """The library whose rule decides which address a job offers over this backend: nccl for nccl, else gloo."""
    return "nccl" if backend == "nccl" else "gloo"


def chosen_address(library: str, names: Wanted, own: Sequence[str], known: Sequence[Interface]) -> str | None:
    """The address that gloo or nccl will offer to its peers, or None if it will find none.

    nccl: that of its first interface. gloo: the first address of the first interface that GLOO_SOCKET_IFNAME names;
    without that variable the first address of the host's own name (`own`) that can be bound, else loopback (torch
    2.6-2.15, ProcessGroupGloo.cpp; gloo's transport/tcp/device.cc).
    """
    if library == "nccl":
        return next((interface.addresses[0] for interface in nccl_choice(names.nccl, known)), None)
    named = gloo_names(names.gloo)
    if not named:
        return own[0] if own else "127.0.0.1"
    return next((i.addresses[0] for i in known if i.name == named[0] and i.addresses), None)


def offered_address(library: str, names: Wanted, own: Sequence[str], known: Sequence[Interface]) -> str | None:
    """The same, but None as well where other hosts could not use it: loopback, or good in its host's zone only."""
    address = chosen_address(library, names, own, known)
    return None if address is None or is_loopback(address) or "%" in address else address


def reverse_seconds(address: str, seconds: float) -> float | None:
    """Seconds that the resolver takes for the name of an address, with or without a result; `None` after a time-out."""
    begin = time.monotonic()

    def look_back() -> float:
        with contextlib.suppress(OSError, ValueError):  # no name: that is an answer as well
            socket.getnameinfo((address, 0), 0)
        return time.monotonic() - begin

    return answer_within(seconds, look_back)


def own_addresses() -> tuple[str, ...] | None:
    """All addresses of this host; None if the kernel does not list them, as in a sandbox that forbids netlink."""
    import psutil

    try:
        known = psutil.net_if_addrs()
    except OSError:
        return None
    return tuple(own.address for addresses in known.values() for own in addresses if own.family in _IP)


def is_local(address: str) -> bool:
    """Whether a numeric address belongs to this host."""
    own = own_addresses()
    return _can_bind(address) if own is None else is_loopback(address) or bare(address) in map(bare, own)


def _can_bind(address: str) -> bool:
    """Mostly: is it our own? With net.ipv4.ip_nonlocal_bind (routers, proxies) any address can be bound."""
    with contextlib.suppress(OSError), _udp(address) as sock:
        sock.bind((address, 0))
        return True
    return False


def ephemeral_ports(root: Path = PROC) -> tuple[int, int] | None:
    """First and last port that the kernel gives to outgoing connections; None if it does not say."""
    fields = (read_text(root / "sys" / "net" / "ipv4" / "ip_local_port_range") or "").split()
    return (int(fields[0]), int(fields[1])) if len(fields) == 2 and all(map(str.isdigit, fields)) else None
