"""The control server: rank 0's end of the control channel to all supervisors, over ZeroMQ."""

import contextlib
import resource
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

import zmq

from ddpdiag.errors import ExitCode, RunLost, UsageError
from ddpdiag.model import Arrival, Place
from ddpdiag.probes.host.programs import holder_of
from ddpdiag.runtime.control.join import greet
from ddpdiag.runtime.control.messages import AnyHello, Downward, Upward
from ddpdiag.runtime.control.relay import RELAYED_RANKS, shares_connection
from ddpdiag.runtime.control.wire import LAST_WORDS_MS, Batch, Wire, new_router, parts, unpacked
from ddpdiag.text import count

# Below the usual ephemeral range (32768-60999 on Linux), of which any program may use a port to connect, and above the
# ports that a job gets without --master-port (launchers.launch.derived_port).
_PORTS_FROM, _PORTS = 30_000, 2_700
_CANDIDATES = 4
# The last port to try: the kernel chooses a free one.
ANY_PORT = 0
_RECEIVE_SECONDS = 0.25
# ZeroMQ's default is 100. If thousands connect at once the kernel then drops most, and each tries again after 1 s, 3 s,
# 7 s. The kernel uses net.core.somaxconn if that is less.
_BACKLOG = 16_384
# Open files of rank 0 that are no connections: pipes, processes and files.
_OTHER_FILES = 64


def control_ports(run_id: str, master_port: int | None, chosen: int | None) -> tuple[int, ...]:
    """The ports to try in turn, the same on every rank: `chosen`, else some derived from MASTER_PORT and run id."""
    if chosen is not None:
        return (chosen,)
    start = zlib.crc32(f"{run_id}:{master_port}".encode())
    ports = (_PORTS_FROM + (start + index * 1009) % _PORTS for index in range(_CANDIDATES + 1))
    return tuple(port for port in ports if port != master_port)[:_CANDIDATES]


def munge_ports(run_id: str, master_port: int | None, chosen: int | None) -> tuple[int, ...]:
    """The ports on which rank 0 may send its secret by munge: the one above `chosen`, else two derived ports."""
    return control_ports(f"{run_id}:munge", master_port, None if chosen is None else chosen + 1)[:2]


def raise_open_files(connections: int = 0) -> None:
    """Raise the soft limit of open files to the hard one; UsageError if that is too low for so many connections.

    With a limit of 100 files, 200 peers connect but only 89 are received, without any error.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], connections + _OTHER_FILES
    if connections > _OTHER_FILES and most != resource.RLIM_INFINITY and most < needed:
        raise UsageError(
            f"rank 0 may open {most} files, expected {needed} or more for {count(connections, 'connection')}; "
            "raise the hard limit on its host (ulimit -Hn, LimitNOFILE of the launcher's service)"
        )


def connections_of(place: Place, wire: Wire) -> int:
    """Number of connections from the other ranks, if all hosts have as many ranks as this one."""
    shared = wire.locked and shares_connection(place, RELAYED_RANKS)
    return -(-place.world_size // (place.local_world_size or 1)) if shared else place.world_size


class ControlServer:
    """Rank 0's end of the control channel. Ranks are known by their ZeroMQ identity.

    RunLost if a control server of this run listens on one of the ports: it refuses `arrival`, which is of this process.
    UsageError if no port is free.
    """

    def __init__(
        self,
        ports: Sequence[int],
        wire: Wire,
        arrival: Arrival,
        *,
        local_only: bool = False,
    ) -> None:
        connections = connections_of(arrival.place, wire)
        raise_open_files(connections)
        self._wire = wire
        self._socket = new_router(wire, connections)
        self._socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        self.port = self._bind(ports, "127.0.0.1" if local_only else "*", arrival)
        self.own_url = f"inproc://rank-0-{arrival.nonce}"  # for the supervisor of this process
        self._socket.bind(self.own_url)
        # For each rank the identity of its host's relay; empty once the rank has its own connection.
        self._relays: dict[bytes, bytes] = {}
        self._batches: defaultdict[bytes, Batch] = defaultdict(Batch)

    def _bind(self, ports: Sequence[int], interface: str, arrival: Arrival) -> int:
        for port in ports:
            try:
                self._socket.bind(f"tcp://{interface}:{port}")
            except zmq.ZMQError:
                _refuse_second(port, self._wire, arrival)
                continue
            return int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._socket.close()
        held = "; ".join(f"{port} is held by {holder_of(port) or 'an unknown process'}" for port in ports)
        raise UsageError(f"no port is free for rank 0: {held}; choose another one with --control-port")

    def send(self, identity: bytes, message: Downward) -> None:
        """Send to a rank, through a relay at the next `receive`. A rank that has ended causes no error."""
        data = self._wire.encode(message)
        if relay := self._relays.get(identity):
            self._batches[relay].add(identity, data)
        else:
            self._send_frames([identity, *parts(data)])

    def _send_frames(self, frames: list[bytes]) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def _send_batches(self) -> None:
        for relay, batch in self._batches.items():
            for frames in batch.packed():
                self._send_frames([relay, *frames])
        self._batches.clear()

    def receive(self, seconds: float) -> Iterator[tuple[bytes, Upward | AnyHello]]:
        """Messages, after waiting at most `seconds` for the first of them, and at most 0.25 s for the others."""
        self._send_batches()
        if not self._socket.poll(max(0, round(seconds * 1000))):
            return
        # Thousands of ranks send without a pause; the caller must also send heartbeats.
        end = time.monotonic() + _RECEIVE_SECONDS
        while time.monotonic() < end:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            for identities, data in self._parcels(frames):
                message = self._wire.decode_upward(data)
                if message is not None:
                    yield from ((identity, message) for identity in identities)

    def _parcels(self, frames: list[bytes]) -> list[tuple[list[bytes], bytes]]:
        """The messages in these frames, each with the ranks that sent it; notes the relay of each such rank."""
        match frames:
            case [relay, b"", *batch] if self._wire.locked:
                parcels = unpacked(b"".join(batch))
                for identities, _data in parcels:
                    for identity in identities:
                        self._relays.setdefault(identity, relay)
                self._relays[relay] = relay
                return parcels
            case [identity, first, *more] if first:
                # Its relay is not used again: the relay did not answer, and may still pass on older messages.
                if self._wire.locked and self._relays.get(identity) != identity:
                    self._relays[identity] = b""
                return [([identity], b"".join((first, *more)))]
            case _:
                return []

    def close(self) -> None:
        """Close; what is still to be sent is sent for at most 0.5 s."""
        self._send_batches()
        self._socket.close(linger=LAST_WORDS_MS)


def _refuse_second(port: int, wire: Wire, arrival: Arrival) -> None:
    """RunLost if a rank 0 of this run holds the port, so that this process is a second one."""
    client = greet(("127.0.0.1", port), wire, arrival, 1.0)
    if client is not None:
        client.close()
        raise RunLost(
            f"another process of this run is rank 0 already ({holder_of(port) or 'it has ended'}); each process needs "
            "its own rank, and each job on a host its own --master-port (or --run-id)",
            ExitCode.USAGE,
        )
