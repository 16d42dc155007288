"""The command's output: when the command last wrote, and what the end of the output says about a failure.

Files and terminals show writes, so the command keeps them as its output: a file grows, and the device of a terminal has
the time of the last write, in steps of 8 s (tty_update_time in drivers/tty/tty_io.c). A pipe shows no writes (since
Linux 6.15 not even a time), so the command gets another pipe, and a thread copies each byte from this pipe to the
original pipe. `/dev/null` shows no writes.

If the command failed, the end of its output often shows why. That can be read from pipes and files, not from terminals.
"""

import array
import contextlib
import fcntl
import glob
import os
import re
import select
import stat
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from msgspec import Struct, structs

from ddpdiag.checks.known_errors import known_error_of, main_reason
from ddpdiag.codec import open_file
from ddpdiag.runtime.supervisor.processes import signal_name
from ddpdiag.text import ranks_text

# The kernel notes the time of a terminal's last write in steps of 8 s, so that typing cannot be timed.
TERMINAL_RESOLUTION_SECONDS = 8.0
_CHUNK_BYTES = 1 << 16
_POLL_SECONDS = 0.25
# The share of time that may be used for reading the times of files, which may need messages to a file server.
_POLL_SHARE = 0.02
# How much of the end of the output is kept in memory (pipes), or read after a failure (each file).
_TAIL_BYTES = 1 << 20
_MAX_FILES = 64
# The time limit for reading files after a failure, because a file system may not respond.
_READ_SECONDS = 5.0
_REPORT_HEAD = b"ddpdiag watch: "
# torchrun's table of failures ends with the root cause. Each part names a rank and its exit code (-2: SIGINT).
_ROOT_CAUSE = b"Root Cause (first observed failure):"
_FAILURE = re.compile(rb"\brank +: (\d{1,6}) .{0,200}?\bexitcode +: (-?\d{1,3}) ", re.DOTALL)


class Sink(Protocol):
    """A file, terminal or pipe to which the command writes, and which shows that it was written to."""

    def last_write(self) -> float | None:
        """The time (time.monotonic) of the last write since the previous call, or None if there was none."""

    def ignore_own_writes(self) -> None:
        """Ignore the writes since the last call of `last_write`, because ddpdiag itself made them."""

    def tail(self) -> Iterator[bytes]:
        """Yield the end of the output since the start, in pieces; nothing if it cannot be read."""


