"""Measure the network paths from this host to all others, which together form a mesh: one connection to each peer."""

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
    LARGE_SIZE,
    SMALL_SIZES,
    STALL_SECONDS,
    Listener,
    Request,
    receive,
    request,
)
from ddpdiag.probes.net.tcp_connect import Reach, TcpInfo, connect, poll_socket, resolve, tcp_info

_NO_LINGER = struct.pack("ii", 1, 0)
# The interval at which progress is checked, so that a stalled connection is noticed.
_POLL_SECONDS = 0.05
_REPEATS = 3
_SHORT_SECONDS = 0.1  # a shorter measurement of the rate is repeated
_TURN_SECONDS = 0.3  # the longest wait for a host's turn
# Grace beyond the time for connecting: all hosts pass the barrier together, but a busy host may be late.
_LATE_SECONDS = 1.0
# On a link of 100 Mbit/s 6 MB pass in this time, enough to know the rate.
_RATE_SECONDS = 0.5
# The share of the remaining time that is spent on sending: other hosts wait for their turn meanwhile.
_SENDING_SHARE = 0.4
# Time for a small size. A path that needs longer for 64 KiB (16 kB/s) is of no use.
_SMALL_SECONDS = 4.0


class Peer(Struct, frozen=True, kw_only=True):
    """Another host of the mesh: the rank that measures there, and the host's number in the mesh.

    `offered` is the address that a job would use for this host ("": none), `host` the address that rank 0 uses.
    """

    rank: int
    number: int
    offered: str
    host: str
    port: int
    token: str


class Cell(Struct, frozen=True, kw_only=True):
    """The measurements of the path from this host to one peer, which are one cell of the matrix of hosts.

    `offered_reach` says how the connect to the address that a job would use failed, if `address` is another address.
    `passed_bytes` is the largest size that was acknowledged, 0 if none was. `stalled_bytes` is the size that was not
    acknowledged (0: the hello), and `broken` says that the connection was cut then. `bytes_per_s` is measured from the
    first byte to the acknowledgement of the last. `segments` and `retransmitted` are those of the repetition with the
    least loss. None: not measured, or the kernel does not say.
    """

    peer: int
    reach: Reach
    address: str | None = None
    offered_reach: Reach | None = None
    source: str | None = None
    passed_bytes: int = 0
    stalled_bytes: int | None = None
    broken: bool = False
    bytes_per_s: float | None = None
    segments: int | None = None
    retransmitted: int | None = None


class _Sending(Struct, frozen=True):
    """The result of sending one message: acknowledged bytes, and the time. `segments` is -1 if it is not known."""

    bytes: int
    seconds: float
    complete: bool
    segments: int
    retransmitted: int


