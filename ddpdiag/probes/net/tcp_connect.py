"""TCP from this host: name look-ups, connects, and the listener that tests a port. Each call has a time limit.

torch raises the same exception for an unknown name, a closed port and a firewall that drops packets. The functions of
this module distinguish these causes.
"""

import contextlib
import errno
import ipaddress
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from enum import Enum
from typing import TypeVar, cast

from msgspec import Struct, structs

from ddpdiag.model import RunOptions

T = TypeVar("T")


class Reach(Enum):
    """The result of a connect. The first member is the best evidence that the host exists, the last the worst."""

    ACCEPTED = "accepted"
    REFUSED = "refused"  # the host exists, but no process listens on the port
    DROPPED = "dropped"  # no answer at all: a firewall, a full backlog, or a host that is down
    UNREACHABLE = "unreachable"  # no route, or a router reports that there is no such host
    UNKNOWN_NAME = "unknown name"  # the resolver reports that there is no such name
    SLOW_NAME = "slow name"  # the resolver did not answer in time


# The result by the errno of a connect; any other errno is UNREACHABLE.
_REACH_BY_ERRNO = {
    0: Reach.ACCEPTED,
    errno.ECONNREFUSED: Reach.REFUSED,
    errno.ECONNRESET: Reach.REFUSED,
    errno.ETIMEDOUT: Reach.DROPPED,
}


class Attempt(Struct, frozen=True, kw_only=True):
    """The result of an attempt to connect to `address`. `source` is the local address of an accepted connection."""

    reach: Reach
    address: str | None = None
    source: str | None = None
    seconds: float = 0.0


def answer_within(seconds: float, ask: Callable[[], T]) -> T | None:
    """Call `ask` in a thread, and return its result; None if it does not return within `seconds`.

    Look-ups of names have no time-out of their own. A thread that never returns ends with the process.
    """
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(ask()), name="resolver", daemon=True)
    thread.start()
    thread.join(max(seconds, 0.0))
    return found[0] if found else None


def resolve(host: str, port: int, seconds: float) -> tuple[str, ...] | None:
    """Look up the numeric addresses of a host, in the resolver's order; empty for unknown names, None if too slow."""

    def look_up() -> tuple[str, ...]:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError):  # ValueError: an invalid name, such as a label of 64 letters
            return ()
        return tuple(dict.fromkeys(str(info[4][0]) for info in infos))

    return answer_within(seconds, look_up)


def try_connect(host: str, port: int, seconds: float) -> Attempt:
    """Connect to `host` within `seconds`, and close the connection. See `connect`."""
    reached, sock = connect(host, port, seconds)
    if sock is not None:
        sock.close()
    return reached


def connect(host: str, port: int, seconds: float) -> tuple[Attempt, socket.socket | None]:
    """Connect to the first address of `host` that accepts. Returns the (best) result, and the connection or None."""
    start = time.monotonic()
    addresses = resolve(host, port, seconds)
    if addresses is None:
        return Attempt(reach=Reach.SLOW_NAME, seconds=time.monotonic() - start), None
    attempts: list[Attempt] = []
    for index, address in enumerate(addresses):
        left = seconds - (time.monotonic() - start)
        attempt, sock = _connect(address, port, left / (len(addresses) - index))
        if sock is not None:
            return structs.replace(attempt, seconds=time.monotonic() - start), sock
        attempts.append(attempt)
    order = list(Reach)
    best = min(attempts, key=lambda attempt: order.index(attempt.reach), default=Attempt(reach=Reach.UNKNOWN_NAME))
    return structs.replace(best, seconds=time.monotonic() - start), None


