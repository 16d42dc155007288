"""TCP from this host: look-ups of names, connects, and this run's own listener. No call exceeds its time.

torch raises the same exception for an unknown name, a closed port and a firewall that drops packets; a connect without
torch tells them apart.
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

from ddpdiag.model import Options

T = TypeVar("T")


class Reach(Enum):
    """The ends of a connect, from best to worst as evidence that the host is there."""

    ACCEPTED = "accepted"
    REFUSED = "refused"  # the host is there, no process listens
    DROPPED = "dropped"  # no answer at all: a firewall, a full backlog, or a host that is down
    UNREACHABLE = "unreachable"  # no route, or something on the way says that there is no such host
    UNKNOWN_NAME = "unknown name"  # the resolver says that there is no such name
    SLOW_NAME = "slow name"  # the resolver did not answer in time


# Of the errno of a connect; any other one is UNREACHABLE.
_MEANINGS = {
    0: Reach.ACCEPTED,
    errno.ECONNREFUSED: Reach.REFUSED,
    errno.ECONNRESET: Reach.REFUSED,
    errno.ETIMEDOUT: Reach.DROPPED,
}


class Reached(Struct, frozen=True, kw_only=True):
    """The result of `reach`; `address` was tried, `source` is our own end of an accepted connection."""

    reach: Reach
    address: str | None = None
    source: str | None = None
    seconds: float = 0.0


def answer_within(seconds: float, ask: Callable[[], T]) -> T | None:
    """The result of a call of the resolver, which has no time-out; `None` if it did not end in time.

    A thread that is stuck in it dies with the process.
    """
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(ask()), name="resolver", daemon=True)
    thread.start()
    thread.join(max(seconds, 0.0))
    return found[0] if found else None


def resolve(host: str, port: int, seconds: float) -> tuple[str, ...] | None:
    """Numeric addresses of a name, in the resolver's order; none if it is unknown, `None` if nothing came in time."""

    def look_up() -> tuple[str, ...]:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError):  # ValueError: what cannot be a name, such as a label of 64 letters
            return ()
        return tuple(dict.fromkeys(str(info[4][0]) for info in infos))

    return answer_within(seconds, look_up)


def reach(host: str, port: int, seconds: float) -> Reached:
    """Connect to `host` within `seconds`, and hang up; of several addresses the best answer counts."""
    reached, sock = dial(host, port, seconds)
    if sock is not None:
        sock.close()
    return reached


def dial(host: str, port: int, seconds: float) -> tuple[Reached, socket.socket | None]:
    """Connect to `host` within `seconds`; the connection, in blocking mode, if there is one."""
    start = time.monotonic()
    addresses = resolve(host, port, seconds)
    if addresses is None:
        return Reached(reach=Reach.SLOW_NAME, seconds=time.monotonic() - start), None
    tries: list[Reached] = []
    for index, address in enumerate(addresses):
        left = seconds - (time.monotonic() - start)
        tried, sock = _connect(address, port, left / (len(addresses) - index))
        if sock is not None:
            return structs.replace(tried, seconds=time.monotonic() - start), sock
        tries.append(tried)
    order = list(Reach)
    best = min(tries, key=lambda tried: order.index(tried.reach), default=Reached(reach=Reach.UNKNOWN_NAME))
    return structs.replace(best, seconds=time.monotonic() - start), None


def _connect(address: str, port: int, seconds: float) -> tuple[Reached, socket.socket | None]:
    """One numeric address."""
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
        # A connect to a free ephemeral port of this host can meet itself; no process listens there.
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
    """The events of poll that the socket has within `seconds`; 0 if none."""
    poll = select.poll()  # not select: it fails on descriptors over 1023
    poll.register(sock, events)
    return next((seen for _, seen in poll.poll(max(seconds, 0.0) * 1000)), 0)


