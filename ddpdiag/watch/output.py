"""When did the command last write something, without coming between it and its reader?

What it writes to is left as it is wherever that shows by itself when it was written to. A file grows. A terminal's
device notes the time, in steps of 8 s (tty_update_time in drivers/tty/tty_io.c), so that the command keeps the very
terminal: its width, its colours, its signals. A pipe shows nothing (since Linux 6.15 not even a time): the command gets
another one, which one thread for each empties into it, byte by byte as they come. `/dev/null` shows nothing at all.
"""

import array
import contextlib
import fcntl
import glob
import os
import select
import stat
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from msgspec import Struct

# The kernel notes when a terminal was written to in steps of so many seconds, so that nobody's typing can be timed.
TERMINAL_STEP_SECONDS = 8.0
_CHUNK_BYTES = 1 << 16
_EAR_SECONDS = 0.25
# Files may lie on a file system for which each look is a message: they are looked at for no more than this share.
_LOOKING_SHARE = 0.02


class Ear(Protocol):
    """Something that shows when it was written to."""

    def heard(self) -> float | None:
        """When it last was, on the clock of time.monotonic, if that is later than what it said before."""

    def deafen(self) -> None:
        """What comes now is our own: forget it."""


class FileEar:
    """Files that grow, or are written to: one by its descriptor, or all that fit a pattern."""

    def __init__(self, files: "Sequence[int | str]") -> None:
        self._files = files
        self._before = dict(self._look())

    def _look(self) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        for file in self._files:
            for one in [file] if isinstance(file, int) else glob.iglob(file, recursive=True):
                try:
                    seen = os.stat(one)
                except OSError:
                    continue
                yield (seen.st_dev, seen.st_ino), (seen.st_size, seen.st_mtime_ns)

    def heard(self) -> float | None:
        now = dict(self._look())
        changed = any(self._before.get(file) != state for file, state in now.items())
        self._before = now
        return time.monotonic() if changed else None

    def deafen(self) -> None:
        self._before = dict(self._look())


class TerminalEar:
    """A terminal, by its device's time: what was written is at most 8 s older than what is said."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._before = self._changed()

    def _changed(self) -> float:
        try:
            return os.fstat(self._descriptor).st_mtime
        except OSError:
            return 0.0

    def heard(self) -> float | None:
        now = self._changed()
        if now <= self._before:
            return None
        self._before = now
        return time.monotonic()

    def deafen(self) -> None:
        self._before = max(self._changed(), time.time() // TERMINAL_STEP_SECONDS * TERMINAL_STEP_SECONDS)


class Relay:
    """A pipe for the command in front of one that others gave us; its reader may leave, and then so does the command's.

    `descriptor` is the command's end.
    """

    def __init__(self, outer: int) -> None:
        self._outer = outer
        self._inner, self.descriptor = os.pipe()
        self._heard = 0.0
        self._carried = 0.0  # the same, and not taken back
        self._since: float | None = None  # a write that the reader has not taken yet
        self._thread = threading.Thread(target=self._carry, name="ddpdiag-relay", daemon=True)

    def start(self) -> None:
        """The command has its end: begin."""
        os.close(self.descriptor)
        self._thread.start()

    def _carry(self) -> None:
        while chunk := os.read(self._inner, _CHUNK_BYTES):
            self._heard = self._carried = time.monotonic()
            try:
                self._put(memoryview(chunk))
                self._carried = time.monotonic()
            except OSError:  # the reader left: as without us, the command's next write tells it (SIGPIPE)
                break
        os.close(self._inner)

    def _put(self, rest: memoryview) -> None:
        self._since = time.monotonic()
        try:
            while rest:
                try:
                    rest = rest[os.write(self._outer, rest) :]
                except BlockingIOError:  # whoever shares the pipe with us made it non-blocking
                    select.select([], [self._outer], [])
        finally:
            self._since = None

    def heard(self) -> float | None:
        last, self._heard = self._heard, 0.0
        return last or None

    def deafen(self) -> None:
        """What we write goes past it."""

    def blocked_seconds(self) -> float:
        """For how long its reader has taken nothing, though there is something."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def is_owing(self, quiet_seconds: float, ended: float = 0.0) -> bool:
        """Is there something that was written and not passed on, or was there, or the command, so short a time ago?

        What has ended may have left a process of its own that holds the pipe open and says nothing.
        """
        if not self._thread.is_alive():
            return False
        left = array.array("i", [0])
        with contextlib.suppress(OSError):  # closed since
            fcntl.ioctl(self._inner, termios.FIONREAD, left)
        return self._since is not None or left[0] > 0 or time.monotonic() - max(self._carried, ended) < quiet_seconds