def _connect(address: str, port: int, seconds: float) -> tuple[Attempt, socket.socket | None]:
    """Connect to one numeric address. Returns the result and the connection, as `connect` does."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:  # no IPv6 here, or too many open files
        return Attempt(reach=_REACH_BY_ERRNO.get(error.errno or errno.EIO, Reach.UNREACHABLE), address=address), None
    try:
        sock.setblocking(False)
        code = sock.connect_ex((address, port))
        if code == errno.EINPROGRESS:
            is_over = poll_socket(sock, select.POLLOUT, seconds)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if is_over else errno.ETIMEDOUT
        # A connect to a free ephemeral port of this host can connect the socket to itself, although no process listens.
        if code == 0 and sock.getsockname() == sock.getpeername():
            code = errno.ECONNREFUSED
        source = str(sock.getsockname()[0]) if code == 0 else None
    except OSError as error:
        code, source = error.errno or errno.EIO, None
    reached = Attempt(reach=_REACH_BY_ERRNO.get(code, Reach.UNREACHABLE), address=address, source=source)
    if code == 0:
        sock.setblocking(True)
        return reached, sock
    sock.close()
    return reached, None


def poll_socket(sock: socket.socket, events: int, seconds: float) -> int:
    """Wait up to `seconds` for one of `events` on the socket. Returns the bits of the events that occurred, or 0."""
    poll = select.poll()  # not select: it fails on descriptors over 1023
    poll.register(sock, events)
    return next((seen for _, seen in poll.poll(max(seconds, 0.0) * 1000)), 0)


def is_loopback(address: str) -> bool:
    """Whether packets to a numeric address never leave the host."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def free_port(host: str = "", ports: Iterable[int] = (0,)) -> int:
    """Find the first of `ports` (0: any) on which no process listens. Another process may bind the port at any time.

    OSError (from bind) if none is free.
    """
    error = OSError(errno.EADDRINUSE, "no port was given")
    for port in ports:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as sock:
            # With this option a listener on the port still prevents binding; an old connection in TIME_WAIT does not.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1 if port else 0)
            try:
                sock.bind((host, port))
            except OSError as taken:
                error = taken
                continue
            return int(sock.getsockname()[1])
    raise error


def allowed_ports(options: RunOptions) -> tuple[int, ...]:
    """The ports on which torch's store may listen: those of `--port-range` (at sites with firewalls), or 0 for any."""
    low, _, high = (options.port_range or "").partition("-")
    return tuple(range(int(low), int(high) + 1)) if low and high else (0,)


# After one port has accepted, the other ports get this much more time, since the caller may prefer one of them.
_MORE_PORTS_SECONDS = 0.05


def try_ports(address: str, ports: Sequence[int], seconds: float) -> dict[int, Attempt]:
    """Connect to all ports of a numeric address at once. Returns the result of each port, in the order of `ports`.

    It returns when all ports have a result, or soon after one has accepted. A port without a result counts as dropped.
    """
    if not ports:
        return {}
    pool = ThreadPoolExecutor(len(ports))
    attempts = {pool.submit(try_connect, address, port, seconds): port for port in ports}
    pool.shutdown(wait=False)
    end = time.monotonic() + seconds + _MORE_PORTS_SECONDS
    waiting = set(attempts)
    while waiting and time.monotonic() < end:
        done, waiting = wait(waiting, timeout=max(0.0, end - time.monotonic()), return_when=FIRST_COMPLETED)
        if any(attempt.result().reach is Reach.ACCEPTED for attempt in done):
            end = min(end, time.monotonic() + _MORE_PORTS_SECONDS)
    silent = Attempt(reach=Reach.DROPPED, address=address, seconds=seconds)
    return {port: attempt.result() if attempt.done() else silent for attempt, port in attempts.items()}


def responds(address: str, ports: Sequence[int], seconds: float) -> bool:
    """Whether the host accepts or refuses a connect to any of the ports, which shows that its kernel is running."""
    return any(entry.reach in (Reach.ACCEPTED, Reach.REFUSED) for entry in try_ports(address, ports, seconds).values())


# Fields of struct tcp_info in <linux/tcp.h>: total_retrans, bytes_acked, segs_out; the last one came with Linux 4.2.
_TCP_INFO = struct.Struct("=100xI16xQ8xI")


class TcpInfo(Struct, frozen=True):
    """A connection's bytes that the peer's kernel has acknowledged, sent segments, and retransmitted segments."""

    acknowledged_bytes: int
    segments: int
    retransmitted: int


def tcp_info(sock: socket.socket) -> TcpInfo | None:
    """Read the kernel's counters of this side of the connection; None if the kernel does not have them."""
    try:
        data = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return None
    if len(data) < _TCP_INFO.size:
        return None
    retransmitted, acknowledged_bytes, segments = _TCP_INFO.unpack(data)
    return TcpInfo(acknowledged_bytes, segments, retransmitted)


