"""A supervisor's end of the control channel, on a connection of its own or through its host's relay."""

import contextlib
import time
from collections.abc import Iterator

import zmq
from msgspec import structs

from ddpdiag.model import Arrival
from ddpdiag.runtime.control.messages import Downward, Hello, Leaving, Upward
from ddpdiag.runtime.control.relay import ASK, BYE, HostRelay, Path
from ddpdiag.runtime.control.wire import LAST_WORDS_MS, Wire, new_socket, parts
from ddpdiag.runtime.deadlines import DEADLINES


class ControlClient:
    """A supervisor's end, once rank 0 has answered its hello."""

    def __init__(self, socket: "zmq.Socket[bytes]", wire: Wire) -> None:
        self.socket = socket
        self.heard = time.monotonic()
        self._wire = wire

    def send(self, message: Upward) -> None:
        """Send without waiting."""
        self._send_frames(parts(self._wire.encode(message)))

    def _send_frames(self, frames: list[bytes]) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send_multipart(frames, zmq.NOBLOCK)

    def receive(self) -> Iterator[Downward]:
        """The messages that have arrived so far."""
        while self.socket.poll(0):
            message = self._decoded(self.socket.recv_multipart(zmq.NOBLOCK))
            if message is not None:
                self.heard = time.monotonic()
                yield message

    def _decoded(self, frames: list[bytes]) -> Downward | None:
        return self._wire.decode_downward(b"".join(frames)) if frames[0] else None

    def close(self) -> None:
        """Close, after a moment for last words."""
        self.socket.close(linger=LAST_WORDS_MS)


class RelayedClient(ControlClient):
    """A supervisor's end whose host's relay passes messages on; once that does not answer, a connection of its own.

    `arrival` is what rank 0 learns then again. `relay` is the relay itself, in the process that has it. `is_declined`
    says that there is one, which does not pass on messages.
    """

    def __init__(self, wire: Wire, arrival: Arrival, relay: HostRelay | None = None) -> None:
        super().__init__(connected(wire.relay_address, wire, arrival), wire)
        self.arrival = arrival
        self._relay = relay
        self._path: Path | None = None
        self._leaving: Leaving | None = None
        self._relayed = True
        self.is_declined = False
        self._asked: float | None = None  # when, if there was no answer yet
        self._answered = 0.0
        self._ask()

    def is_answered(self, seconds: float) -> bool:
        """Whether a relay answers within so many seconds."""
        if self.socket.poll(round(1000 * seconds)):
            self._decoded(self.socket.recv_multipart(zmq.NOBLOCK))
        return self._path is not None

    def send(self, message: Upward) -> None:
        """Send without waiting. A relay that was killed just now must not keep back why this rank is leaving."""
        super().send(message)
        if isinstance(message, Leaving):
            self._leaving = message
            self._ask()

    def receive(self) -> Iterator[Downward]:
        """The messages that have arrived so far."""
        yield from super().receive()
        now = time.monotonic()
        patience = DEADLINES.relay if self._leaving is None else DEADLINES.relay_leaving
        if not self._relayed or self._relay is not None:
            return
        if self._asked is not None and now - self._asked > patience:
            self._leave_relay()
        elif self._asked is None and now - self._answered > DEADLINES.ask_relay:
            self._ask()

    def _decoded(self, frames: list[bytes]) -> Downward | None:
        if frames == BYE and self._relay is None:
            self.is_declined = self._path is None
            self._leave_relay()
        elif (path := Path.of(frames)) is not None:
            self._path, self._asked, self._answered = path, None, time.monotonic()
            self.arrival = structs.replace(self.arrival, address=path.source)
        return super()._decoded(frames)

    def _ask(self) -> None:
        if self._relayed:
            self._asked = time.monotonic()
            self._send_frames(ASK)

    def _leave_relay(self) -> None:
        if self._relayed and self._path is not None:
            self._relayed = False
            self.socket.close()
            self.socket = connected(self._path.url, self._wire, self.arrival)
            self.send(Hello(self.arrival))
            if self._leaving is not None:
                self.send(self._leaving)

    def close(self) -> None:
        """Close, after a moment for last words; a relay waits for those of its host's other ranks."""
        if self._relayed:
            self._send_frames(BYE)
        super().close()
        if self._relay is not None:
            self._relay.wait()


def identity_of(arrival: Arrival) -> bytes:
    """The name under which a process connects: another one with its rank has another nonce."""
    return f"{arrival.place.rank}-{arrival.nonce}".encode()


def connected(url: str, wire: Wire, arrival: Arrival) -> "zmq.Socket[bytes]":
    """A socket of this process, under its name."""
    socket = new_socket(zmq.DEALER)
    wire.lock_client(socket)
    socket.setsockopt(zmq.ROUTING_ID, identity_of(arrival))
    socket.connect(url)
    return socket