class Connection:
    """A connection to a peer, and in `cell` its measurements. The constructor connects, which may fail."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.cell, self._sock = _connect_to(peer)

    @property
    def is_open(self) -> bool:
        """Whether the connection exists, and no measurement over it has failed."""
        return self._sock is not None

    def try_sizes(self, own_number: int) -> None:
        """Send the hello and the small messages, and store the results in `cell`."""
        self._run_stage(0, lambda sock: self._send_hello(sock, own_number))
        for size in SMALL_SIZES:
            self._run_stage(size, partial(self._send_small, size=size))

    def measure_rate(self, load: memoryview, turn: threading.Lock, *, first: bool, seconds: float) -> bool:
        """Measure the rate while no other transfer of this run uses the two hosts; False if one of them is busy.

        To avoid a deadlock, the turn of the host with the lower number is taken first (`first`: it is this host).
        """
        with contextlib.ExitStack() as held:
            if first and not _take_turn(turn, held):
                return False
            if not self._request_turn():
                return not self.is_open
            held.callback(self._send_request, Request.END)
            if not first and not _take_turn(turn, held):
                return False
            self._run_stage(LARGE_SIZE, lambda sock: self._measure_large(sock, load, seconds))
        return True

    def close(self, *, with_bye: bool = True) -> None:
        """Close the connection, after a bye or else by a reset, which drops data in transit."""
        if with_bye:
            self._send_request(Request.BYE)
        sock, self._sock = self._sock, None
        if sock is not None:
            with sock, contextlib.suppress(OSError):
                if not with_bye:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)

    def _run_stage(self, size: int, stage: Callable[[socket.socket], object]) -> bool:
        """Run one stage. Returns whether it succeeds. If not, record the size as stalled, and reset the connection."""
        if self._sock is None:
            return False
        try:
            stage(self._sock)
        except OSError as error:
            broken = not isinstance(error, TimeoutError)
            self.cell = structs.replace(self.cell, stalled_bytes=size, broken=broken)
            self.close(with_bye=False)
            return False
        return True

    def _send_request(self, kind: Request) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.sendall(request(kind))

    def _send_hello(self, sock: socket.socket, own_number: int) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(request(Request.HELLO, own_number) + self.peer.token.encode())
        receive(sock, len(DONE), STALL_SECONDS)

    def _send_small(self, sock: socket.socket, size: int) -> None:
        """Send one small message. If that takes longer than `_SMALL_SECONDS`, record the rate until then, and close."""
        sending = _send_load(sock, memoryview(bytes(size)), _SMALL_SECONDS)
        if sending.complete:
            self.cell = structs.replace(self.cell, passed_bytes=size)
        else:
            self.cell = _with_rate(self.cell, sending)
            self.close(with_bye=False)

    def _request_turn(self) -> bool:
        """Request the turn of the peer's host. Returns whether it is granted. No answer resets the connection."""
        if self._sock is None:
            return False
        try:
            self._sock.sendall(request(Request.TURN, round(_TURN_SECONDS * 1000)))
            return receive(self._sock, len(GRANTED), _TURN_SECONDS + STALL_SECONDS) == GRANTED
        except OSError:
            self.close(with_bye=False)
            return False

    def _measure_large(self, sock: socket.socket, load: memoryview, seconds: float) -> None:
        """Send the large message up to `_REPEATS` times in about `seconds`. A message that takes longer is cut off.

        The message is repeated if the time was so short that a wait of the process for a core would change it, or if
        packets were lost: TCP's slow start may lose some without a fault.
        """
        begin = time.monotonic()
        for _ in range(_REPEATS):
            sending = _send_load(sock, load, seconds)
            self.cell = _with_rate(self.cell, sending)
            if not sending.complete:
                self.close(with_bye=False)
                return
            spent = time.monotonic() - begin
            if spent + sending.seconds > seconds or (spent > _SHORT_SECONDS and not sending.retransmitted):
                return


def _connect_to(peer: Peer) -> tuple[Cell, socket.socket | None]:
    """Connect to the address that a job would use, else to that which rank 0 uses. Returns the cell's first results."""
    offered_reach = None
    for host in dict.fromkeys((peer.offered or peer.host, peer.host)):
        if offered_reach is not None and peer.offered in (resolve(host, peer.port, CONNECT_SECONDS) or ()):
            break
        reached, sock = connect(host, peer.port, CONNECT_SECONDS)
        cell = Cell(peer=peer.rank, reach=reached.reach, address=reached.address or host, offered_reach=offered_reach)
        if sock is not None:
            return structs.replace(cell, source=reached.source), sock
        offered_reach = offered_reach or reached.reach
    return Cell(peer=peer.rank, reach=offered_reach or Reach.UNREACHABLE, address=peer.offered or peer.host), None


def _take_turn(turn: threading.Lock, held: contextlib.ExitStack) -> bool:
    if not turn.acquire(timeout=_TURN_SECONDS):
        return False
    held.callback(turn.release)
    return True


