"""The Board: rank 0's out-of-band channel to every supervisor, over ZeroMQ and never over what is being tested."""

import contextlib
import resource
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import zmq
from msgspec import structs

from ddpdiag.errors import ExitCode, RunLost, UsageError
from ddpdiag.model import Arrival
from ddpdiag.probes.sockets import Reach, holder_of, reach, resolve
from ddpdiag.runtime.messages import MAX_MESSAGE_BYTES, Downward, Hello, Refused, Seal, Seated, Upward, Welcome

# Below the usual ephemeral range (32768-60999 on Linux), where a stranger's outgoing connection might sit, and above
# the ports that we derive for jobs (see runtime.said).
_PORTS_FROM, _PORTS = 30_000, 2_700
_CANDIDATES = 4
_LAST_WORDS_MS = 500


def board_ports(run_id: str, master_port: int | None, asked: int | None) -> tuple[int, ...]:
    """Ports to try in turn, the same on every rank: the one asked for, else some that MASTER_PORT and run id give."""
    if asked is not None:
        return (asked,)
    start = zlib.crc32(f"{run_id}:{master_port}".encode())
    ports = (_PORTS_FROM + (start + index * 1009) % _PORTS for index in range(_CANDIDATES + 1))
    return tuple(port for port in ports if port != master_port)[:_CANDIDATES]


def raise_open_files() -> None:
    """As many open files as may be: with 100 of them 200 peers connect, 89 are heard, and nothing says so."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _socket(kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
    # Longer than our own patience: who is silent is judged by us, with a sentence, not cut off by the library.
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
    return socket


class Hub:
    """Rank 0's end. Identities are ZeroMQ's; a rank is bound to one by the coordinator.

    `arrival` is this process's own: where a Board of this run listens already, that one refuses it, and RunLost is
    raised.
    """

    def __init__(self, ports: Sequence[int], seal: Seal, arrival: Arrival, *, local_only: bool = False) -> None:
        raise_open_files()
        self._seal = seal
        self._socket = _socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a connection that broke comes back under its own name
        self.port = self._bind(ports, "127.0.0.1" if local_only else "*", arrival)

    def _bind(self, ports: Sequence[int], interface: str, arrival: Arrival) -> int:
        for port in ports:
            try:
                self._socket.bind(f"tcp://{interface}:{port}")
            except zmq.ZMQError:
                _refuse_second(port, self._seal, arrival)
                continue
            return port
        self._socket.close()
        held = "; ".join(f"{port} is held by {holder_of(port) or 'an unknown process'}" for port in ports)
        raise UsageError(f"no port is free for the Board: {held}; choose another one with --board-port")

    def send(self, identity: bytes, message: Downward) -> None:
        """Send to a peer; one that is gone is noticed by its silence."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([identity, self._seal.close(message)], zmq.NOBLOCK)

    def receive(self, seconds: float) -> Iterator[tuple[bytes, Upward]]:
        """What has come, after waiting at most `seconds` for the first of it."""
        timeout = max(0, round(seconds * 1000))
        while self._socket.poll(timeout):
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            message = self._seal.open_upward(frames[-1]) if len(frames) == 2 else None
            if message is not None:
                yield frames[0], message
            timeout = 0

    def close(self) -> None:
        """Close, after a moment for last words."""
        self._socket.close(linger=_LAST_WORDS_MS)


def _refuse_second(port: int, seal: Seal, arrival: Arrival) -> None:
    """If the Board of this very run holds the port, this is a second rank 0; a stranger's port is only taken."""
    link = _greet("127.0.0.1", port, seal, arrival, None, 1.0)
    if link is not None:
        link.close()
        raise RunLost("another process of this run is rank 0 already; each process needs its own rank", ExitCode.USAGE)


@dataclass(frozen=True)
class Desk:
    """Where the Board is: rank 0's host, and the ports to try."""

    host: str
    ports: tuple[int, ...]
    wait_seconds: float
    greet_seconds: float = 2.0  # how long one port may take to prove that it is our Board


class Link:
    """A supervisor's end, once rank 0 has heard it."""

    def __init__(self, socket: zmq.Socket[bytes], seal: Seal) -> None:
        self.socket = socket
        self.heard = time.monotonic()
        self._seal = seal

    def send(self, message: Upward) -> None:
        """Send without waiting."""
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send(self._seal.close(message), zmq.NOBLOCK)

    def receive(self) -> Iterator[Downward]:
        """What has come so far."""
        while self.socket.poll(0):
            message = self._seal.open_downward(self.socket.recv(zmq.NOBLOCK))
            if message is not None:
                self.heard = time.monotonic()
                yield message

    def close(self) -> None:
        """Close, after a moment for last words."""
        self.socket.close(linger=_LAST_WORDS_MS)


_SENTENCES = {
    Reach.ACCEPTED: "something accepts connections there, but it is not the Board of this run",
    Reach.REFUSED: "the connection is refused: nobody listens there",
    Reach.DROPPED: "no answer: a firewall drops the packets, or the host is down",
    Reach.UNREACHABLE: "the host or network is unreachable",
    Reach.UNKNOWN_NAME: "the name cannot be resolved",
    Reach.SLOW_NAME: "the name server does not answer",
}


def join(desk: Desk, seal: Seal, arrival: Arrival, stopped: Callable[[], int | None]) -> Link:
    """Find the Board and say hello; RunLost after `desk.wait_seconds`, with what a plain TCP connect said.

    RunLost, too, when rank 0 refuses this process (its rank is taken), or a signal came (`stopped` gives its number).
    """
    end = time.monotonic() + desk.wait_seconds
    answer = Reach.UNKNOWN_NAME
    while (left := end - time.monotonic()) > 0:
        if signum := stopped():
            raise RunLost(f"rank {arrival.place.rank} was told to leave before it reached rank 0", 128 + signum)
        # All that is left for one look-up: a slow resolver must not be asked again and again. A name may come up late.
        addresses = resolve(desk.host, desk.ports[0], left)
        if not addresses:
            answer = Reach.SLOW_NAME if addresses is None else Reach.UNKNOWN_NAME
        for address in addresses or ():
            for port in desk.ports:
                reached = reach(address, port, min(2.0, max(0.1, end - time.monotonic())))
                answer = reached.reach
                if answer is Reach.ACCEPTED:
                    link = _greet(address, port, seal, arrival, reached.source, desk.greet_seconds)
                    if link is not None:
                        return link
        time.sleep(0.02)
    ports = ", ".join(map(str, desk.ports))
    raise RunLost(
        f"rank {arrival.place.rank} on {arrival.place.node} did not reach rank 0 at {desk.host} (port {ports}) "
        f"within {desk.wait_seconds:g} s: {_SENTENCES[answer]}"
    )


def _greet(address: str, port: int, seal: Seal, arrival: Arrival, source: str | None, seconds: float) -> Link | None:
    """Say hello to one port; a stranger behind it gives no answer that carries our run id within `seconds`."""
    socket = _socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, f"{arrival.place.rank}-{arrival.nonce}".encode())
    socket.connect(f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}")
    link = Link(socket, seal)
    link.send(Hello(structs.replace(arrival, address=source or address)))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not socket.poll(100):
            continue
        for message in link.receive():
            match message:
                case Seated() | Welcome():
                    return link
                case Refused(sentence, code):
                    link.close()
                    raise RunLost(sentence, code)
                case _:
                    continue
    link.close()
    return None
