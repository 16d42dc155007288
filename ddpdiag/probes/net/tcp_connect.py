"""TCP from this host: look-ups of names, connects, and this run's listener. Each call has a time limit.

torch raises the same exception for an unknown name, a closed port and a firewall that drops packets. A connect without
torch distinguishes them.
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
    """The results of a connect, from the best to the worst evidence that the host exists."""

    ACCEPTED = "accepted"
    REFUSED = "refused"  # the host is there, no process listens
    DROPPED = "dropped"  # no answer at all: a firewall, a full backlog, or a host that is down
    UNREACHABLE = "unreachable"  # no route, or something on the way says that there is no such host
    UNKNOWN_NAME = "unknown name"  # the resolver says that there is no such name
    SLOW_NAME = "slow name"  # the resolver did not answer in time


# The result by the errno of a connect; any other errno is UNREACHABLE.
_MEANINGS = {
    0: Reach.ACCEPTED,
    errno.ECONNREFUSED: Reach.REFUSED,
    errno.ECONNRESET: Reach.REFUSED,
    errno.ETIMEDOUT: Reach.DROPPED,
}


class Reached(Struct, frozen=True, kw_only=True):
    """The result of `reach`: the tried `address`, and in `source` the local address of an accepted connection."""

    reach: Reach
    address: str | None = None
    source: str | None = None
    seconds: float = 0.0


def answer_within(seconds: float, ask: Callable[[], T]) -> T | None:
    """Call `ask` (the resolver, which has no time-out) in a thread; None if it does not return within `seconds`.

    A thread that never returns ends with the process.
    """
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(ask()), name="resolver", daemon=True)
    thread.start()
    thread.join(max(seconds, 0.0))
    return found[0] if found else None


def resolve(host: str, port: int, seconds: float) -> tuple[str, ...] | None:
    """Look up a name's numeric addresses, in the resolver's order; empty if it is unknown, None after a time-out."""

    def look_up() -> tuple[str, ...]:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError):  # ValueError: an invalid name, such as a label of 64 letters
            return ()
        return tuple(dict.fromkeys(str(info[4][0]) for info in infos))

    return answer_within(seconds, look_up)


def reach(host: str, port: int, seconds: float) -> Reached:
    """Connect to `host` within `seconds`, and close the connection. Of several addresses the best result counts."""
    reached, sock = dial(host, port, seconds)
    if sock is not None:
        sock.close()
    return reached


def dial(host: str, port: int, seconds: float) -> tuple[Reached, socket.socket | None]:
    """Connect to `host` within `seconds`. Returns the result, and the connection in blocking mode if there is one."""
    start = time.monotonic()
    addresses = resolve(host, port, seconds)
    if addresses is None:
        return Reached(reach=Reach.SLOW_NAME, seconds=time.monotonic() - start), None
    attempts: list[Reached] = []
    for index, address in enumerate(addresses):
        left = seconds - (time.monotonic() - start)
        attempt, sock = _connect(address, port, left / (len(addresses) - index))
        if sock is not None:
            return structs.replace(attempt, seconds=time.monotonic() - start), sock
        attempts.append(attempt)
    order = list(Reach)
    best = min(attempts, key=lambda attempt: order.index(attempt.reach), default=Reached(reach=Reach.UNKNOWN_NAME))
    return structs.replace(best, seconds=time.monotonic() - start), None


def _connect(address: str, port: int, seconds: float) -> tuple[Reached, socket.socket | None]:
    """Connect to one numeric address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:  # no IPv6 here, or too many open files
        return Reached(reach=_MEANINGS.get(error.errno or errno.EIO, Reach.UNREACHABLE), address=address), None
    try:
        sock.setblocking(False)
        code = sock.connect_ex((address, port))
        if code == errno.EINPROGRESS:
            is_over = polled(sock, select.POLLOUT, seconds)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if is_over else errno.ETIMEDOUT
        # A connect to a free ephemeral port of this host can reach its own socket: no process listens there.
        if code == 0 and sock.getsockname() == sock.getpeername():
            code = errno.ECONNREFUSED
        source = str(sock.getsockname()[0]) if code == 0 else None
    except OSError as error:
        code, source = error.errno or errno.EIO, None
    reached = Reached(reach=_MEANINGS.get(code, Reach.UNREACHABLE), address=address, source=source)
    if code == 0:
        sock.setblocking(True)
        return reached, sock
    sock.close()
    return reached, None


def polled(sock: socket.socket, events: int, seconds: float) -> int:
    """Poll the socket for `events` up to `seconds`; the events that it has, 0 if none."""
    poll = select.poll()  # not select: it fails on descriptors over 1023
    poll.register(sock, events)
    return next((seen for _, seen in poll.poll(max(seconds, 0.0) * 1000)), 0)


def is_loopback(address: str) -> bool:
    """Whether packets to a numeric address never leave the host."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def free_port(host: str = "", ports: Iterable[int] = (0,)) -> int:
    """Find the first of `ports` (0: any) on which no process listens now. The caller must bind it soon, or may lose it.

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
    """The ports on which a store may listen: 0 for any, or the range of `--port-range` for sites with a firewall."""
    low, _, high = (options.port_range or "").partition("-")
    return tuple(range(int(low), int(high) + 1)) if low and high else (0,)


