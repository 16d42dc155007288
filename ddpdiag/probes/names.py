"""Names of addresses, and the families of addresses that this host has."""

import contextlib
import ipaddress
import socket
import threading
import time

IPV4, IPV6 = "IPv4", "IPv6"


def family_of(address: str) -> str:
    """The family of a numeric address."""
    return IPV6 if ":" in address else IPV4


def reverse_seconds(address: str, seconds: float) -> float | None:
    """How long the resolver takes for the name of an address, whether there is one or not; `None` if it is longer."""
    over = threading.Event()
    begin = time.monotonic()
    # getnameinfo has no time-out; a thread that is stuck in it dies with the process.
    threading.Thread(target=_look_back, args=(address, over), name="look back", daemon=True).start()
    return time.monotonic() - begin if over.wait(seconds) else None


def _look_back(address: str, over: threading.Event) -> None:
    with contextlib.suppress(OSError, ValueError):  # no name: that is an answer as well
        socket.getnameinfo((address, 0), 0)
    over.set()


def own_addresses() -> tuple[str, ...] | None:
    """All addresses of this host; None if the kernel does not list them, as in a sandbox that forbids netlink."""
    import psutil

    try:
        known = psutil.net_if_addrs()
    except OSError:
        return None
    return tuple(own.address for addresses in known.values() for own in addresses if _is_ip(own.family))


def own_families() -> tuple[str, ...] | None:
    """Families of this host's addresses that other hosts could reach: not loopback or link-local; None as above."""
    own = own_addresses()
    return None if own is None else tuple(sorted({family_of(address) for address in own if is_reachable(address)}))


def _is_ip(family: int) -> bool:
    return family in (socket.AF_INET, socket.AF_INET6)


def is_reachable(address: str) -> bool:
    """May other hosts reach a numeric address, beyond their own cable?"""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified or parsed.is_multicast)