class Outlets(Struct):
    """Standard output and error of the command, and other files that it writes."""

    ears: list[Ear]
    relays: dict[int, Relay]  # by descriptor of the command, 1 and 2
    files: Ear | None  # one of the ears, for files beside them
    deaf: bool  # is there nothing that could be heard?
    step_seconds: float  # what was heard is at most so much older than it seems


def open_outlets(patterns: Sequence[str]) -> Outlets:
    """Look at what our own output goes to; `patterns` are names of files that the command writes beside it."""
    ears: list[Ear] = []
    relays: dict[int, Relay] = {}
    known: dict[tuple[int, int], int] = {}
    for descriptor in (1, 2):
        seen = os.fstat(descriptor)
        same = known.setdefault((seen.st_dev, seen.st_ino), descriptor)
        if same != descriptor:
            if same in relays:  # 2>&1: one pipe for both, or their order would be lost
                relays[descriptor] = relays[same]
        elif os.isatty(descriptor):
            ears.append(TerminalEar(descriptor))
        elif stat.S_ISREG(seen.st_mode):
            ears.append(FileEar([descriptor]))
        elif not stat.S_ISCHR(seen.st_mode):
            relays[descriptor] = Relay(descriptor)
            ears.append(relays[descriptor])
    files = FileEar(patterns) if patterns else None
    ears += [files] if files is not None else []
    on_terminal = any(isinstance(ear, TerminalEar) for ear in ears)
    return Outlets(ears, relays, files, not ears, TERMINAL_STEP_SECONDS if on_terminal else 0.0)


class Listener:
    """A thread for each ear: a file system that does not answer holds up its own ear, and nobody else.

    `heard` are the ears that have heard something at all.
    """

    def __init__(self, ears: Sequence[Ear]) -> None:
        self.heard: set[Ear] = set()
        self._last: dict[Ear | None, float] = dict.fromkeys((None, *ears), time.monotonic())
        self._told = {ear: threading.Event() for ear in ears}
        self._tellings = 0
        self._telling = False
        for ear in ears:
            threading.Thread(target=self._listen, args=(ear,), name="ddpdiag-listener", daemon=True).start()

    @property
    def last(self) -> float:
        """When something was heard last, on the clock of time.monotonic."""
        return max(self._last.values())

    def _listen(self, ear: Ear) -> None:
        forgotten = 0
        while True:
            begin, tellings = time.monotonic(), self._tellings
            if not self._telling:
                if forgotten == tellings:
                    self._hear(ear, tellings)
                else:
                    ear.deafen()
                    forgotten = tellings
            told = self._told[ear]  # forget at once, before the command writes more
            told.wait(max(_EAR_SECONDS, (time.monotonic() - begin) / _LOOKING_SHARE))
            told.clear()

    def _hear(self, ear: Ear, tellings: int) -> None:
        heard = ear.heard()
        if heard is not None and self._tellings == tellings:  # else it may have been ourselves
            self._last[ear] = max(self._last[ear], heard)
            self.heard.add(ear)

    @contextlib.contextmanager
    def ignoring(self) -> Iterator[None]:
        """While this is open we write ourselves. It never waits: each ear forgets what came at its own next turn."""
        self._tellings += 1
        self._telling = True
        try:
            yield
        finally:
            self._telling = False
            for told in self._told.values():
                told.set()
