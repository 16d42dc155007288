"""A host's part in the mesh: it answers the callers of its group, and measures the connections to all others."""

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ddpdiag.probes.net.mesh.connection import Cell, Connection, Peer
from ddpdiag.probes.net.mesh.protocol import (
    BUSY,
    CLOCKS,
    CONNECT_SECONDS,
    DONE,
    GRANTED,
    LARGE,
    MIB,
    REQUEST,
    STALL_SECONDS,
    TOKEN_BYTES,
    Request,
    receive,
)

# Beyond their time for connecting: all pass the gate together, but on busy hosts.
_LATE_SECONDS = 1.0
# On a link of 100 Mbit/s these are 6 MB, enough to know the rate.
_RATE_SECONDS = 0.5
# Of the time that is left, the share for sending: others wait for their turn meanwhile.
_SENDING_SHARE = 0.4


class Listener:
    """Listens on the first free one of `ports` (0 is any) until `end` (monotonic); OSError if none is free.

    `turn` is this host's: whoever holds it measures, and nothing else of ours disturbs.
    """

    def __init__(self, ports: Iterable[int], turn: threading.Lock, end: float) -> None:
        self.token = os.urandom(TOKEN_BYTES // 2).hex()
        self._turn = turn
        self._end = end
        self._server = _listen(ports)
        self.port = int(self._server.getsockname()[1])
        self._change = threading.Condition()
        self._came: set[int] = set()
        self._gone: set[int] = set()
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def wait(self, callers: int, late: float) -> None:
        """Until all callers have come and gone; after `late` (monotonic) only those are waited for that came."""
        with self._change:
            while len(self._gone) < callers and (now := time.monotonic()) < self._end:
                if now >= late and self._gone == self._came:
                    return
                self._change.wait(min(0.1 if now >= late else late - now, self._end - now))

    def close(self) -> None:
        """Stop listening; connections that are still open end with their callers."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(sock,), name="serve", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        caller = None
        with sock, contextlib.suppress(OSError, ValueError):  # ValueError: a letter that is no request
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller = self._greet(sock)
            if caller is not None:
                self._note(self._came, caller)
                self._answer(sock)
        if caller is not None:
            self._note(self._gone, caller)

    def _note(self, who: set[int], caller: int) -> None:
        with self._change:
            who.add(caller)
            self._change.notify()

    def _greet(self, sock: socket.socket) -> int | None:
        """The caller's number, or None for a stranger."""
        kind, number = REQUEST.unpack(receive(sock, REQUEST.size, STALL_SECONDS))
        if kind != Request.HELLO.value or receive(sock, TOKEN_BYTES, STALL_SECONDS) != self.token.encode():
            return None
        sock.sendall(DONE)
        return int(number)

    def _answer(self, sock: socket.socket) -> None:
        """Obey until the caller says bye or hangs up."""
        held = False
        try:
            while True:
                kind, number = REQUEST.unpack(receive(sock, REQUEST.size, self._end - time.monotonic()))
                match Request(kind):
                    case Request.PING:
                        sock.sendall(CLOCKS.pack(time.time(), time.time()))
                    case Request.DATA:
                        _swallow(sock, number)
                    case Request.TURN:
                        held = held or self._turn.acquire(timeout=min(number / 1000, 10.0))
                        sock.sendall(GRANTED if held else BUSY)
                    case Request.END if held:
                        self._turn.release()
                        held = False
                    case _:
                        return
        finally:
            if held:
                self._turn.release()


def _listen(ports: Iterable[int]) -> socket.socket:
    error: OSError | None = None
    for port in ports:
        try:
            return _bind(port)
        except OSError as taken:
            error = taken
    raise error or OSError("no port to listen on")


def _bind(port: int) -> socket.socket:
    """On all addresses of both families, as far as this host has them."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 can be switched off while the kernel knows it
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    return socket.create_server(("", port), backlog=128)


def _swallow(sock: socket.socket, count: int) -> None:
    """Take so many bytes and say so; a peer that stops on the way is given up."""
    if count > LARGE:
        raise ConnectionAbortedError(f"{count} bytes are more than anybody sends")
    buffer = bytearray(min(count, MIB))
    sock.settimeout(2 * STALL_SECONDS)
    while count:
        got = sock.recv_into(buffer, min(count, len(buffer)))
        if not got:
            raise ConnectionResetError("the peer hung up")
        count -= got
    sock.sendall(DONE)


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
    """One cell for each peer. Done by `end` (monotonic), whatever the others do, and not before they need us no more.
    `addresses` is how many of ours a caller tries; whoever has not come after that will not come any more.

    First all ways at once with little data, so that blocked ones wait together; then the rates one by one.
    """
    late = time.monotonic() + addresses * CONNECT_SECONDS + _LATE_SECONDS
    step("connect to the other hosts")
    connections = _connected(peers, own_number)
    step("send to the other hosts")
    _transfer(connections, own_number, turn, end)
    for connection in connections:
        connection.close()
    step("wait for the other hosts")
    listener.wait(len(peers), late)
    listener.close()
    return tuple(connection.cell for connection in connections)


def _connected(peers: Sequence[Peer], own_number: int) -> list[Connection]:
    def connected(peer: Peer) -> Connection:
        connection = Connection(peer)
        connection.try_sizes(own_number)
        return connection

    with ThreadPoolExecutor(len(peers), "call") as pool:
        return list(pool.map(connected, peers))


def _transfer(connections: Sequence[Connection], own_number: int, turn: threading.Lock, end: float) -> None:
    """The rates, in an order in which all hosts are busy in pairs; who finds a peer busy comes back later."""
    load = memoryview(os.urandom(LARGE // 256) * 256)
    left = end - time.monotonic()
    seconds = min(_RATE_SECONDS, _SENDING_SHARE * left / (2 * len(connections)))
    # Numbers that differ by the same bits form pairs: in round r, i meets i ^ r, who meets i.
    waiting = deque(sorted((c for c in connections if c.is_open), key=lambda c: c.peer.number ^ own_number))
    while waiting and time.monotonic() < end - seconds - STALL_SECONDS:
        connection = waiting.popleft()
        if connection.transfer(load, turn, first=own_number < connection.peer.number, seconds=seconds):
            connection.close()
        else:
            waiting.append(connection)
