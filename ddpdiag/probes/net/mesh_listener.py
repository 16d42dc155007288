"""A host's answers in the mesh: the protocol by which two hosts measure the way between them, and the listener.

A plain TCP connection, one way at a time. The caller sends requests of a letter and a number, the listener answers:
- hello: my number in the group, then the listener's token -> a byte. Another token ends the connection.
- data: so many bytes, then these -> a byte when all are there.
- turn: wait so many milliseconds at most for the listener's host to be free -> granted or busy.
- end of the turn, and bye: no answer.
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

from ddpdiag.probes.net.tcp_connect import listen, polled

REQUEST = struct.Struct("!cI")
TOKEN_BYTES = 16
KIB = 1 << 10
MIB = 1 << 20
# The sizes: what fits one packet, what needs many (so that a smaller MTU on the way shows), what shows the speed.
SMALL = (KIB, 64 * KIB)
LARGE = 16 * MIB

# SYN is repeated after 1 s and after 3 s: one lost SYN is forgiven.
CONNECT_SECONDS = 2.0
# TCP's third retransmission comes 1.4 s after the first loss at the latest (RTO 0.2 s, doubled each time).
STALL_SECONDS = 2.0


class Request(Enum):
    """The letters."""

    HELLO = b"h"
    DATA = b"d"
    TURN = b"t"
    END = b"e"
    BYE = b"b"


DONE = b"k"
GRANTED = b"g"
BUSY = b"w"


def request(kind: Request, number: int = 0) -> bytes:
    """A request as bytes."""
    return REQUEST.pack(kind.value, number)


def receive(sock: socket.socket, count: int, seconds: float) -> bytes:
    """Exactly so many bytes; TimeoutError if they do not come in time, ConnectionError if the peer hung up."""
    end = time.monotonic() + seconds
    parts = b""
    while len(parts) < count:
        if not polled(sock, select.POLLIN, end - time.monotonic()):
            raise TimeoutError(f"nothing for {seconds:.1f} s")
        part = sock.recv(count - len(parts))
        if not part:
            raise ConnectionResetError("the peer hung up")
        parts += part
    return parts


class Listener:
    """Listens on the first free one of `ports` (0 is any) until `end` (monotonic); OSError if none is free.

    `turn` is this host's: its holder measures while nothing else of this run disturbs.
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
        """Wait until all callers have finished; after `late` (monotonic) only for those that have connected."""
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
            kind, number = REQUEST.unpack(receive(sock, REQUEST.size, STALL_SECONDS))
            # A process of another run has another token.
            if kind == Request.HELLO.value and receive(sock, TOKEN_BYTES, STALL_SECONDS) == self.token.encode():
                sock.sendall(DONE)
                caller = int(number)
                self._note(self._came, caller)
                self._answer(sock)
        if caller is not None:
            self._note(self._gone, caller)

    def _note(self, who: set[int], caller: int) -> None:
        with self._change:
            who.add(caller)
            self._change.notify()

    def _answer(self, sock: socket.socket) -> None:
        """Obey until the caller says bye or hangs up."""
        held = False
        try:
            while True:
                kind, number = REQUEST.unpack(receive(sock, REQUEST.size, self._end - time.monotonic()))
                match Request(kind):
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
            return listen(port)
        except OSError as taken:
            error = taken
    raise error or OSError("no port to listen on")


def _swallow(sock: socket.socket, count: int) -> None:
    """Take so many bytes and say so; a peer that stops on the way is given up."""
    if count > LARGE:
        raise ConnectionAbortedError(f"{count} bytes are more than any caller sends")
    buffer = bytearray(min(count, MIB))
    sock.settimeout(2 * STALL_SECONDS)
    while count:
        got = sock.recv_into(buffer, min(count, len(buffer)))
        if not got:
            raise ConnectionResetError("the peer hung up")
        count -= got
    sock.sendall(DONE)
