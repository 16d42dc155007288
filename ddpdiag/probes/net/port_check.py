"""A listener of our own on a given port, and a check whether it is the one that answers there."""

import contextlib
import errno
import socket
import threading
import time
from pathlib import Path

from msgspec import Struct

from ddpdiag.probes.host.kernel import read_text
from ddpdiag.probes.net.interfaces import bare, own_addresses
from ddpdiag.probes.net.tcp_connect import Reach, Reached, dial, is_loopback

PROC = Path("/proc")
_MAX_WORD = 64
# An honest visitor says at once who it is; a port scanner may say nothing.
_VISIT_SECONDS = 1.0


class PortAnswer(Struct, frozen=True, kw_only=True):
    """What came of a check; `ours` says whether our own listener answered (None: nobody did, or it was not asked)."""

    reached: Reached
    ours: bool | None = None


class PortListener:
    """Listens where a job's store would: on all addresses, IPv6 too where there is one; OSError if it cannot.

    Whoever comes is told `word`, and says in return who it is.
    """

    def __init__(self, port: int, word: str) -> None:
        self._word = word.encode()
        self._visitors: set[str] = set()
        self._changed = threading.Condition()
        self._socket = _listen(port)
        self._socket.settimeout(0.1)
        self._open = True
        self._thread = threading.Thread(target=self._serve, name="port check", daemon=True)
        self._thread.start()

    def wait(self, visitors: int, seconds: float) -> bool:
        """Wait until so many different ones came, at most so long."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._visitors) >= visitors, max(0.0, seconds))

    def close(self) -> None:
        """Listen no longer; the port is free after this."""
        self._open = False
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while self._open:
            with contextlib.suppress(OSError):  # nobody came, or whoever came has gone again
                visitor, _address = self._socket.accept()
                with visitor:
                    self._greet(visitor)

    def _greet(self, visitor: socket.socket) -> None:
        visitor.settimeout(_VISIT_SECONDS)
        visitor.sendall(self._word)
        if who := visitor.recv(_MAX_WORD).decode(errors="replace"):
            with self._changed:
                self._visitors.add(who)
                self._changed.notify_all()


def _listen(port: int) -> socket.socket:
    """As c10d's store does: one socket for both families, else IPv4 alone."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return socket.create_server(("", port), backlog=1024)


def check_port(host: str, port: int, seconds: float, *, who: str, word: str | None) -> PortAnswer:
    """Connect to a host's port, say who we are, and hear whether the answer is `word` (None: whoever answers is right).

    Up to twice `seconds` if somebody accepts and says nothing.
    """
    reached, visit = dial(host, port, seconds)
    if visit is None:
        return PortAnswer(reached=reached)
    with visit:
        return PortAnswer(
            reached=reached, ours=None if word is None else _is_answered(visit, who, word.encode(), seconds)
        )


def _is_answered(visit: socket.socket, who: str, word: bytes, seconds: float) -> bool:
    end = time.monotonic() + seconds
    heard = b""
    try:
        visit.settimeout(seconds)
        visit.sendall(who.encode())
        while len(heard) < len(word) and word.startswith(heard):
            visit.settimeout(max(0.001, end - time.monotonic()))
            if not (more := visit.recv(len(word) - len(heard))):
                break
            heard += more
    except OSError:
        return False
    return heard == word


def is_local(address: str) -> bool:
    """Is a numeric address one of this host's own?"""
    own = own_addresses()
    if own is None:
        return _can_bind(address)
    return is_loopback(address) or bare(address) in map(bare, own)


def _can_bind(address: str) -> bool:
    """The next best answer: with net.ipv4.ip_nonlocal_bind (routers, proxies) any address can be bound."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.bind((address, 0))
    except OSError:
        return False
    return True


def ephemeral_ports(root: Path = PROC) -> tuple[int, int] | None:
    """First and last port that the kernel gives to outgoing connections; None if it does not say."""
    fields = (read_text(root / "sys" / "net" / "ipv4" / "ip_local_port_range") or "").split()
    return (int(fields[0]), int(fields[1])) if len(fields) == 2 and all(map(str.isdigit, fields)) else None


def answered(found: PortAnswer) -> bool:
    """Did the right one answer?"""
    return found.reached.reach is Reach.ACCEPTED and found.ours is not False
