"""What a process can move by itself: copies in its memory, and a TCP stream to itself over the loopback interface.

gloo sends over TCP on one host as well, so these two bound it there; both are rates of this moment, with whatever else
runs on the host. (Measured, 2 cores: 2 GB/s over loopback, 11 to 15 GB/s copied.)
"""

import contextlib
import socket
import time

# Larger than the caches of a core, smaller than what many ranks on one host would miss.
COPY_BYTES = 16 << 20
# gloo's segments are 1 MiB at most (allreduce.cc).
_SEGMENT_BYTES = 1 << 20
_CONNECT_SECONDS = 1.0


class Copier:
    """Copies between two buffers of its own, made once, because fresh memory is slower."""

    def __init__(self, size_bytes: int = COPY_BYTES) -> None:
        self._source = memoryview(bytearray(size_bytes))
        self._target = memoryview(bytearray(size_bytes))
        self._target[:] = self._source

    def bytes_per_s(self, seconds: float) -> float:
        """Bytes copied per second (each read once and written once), over about `seconds`; at least one copy."""
        begin = time.perf_counter()
        copies, elapsed = 0, 0.0
        while copies == 0 or elapsed < seconds:
            self._target[:] = self._source
            copies += 1
            elapsed = time.perf_counter() - begin
        return copies * len(self._source) / max(elapsed, 1e-9)


def loopback_bytes_per_s(seconds: float) -> float | None:
    """Bytes per second of one TCP stream from this process to itself over 127.0.0.1; None if there is no loopback.

    One thread sends and receives, as gloo's does (transport/tcp/loop.cc), in gloo's segments, out of and into buffers
    that are larger than a cache.
    """
    try:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            sender = stack.enter_context(socket.create_connection(listener.getsockname(), _CONNECT_SECONDS))
            receiver = stack.enter_context(listener.accept()[0])
            sender.setblocking(False)
            receiver.setblocking(False)
            return _stream(sender, receiver, seconds)
    except OSError:
        return None


def _stream(sender: socket.socket, receiver: socket.socket, seconds: float) -> float:
    source, target = memoryview(bytearray(COPY_BYTES)), memoryview(bytearray(COPY_BYTES))
    begin, sent, received = time.perf_counter(), 0, 0
    while time.perf_counter() - begin < seconds:
        with contextlib.suppress(BlockingIOError):
            sent += sender.send(_segment(source, sent))
        with contextlib.suppress(BlockingIOError):
            received += receiver.recv_into(_segment(target, received))
    return received / max(time.perf_counter() - begin, 1e-9)


def _segment(buffer: memoryview, position: int) -> memoryview:
    start = position % len(buffer)
    return buffer[start : start + _SEGMENT_BYTES]
