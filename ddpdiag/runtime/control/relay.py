"""The relay of a host: in a large world the supervisor of local rank 0 passes on the messages of the host's ranks.

A CURVE handshake takes 0.35 ms of rank 0's CPU, so that 10,000 of them would take 3.5 s. With relays there is one
handshake per host. The relay neither decodes nor stores messages. A rank that gets no answer from its relay connects to
rank 0 directly (client.RelayedClient).
"""

import contextlib
import threading
import time

import msgspec
import zmq

from ddpdiag.model import Place
from ddpdiag.runtime.control.wire import LINGER_MS, Batch, Wire, new_router, split_frames, unpack_batch

# Worlds of at most this many ranks have a connection for each rank: 512 handshakes take 0.2 s.
MAX_DIRECT_RANKS = 512
# Messages between a rank and its relay. They begin with an empty frame; messages between a rank and rank 0 have none.
ROUTE_REQUEST, GOODBYE = [b"", b"ask"], [b"", b"bye"]
# The ranks of a host send at the same time. Messages that arrive within this time are sent to rank 0 as one message.
_GATHER_SECONDS = 0.005


def shares_connection(place: Place, max_direct_ranks: int) -> bool:
    """Whether the ranks of a host share one connection to rank 0, if the run has a secret."""
    has_local_peers = place.local_world_size is not None and place.local_world_size > 1 and place.local_rank is not None
    return has_local_peers and place.world_size > max_direct_ranks


class Route(msgspec.Struct, frozen=True, array_like=True):
    """The URL of rank 0 as a host reaches it, and the source address of that host's connection."""

    url: str
    source_address: str

    def frames(self) -> list[bytes]:
        return [b"", msgspec.msgpack.encode(self)]

    @classmethod
    def from_frames(cls, frames: list[bytes]) -> "Route | None":
        """The route in a relay's message, or None for any other message."""
        try:
            return msgspec.msgpack.decode(frames[-1], type=cls) if len(frames) > 1 and not frames[0] else None
        except msgspec.DecodeError:
            return None


class HostRelay:
    """A thread that passes messages between rank 0 and the ranks of this host.

    `upstream` is the connection of this process's rank, `identity`, to rank 0. Afterwards this rank uses the relay like
    the other ranks. The relay ends 0.5 s after this rank has closed, or sooner if all ranks of the host have closed.
    zmq.ZMQError if this run has another relay on this host.
    """

    def __init__(self, upstream: "zmq.Socket[bytes]", wire: Wire, identity: bytes, route: Route) -> None:
        self._upstream = upstream
        self._identity = identity
        self._answer = route.frames()
        self._ranks: set[bytes] = set()
        self._local = new_router(wire)
        try:
            self._local.bind(wire.relay_address)
        except zmq.ZMQError:
            self._local.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="relay", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait at most 1 s for the end of the thread. Call it after the client of this process has closed."""
        self._thread.join(2 * LINGER_MS / 1000)

    def _serve(self) -> None:
        while self._identity not in self._ranks:  # until this rank has connected, it could not receive messages
            self._local.poll()
            self._pass_up()
        poller = zmq.Poller()
        poller.register(self._upstream, zmq.POLLIN)
        poller.register(self._local, zmq.POLLIN)
        end = time.monotonic()
        while self._identity in self._ranks or (self._ranks and time.monotonic() < end):
            ready = dict(poller.poll(LINGER_MS))
            if self._upstream in ready:
                self._pass_down()
            if self._local in ready:
                time.sleep(_GATHER_SECONDS)
                self._pass_up()
            if self._identity in self._ranks:
                end = time.monotonic() + LINGER_MS / 1000
        for identity in self._ranks:
            self._send(identity, GOODBYE)
        self._local.close(linger=LINGER_MS)
        self._upstream.close(linger=LINGER_MS)

    def _pass_up(self) -> None:
        batch = Batch()
        with contextlib.suppress(zmq.Again):
            while True:
                identity, *frames = self._local.recv_multipart(zmq.NOBLOCK)
                if frames == GOODBYE:
                    self._ranks.discard(identity)
                    continue
                self._ranks.add(identity)
                if frames == ROUTE_REQUEST:
                    self._send(identity, self._answer)
                elif frames[0]:
                    batch.add(identity, b"".join(frames))
        with contextlib.suppress(zmq.Again):
            for frames in batch.packed_messages():
                self._upstream.send_multipart(frames, zmq.NOBLOCK)

    def _pass_down(self) -> None:
        match self._upstream.recv_multipart():
            case [b"", *batch]:
                for identities, data in unpack_batch(b"".join(batch)):
                    for identity in identities:
                        self._send(identity, split_frames(data))
            case frames:
                self._send(self._identity, frames)

    def _send(self, identity: bytes, frames: list[bytes]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the rank has ended, or has connected to rank 0 itself
            self._local.send_multipart([identity, *frames], zmq.NOBLOCK)