class FileSink:
    """Files, given as descriptors or as patterns of names. A change of a file's size or time is a write."""

    def __init__(self, files: "Sequence[int | str]") -> None:
        self._files = files
        self._previous_states = self._first_states = dict(self._states())

    def _states(self) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Yield device and inode of each file, with its size and time."""
        for file in self._all_files():
            with contextlib.suppress(OSError):
                status = os.stat(file)
                yield (status.st_dev, status.st_ino), (status.st_size, status.st_mtime_ns)

    def _all_files(self) -> Iterator[int | str]:
        for file in self._files:
            yield from [file] if isinstance(file, int) else glob.iglob(file, recursive=True)

    def last_write(self) -> float | None:
        now = dict(self._states())
        changed = any(self._previous_states.get(file) != state for file, state in now.items())
        self._previous_states = now
        return time.monotonic() if changed else None

    def ignore_own_writes(self) -> None:
        self._previous_states = dict(self._states())

    def tail(self) -> Iterator[bytes]:
        for source in islice(self._all_files(), _MAX_FILES):
            # A descriptor that is open for writing only cannot be read, but its file can be opened again.
            path = f"/proc/self/fd/{source}" if isinstance(source, int) else source
            with contextlib.suppress(OSError), open_file(path) as file:
                status = os.fstat(file.fileno())
                begin, _ = self._first_states.get((status.st_dev, status.st_ino), (0, 0))
                if stat.S_ISREG(status.st_mode):
                    file.seek(max(begin if begin <= status.st_size else 0, status.st_size - _TAIL_BYTES))
                    yield file.read(_TAIL_BYTES)


class RankFileSink(FileSink):
    """The files that are standard output or error of a rank, such as those in torchrun's --log-dir.

    `rank_pids` returns the ranks' processes. A file's name is kept, so that it can be read after the rank has ended.
    """

    def __init__(self, rank_pids: Callable[[], Iterable[int]]) -> None:
        self._rank_pids = rank_pids
        self.names: dict[str, None] = {}
        self._own_files = {os.fstat(descriptor)[1:3] for descriptor in (1, 2)}  # inode and device
        super().__init__(())

    def _all_files(self) -> Iterator[str]:
        for pid in tuple(self._rank_pids()):
            for link in (f"/proc/{pid}/fd/1", f"/proc/{pid}/fd/2"):
                with contextlib.suppress(OSError):
                    status = os.stat(link)
                    if stat.S_ISREG(status.st_mode) and status[1:3] not in self._own_files:
                        name = os.readlink(link)
                        self.names[name if os.path.exists(name) else link] = None  # else: another container's file
        return iter(tuple(self.names))


class TerminalSink:
    """A terminal. The time of its device shows writes, but up to 8 s later than they were made."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._previous_time = self._modified_at()

    def _modified_at(self) -> float:
        try:
            return os.fstat(self._descriptor).st_mtime
        except OSError:
            return 0.0

    def last_write(self) -> float | None:
        now = self._modified_at()
        if now <= self._previous_time:
            return None
        self._previous_time = now
        return time.monotonic()

    def ignore_own_writes(self) -> None:
        step = TERMINAL_RESOLUTION_SECONDS
        self._previous_time = max(self._modified_at(), time.time() // step * step)

    def tail(self) -> Iterator[bytes]:
        return iter(())


class Relay:
    """A pipe for the command, and a thread that copies from this pipe to the original pipe.

    `descriptor` is the command's end of the pipe. When the reader closes the original pipe, the thread closes this one.
    """

    def __init__(self, original: int) -> None:
        self._original = original
        self._inner, self.descriptor = os.pipe()
        self._last_write = 0.0
        self._last_copy = 0.0  # when the last copy began or ended, which `last_write` does not reset
        self._blocked_since: float | None = None  # when the copy began that is not finished
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._thread = threading.Thread(target=self._copy, name="ddpdiag-relay", daemon=True)

    def start(self) -> None:
        """Close the command's end in this process, and begin to copy."""
        os.close(self.descriptor)
        self._thread.start()

    def _copy(self) -> None:
        while chunk := os.read(self._inner, _CHUNK_BYTES):
            self._last_write = self._last_copy = time.monotonic()
            self._tail.append(chunk)
            self._tail_bytes += len(chunk)
            while self._tail_bytes > _TAIL_BYTES:
                self._tail_bytes -= len(self._tail.popleft())
            try:
                self._write(memoryview(chunk))
                self._last_copy = time.monotonic()
            except OSError:  # the reader closed the pipe, so the command's next write must fail (SIGPIPE)
                break
        os.close(self._inner)

    def _write(self, remaining: memoryview) -> None:
        self._blocked_since = time.monotonic()
        try:
            while remaining:
                try:
                    remaining = remaining[os.write(self._original, remaining) :]
                except BlockingIOError:  # another process that shares the pipe made it non-blocking
                    select.select([], [self._original], [])
        finally:
            self._blocked_since = None

    def tail(self) -> Iterator[bytes]:
        return iter(tuple(self._tail))

    def last_write(self) -> float | None:
        last, self._last_write = self._last_write, 0.0
        return last or None

    def ignore_own_writes(self) -> None:
        """Do nothing: what ddpdiag itself writes does not pass through the relay."""

    def blocked_seconds(self) -> float:
        """For how many seconds the reader has not read what is being copied; 0.0 if no copy is under way."""
        since = self._blocked_since
        return 0.0 if since is None else time.monotonic() - since

    def is_copying(self, quiet_seconds: float, ended_at: float = 0.0) -> bool:
        """Whether there is output to copy, or the last copy or the command's end is less than `quiet_seconds` ago.

        Children of the command may hold the pipe open after its end (`ended_at`), and write nothing.
        """
        if not self._thread.is_alive():
            return False
        unread = array.array("i", [0])
        with contextlib.suppress(OSError):  # the thread has closed the pipe meanwhile
            fcntl.ioctl(self._inner, termios.FIONREAD, unread)
        if self._blocked_since is not None or unread[0] > 0:
            return True
        return time.monotonic() - max(self._last_copy, ended_at) < quiet_seconds


class CommandOutput(Struct):
    """Standard output and error of the command, and other files that it writes."""

    sinks: list[Sink]  # empty if no output shows when it was written to
    relays: dict[int, Relay]  # by the command's descriptor, 1 or 2
    resolution_seconds: float  # by how much the time of a write may be too late


def open_output(patterns: Sequence[str]) -> CommandOutput:
    """Find or make the command's output. `patterns` are names of other files that the command writes."""
    sinks: list[Sink] = []
    relays: dict[int, Relay] = {}
    descriptors: dict[tuple[int, int], int] = {}
    for descriptor in (1, 2):
        status = os.fstat(descriptor)
        first = descriptors.setdefault((status.st_dev, status.st_ino), descriptor)
        if first != descriptor:
            if first in relays:  # 2>&1: both use one pipe, or the order of their lines would be lost
                relays[descriptor] = relays[first]
        elif os.isatty(descriptor):
            sinks.append(TerminalSink(descriptor))
        elif stat.S_ISREG(status.st_mode):
            sinks.append(FileSink([descriptor]))
        elif not stat.S_ISCHR(status.st_mode):
            relays[descriptor] = Relay(descriptor)
            sinks.append(relays[descriptor])
    sinks += [FileSink(patterns)] if patterns else []
    has_terminal = any(isinstance(sink, TerminalSink) for sink in sinks)
    return CommandOutput(sinks, relays, TERMINAL_RESOLUTION_SECONDS if has_terminal else 0.0)


class OutputMonitor:
    """Watches each sink in its own thread, because a file system that does not respond must block one sink only."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._start = time.monotonic()
        self._last_writes = dict.fromkeys(sinks, self._start)
        self._wake_events = {sink: threading.Event() for sink in sinks}
        self._report_count = 0
        self._is_reporting = False
        for sink in sinks:
            threading.Thread(target=self._monitor, args=(sink,), name="ddpdiag-listener", daemon=True).start()

    @property
    def last_write(self) -> float:
        """The time (time.monotonic) of the last write to any sink, or of the start if none was written to."""
        return max(self._last_writes.values(), default=self._start)

    def _monitor(self, sink: Sink) -> None:
        ignored_count = 0
        while True:
            begin, report_count = time.monotonic(), self._report_count
            if not self._is_reporting:
                if ignored_count == report_count:
                    written = sink.last_write()
                    if written is not None and self._report_count == report_count:  # else ddpdiag may have written
                        self._last_writes[sink] = max(self._last_writes[sink], written)
                else:
                    sink.ignore_own_writes()
                    ignored_count = report_count
            wake = self._wake_events[sink]  # set after a report, to ignore it before the command writes more
            wake.wait(max(_POLL_SECONDS, (time.monotonic() - begin) / _POLL_SHARE))
            wake.clear()

    @contextlib.contextmanager
    def ignore_writes(self) -> Iterator[None]:
        """Do not count what ddpdiag writes within the `with` block as output of the command."""
        self._report_count += 1
        self._is_reporting = True
        try:
            yield
        finally:
            self._is_reporting = False
            for wake in self._wake_events.values():
                wake.set()


class _Failed(NamedTuple):
    """A rank and its exit code. It certainly failed first if the ends of all ranks were seen."""

    rank: int
    code: int
    is_certain: bool


def failure_text(sinks: Sequence[Sink], status: int, ended: Sequence[int] = ()) -> str:
    """Sentences on why a command with this wait status failed; empty if its output shows no known error in time.

    `ended` are the ranks that are known to have ended, the first one first.
    """
    texts: list[str] = []

    def read() -> None:
        # A report on an earlier silence, which a file of the command may hold, is not the command's own text.
        tail = b"".join(piece.replace(_REPORT_HEAD, b"") for sink in sinks for piece in sink.tail())
        first = _first_failed(tail, ended)
        texts.append(_known_error_text(tail, status, first) or _first_failed_text(first, status))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(_READ_SECONDS)
    return texts[0] if texts else ""


def _known_error_text(tail: bytes, status: int, first: _Failed | None) -> str:
    if status == 0 or (sighting := main_reason([tail], with_unknown=True)) is None:
        return ""
    if sighting.card.shows_only == "process" and first is not None:
        # The end of another rank may be an effect of the first one, such as SIGABRT by gloo.
        if first.rank not in sighting.ranks:
            return ""
        if first.is_certain:
            sighting = structs.replace(sighting, ranks=(first.rank,))
    cause, end = known_error_of(sighting), end_text(os.waitstatus_to_exitcode(status))
    lead = f"{ranks_text(sighting.ranks)}: " if sighting.ranks else ""
    if sighting.card.is_fallback:  # an exception of the user's own code, which only a rank makes worth a sentence
        where = f", raised in {sighting.frame}" if sighting.frame else ""
        return f"the command failed ({end}): {lead}{cause.quote}{where}." if lead else ""
    waiting_text = f"It waited for {ranks_text(sighting.missing_ranks)}." if sighting.missing_ranks else ""
    parts = (f"the command failed ({end}): {lead}{cause.title}.", cause.meaning, waiting_text, f"Fix: {cause.fix}")
    return " ".join(filter(None, parts))


def _first_failed(tail: bytes, ended: Sequence[int]) -> _Failed | None:
    """The rank that failed first, of those in torchrun's table of failures; None if there is no table."""
    others, _, root_cause = tail.partition(_ROOT_CAUSE)
    if (root := _FAILURE.search(root_cause)) is None:
        return None
    failures = [*_FAILURE.findall(others.rpartition(b"\nFailures:\n")[2]), root.groups()]
    codes = {int(rank): int(code) for rank, code in failures}
    is_certain = codes.keys() <= {*ended}
    rank = min(codes, key=ended.index) if is_certain else int(root[1])
    return _Failed(rank, codes[rank], is_certain=is_certain)


def _first_failed_text(first: _Failed | None, status: int) -> str:
    """A sentence on the rank that failed first, unless it raised an exception, as ranks without a peer do."""
    if status == 0 or first is None or first.code == 1:
        return ""
    end = end_text(os.waitstatus_to_exitcode(status))
    return f"the command failed ({end}): rank {first.rank} failed first ({end_text(first.code)})."


def end_text(code: int) -> str:
    """The end of a process in words: "exit code 1" or "SIGKILL"."""
    return f"exit code {code}" if code >= 0 else signal_name(-code)
