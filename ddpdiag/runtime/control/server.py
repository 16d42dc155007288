"""The control server, which is rank 0's end of the control channel, and the choice of its ports."""

import contextlib
import resource
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

import zmq

from ddpdiag.errors import ExitCode, RunLost, UsageError
from ddpdiag.model import Arrival, Place
from ddpdiag.probes.host.programs import port_user
from ddpdiag.runtime.control.join import runs_here
from ddpdiag.runtime.control.messages import MessageToRank, MessageToRank0, OtherVersionHello
from ddpdiag.runtime.control.relay import MAX_DIRECT_RANKS, shares_connection
from ddpdiag.runtime.control.wire import LINGER_MS, Batch, Wire, new_router, split_frames, unpack_batch
from ddpdiag.text import count

# Below the usual ephemeral range (32768-60999 on Linux), of which any program may use a port to connect, and above the
# ports that a job gets without --master-port (launchers.launch.derived_port).
_PORTS_FROM, _PORTS = 30_000, 2_700
_PORT_COUNT = 4
# As the number of a port to listen on, 0 makes the kernel choose a free port.
ANY_PORT = 0
_RECEIVE_SECONDS = 0.25
# ZeroMQ's default is 100. With that, if thousands connect at once, the kernel drops most connections, which are tried
# again after 1 s, 3 s and 7 s. The kernel uses net.core.somaxconn if that is less.
_BACKLOG = 16_384
# Open files of rank 0 that are no connections: pipes, processes and files.
_OTHER_FILES = 64


def control_ports(run_id: str, master_port: int | None, control_port: int | None) -> tuple[int, ...]:
    """The ports to try in turn: `control_port`, else ports that every rank derives from MASTER_PORT and run id."""
    if control_port is not None:
        return (control_port,)
    start = zlib.crc32(f"{run_id}:{master_port}".encode())
    ports = (_PORTS_FROM + (start + index * 1009) % _PORTS for index in range(_PORT_COUNT + 1))
    return tuple(port for port in ports if port != master_port)[:_PORT_COUNT]


def munge_ports(run_id: str, master_port: int | None, control_port: int | None) -> tuple[int, ...]:
    """The ports on which rank 0 may send its secret by munge: `control_port` + 1, or without it two derived ports."""
    return control_ports(f"{run_id}:munge", master_port, None if control_port is None else control_port + 1)[:2]


def raise_open_files_limit(connections: int = 0) -> None:
    """Raise the soft limit of open files to the hard one. UsageError if that is too low for so many connections.

    With a limit of 100 files, 200 peers connect but only 89 are received, without any error.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], connections + _OTHER_FILES
    if connections > _OTHER_FILES and limit != resource.RLIM_INFINITY and limit < needed:
        raise UsageError(
            f"rank 0 may open {limit} files, expected {needed} or more for {count(connections, 'connection')}; "
            "raise the hard limit on its host (ulimit -Hn, LimitNOFILE of the launcher's service)"
        )


def expected_connections(place: Place, wire: Wire) -> int:
    """Number of connections to rank 0, provided that all hosts have as many ranks as this host."""
    is_shared = wire.is_locked and shares_connection(place, MAX_DIRECT_RANKS)
    return -(-place.world_size // (place.local_world_size or 1)) if is_shared else place.world_size


class ControlServer:
    """Rank 0's end of the control channel. A rank is addressed by its ZeroMQ identity.

    It listens on the first free port of `ports`. If a port is in use, this process sends a hello with `arrival` there:
    RunLost if the answer is that of a control server of this run. UsageError if no port is free.
    """

    def __init__(self, ports: Sequence[int], wire: Wire, arrival: Arrival, *, local_only: bool = False) -> None:
        connections = expected_connections(arrival.place, wire)
        raise_open_files_limit(connections)
        self._wire = wire
        self._socket = new_router(wire, connections)
        self._socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        self.port = self._bind(ports, "127.0.0.1" if local_only else "*", arrival)
        self.in_process_url = f"inproc://rank-0-{arrival.nonce}"  # for the supervisor of this process
        self._socket.bind(self.in_process_url)
        # For each rank the identity of its host's relay, or b"" once the rank has a direct connection.
        self._relays: dict[bytes, bytes] = {}
        self._batches: defaultdict[bytes, Batch] = defaultdict(Batch)

    def _bind(self, ports: Sequence[int], interface: str, arrival: Arrival) -> int:
        for port in ports:
            try:
                self._socket.bind(f"tcp://{interface}:{port}")
            except zmq.ZMQError:
                if runs_here(port, self._wire, arrival):
                    holder = port_user(port) or "it has ended"
                    sentence = (
                        f"another process of this run is rank 0 already ({holder}); each process needs its own rank, "
                        "and each job on a host its own --master-port (or --run-id)"
                    )
                    raise RunLost(sentence, ExitCode.USAGE) from None
                continue
            return int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._socket.close()
        holders = "; ".join(f"{port} is held by {port_user(port) or 'an unknown process'}" for port in ports)
        raise UsageError(f"no port is free for rank 0: {holders}; choose another one with --control-port")

    def send(self, identity: bytes, message: MessageToRank) -> None:
        """Send to a rank. A message through a relay is sent at the next `receive`. A rank that has ended is ignored."""
        data = self._wire.encode(message)
        if relay := self._relays.get(identity):
            self._batches[relay].add(identity, data)
        else:
            self._send_frames([identity, *split_frames(data)])

    def _send_frames(self, frames: list[bytes]) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def _send_batches(self) -> None:
        for relay, batch in self._batches.items():
            for frames in batch.packed_messages():
                self._send_frames([relay, *frames])
        self._batches.clear()

    def receive(self, seconds: float) -> Iterator[tuple[bytes, MessageToRank0 | OtherVersionHello]]:
        """Yield messages with their senders' identities: wait at most `seconds`, then receive for at most 0.25 s."""
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
                message = self._wire.decode_for_rank_0(data)
                if message is not None:
                    yield from ((identity, message) for identity in identities)

    def _parcels(self, frames: list[bytes]) -> list[tuple[list[bytes], bytes]]:
        """The messages in these frames, each with the identities of its senders. Remembers the relay of each sender."""
        match frames:
            case [relay, b"", *batch] if self._wire.is_locked:
                parcels = unpack_batch(b"".join(batch))
                for identities, _data in parcels:
                    for identity in identities:
                        self._relays.setdefault(identity, relay)
                self._relays[relay] = relay
                return parcels
            case [identity, first, *more] if first:
                # The rank connected directly because its relay did not answer. The relay may still pass on older
                # messages of this rank, but is not used again.
                if self._wire.is_locked and self._relays.get(identity) != identity:
                    self._relays[identity] = b""
                return [([identity], b"".join((first, *more)))]
            case _:
                return []

    def close(self) -> None:
        self._send_batches()
        self._socket.close(linger=LINGER_MS)
