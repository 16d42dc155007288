"""The wire between supervisors and rank 0: sockets and their keys, the encoding of messages, and batches of them."""

import hashlib
import hmac
from collections.abc import Iterator
from typing import TypeVar

import msgspec
import zmq
from msgspec import Struct
from zmq.utils import z85

from ddpdiag import __version__
from ddpdiag.runtime.control.messages import MAX_MESSAGE_BYTES, AnyHello, Downward, Hello, Upward

_up: msgspec.json.Decoder[Upward] = msgspec.json.Decoder(Upward)
_down: msgspec.json.Decoder[Downward] = msgspec.json.Decoder(Downward)
_any_hello: msgspec.json.Decoder[AnyHello] = msgspec.json.Decoder(AnyHello)

LAST_WORDS_MS = 500
HANDSHAKE_MS = 30_000  # libzmq's default
_MOST_HANDSHAKE_TIMERS = 1_000
# A peer that has not authenticated can make this process hold one frame: 64 MiB for 1,000 connections.
_MAX_FRAME_BYTES = 64 << 10
# CURVE adds 33 bytes to a frame (rfc.zeromq.org/spec/26).
_PART_BYTES = _MAX_FRAME_BYTES - 1024


def parts(data: bytes) -> list[bytes]:
    """The frames of a message, none of them empty; joined they are the message."""
    return [data[start : start + _PART_BYTES] for start in range(0, len(data), _PART_BYTES)]


def new_socket(kind: int) -> "zmq.Socket[bytes]":
    """A ZeroMQ socket with bounded frames, unbounded queues, IPv4 and IPv6, and heartbeats."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
    # Longer than the patience of the membership, which reports a silent peer with a sentence before ZeroMQ cuts it off.
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
    return socket


def new_router(wire: "Wire", connections: int = 0) -> "zmq.Socket[bytes]":
    """A socket to which the ranks of a run connect, each under its name; `connections` is the number to expect."""
    socket = new_socket(zmq.ROUTER)
    wire.lock_server(socket)
    # Supervisors' heartbeats are enough. A heartbeat's timer here would end the process if its connection broke after
    # another one had taken its name (libzmq 4.3.5, stream_engine_base.cpp). A handshake's timer closes connections that
    # stay silent. To end a timer libzmq looks through all of them (poller_base.cpp, cancel_timer): with 10,000
    # connections that kept a core busy, and the handshakes never ended.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS if connections <= _MOST_HANDSHAKE_TIMERS else 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a connection that broke is replaced by a new one of its name
    return socket


class _Framed(Struct, frozen=True):
    run_id: str
    body: msgspec.Raw


_framed: msgspec.json.Decoder[_Framed] = msgspec.json.Decoder(_Framed)


class Wire:
    """Adds the run id to messages, and locks sockets with the run's `secret`, if it has one.

    Locked sockets use CURVE (rfc.zeromq.org/spec/26): messages are encrypted, and no one can replay or reflect them.
    Rank 0's long-term key pair is derived from secret and run id. Its public key never crosses the wire, so that only
    holders of the secret can connect.
    """

    def __init__(self, run_id: str, secret: bytes = b"") -> None:
        self._run_id = run_id
        self._secret = secret
        self._last: tuple[Upward | Downward, bytes] | None = None

    @property
    def locked(self) -> bool:
        return bool(self._secret)

    def lock_server(self, socket: "zmq.Socket[bytes]") -> None:
        """Accept only peers that hold the secret."""
        if self.locked:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._rank_0_key())

    def lock_client(self, socket: "zmq.Socket[bytes]") -> None:
        """Connect only to a server that holds the secret."""
        if self.locked:
            public, secret = zmq.curve_keypair()
            socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(self._rank_0_key()))
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)

    def _rank_0_key(self) -> bytes:
        # Any 32 bytes are a secret key of Curve25519 (RFC 7748, section 5).
        text = b"ddpdiag rank 0\0" + self._run_id.encode("utf-8", "surrogateescape")
        return z85.encode(hmac.new(self._secret, text, hashlib.sha256).digest())

    @property
    def relay_address(self) -> str:
        """Address of a host's relay: an abstract UNIX socket whose name only holders of the secret know."""
        text = b"ddpdiag relay\0" + self._run_id.encode("utf-8", "surrogateescape")
        return f"ipc://@ddpdiag-relay-{hmac.new(self._secret, text, hashlib.sha256).hexdigest()[:32]}"

    def encode(self, message: Upward | Downward) -> bytes:
        """The message as bytes for the wire. For the same object as in the last call the same bytes are returned."""
        last = self._last  # read once, because rank 0's supervisor runs in another thread
        if last is not None and last[0] is message:
            return last[1]
        framed = msgspec.json.encode(_Framed(self._run_id, msgspec.Raw(msgspec.json.encode(message))))
        self._last = message, framed
        return framed

    def decode_upward(self, data: bytes) -> Upward | AnyHello | None:
        """A supervisor's message, or None if it is not of this run; `AnyHello` for a hello of another version."""
        body = self._body(data)
        if body is None:
            return None
        known = _decode(_up, body)
        if known is None or (isinstance(known, Hello) and known.version != __version__):
            return _decode(_any_hello, body)
        return known

    def decode_downward(self, data: bytes) -> Downward | None:
        """The message of rank 0; None if it is not of this run."""
        body = self._body(data)
        return None if body is None else _decode(_down, body)

    def _body(self, data: bytes) -> bytes | None:
        framed = _decode(_framed, data) if len(data) <= MAX_MESSAGE_BYTES else None
        return None if framed is None or framed.run_id != self._run_id else bytes(framed.body)


T = TypeVar("T")


def _decode(decoder: "msgspec.json.Decoder[T]", data: bytes) -> T | None:
    """The message; None for any other data, because a port scanner must not end a run."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


# Well below MAX_MESSAGE_BYTES: one more message, which may be large, must fit.
_BATCH_BYTES = 1 << 20
_Parcels = list[tuple[list[bytes], bytes]]
_parcels: msgspec.msgpack.Decoder[_Parcels] = msgspec.msgpack.Decoder(_Parcels)


class Batch:
    """Encoded messages of several ranks for one connection; equal messages in a row are sent once."""

    def __init__(self) -> None:
        self._parcels: list[_Parcels] = []
        self._bytes = 0

    def add(self, identity: bytes, data: bytes) -> None:
        """Append a message from or to a rank."""
        if not self._parcels or self._bytes + len(data) > _BATCH_BYTES:
            self._parcels.append([])
            self._bytes = 0
        parcels = self._parcels[-1]
        if parcels and parcels[-1][1] == data:
            parcels[-1][0].append(identity)
        else:
            parcels.append(([identity], data))
            self._bytes += len(data)

    def packed(self) -> Iterator[list[bytes]]:
        """The frames of each message for the wire; the first frame is empty, which marks a batch."""
        for parcels in self._parcels:
            yield [b"", *parts(msgspec.msgpack.encode(parcels))]


def unpacked(data: bytes) -> _Parcels:
    """The messages of a batch, each with its ranks; empty if the data is not a batch."""
    try:
        return _parcels.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return []
