"""What goes over the wire between supervisors and rank 0: the encoding, the run id, and the keys of a run's sockets."""

import hashlib
import hmac
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


class _Framed(Struct, frozen=True):
    run_id: str
    body: msgspec.Raw


_framed: msgspec.json.Decoder[_Framed] = msgspec.json.Decoder(_Framed)


class Wire:
    """Stamps messages with the run id, and locks sockets with the run's `secret`, if it has one.

    Locked sockets speak CURVE (rfc.zeromq.org/spec/26): encrypted, each message once and in one direction. Rank 0's
    long-term key pair is derived from secret and run id; its public key never crosses the wire, so that only who holds
    the secret can begin to talk.
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

    def encode(self, message: Upward | Downward) -> bytes:
        """The message as bytes for the wire; one that goes to many is written once, if it is the same object."""
        last = self._last  # read once: rank 0's own supervisor is another thread
        if last is not None and last[0] is message:
            return last[1]
        framed = msgspec.json.encode(_Framed(self._run_id, msgspec.Raw(msgspec.json.encode(message))))
        self._last = message, framed
        return framed

    def decode_upward(self, data: bytes) -> Upward | AnyHello | None:
        """A supervisor's message, or None if it is not of this run."""
        body = self._body(data)
        if body is None:
            return None
        known = _decode(_up, body)
        if known is None or (isinstance(known, Hello) and known.version != __version__):
            return _decode(_any_hello, body)
        return known

    def decode_downward(self, data: bytes) -> Downward | None:
        """Rank 0's message, or None if it is not of this run."""
        body = self._body(data)
        return None if body is None else _decode(_down, body)

    def _body(self, data: bytes) -> bytes | None:
        framed = _decode(_framed, data) if len(data) <= MAX_MESSAGE_BYTES else None
        return None if framed is None or framed.run_id != self._run_id else bytes(framed.body)


T = TypeVar("T")


def _decode(decoder: "msgspec.json.Decoder[T]", data: bytes) -> T | None:
    """The message, or None for noise: a port scanner must not end a run."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