# After one port has accepted, wait this long for others to accept, since the caller may prefer another port.
_TOGETHER_SECONDS = 0.05


def reach_any(address: str, ports: Sequence[int], seconds: float) -> dict[int, Reached]:
    """Connect to each port of a numeric address at once. Returns the results in the order of `ports`.

    It returns when all ports have answered, or soon after one has accepted. A port without an answer counts as dropped.
    """
    if not ports:
        return {}
    pool = ThreadPoolExecutor(len(ports))
    attempts = {pool.submit(reach, address, port, seconds): port for port in ports}
    pool.shutdown(wait=False)
    end = time.monotonic() + seconds + _TOGETHER_SECONDS
    waiting = set(attempts)
    while waiting and time.monotonic() < end:
        done, waiting = wait(waiting, timeout=max(0.0, end - time.monotonic()), return_when=FIRST_COMPLETED)
        if any(attempt.result().reach is Reach.ACCEPTED for attempt in done):
            end = min(end, time.monotonic() + _TOGETHER_SECONDS)
    silent = Reached(reach=Reach.DROPPED, address=address, seconds=seconds)
    return {port: attempt.result() if attempt.done() else silent for attempt, port in attempts.items()}


def answers(address: str, ports: Sequence[int], seconds: float) -> bool:
    """Connect to the ports: whether the host's kernel answers at all, by accepting or refusing a connection."""
    return any(entry.reach in (Reach.ACCEPTED, Reach.REFUSED) for entry in reach_any(address, ports, seconds).values())


# Fields of struct tcp_info in <linux/tcp.h>: total_retrans, bytes_acked, segs_out; the last one came with Linux 4.2.
_TCP_INFO = struct.Struct("=100xI16xQ8xI")


class TcpInfo(Struct, frozen=True):
    """Bytes that the peer's kernel acknowledged, segments sent, and how many of these were sent again."""

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


_MAX_WORD = 64
# A host sends its name at once; a port scanner may send nothing.
_VISIT_SECONDS = 1.0
# At most this many visitors may be silent at a time. Then the oldest is closed; it got the word when it connected.
_MOST_SILENT = 256


class PortAnswer(Struct, frozen=True, kw_only=True):
    """The result of `check_port`. `ours`: this run's listener answered (None: no connection, or no answer expected)."""

    reached: Reached
    ours: bool | None = None


class PortListener:
    """Listens as a job's store would: on all addresses, also of IPv6 if the host has it; OSError if it cannot.

    It sends `word` to every visitor at once, and reads the visitor's name; only names that are `expected` count. It
    serves all visitors at once, so that a silent visitor does not delay others.
    """

    def __init__(self, port: int, word: str, expected: Collection[str]) -> None:
        self._word = word.encode()
        self._missing = set(expected)
        self._all_came = threading.Event()
        self._server = listen(port)
        self._server.setblocking(False)
        self._silent: dict[socket.socket, float] = {}  # connection time of each, the oldest first
        self._open = True
        self._thread = threading.Thread(target=self._serve, name="port check", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until all expected visitors have connected; False if that takes longer than `seconds`."""
        return self._all_came.wait(max(0.0, seconds))

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
                        self._note(sock)
                        self._dismiss(ready, sock)
                    elif (visitor := self._accept()) is not None:
                        ready.register(visitor, selectors.EVENT_READ)
                late = time.monotonic() - _VISIT_SECONDS
                surplus = len(self._silent) - _MOST_SILENT
                for number, (sock, came) in enumerate(list(self._silent.items())):
                    if came < late or number < surplus:
                        self._dismiss(ready, sock)

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

    def _note(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self._missing.discard(sock.recv(_MAX_WORD).decode(errors="replace"))
        if not self._missing:
            self._all_came.set()

    def _dismiss(self, ready: selectors.BaseSelector, sock: socket.socket) -> None:
        ready.unregister(sock)
        del self._silent[sock]
        sock.close()


def listen(port: int) -> socket.socket:
    """Listen on all addresses as c10d's store does: one socket for IPv6 and IPv4, or IPv4 alone without IPv6."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return socket.create_server(("", port), backlog=1024)


def check_port(host: str, port: int, seconds: float, *, who: str, word: str | None) -> PortAnswer:
    """Connect to a host's port, send the name `who`, and compare the answer with `word` (None: no answer is needed).

    This takes up to twice `seconds` if the connection is accepted and nothing is sent.
    """
    reached, visit = dial(host, port, seconds)
    if visit is None:
        return PortAnswer(reached=reached)
    if word is None:
        visit.close()
        return PortAnswer(reached=reached)
    end = time.monotonic() + seconds
    received, expected = b"", word.encode()
    with visit, contextlib.suppress(OSError):
        visit.settimeout(seconds)
        visit.sendall(who.encode())
        while len(received) < len(expected) and expected.startswith(received):
            visit.settimeout(max(0.001, end - time.monotonic()))
            if not (more := visit.recv(len(expected) - len(received))):
                break
            received += more
    return PortAnswer(reached=reached, ours=received == expected)


def answered(found: PortAnswer) -> bool:
    """Whether the expected listener answered, or, without an expected word, any process accepted the connection."""
    return found.reached.reach is Reach.ACCEPTED and found.ours is not False
