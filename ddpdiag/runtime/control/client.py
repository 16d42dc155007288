"""A supervisor's end of the control channel: its own connection to rank 0, or one through its host's relay."""

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
    """A supervisor's connection to rank 0. `heard` is the time of the last message."""

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
        """The messages that have arrived; does not wait."""
        while self.socket.poll(0):
            message = self._decoded(self.socket.recv_multipart(zmq.NOBLOCK))
            if message is not None:
                self.heard = time.monotonic()
                yield message

    def _decoded(self, frames: list[bytes]) -> Downward | None:
        return self._wire.decode_downward(b"".join(frames)) if frames[0] else None

    def close(self) -> None:
        """Close; what is still to be sent is sent for at most 0.5 s."""
        self.socket.close(linger=LAST_WORDS_MS)


class RelayedClient(ControlClient):
    """A supervisor's connection through its host's relay; if the relay does not answer, it connects to rank 0 itself.

    `arrival` is sent again in that case. `relay` is set in the process that runs the relay. `is_declined`: a relay
    exists, but does not pass on messages.
    """

    def __init__(self, wire: Wire, arrival: Arrival, relay: HostRelay | None = None) -> None:
        super().__init__(connected(wire.relay_address, wire, arrival), wire)
        self.arrival = arrival
        self._relay = relay
        self._path: Path | None = None
        self._leaving: Leaving | None = None
        self._relayed = True
        self.is_declined = False
        self._asked: float | None = None  # time of a question without an answer yet
        self._answered_at = 0.0
        self._ask()

    def is_answered(self, seconds: float) -> bool:
        """Wait for an answer of the relay, and return whether it came within so many seconds."""
        if self.socket.poll(round(1000 * seconds)):
            self._decoded(self.socket.recv_multipart(zmq.NOBLOCK))
        return self._path is not None

    def send(self, message: Upward) -> None:
        """Send without waiting. After `Leaving` the relay must answer soon, or this rank connects to rank 0 itself."""
        super().send(message)
        if isinstance(message, Leaving):
            self._leaving = message
            self._ask()

    def receive(self) -> Iterator[Downward]:
        """The messages that have arrived. Asks the relay for a sign of life now and then; without one, leaves it."""
        yield from super().receive()
        now = time.monotonic()
        patience = DEADLINES.relay if self._leaving is None else DEADLINES.relay_leaving
        if not self._relayed or self._relay is not None:
            return
        if self._asked is not None and now - self._asked > patience:
            self._leave_relay()
        elif self._asked is None and now - self._answered_at > DEADLINES.ask_relay:
            self._ask()

    def _decoded(self, frames: list[bytes]) -> Downward | None:
        if frames == BYE and self._relay is None:
            self.is_declined = self._path is None
            self._leave_relay()
        elif (path := Path.of(frames)) is not None:
            self._path, self._asked, self._answered_at = path, None, time.monotonic()
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
        """Close; what is still to be sent is sent for at most 0.5 s. A relay waits for the other ranks of its host."""
        if self._relayed:
            self._send_frames(BYE)
        super().close()
        if self._relay is not None:
            self._relay.wait()


def identity_of(arrival: Arrival) -> bytes:
    """The name under which a process connects; two processes with the same rank differ by their nonce."""
    return f"{arrival.place.rank}-{arrival.nonce}".encode()


def connected(url: str, wire: Wire, arrival: Arrival) -> "zmq.Socket[bytes]":
    """A new socket of this process that connects to `url` under its name."""
    socket = new_socket(zmq.DEALER)
    wire.lock_client(socket)
    socket.setsockopt(zmq.ROUTING_ID, identity_of(arrival))
    socket.connect(url)
    return socket