def is_loopback(address: str) -> bool:
    """Whether a numeric address never leaves its host."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def free_port(host: str = "", ports: Iterable[int] = (0,)) -> int:
    """The first of `ports` (0 is any) on which no process listens now; the caller must bind it soon, or lose it.

    OSError, as bind gives it, if none is free.
    """
    error = OSError(errno.EADDRINUSE, "no port was given")
    for port in ports:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as sock:
            # A listener on the port still stands in the way; the remains of an earlier connection do not.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1 if port else 0)
            try:
                sock.bind((host, port))
            except OSError as taken:
                error = taken
                continue
            return int(sock.getsockname()[1])
    raise error


def allowed_ports(options: Options) -> tuple[int, ...]:
    """Ports on which a store may listen: any (0), or the range of `--port-range` for sites with a firewall."""
    low, _, high = (options.port_range or "").partition("-")
    return tuple(range(int(low), int(high) + 1)) if low and high else (0,)


# Two ports that accept do so within moments of each other, and the caller may prefer the other one.
_TOGETHER_SECONDS = 0.05


def reach_any(address: str, ports: Sequence[int], seconds: float) -> dict[int, Reached]:
    """The result of a connect to each port of a numeric address, in the order of `ports`.

    Over when all have answered, or soon after one has accepted; a port that has said nothing by then counts as dropped.
    """
    if not ports:
        return {}
    pool = ThreadPoolExecutor(len(ports))
    tries = {pool.submit(reach, address, port, seconds): port for port in ports}
    pool.shutdown(wait=False)
    end = time.monotonic() + seconds + _TOGETHER_SECONDS
    waiting = set(tries)
    while waiting and time.monotonic() < end:
        done, waiting = wait(waiting, timeout=max(0.0, end - time.monotonic()), return_when=FIRST_COMPLETED)
        if any(tried.result().reach is Reach.ACCEPTED for tried in done):
            end = min(end, time.monotonic() + _TOGETHER_SECONDS)
    silent = Reached(reach=Reach.DROPPED, address=address, seconds=seconds)
    return {port: tried.result() if tried.done() else silent for tried, port in tries.items()}


def answers(address: str, ports: Sequence[int], seconds: float) -> bool:
    """Whether that host's kernel answers at all, by accepting or refusing a connection."""
    return any(met.reach in (Reach.ACCEPTED, Reach.REFUSED) for met in reach_any(address, ports, seconds).values())


# Fields of struct tcp_info in <linux/tcp.h>: total_retrans, bytes_acked, segs_out; the last one came with Linux 4.2.
_TCP_INFO = struct.Struct("=100xI16xQ8xI")


class TcpInfo(Struct, frozen=True):
    """Bytes that the peer's kernel acknowledged, segments sent, and those of them that were sent again."""

    acknowledged_bytes: int
    segments: int
    retransmitted: int


def tcp_info(sock: socket.socket) -> TcpInfo | None:
    """The counters of our sending side, or None where the kernel does not say."""
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
# So many visitors may be silent at one time; for more, the oldest is closed. It was sent the word when it came.
_MOST_SILENT = 256


class PortAnswer(Struct, frozen=True, kw_only=True):
    """The result of a check; `ours`: this run's listener answered (None: there was no answer, or none was expected)."""

    reached: Reached
    ours: bool | None = None


class PortListener:
    """Listens where a job's store would: on all addresses, IPv6 too where there is one; OSError if it cannot.

    Every visitor is sent `word` on accept, and sends its name; only those that are `expected` count. All visitors are
    served at once, so that silent ones keep no other waiting.
    """

    def __init__(self, port: int, word: str, expected: Collection[str]) -> None:
        self._word = word.encode()
        self._missing = set(expected)
        self._all_came = threading.Event()
        self._server = listen(port)
        self._server.setblocking(False)
        self._silent: dict[socket.socket, float] = {}  # when each came, the oldest first
        self._open = True
        self._thread = threading.Thread(target=self._serve, name="port check", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until all expected visitors have connected; false if that takes longer than `seconds`."""
        return self._all_came.wait(max(0.0, seconds))

    def close(self) -> None:
        """Stop listening; the port is free after this."""
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
    """A listener on all addresses; as c10d's store does: one socket for both families, else IPv4 alone."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return socket.create_server(("", port), backlog=1024)


def check_port(host: str, port: int, seconds: float, *, who: str, word: str | None) -> PortAnswer:
    """Connect to a host's port, send the name `who`, and compare the answer with `word` (None: any process is right).

    Takes up to twice `seconds` if the connection is accepted and nothing is sent.
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
    """Whether this run's listener, or the one that was expected, answered."""
    return found.reached.reach is Reach.ACCEPTED and found.ours is not False
