"""Messages between a supervisor, its fork server and its workers, and the shared page with a worker's steps."""

import errno
import mmap
import os
import socket
import struct
import tempfile
import time
from collections.abc import Mapping

import msgspec
from msgspec import Struct, field

from ddpdiag.model import Collective, Place, RunOptions, Status, Trial
from ddpdiag.runtime.control.messages import BarrierOpen, BarrierReached, PartialData


class Task(Struct, frozen=True, tag=True):
    """Run this trial. `env` is applied first; None unsets a variable. `scratch` is a private folder on this host.

    `end` is the time at which the supervisor will end the trial, on this host's monotonic clock. `ending` holds the
    pids of killed workers whose GPU the driver may not have released yet.
    """

    place: Place
    trial: Trial
    options: RunOptions
    scratch: str
    env: dict[str, str | None]
    end: float
    ending: tuple[int, ...] = ()


class PostedCollectives(Struct, frozen=True, tag=True):
    """The collectives that a worker posted last in this trial. If they are None, `no_collectives` may say why."""

    collectives: tuple[Collective, ...] | None = None
    no_collectives: str = ""


class TrialEnded(Struct, frozen=True, tag=True):
    """The worker ended the trial: DONE with `data`, or RAISED with `error` and a short traceback in `detail`."""

    status: Status
    data: msgspec.Raw = msgspec.Raw(b"null")  # an empty Raw would be encoded as no text, which is not JSON
    error: str = ""
    detail: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    posted: PostedCollectives = PostedCollectives()


class IncompleteMessage(Struct, frozen=True):
    """Returned in place of a message of which only a part has arrived."""


# The supervisor sends `BarrierReached` and `PartialData` on to rank 0 unchanged.
WorkerMessage = BarrierReached | PartialData | TrialEnded
WorkerCommand = Task | BarrierOpen


class Fork(Struct, frozen=True, tag=True):
    """Fork a worker for this rank.

    Seven descriptors are sent with the message: the worker's channel, step page, stack file and recorder channel, a
    pipe that its supervisor holds open, its log, and a file with its environment.
    """

    rank: int


FORK_DESCRIPTORS = 7
# The most clients of one fork server. The kernel queues at most net.core.somaxconn clients that are not accepted yet.
MAX_CLIENTS = 4096


class SkipLazyImports(Struct, frozen=True, tag=True):
    """Do not import the modules that only DDP needs."""


class Accepted(Struct, frozen=True, tag=True):
    """The server `pid` has accepted the client. It lives as long as a client holds its descriptor `life_pipe` open."""

    pid: int
    life_pipe: int


class ForkRefused(Struct, frozen=True, tag=True):
    """The server refuses to fork workers for a rank, because workers that the rank starts itself would differ."""

    reason: str


class Imported(Struct, frozen=True, tag=True):
    """The server has imported torch, in so many seconds."""

    seconds: float


class Forked(Struct, frozen=True, tag=True):
    """The requested worker has this pid."""

    pid: int


class Exited(Struct, frozen=True, tag=True):
    """A worker has ended, or the server itself ends. `code` is negative for a signal, as in subprocess."""

    pid: int
    code: int


ForkServerRequest = Fork | SkipLazyImports
ForkServerMessage = Accepted | ForkRefused | Imported | Forked | Exited

decode_worker_message: msgspec.json.Decoder[WorkerMessage] = msgspec.json.Decoder(WorkerMessage)
decode_recorder_answer: msgspec.json.Decoder[PostedCollectives] = msgspec.json.Decoder(PostedCollectives)
decode_worker_command: msgspec.json.Decoder[WorkerCommand] = msgspec.json.Decoder(WorkerCommand)
decode_fork_server_request: msgspec.json.Decoder[ForkServerRequest] = msgspec.json.Decoder(ForkServerRequest)
decode_fork_server_message: msgspec.json.Decoder[ForkServerMessage] = msgspec.json.Decoder(ForkServerMessage)


FRAME_BYTES = 64 << 10
_MORE, _LAST = b"+", b"."


def send_framed(channel: socket.socket, message: bytes) -> None:
    """Send a message of any length over a SOCK_SEQPACKET socket. Waits if the other end does not read."""
    for start in range(0, max(1, len(message)), FRAME_BYTES):
        end = start + FRAME_BYTES
        channel.send((_MORE if end < len(message) else _LAST) + message[start:end])


class FrameReader:
    """Joins the frames of `send_framed` to messages."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []

    def receive(self, channel: socket.socket) -> bytes | None:
        """Receive one frame without waiting. Returns the message if it is complete, else None; b"" if closed."""
        try:
            frame = channel.recv(1 + FRAME_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            return b""
        if not frame:
            return b""
        self._frames.append(frame[1:])
        if frame[:1] == _MORE:
            return None
        message, self._frames = b"".join(self._frames), []
        return message


_STEP = struct.Struct("<qd")
_LABEL_BYTES = 120
_SIZE = mmap.PAGESIZE


def anonymous_file(name: str) -> int:
    """A descriptor of an unnamed file in memory. In a file on a full disk, a mapped page would cause SIGBUS."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# execve(2): arguments and environment together have at most three quarters of 8 MiB.
_MAX_ENVIRONMENT_BYTES = 6 << 20


def environment_file(env: Mapping[str, str]) -> int:
    """A descriptor of a file with these variables, as in /proc/PID/environ. They may be too large for a message."""
    descriptor = anonymous_file("ddpdiag-environment")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(b"\0".join(os.fsencode(f"{name}={value}") for name, value in env.items()))
    return descriptor


def read_environment(descriptor: int) -> dict[str, str]:
    """The variables in a file of `environment_file`. OSError if they exceed the kernel's limit of an environment."""
    size = os.fstat(descriptor).st_size
    if size > _MAX_ENVIRONMENT_BYTES:
        raise OSError(errno.E2BIG, f"an environment of {size} bytes")
    words = os.pread(descriptor, size, 0).split(b"\0")
    return dict(os.fsdecode(word).split("=", 1) for word in words if b"=" in word)


class StepPage:
    """A page of memory that a worker shares with its supervisor, with number, time and label of the current step.

    A worker that holds the GIL, is stopped or is stuck in a driver answers no message, but its page can be read. The
    supervisor may read a label that is only half written, which does no harm.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, _SIZE)

    @classmethod
    def create(cls) -> "StepPage":
        descriptor = anonymous_file("ddpdiag-steps")
        os.truncate(descriptor, _SIZE)
        return cls(descriptor)

    def write(self, step: int, label: str) -> None:
        text = label.encode(errors="replace")[:_LABEL_BYTES]
        self._map[: _STEP.size + _LABEL_BYTES] = _STEP.pack(step, time.monotonic()) + text.ljust(_LABEL_BYTES, b"\0")

    def read(self) -> tuple[int, str]:
        """Number and label of the last step announced."""
        step, _at = _STEP.unpack(self._map[: _STEP.size])
        label = self._map[_STEP.size : _STEP.size + _LABEL_BYTES].rstrip(b"\0")
        return step, label.decode(errors="replace")

    def step_seconds(self) -> float:
        """Seconds since the last step was announced. All processes of a host share the monotonic clock."""
        _step, at = _STEP.unpack(self._map[: _STEP.size])
        return max(0.0, time.monotonic() - float(at))

    def close(self) -> None:
        self._map.close()
        os.close(self.descriptor)
