"""The sockets of the control channel and their keys, the encoding of messages, and batches of messages."""

import hashlib
import hmac
from collections.abc import Iterator
from typing import TypeVar

import msgspec
import zmq
from msgspec import Struct
from zmq.utils import z85

from ddpdiag import __version__
from ddpdiag.runtime.control.messages import MAX_MESSAGE_BYTES, Hello, MessageToRank, MessageToRank0, OtherVersionHello

_rank_0_decoder: msgspec.json.Decoder[MessageToRank0] = msgspec.json.Decoder(MessageToRank0)
_rank_decoder: msgspec.json.Decoder[MessageToRank] = msgspec.json.Decoder(MessageToRank)
_hello_decoder: msgspec.json.Decoder[OtherVersionHello] = msgspec.json.Decoder(OtherVersionHello)

LINGER_MS = 500  # time in which a closed socket still sends its last messages
HANDSHAKE_MS = 30_000  # libzmq's default
_MAX_HANDSHAKE_TIMERS = 1_000
# A peer that has not authenticated can make this process hold one frame: 64 MiB for 1,000 connections.
_MAX_FRAME_BYTES = 64 << 10
# CURVE adds 33 bytes to a frame (rfc.zeromq.org/spec/26).
_PART_BYTES = _MAX_FRAME_BYTES - 1024


def split_frames(data: bytes) -> list[bytes]:
    """Split an encoded message into frames. No frame is empty."""
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
    # Longer than membership.Patience, so that a silent peer is reported before ZeroMQ closes its connection.
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
    return socket


def new_router(wire: "Wire", connections: int = 0) -> "zmq.Socket[bytes]":
    """A socket to which the ranks of a run connect, each with its identity. `connections` is their expected number."""
    socket = new_socket(zmq.ROUTER)
    wire.lock_server(socket)
    # The heartbeats of supervisors are enough. With a heartbeat timer in this socket, the process would end if a
    # connection broke after another one had taken its identity (libzmq 4.3.5, stream_engine_base.cpp). A handshake
    # timer closes connections that stay silent. To end a timer libzmq searches all timers (poller_base.cpp,
    # cancel_timer): with 10,000 connections this kept a core busy, and the handshakes never ended.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS if connections <= _MAX_HANDSHAKE_TIMERS else 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a new connection replaces a broken one with the same identity
    return socket


class _Envelope(Struct, frozen=True):
    run_id: str
    body: msgspec.Raw


_envelope_decoder: msgspec.json.Decoder[_Envelope] = msgspec.json.Decoder(_Envelope)


class Wire:
    """Encodes and decodes messages with the run id, and locks sockets with the run's `secret`, if there is one.

    Locked sockets use CURVE (rfc.zeromq.org/spec/26): messages are encrypted, and cannot be replayed or reflected. Rank
    0's long-term key pair is derived from secret and run id. Its public key is never sent, so that only holders of the
    secret can connect.
    """

    def __init__(self, run_id: str, secret: bytes = b"") -> None:
        self._run_id = run_id
        self._secret = secret
        self._last_encoded: tuple[MessageToRank0 | MessageToRank, bytes] | None = None

    @property
    def is_locked(self) -> bool:
        """Whether the run has a secret."""
        return bool(self._secret)

    def lock_server(self, socket: "zmq.Socket[bytes]") -> None:
        if self.is_locked:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._rank_0_key())

    def lock_client(self, socket: "zmq.Socket[bytes]") -> None:
        if self.is_locked:
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
        """The address of a host's relay, an abstract UNIX socket whose name only holders of the secret can compute."""
        text = b"ddpdiag relay\0" + self._run_id.encode("utf-8", "surrogateescape")
        return f"ipc://@ddpdiag-relay-{hmac.new(self._secret, text, hashlib.sha256).hexdigest()[:32]}"

    def encode(self, message: MessageToRank0 | MessageToRank) -> bytes:
        """Encode a message. If it is the same object as in the last call, the same bytes are returned again."""
        last = self._last_encoded  # read once, because rank 0's supervisor runs in another thread
        if last is not None and last[0] is message:
            return last[1]
        data = msgspec.json.encode(_Envelope(self._run_id, msgspec.Raw(msgspec.json.encode(message))))
        self._last_encoded = message, data
        return data

    def decode_for_rank_0(self, data: bytes) -> MessageToRank0 | OtherVersionHello | None:
        """Decode a message to rank 0, or only the version of another version's hello. None if it is not of this run."""
        body = self._body(data)
        if body is None:
            return None
        message = _decode(_rank_0_decoder, body)
        if message is None or (isinstance(message, Hello) and message.version != __version__):
            return _decode(_hello_decoder, body)
        return message

    def decode_for_rank(self, data: bytes) -> MessageToRank | None:
        """Decode a message of rank 0. Returns None for a message of another run and for invalid data."""
        body = self._body(data)
        return None if body is None else _decode(_rank_decoder, body)

    def _body(self, data: bytes) -> bytes | None:
        envelope = _decode(_envelope_decoder, data) if len(data) <= MAX_MESSAGE_BYTES else None
        return None if envelope is None or envelope.run_id != self._run_id else bytes(envelope.body)


T = TypeVar("T")


def _decode(decoder: "msgspec.json.Decoder[T]", data: bytes) -> T | None:
    """Decode a message. Returns None for invalid data, because a port scanner must not end a run."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


# Well below MAX_MESSAGE_BYTES: one more message, which may be large, must fit.
_BATCH_BYTES = 1 << 20
# Parcels: pairs of an encoded message and the identities of the ranks that sent it or will receive it.
_Parcels = list[tuple[list[bytes], bytes]]
_parcels_decoder: msgspec.msgpack.Decoder[_Parcels] = msgspec.msgpack.Decoder(_Parcels)


class Batch:
    """Encoded messages from or to several ranks on one connection. Equal consecutive messages are merged."""

    def __init__(self) -> None:
        self._parcels: list[_Parcels] = []
        self._bytes = 0

    def add(self, identity: bytes, data: bytes) -> None:
        if not self._parcels or self._bytes + len(data) > _BATCH_BYTES:
            self._parcels.append([])
            self._bytes = 0
        parcels = self._parcels[-1]
        if parcels and parcels[-1][1] == data:
            parcels[-1][0].append(identity)
        else:
            parcels.append(([identity], data))
            self._bytes += len(data)

    def packed_messages(self) -> Iterator[list[bytes]]:
        """Yield the batch as messages of about 1 MiB, each as its frames. An empty first frame marks a batch."""
        for parcels in self._parcels:
            yield [b"", *split_frames(msgspec.msgpack.encode(parcels))]


def unpack_batch(data: bytes) -> _Parcels:
    """The messages of a batch, each with the identities of its ranks. The list is empty if the data is no batch."""
    try:
        return _parcels_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return []
