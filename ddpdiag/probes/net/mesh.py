"""A host's part in the mesh: one connection to each peer, its measurements, and the survey of all connections."""

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from msgspec import Struct, structs

from ddpdiag.probes.net.mesh_listener import (
    CONNECT_SECONDS,
    DONE,
    GRANTED,
    LARGE,
    SMALL,
    STALL_SECONDS,
    Listener,
    Request,
    receive,
    request,
)
from ddpdiag.probes.net.tcp_connect import Reach, TcpInfo, dial, polled, resolve, tcp_info

_NO_LINGER = struct.pack("ii", 1, 0)
# The interval at which progress is checked, so that a stalled connection is noticed.
_LOOK_SECONDS = 0.05
_REPEATS = 3
_SHORT_SECONDS = 0.1
_TURN_SECONDS = 0.3
# Grace beyond the time for connecting: all hosts pass the barrier together, but a busy host may be late.
_LATE_SECONDS = 1.0
# On a link of 100 Mbit/s 6 MB pass in this time, enough to know the rate.
_RATE_SECONDS = 0.5
# The share of the remaining time that is spent on sending: other hosts wait for their turn meanwhile.
_SENDING_SHARE = 0.4
# Time for a small size. A path that needs longer for 64 KiB (16 kB/s) is of no use.
_SMALL_SECONDS = 4.0


class Peer(Struct, frozen=True, kw_only=True):
    """A host of the group: the rank of its leader, and the host's number in the group.

    `offered` is the address that a job would use for this host ("" without one), `host` the one that rank 0 uses.
    """

    rank: int
    number: int
    offered: str
    host: str
    port: int
    token: str


class Cell(Struct, frozen=True, kw_only=True):
    """The path from this host to one peer, as one cell of the matrix.

    `missed` says how the address that a job would use failed, if another address (`address`) was used instead.
    `passed_bytes` is the largest size that passed, 0 if not even a hello was answered. `stalled_bytes` is the size that
    did not pass; `broken` says that the connection was then cut. Rates are from the first byte to the acknowledgement
    of the last. `segments` and `retransmitted` are those of the repetition with the least loss. None: not measured, or
    the kernel does not say.
    """

    peer: int
    reach: Reach
    address: str | None = None
    missed: Reach | None = None
    source: str | None = None
    passed_bytes: int = 0
    stalled_bytes: int | None = None
    broken: bool = False
    bytes_per_s: float | None = None
    segments: int | None = None
    retransmitted: int | None = None


class _Pushed(Struct, frozen=True):
    """The result of one sending: bytes acknowledged, and the seconds. `segments` is -1 if the kernel does not say."""

    bytes: int
    seconds: float
    complete: bool
    segments: int
    retransmitted: int


