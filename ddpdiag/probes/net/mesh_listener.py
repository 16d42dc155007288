"""The protocol by which two hosts of the mesh measure the path between them, and the listener of a host.

The host that measures, the caller, connects to the listener of the other host by TCP. The caller sends requests, each a
letter and a number, and the listener answers:
- hello: the caller's number in the group, then the listener's token -> DONE. A wrong token ends the connection.
- data: a number of bytes, then the bytes -> DONE, when all bytes have arrived.
- turn: the most milliseconds to wait for the turn of the listener's host, which is a lock -> GRANTED or BUSY.
- end (releases the turn) and bye: no answer.
"""

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable
from enum import Enum

from ddpdiag.probes.net.tcp_connect import listen, poll_socket

REQUEST = struct.Struct("!cI")
TOKEN_BYTES = 16
KIB = 1 << 10
MIB = 1 << 20
# The sizes in bytes: one that fits into a packet, one that needs many (they fail at a smaller MTU), one for the rate.
SMALL_SIZES = (KIB, 64 * KIB)
LARGE_SIZE = 16 * MIB

# TCP repeats a SYN after 1 s and after 3 s, so a connect with this time limit tolerates one lost SYN.
CONNECT_SECONDS = 2.0
# The longest time without progress. TCP's third retransmission is at most 1.4 s after a loss (RTO 0.2 s, then doubled).
STALL_SECONDS = 2.0


class Request(Enum):
    """The kinds of requests, each with its letter."""

    HELLO = b"h"
    DATA = b"d"
    TURN = b"t"
    END = b"e"
    BYE = b"b"


DONE = b"k"
GRANTED = b"g"
BUSY = b"w"


def request(kind: Request, number: int = 0) -> bytes:
    return REQUEST.pack(kind.value, number)


def receive(sock: socket.socket, count: int, seconds: float) -> bytes:
    """Receive exactly `count` bytes. TimeoutError after `seconds`, ConnectionError if the connection is closed."""
    end = time.monotonic() + seconds
    parts = b""
    while len(parts) < count:
        if not poll_socket(sock, select.POLLIN, end - time.monotonic()):
            raise TimeoutError(f"nothing for {seconds:.1f} s")
        part = sock.recv(count - len(parts))
        if not part:
            raise ConnectionResetError("the peer hung up")
        parts += part
    return parts


class Listener:
    """Listens on the first free port of `ports` (0: any port) until `end` (monotonic); OSError if none is free.

    `turn` is a lock: its holder alone may send over the network of this host.
    """

    def __init__(self, ports: Iterable[int], turn: threading.Lock, end: float) -> None:
        self.token = os.urandom(TOKEN_BYTES // 2).hex()
        self._turn = turn
        self._end = end
        self._server = _listen(ports)
        self.port = int(self._server.getsockname()[1])
        self._changed = threading.Condition()
        self._connected: set[int] = set()
        self._finished: set[int] = set()
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def wait(self, callers: int, late: float) -> None:
        """Wait until so many `callers` have finished; after `late` (monotonic), only for those that have connected."""
        with self._changed:
            while len(self._finished) < callers and (now := time.monotonic()) < self._end:
                if now >= late and self._finished == self._connected:
                    return
                self._changed.wait(min(0.1 if now >= late else late - now, self._end - now))

    def close(self) -> None:
        """Stop listening. Open connections stay open until their callers close them."""
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
            kind, number = REQUEST.unpack(receive(sock, REQUEST.size, STALL_SECONDS))
            # A process of another run has another token.
            if kind == Request.HELLO.value and receive(sock, TOKEN_BYTES, STALL_SECONDS) == self.token.encode():
                sock.sendall(DONE)
                caller = int(number)
                self._add(self._connected, caller)
                self._answer_requests(sock)
        if caller is not None:
            self._add(self._finished, caller)

    def _add(self, callers: set[int], caller: int) -> None:
        with self._changed:
            callers.add(caller)
            self._changed.notify()

    def _answer_requests(self, sock: socket.socket) -> None:
        """Answer requests until the caller sends bye. OSError if the caller closes the connection without a bye."""
        held = False
        try:
            while True:
                kind, number = REQUEST.unpack(receive(sock, REQUEST.size, self._end - time.monotonic()))
                match Request(kind):
                    case Request.DATA:
                        _discard(sock, number)
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
            return listen(port)
        except OSError as taken:
            error = taken
    raise error or OSError("no port to listen on")


def _discard(sock: socket.socket, count: int) -> None:
    """Receive and discard `count` bytes, then send DONE. OSError if the caller stops before."""
    if count > LARGE_SIZE:
        raise ConnectionAbortedError(f"{count} bytes are more than any caller sends")
    buffer = bytearray(min(count, MIB))
    sock.settimeout(2 * STALL_SECONDS)
    while count:
        got = sock.recv_into(buffer, min(count, len(buffer)))
        if not got:
            raise ConnectionResetError("the peer hung up")
        count -= got
    sock.sendall(DONE)
