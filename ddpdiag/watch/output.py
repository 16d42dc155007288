"""The command's output: when it last wrote, observed without changing what its reader gets, and why it failed.

The command's output stays as it is wherever writes can be seen from outside. A file grows. A terminal's device notes
the time, in steps of 8 s (tty_update_time in drivers/tty/tty_io.c), so the command keeps that terminal: its width, its
colours, its signals. A pipe shows nothing (since Linux 6.15 not even a time), so the command gets another pipe, and a
thread copies each byte from it to the original one. `/dev/null` shows nothing at all.

If the command failed, the end of its output shows why. This end is known of pipes and of files, but not of a terminal.
"""

import array
import contextlib
import fcntl
import glob
import os
import select
import signal
import stat
import termios
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Protocol

from msgspec import Struct

from ddpdiag.checks.known_errors import as_known, first_reason
from ddpdiag.codec import open_file
from ddpdiag.text import ranks_text

# The kernel notes the time of a terminal's last write in steps of 8 s, so that typing cannot be timed.
TERMINAL_STEP_SECONDS = 8.0
_CHUNK_BYTES = 1 << 16
_POLL_SECONDS = 0.25
# Reading a file's time may be a message to a file server, so at most this share of the time is used for it.
_POLL_SHARE = 0.02
# How much of the end of the output is kept in memory (of a pipe), or read after a failure (of each file).
_TAIL_BYTES = 1 << 20
_MOST_FILES = 64
# The time limit for reading files after a failure, because a file system may not respond.
_READ_SECONDS = 5.0


class Sink(Protocol):
    """A place to which the command writes, and which shows when it was written to."""

    def last_write(self) -> float | None:
        """The time (time.monotonic) of the last write since the last call, or None if there was none."""

    def forget(self) -> None:
        """Ignore the writes since the last call of `last_write`: ddpdiag itself made them."""

    def written(self) -> Iterator[bytes]:
        """The end of what was written since the start, in pieces, as far as it can be read."""


class FileSink:
    """Files, by descriptors or by patterns of names. A change of a file's size or time is a write."""

    def __init__(self, files: "Sequence[int | str]") -> None:
        self._files = files
        self._before = self._begin = dict(self._states())

    def _states(self) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        for one in self._all_files():
            try:
                seen = os.stat(one)
            except OSError:
                continue
            yield (seen.st_dev, seen.st_ino), (seen.st_size, seen.st_mtime_ns)

    def _all_files(self) -> Iterator[int | str]:
        for file in self._files:
            yield from [file] if isinstance(file, int) else glob.iglob(file, recursive=True)

    def last_write(self) -> float | None:
        now = dict(self._states())
        changed = any(self._before.get(file) != state for file, state in now.items())
        self._before = now
        return time.monotonic() if changed else None

    def forget(self) -> None:
        self._before = dict(self._states())

    def written(self) -> Iterator[bytes]:
        for one in islice(self._all_files(), _MOST_FILES):
            # A descriptor for writing alone cannot be read, but its file can, where it is permitted.
            path = f"/proc/self/fd/{one}" if isinstance(one, int) else one
            with contextlib.suppress(OSError), open_file(path) as file:
                seen = os.fstat(file.fileno())
                begin, _ = self._begin.get((seen.st_dev, seen.st_ino), (0, 0))
                if stat.S_ISREG(seen.st_mode):
                    file.seek(max(begin if begin <= seen.st_size else 0, seen.st_size - _TAIL_BYTES))
                    yield file.read(_TAIL_BYTES)