def _send_load(sock: socket.socket, load: memoryview, limit_seconds: float) -> _Sending:
    """Send `load`, and wait for the listener's DONE. Stop at the limit if some bytes have been acknowledged.

    TimeoutError if no byte is acknowledged for STALL_SECONDS: then the path loses large packets.
    """
    before = tcp_info(sock)
    begin = progress_time = time.monotonic()
    sock.sendall(request(Request.DATA, len(load)))
    sent = acknowledged = 0
    while True:
        events = poll_socket(sock, select.POLLIN | (select.POLLOUT if sent < len(load) else 0), _POLL_SECONDS)
        if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
            receive(sock, len(DONE), STALL_SECONDS)
            return _result(sock, before, len(load), time.monotonic() - begin, complete=True)
        if events & select.POLLOUT:
            sent += sock.send(load[sent:], socket.MSG_DONTWAIT)
        now, info = time.monotonic(), tcp_info(sock)
        known = sent if info is None or before is None else info.acknowledged_bytes - before.acknowledged_bytes
        if known > acknowledged:
            acknowledged, progress_time = known, now
        if now - progress_time > STALL_SECONDS:
            raise TimeoutError(f"no progress for {STALL_SECONDS:g} s after {acknowledged} bytes")
        if acknowledged and now - begin > limit_seconds:
            return _result(sock, before, acknowledged, now - begin, complete=False)


def _result(sock: socket.socket, before: TcpInfo | None, count: int, seconds: float, *, complete: bool) -> _Sending:
    after = tcp_info(sock)
    if before is None or after is None:
        return _Sending(count, seconds, complete, -1, 0)
    segments, retransmitted = after.segments - before.segments, after.retransmitted - before.retransmitted
    return _Sending(count, seconds, complete, segments, retransmitted)


def _with_rate(cell: Cell, sending: _Sending) -> Cell:
    """The cell with the higher rate and the lower loss: a loss that a repetition avoids is not a fault of the path."""
    rate = max(cell.bytes_per_s or 0.0, sending.bytes / sending.seconds)
    cell = structs.replace(cell, bytes_per_s=rate, passed_bytes=LARGE_SIZE if sending.complete else cell.passed_bytes)
    if sending.segments <= 0:
        return cell
    share = sending.retransmitted / sending.segments
    if cell.segments and cell.retransmitted is not None and cell.retransmitted / cell.segments <= share:
        return cell
    return structs.replace(cell, segments=sending.segments, retransmitted=sending.retransmitted)


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
    """Measure the path to each peer until `end` (monotonic), whatever the peers do. Returns a cell for each peer.

    First, all paths are tested at once with little data, so that blocked paths time out together. Then the rates are
    measured one by one. Last, this waits for the peers' measurements, but not for a peer that has not connected in the
    time that it needs to try `addresses` addresses of this host.
    """
    late = time.monotonic() + addresses * CONNECT_SECONDS + _LATE_SECONDS
    step("connect to the other hosts")

    def open_connection(peer: Peer) -> Connection:
        connection = Connection(peer)
        connection.try_sizes(own_number)
        return connection

    with ThreadPoolExecutor(len(peers), "call") as pool:
        connections = list(pool.map(open_connection, peers))
    step("send to the other hosts")
    _measure_rates(connections, own_number, turn, end)
    for connection in connections:
        connection.close()
    step("wait for the other hosts")
    listener.wait(len(peers), late)
    listener.close()
    return tuple(connection.cell for connection in connections)


def _measure_rates(connections: Sequence[Connection], own_number: int, turn: threading.Lock, end: float) -> None:
    """Measure the rates in an order in which the hosts form pairs. A path to a busy peer is measured later."""
    load = memoryview(os.urandom(LARGE_SIZE // 256) * 256)
    left = end - time.monotonic()
    seconds = min(_RATE_SECONDS, _SENDING_SHARE * left / (2 * len(connections)))
    # The pairs of round r are the hosts i and i ^ r.
    waiting = deque(sorted((c for c in connections if c.is_open), key=lambda c: c.peer.number ^ own_number))
    while waiting and time.monotonic() < end - seconds - STALL_SECONDS:
        connection = waiting.popleft()
        if connection.measure_rate(load, turn, first=own_number < connection.peer.number, seconds=seconds):
            connection.close()
        else:
            waiting.append(connection)