_MAX_NAME_BYTES = 64
# A host of this run sends its name at once. Another visitor, such as a port scanner, is closed after this time.
_SILENCE_SECONDS = 1.0
# At most this many visitors may be silent at a time. If there are more, the oldest is closed: it has received the word.
_MAX_SILENT = 256


class PortCheckResult(Struct, frozen=True, kw_only=True):
    """The result of `check_port`. `listener_answered`: the word was received (None: not expected, or no connection)."""

    reached: Attempt
    listener_answered: bool | None = None


class PortListener:
    """Listens on a port as the store of a job would: on all IPv4 and IPv6 addresses. OSError if the port is not free.

    It sends `word` to every visitor, and reads the visitor's name, until all `expected` names have been received. A
    silent visitor does not delay other visitors.
    """

    def __init__(self, port: int, word: str, expected: Collection[str]) -> None:
        self._word = word.encode()
        self._missing = set(expected)
        self._all_connected = threading.Event()
        self._server = listen(port)
        self._server.setblocking(False)
        self._silent: dict[socket.socket, float] = {}  # silent visitors and the times of their connects, oldest first
        self._open = True
        self._thread = threading.Thread(target=self._serve, name="port check", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until all expected visitors have sent their names; False if that takes longer than `seconds`."""
        return self._all_connected.wait(max(0.0, seconds))

    def close(self) -> None:
        """Stop listening, and free the port."""
        self._open = False
        self._thread.join()
        for visitor in (self._server, *self._silent):
            visitor.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._server, selectors.EVENT_READ)
            while self._open:
                for key, _ in ready.select(0.1):
                    sock = cast(socket.socket, key.fileobj)
                    if sock is not self._server:
                        self._read_name(sock)
                        self._close_visitor(ready, sock)
                    elif (visitor := self._accept()) is not None:
                        ready.register(visitor, selectors.EVENT_READ)
                late = time.monotonic() - _SILENCE_SECONDS
                surplus = len(self._silent) - _MAX_SILENT
                for number, (sock, connected_at) in enumerate(list(self._silent.items())):
                    if connected_at < late or number < surplus:
                        self._close_visitor(ready, sock)

    def _accept(self) -> socket.socket | None:
        visitor = None
        try:
            visitor, _ = self._server.accept()
            visitor.setblocking(False)
            visitor.send(self._word)
        except OSError:  # the visitor has gone, or this process has too many open files
            if visitor is not None:
                visitor.close()
            return None
        self._silent[visitor] = time.monotonic()
        return visitor

    def _read_name(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self._missing.discard(sock.recv(_MAX_NAME_BYTES).decode(errors="replace"))
        if not self._missing:
            self._all_connected.set()

    def _close_visitor(self, ready: selectors.BaseSelector, sock: socket.socket) -> None:
        ready.unregister(sock)
        del self._silent[sock]
        sock.close()


def listen(port: int) -> socket.socket:
    """Listen on all addresses as c10d's store does, with one socket for IPv6 and IPv4. Without IPv6, on IPv4 alone."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return socket.create_server(("", port), backlog=1024)


def check_port(host: str, port: int, seconds: float, *, caller: str, word: str | None) -> PortCheckResult:
    """Connect to a port, send the name `caller`, and compare the answer with the listener's `word`.

    If `word` is None, it only connects. It takes up to twice `seconds` if the listener accepts, but sends nothing.
    """
    reached, visit = connect(host, port, seconds)
    if visit is None:
        return PortCheckResult(reached=reached)
    if word is None:
        visit.close()
        return PortCheckResult(reached=reached)
    end = time.monotonic() + seconds
    received, expected = b"", word.encode()
    with visit, contextlib.suppress(OSError):
        visit.settimeout(seconds)
        visit.sendall(caller.encode())
        while len(received) < len(expected) and expected.startswith(received):
            visit.settimeout(max(0.001, end - time.monotonic()))
            if not (more := visit.recv(len(expected) - len(received))):
                break
            received += more
    return PortCheckResult(reached=reached, listener_answered=received == expected)


def is_answered(found: PortCheckResult) -> bool:
    """Whether the expected listener answered. If no word is expected, whether any process accepted the connection."""
    return found.reached.reach is Reach.ACCEPTED and found.listener_answered is not False
