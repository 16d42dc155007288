"""What two hosts say to each other to measure the way between them: a plain TCP connection, one way at a time.

The caller sends requests of a letter and a number, the listener answers:
- hello: my number in the group, then the listener's token -> a byte. A stranger's token ends the connection.
- ping -> the listener's clock at receipt and at reply, as NTP does it.
- data: so many bytes, then these -> a byte when all are there.
- turn: wait so many milliseconds at most for the listener's host to be free -> granted or busy.
- end of the turn, and bye: no answer.
"""

import select
import socket
import struct
import time
from enum import Enum

REQUEST = struct.Struct("!cI")
CLOCKS = struct.Struct("!dd")
TOKEN_BYTES = 16
KIB = 1 << 10
MIB = 1 << 20
# The ladder: what fits one packet, what needs many (so that a smaller MTU on the way shows), what shows the speed.
SMALL = (KIB, 64 * KIB)
LARGE = 16 * MIB

# SYN is repeated after 1 s and after 3 s: one lost SYN is forgiven.
CONNECT_SECONDS = 2.0
# TCP's third retransmission comes 1.4 s after the first loss at the latest (RTO 0.2 s, doubled each time).
STALL_SECONDS = 2.0


class Request(Enum):
    """The letters."""

    HELLO = b"h"
    PING = b"p"
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
        wait_for(sock, select.POLLIN, end - time.monotonic())
        part = sock.recv(count - len(parts))
        if not part:
            raise ConnectionResetError("the peer hung up")
        parts += part
    return parts


def wait_for(sock: socket.socket, events: int, seconds: float) -> int:
    """Poll's events on the socket; TimeoutError if there are none in time."""
    poll = select.poll()  # not select: it fails on descriptors over 1023
    poll.register(sock, events)
    ready = poll.poll(max(seconds, 0.0) * 1000)
    if not ready:
        raise TimeoutError(f"nothing for {seconds:.1f} s")
    return ready[0][1]
