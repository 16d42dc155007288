"""What a supervisor, its nursery and its workers say to each other: typed structs, never pickle."""

import mmap
import os
import socket
import struct
import tempfile
import time

import msgspec
from msgspec import Struct, field

from ddpdiag.model import Collective, Options, Place, Status, Trial
from ddpdiag.runtime.control.messages import BarrierOpen

# Supervisor to worker, and back --------------------------------------------------------------------------------------


class Task(Struct, frozen=True, tag="task"):
    """Measure this. `env` is applied first (`None` unsets); `scratch` is a private directory on this host.

    `end` is when the supervisor will end it, on the monotonic clock of this host.
    """

    place: Place
    trial: Trial
    options: Options
    scratch: str
    env: dict[str, str | None]
    end: float


class BarrierReached(Struct, frozen=True, tag="atgate"):
    """The worker waits for its group; `shares` asks for everybody's offers."""

    offer: str
    shares: bool = False


class WorkerPartial(Struct, frozen=True, tag="sofar"):
    """What is measured so far, and how far that is, in words."""

    data: msgspec.Raw
    text: str = ""


class Answer(Struct, frozen=True, tag="answer"):
    """The trial ended by itself: `data` (DONE), or `error`, a short traceback in `detail` and the `flight` (RAISED)."""

    status: Status
    data: msgspec.Raw = msgspec.Raw(b"null")  # an empty Raw would be written as nothing, which is no JSON
    error: str = ""
    detail: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    flight: tuple[Collective, ...] | None = None


class Posted(Struct, frozen=True, tag="posted"):
    """The worker's witness answers: the collectives posted last in this trial; None if torch keeps no record."""

    flight: tuple[Collective, ...] | None


class Ras(Struct, frozen=True, tag="ras"):
    """What NCCL's own service said then, if the worker was asked to ask it; empty if nothing, or if there is none."""

    text: str


class More(Struct, frozen=True):
    """Not a word: what came is a part of one."""


WorkerWord = BarrierReached | WorkerPartial | Answer
WorkerOrder = Task | BarrierOpen

# Supervisor to nursery, and back -------------------------------------------------------------------------------------


class Fork(Struct, frozen=True, tag="fork"):
    """Fork a worker; its sockets, step page and stack file travel beside this message as descriptors."""


class Enough(Struct, frozen=True, tag="enough"):
    """Import nothing beyond torch itself."""


class Imported(Struct, frozen=True, tag="imported"):
    """torch is there, after so many seconds."""

    seconds: float


class Forked(Struct, frozen=True, tag="forked"):
    """The worker asked for runs as `pid`."""

    pid: int


class Exited(Struct, frozen=True, tag="exited"):
    """A worker ended; `code` is negative for a signal, as in subprocess."""

    pid: int
    code: int


NurseryWord = Imported | Forked | Exited

decode_worker_word: msgspec.json.Decoder[WorkerWord] = msgspec.json.Decoder(WorkerWord)
decode_witness: msgspec.json.Decoder[Posted | Ras] = msgspec.json.Decoder(Posted | Ras)
decode_worker_order: msgspec.json.Decoder[WorkerOrder] = msgspec.json.Decoder(WorkerOrder)
decode_nursery_word: msgspec.json.Decoder[NurseryWord] = msgspec.json.Decoder(NurseryWord)


# Framing: the kernel takes no more than net.core.wmem_max at once, 208 KiB as a rule ---------------------------------

PIECE_BYTES = 64 << 10
_MORE, _LAST = b"+", b"."


def send(link: socket.socket, word: bytes) -> None:
    """Send a word of any length over a socket that keeps messages apart; waits while the other end does not read."""
    for start in range(0, max(1, len(word)), PIECE_BYTES):
        end = start + PIECE_BYTES
        link.send((_MORE if end < len(word) else _LAST) + word[start:end])


class Parcel:
    """The other end: collects the pieces of one word after the other."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def receive(self, link: socket.socket) -> bytes | None:
        """The whole word, None as long as there is more to come, nothing when the link is closed. Does not wait."""
        try:
            piece = link.recv(1 + PIECE_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            return b""
        if not piece:
            return b""
        self._pieces.append(piece[1:])
        if piece[:1] == _MORE:
            return None
        word, self._pieces = b"".join(self._pieces), []
        return word


# The step page -------------------------------------------------------------------------------------------------------

_STEP = struct.Struct("<qd")
_LABEL_BYTES = 120
_SIZE = mmap.PAGESIZE


def nameless_file(name: str) -> int:
    """A descriptor of an empty file without a name, in memory: on a full disk a mapped page would end us by SIGBUS."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class StepPage:
    """A step's number, time and name. One writer; a torn label is possible and harmless."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, _SIZE)

    @classmethod
    def create(cls) -> "StepPage":
        """A fresh page, whose descriptor can be handed to a worker."""
        descriptor = nameless_file("ddpdiag-steps")
        os.truncate(descriptor, _SIZE)
        return cls(descriptor)

    def write(self, step: int, label: str) -> None:
        """Announce a step."""
        text = label.encode(errors="replace")[:_LABEL_BYTES]
        self._map[: _STEP.size + _LABEL_BYTES] = _STEP.pack(step, time.monotonic()) + text.ljust(_LABEL_BYTES, b"\0")

    def read(self) -> tuple[int, str]:
        """The last step announced, and its label."""
        step, _at = _STEP.unpack(self._map[: _STEP.size])
        label = self._map[_STEP.size : _STEP.size + _LABEL_BYTES].rstrip(b"\0")
        return step, label.decode(errors="replace")

    def seconds(self) -> float:
        """How long ago the last step was announced; the monotonic clock is that of all processes of a host."""
        _step, at = _STEP.unpack(self._map[: _STEP.size])
        return max(0.0, time.monotonic() - float(at))

    def close(self) -> None:
        """Unmap and close."""
        self._map.close()
        os.close(self.descriptor)