class Connection:
    """A connection to `peer`, if one was made, and in `cell` the measurements of it."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.cell, self._sock = _call(peer)

    @property
    def is_open(self) -> bool:
        """Whether more can be measured over the connection."""
        return self._sock is not None

    def try_sizes(self, own_number: int) -> None:
        """Send a hello and the small sizes, and note the results in `cell`."""
        self._attempt(0, lambda sock: self._greet(sock, own_number))
        for size in SMALL:
            self._attempt(size, partial(self._send_small, size=size))

    def transfer(self, load: memoryview, turn: threading.Lock, *, first: bool, seconds: float) -> bool:
        """Measure the rate while no other transfer of this run uses the two hosts; False if one of them was busy.

        All hosts take the turn of the lower number first (`first`: this host's), so that none wait in a circle.
        """
        with contextlib.ExitStack() as held:
            if first and not _take(turn, held):
                return False
            if not self._granted():
                return not self.is_open
            held.callback(self._say, Request.END)
            if not first and not _take(turn, held):
                return False
            self._attempt(LARGE, lambda sock: self._measure(sock, load, seconds))
        return True

    def close(self, *, politely: bool = True) -> None:
        """Close the connection: politely with a bye, else by a reset that drops data in transit."""
        if politely:
            self._say(Request.BYE)
        sock, self._sock = self._sock, None
        if sock is not None:
            with sock, contextlib.suppress(OSError):
                if not politely:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)

    def _attempt(self, size: int, stage: Callable[[socket.socket], object]) -> bool:
        """Run one stage. If it fails, note the size as stalled, and end the connection."""
        if self._sock is None:
            return False
        try:
            stage(self._sock)
        except OSError as error:
            broken = not isinstance(error, TimeoutError)
            self.cell = structs.replace(self.cell, stalled_bytes=size, broken=broken)
            self.close(politely=False)
            return False
        return True

    def _say(self, kind: Request) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.sendall(request(kind))

    def _greet(self, sock: socket.socket, own_number: int) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(request(Request.HELLO, own_number) + self.peer.token.encode())
        receive(sock, len(DONE), STALL_SECONDS)

    def _send_small(self, sock: socket.socket, size: int) -> None:
        """Send one small size. If it is not through after `_SMALL_SECONDS`, note the rate until then, and close."""
        pushed = _push(sock, memoryview(bytes(size)), _SMALL_SECONDS)
        if pushed.complete:
            self.cell = structs.replace(self.cell, passed_bytes=size)
        else:
            self.cell = _with_rate(self.cell, pushed)
            self.close(politely=False)

    def _granted(self) -> bool:
        """Request the turn of the peer's host; whether it was granted. Without an answer the connection is closed."""
        if self._sock is None:
            return False
        try:
            self._sock.sendall(request(Request.TURN, round(_TURN_SECONDS * 1000)))
            return receive(self._sock, len(GRANTED), _TURN_SECONDS + STALL_SECONDS) == GRANTED
        except OSError:
            self.close(politely=False)
            return False

    def _measure(self, sock: socket.socket, load: memoryview, seconds: float) -> None:
        """Send the large size up to `_REPEATS` times in about `seconds`; a slow sending is cut short, and counts.

        A sending is repeated if it was so short that a wait of the process for a core would show, or if it lost
        packets: TCP's slow start may lose some without a fault.
        """
        begin = time.monotonic()
        for _ in range(_REPEATS):
            pushed = _push(sock, load, seconds)
            self.cell = _with_rate(self.cell, pushed)
            if not pushed.complete:
                self.close(politely=False)
                return
            spent = time.monotonic() - begin
            if spent + pushed.seconds > seconds or (spent > _SHORT_SECONDS and not pushed.retransmitted):
                return


def _call(peer: Peer) -> tuple[Cell, socket.socket | None]:
    """Connect to the address that a job would use, else to the address that rank 0 uses."""
    missed = None
    for host in dict.fromkeys((peer.offered or peer.host, peer.host)):
        if missed is not None and peer.offered in (resolve(host, peer.port, CONNECT_SECONDS) or ()):
            break
        reached, sock = dial(host, peer.port, CONNECT_SECONDS)
        cell = Cell(peer=peer.rank, reach=reached.reach, address=reached.address or host, missed=missed)
        if sock is not None:
            return structs.replace(cell, source=reached.source), sock
        missed = missed or reached.reach
    return Cell(peer=peer.rank, reach=missed or Reach.UNREACHABLE, address=peer.offered or peer.host), None


def _take(turn: threading.Lock, held: contextlib.ExitStack) -> bool:
    if not turn.acquire(timeout=_TURN_SECONDS):
        return False
    held.callback(turn.release)
    return True


def _push(sock: socket.socket, load: memoryview, limit_seconds: float) -> _Pushed:
    """Send `load`, and wait for the listener's DONE, or until the limit if some bytes were acknowledged.

    TimeoutError if no byte is acknowledged for a while, since large packets are then lost on the path.
    """
    before = tcp_info(sock)
    begin = moved = time.monotonic()
    sock.sendall(request(Request.DATA, len(load)))
    sent = acknowledged = 0
    while True:
        events = polled(sock, select.POLLIN | (select.POLLOUT if sent < len(load) else 0), _LOOK_SECONDS)
        if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
            receive(sock, len(DONE), STALL_SECONDS)
            return _pushed(sock, before, len(load), time.monotonic() - begin, complete=True)
        if events & select.POLLOUT:
            sent += sock.send(load[sent:], socket.MSG_DONTWAIT)
        now, info = time.monotonic(), tcp_info(sock)
        known = sent if info is None or before is None else info.acknowledged_bytes - before.acknowledged_bytes
        if known > acknowledged:
            acknowledged, moved = known, now
        if now - moved > STALL_SECONDS:
            raise TimeoutError(f"no progress for {STALL_SECONDS:g} s after {acknowledged} bytes")
        if acknowledged and now - begin > limit_seconds:
            return _pushed(sock, before, acknowledged, now - begin, complete=False)


def _pushed(sock: socket.socket, before: TcpInfo | None, count: int, seconds: float, *, complete: bool) -> _Pushed:
    after = tcp_info(sock)
    if before is None or after is None:
        return _Pushed(count, seconds, complete, -1, 0)
    segments, again = after.segments - before.segments, after.retransmitted - before.retransmitted
    return _Pushed(count, seconds, complete, segments, again)


def _with_rate(cell: Cell, pushed: _Pushed) -> Cell:
    """The cell with the better rate and the lower loss, since a loss that a repetition avoids is not the path's."""
    rate = max(cell.bytes_per_s or 0.0, pushed.bytes / pushed.seconds)
    cell = structs.replace(cell, bytes_per_s=rate, passed_bytes=LARGE if pushed.complete else cell.passed_bytes)
    if pushed.segments <= 0:
        return cell
    share = pushed.retransmitted / pushed.segments
    if cell.segments and cell.retransmitted is not None and cell.retransmitted / cell.segments <= share:
        return cell
    return structs.replace(cell, segments=pushed.segments, retransmitted=pushed.retransmitted)


def survey(
    peers: Sequence[Peer],
    own_number: int,
    listener: Listener,
    turn: threading.Lock,
    end: float,
    step: Callable[[str], None],
    *,
    addresses: int,
) -> tuple[Cell, ...]:
    """Measure the path to each peer until `end` (monotonic), whatever the peers do; one cell for each peer.

    First all paths are tested at once with little data, so that blocked paths time out together, then the rates one by
    one. Then the survey waits for the peers' measurements. A caller tries `addresses` of this host's addresses, and is
    not expected if it has not connected by then.
    """
    late = time.monotonic() + addresses * CONNECT_SECONDS + _LATE_SECONDS
    step("connect to the other hosts")

    def connected(peer: Peer) -> Connection:
        connection = Connection(peer)
        connection.try_sizes(own_number)
        return connection

    with ThreadPoolExecutor(len(peers), "call") as pool:
        connections = list(pool.map(connected, peers))
    step("send to the other hosts")
    _transfer(connections, own_number, turn, end)
    for connection in connections:
        connection.close()
    step("wait for the other hosts")
    listener.wait(len(peers), late)
    listener.close()
    return tuple(connection.cell for connection in connections)


def _transfer(connections: Sequence[Connection], own_number: int, turn: threading.Lock, end: float) -> None:
    """Measure the rates in an order that keeps all hosts busy in pairs; a busy peer is tried again later."""
    load = memoryview(os.urandom(LARGE // 256) * 256)
    left = end - time.monotonic()
    seconds = min(_RATE_SECONDS, _SENDING_SHARE * left / (2 * len(connections)))
    # Numbers that differ by the same bits form pairs: in round r, host i measures i ^ r, which measures i.
    waiting = deque(sorted((c for c in connections if c.is_open), key=lambda c: c.peer.number ^ own_number))
    while waiting and time.monotonic() < end - seconds - STALL_SECONDS:
        connection = waiting.popleft()
        if connection.transfer(load, turn, first=own_number < connection.peer.number, seconds=seconds):
            connection.close()
        else:
            waiting.append(connection)
