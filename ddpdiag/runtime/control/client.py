"""A supervisor's end of the control channel: a connection to rank 0, either direct or through its host's relay."""

import contextlib
import time
from collections.abc import Iterator

import zmq
from msgspec import structs

from ddpdiag.model import Arrival
from ddpdiag.runtime.control.messages import Hello, Leaving, MessageToRank, MessageToRank0
from ddpdiag.runtime.control.relay import GOODBYE, ROUTE_REQUEST, HostRelay, Route
from ddpdiag.runtime.control.wire import LINGER_MS, Wire, new_socket, split_frames
from ddpdiag.runtime.deadlines import DEADLINES


class ControlClient:
    """A supervisor's connection to rank 0. `last_message_at` is the monotonic time of rank 0's last message."""

    def __init__(self, socket: "zmq.Socket[bytes]", wire: Wire) -> None:
        self.socket = socket
        self.last_message_at = time.monotonic()
        self._wire = wire

    def send(self, message: MessageToRank0) -> None:
        self._send_frames(split_frames(self._wire.encode(message)))

    def _send_frames(self, frames: list[bytes]) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send_multipart(frames, zmq.NOBLOCK)

    def receive(self) -> Iterator[MessageToRank]:
        """Yield the messages that have arrived. Does not wait."""
        while self.socket.poll(0):
            message = self._decode(self.socket.recv_multipart(zmq.NOBLOCK))
            if message is not None:
                self.last_message_at = time.monotonic()
                yield message

    def _decode(self, frames: list[bytes]) -> MessageToRank | None:
        return self._wire.decode_for_rank(b"".join(frames)) if frames[0] else None

    def close(self) -> None:
        """Close the connection. Unsent messages are still sent for at most 0.5 s."""
        self.socket.close(linger=LINGER_MS)


class RelayedClient(ControlClient):
    """A supervisor's connection to rank 0 through its host's relay.

    If the relay ends or stops answering, the client connects to rank 0 directly, and sends its hello again. `relay` is
    set only in the process that runs the relay. `is_declined` is True if the relay ended before it sent its `Route`.
    """

    def __init__(self, wire: Wire, arrival: Arrival, relay: HostRelay | None = None) -> None:
        super().__init__(connect_socket(wire.relay_address, wire, arrival), wire)
        self.arrival = arrival
        self._relay = relay
        self._route: Route | None = None
        self._leaving_message: Leaving | None = None
        self._uses_relay = True
        self.is_declined = False
        self._asked_at: float | None = None  # time of the request that the relay has not answered; None if it has
        self._answered_at = 0.0
        self._ask_relay()

    def wait_for_answer(self, seconds: float) -> bool:
        """Wait at most `seconds` for a message of the relay. Returns whether the relay has sent its `Route` by now."""
        if self.socket.poll(round(1000 * seconds)):
            self._decode(self.socket.recv_multipart(zmq.NOBLOCK))
        return self._route is not None

    def send(self, message: MessageToRank0) -> None:
        """Send without waiting. After `Leaving`, wait for an answer of the relay only 0.25 s instead of 1.5 s."""
        super().send(message)
        if isinstance(message, Leaving):
            self._leaving_message = message
            self._ask_relay()

    def receive(self) -> Iterator[MessageToRank]:
        """Yield the messages that have arrived. Connects to rank 0 itself if the relay does not answer."""
        yield from super().receive()
        now = time.monotonic()
        patience = DEADLINES.relay_answer if self._leaving_message is None else DEADLINES.relay_answer_leaving
        if not self._uses_relay or self._relay is not None:
            return
        if self._asked_at is not None and now - self._asked_at > patience:
            self._leave_relay()
        elif self._asked_at is None and now - self._answered_at > DEADLINES.ask_relay:
            self._ask_relay()

    def _decode(self, frames: list[bytes]) -> MessageToRank | None:
        if frames == GOODBYE and self._relay is None:
            self.is_declined = self._route is None
            self._leave_relay()
        elif (route := Route.from_frames(frames)) is not None:
            self._route, self._asked_at, self._answered_at = route, None, time.monotonic()
            self.arrival = structs.replace(self.arrival, address=route.source_address)
        return super()._decode(frames)

    def _ask_relay(self) -> None:
        if self._uses_relay:
            self._asked_at = time.monotonic()
            self._send_frames(ROUTE_REQUEST)

    def _leave_relay(self) -> None:
        if self._uses_relay and self._route is not None:
            self._uses_relay = False
            self.socket.close()
            self.socket = connect_socket(self._route.url, self._wire, self.arrival)
            self.send(Hello(self.arrival))
            if self._leaving_message is not None:
                self.send(self._leaving_message)

    def close(self) -> None:
        """Close the connection. In the process that runs the relay, also wait at most 1 s for the relay to end."""
        if self._uses_relay:
            self._send_frames(GOODBYE)
        super().close()
        if self._relay is not None:
            self._relay.wait()


def identity_of(arrival: Arrival) -> bytes:
    """The ZeroMQ identity of a process. Two processes with the same rank differ in their nonce."""
    return f"{arrival.place.rank}-{arrival.nonce}".encode()


def connect_socket(url: str, wire: Wire, arrival: Arrival) -> "zmq.Socket[bytes]":
    """A new socket that connects to `url` with the identity of this process."""
    socket = new_socket(zmq.DEALER)
    wire.lock_client(socket)
    socket.setsockopt(zmq.ROUTING_ID, identity_of(arrival))
    socket.connect(url)
    return socket