class TerminalSink:
    """A terminal. The time of its device shows writes, which are at most 8 s older than the time returned."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._before = self._changed()

    def _changed(self) -> float:
        try:
            return os.fstat(self._descriptor).st_mtime
        except OSError:
            return 0.0

    def last_write(self) -> float | None:
        now = self._changed()
        if now <= self._before:
            return None
        self._before = now
        return time.monotonic()

    def forget(self) -> None:
        self._before = max(self._changed(), time.time() // TERMINAL_STEP_SECONDS * TERMINAL_STEP_SECONDS)

    def written(self) -> Iterator[bytes]:
        return iter(())


class Relay:
    """A pipe for the command, and a thread that copies from it to the original pipe.

    `descriptor` is the command's end. When the reader of the original pipe closes it, the command's is closed, too.
    """

    def __init__(self, outer: int) -> None:
        self._outer = outer
        self._inner, self.descriptor = os.pipe()
        self._written = 0.0
        self._carried = 0.0  # the time of the last copy, which `last_write` does not reset
        self._since: float | None = None  # when the copy began that the reader has not taken yet
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._thread = threading.Thread(target=self._carry, name="ddpdiag-relay", daemon=True)

    def start(self) -> None:
        """Close the command's end in this process, and begin to copy."""
        os.close(self.descriptor)
        self._thread.start()

    def _carry(self) -> None:
        while chunk := os.read(self._inner, _CHUNK_BYTES):
            self._written = self._carried = time.monotonic()
            self._tail.append(chunk)
            self._tail_bytes += len(chunk)
            while self._tail_bytes > _TAIL_BYTES:
                self._tail_bytes -= len(self._tail.popleft())
            try:
                self._put(memoryview(chunk))
                self._carried = time.monotonic()
            except OSError:  # the reader closed it: the command's next write fails, as if unwatched (SIGPIPE)
                break
        os.close(self._inner)

    def _put(self, rest: memoryview) -> None:
        self._since = time.monotonic()
        try:
            while rest:
                try:
                    rest = rest[os.write(self._outer, rest) :]
                except BlockingIOError:  # another process that shares the pipe made it non-blocking
                    select.select([], [self._outer], [])
        finally:
            self._since = None

    def written(self) -> Iterator[bytes]:
        return iter(tuple(self._tail))

    def last_write(self) -> float | None:
        last, self._written = self._written, 0.0
        return last or None

    def forget(self) -> None:
        """Do nothing: what ddpdiag itself writes does not pass through the relay."""

    def blocked_seconds(self) -> float:
        """For how many seconds the reader has not taken what was written; 0.0 if nothing waits for it."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def is_owing(self, quiet_seconds: float, ended: float = 0.0) -> bool:
        """Whether something must still be copied, or the last copy or `ended` is less than `quiet_seconds` ago.

        `ended` is when the command ended. A child of it may hold the pipe open after that, and write nothing.
        """
        if not self._thread.is_alive():
            return False
        left = array.array("i", [0])
        with contextlib.suppress(OSError):  # closed meanwhile
            fcntl.ioctl(self._inner, termios.FIONREAD, left)
        return self._since is not None or left[0] > 0 or time.monotonic() - max(self._carried, ended) < quiet_seconds


class CommandOutput(Struct):
    """Standard output and error of the command, and other files that it writes."""

    sinks: list[Sink]  # empty if nothing shows when it was written to
    relays: dict[int, Relay]  # by descriptor of the command, 1 and 2
    step_seconds: float  # by how much a write may be older than its time


def open_output(patterns: Sequence[str]) -> CommandOutput:
    """Prepare the output of this process for the command. `patterns` are names of other files that it writes."""
    sinks: list[Sink] = []
    relays: dict[int, Relay] = {}
    known: dict[tuple[int, int], int] = {}
    for descriptor in (1, 2):
        seen = os.fstat(descriptor)
        same = known.setdefault((seen.st_dev, seen.st_ino), descriptor)
        if same != descriptor:
            if same in relays:  # 2>&1: one pipe for both, or their order would be lost
                relays[descriptor] = relays[same]
        elif os.isatty(descriptor):
            sinks.append(TerminalSink(descriptor))
        elif stat.S_ISREG(seen.st_mode):
            sinks.append(FileSink([descriptor]))
        elif not stat.S_ISCHR(seen.st_mode):
            relays[descriptor] = Relay(descriptor)
            sinks.append(relays[descriptor])
    sinks += [FileSink(patterns)] if patterns else []
    on_terminal = any(isinstance(sink, TerminalSink) for sink in sinks)
    return CommandOutput(sinks, relays, TERMINAL_STEP_SECONDS if on_terminal else 0.0)


class OutputMonitor:
    """Watches each sink in a thread, so that a file system that does not respond holds up only its own sink."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._last: dict[Sink | None, float] = dict.fromkeys((None, *sinks), time.monotonic())
        self._wake = {sink: threading.Event() for sink in sinks}
        self._reports = 0
        self._reporting = False
        for sink in sinks:
            threading.Thread(target=self._monitor, args=(sink,), name="ddpdiag-listener", daemon=True).start()

    @property
    def last(self) -> float:
        """The time (time.monotonic) of the last write to any sink."""
        return max(self._last.values())

    def _monitor(self, sink: Sink) -> None:
        forgotten = 0
        while True:
            begin, reports = time.monotonic(), self._reports
            if not self._reporting:
                if forgotten == reports:
                    written = sink.last_write()
                    if written is not None and self._reports == reports:  # else it may have been ddpdiag itself
                        self._last[sink] = max(self._last[sink], written)
                else:
                    sink.forget()
                    forgotten = reports
            wake = self._wake[sink]  # forget at once, before the command writes more
            wake.wait(max(_POLL_SECONDS, (time.monotonic() - begin) / _POLL_SHARE))
            wake.clear()

    @contextlib.contextmanager
    def ignoring(self) -> Iterator[None]:
        """Ignore what ddpdiag writes within the `with` block. Each sink forgets it at its next turn."""
        self._reports += 1
        self._reporting = True
        try:
            yield
        finally:
            self._reporting = False
            for wake in self._wake.values():
                wake.set()


def failure_text(sinks: Iterable[Sink], status: int) -> str:
    """Sentences on why a command with this wait status failed. Empty if no known text explains it in time."""
    texts: list[str] = []
    written = chain.from_iterable(sink.written() for sink in sinks)
    reader = threading.Thread(target=lambda: texts.append(_reason(written, status)), daemon=True)
    reader.start()
    reader.join(_READ_SECONDS)
    return texts[0] if texts else ""


def _reason(written: Iterable[bytes], status: int) -> str:
    if status == 0 or (sighting := first_reason(written)) is None:
        return ""
    cause, code = as_known(sighting), os.waitstatus_to_exitcode(status)
    ended = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    lead = f"{ranks_text(sighting.ranks)}: " if sighting.ranks else ""
    waited = f"It waited for {ranks_text(sighting.missing)}." if sighting.missing else ""
    parts = (f"the command failed ({ended}): {lead}{cause.title}.", cause.more, waited, f"Fix: {cause.fix}")
    return " ".join(filter(None, parts))
