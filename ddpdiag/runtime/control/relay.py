"""One connection per host: the supervisor of local rank 0 passes the messages of the host's other ranks on.

A CURVE handshake takes 0.35 ms of rank 0's CPU, so that 10,000 of them would take 3.5 s. The relay decodes no message
and keeps none back: a rank that gets no answer from its relay connects to rank 0 itself (client.RelayedClient).
"""

import contextlib
import threading
import time

import msgspec
import zmq

from ddpdiag.model import Place
from ddpdiag.runtime.control.wire import LAST_WORDS_MS, Batch, Wire, new_router, parts, unpacked

# Worlds of at most this many ranks have a connection for each rank: 512 handshakes take 0.2 s.
RELAYED_RANKS = 512
# Messages between a rank and its relay: a message between a rank and rank 0 has no empty frame.
ASK, BYE = [b"", b"ask"], [b"", b"bye"]
# The ranks of a host send at the same time. What arrives within this time reaches rank 0 as one message.
_GATHER_SECONDS = 0.005


def shares_connection(place: Place, relayed_ranks: int) -> bool:
    """Whether the ranks of a host share one connection, provided that the run has a secret."""
    several = place.local_world_size is not None and place.local_world_size > 1 and place.local_rank is not None
    return several and place.world_size > relayed_ranks


class Path(msgspec.Struct, frozen=True, array_like=True):
    """A host's way to rank 0: rank 0's URL, and the address of this host on that way."""

    url: str
    source: str

    def frames(self) -> list[bytes]:
        """The path as frames of a relay's answer."""
        return [b"", msgspec.msgpack.encode(self)]

    @classmethod
    def of(cls, frames: list[bytes]) -> "Path | None":
        """The path in a relay's answer; None for other frames."""
        try:
            return msgspec.msgpack.decode(frames[-1], type=cls) if len(frames) > 1 and not frames[0] else None
        except msgspec.DecodeError:
            return None


class HostRelay:
    """A thread that passes messages on between `upstream` and the ranks of this host, until all of them have closed.

    `upstream` is the connection to rank 0 of the rank `identity`, which then uses the relay like the others.
    zmq.ZMQError if this run has another relay on this host.
    """

    def __init__(self, upstream: "zmq.Socket[bytes]", wire: Wire, identity: bytes, path: Path) -> None:
        self._upstream = upstream
        self._identity = identity
        self._answer = path.frames()
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
        """Wait for the thread to end, for 1 s at most: it ends soon after this process's client has closed."""
        self._thread.join(2 * LAST_WORDS_MS / 1000)

    def _serve(self) -> None:
        while self._identity not in self._ranks:  # before that a message of rank 0 would find no receiver
            self._local.poll()
            self._pass_up()
        poller = zmq.Poller()
        poller.register(self._upstream, zmq.POLLIN)
        poller.register(self._local, zmq.POLLIN)
        end = time.monotonic()
        while self._identity in self._ranks or (self._ranks and time.monotonic() < end):
            ready = dict(poller.poll(LAST_WORDS_MS))
            if self._upstream in ready:
                self._pass_down()
            if self._local in ready:
                time.sleep(_GATHER_SECONDS)
                self._pass_up()
            if self._identity in self._ranks:
                end = time.monotonic() + LAST_WORDS_MS / 1000
        for identity in self._ranks:
            self._send(identity, BYE)
        self._local.close(linger=LAST_WORDS_MS)
        self._upstream.close(linger=LAST_WORDS_MS)

    def _pass_up(self) -> None:
        batch = Batch()
        with contextlib.suppress(zmq.Again):
            while True:
                identity, *frames = self._local.recv_multipart(zmq.NOBLOCK)
                if frames == BYE:
                    self._ranks.discard(identity)
                    continue
                self._ranks.add(identity)
                if frames == ASK:
                    self._send(identity, self._answer)
                elif frames[0]:
                    batch.add(identity, b"".join(frames))
        with contextlib.suppress(zmq.Again):
            for frames in batch.packed():
                self._upstream.send_multipart(frames, zmq.NOBLOCK)

    def _pass_down(self) -> None:
        match self._upstream.recv_multipart():
            case [b"", *batch]:
                for identities, data in unpacked(b"".join(batch)):
                    for identity in identities:
                        self._send(identity, parts(data))
            case frames:
                self._send(self._identity, frames)

    def _send(self, identity: bytes, frames: list[bytes]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the rank has ended, or has connected to rank 0 itself
            self._local.send_multipart([identity, *frames], zmq.NOBLOCK)
