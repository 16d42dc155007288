"""What a run keeps in a folder that all hosts share (`--shared-dir`), so that it survives the loss of rank 0.

    ddpdiag-<run id>-<nonce>/    mode 0700, one for each run, removed at its end
        run.jsonl                rank 0's lines, as they happen
        heartbeat                a number that grows as long as rank 0 lives
        rank-<n>.jsonl           a copy of each other rank's own record
        candidate-<n>            rank n lives, and has lost rank 0
        ready-<n>                its record is complete
        leader-<turn>            the rank that makes the report in rank 0's place
        verdict                  exit code and sentence
        read-<n>                 rank n has read them
        look-<n>                 made and removed at once: rank n looks at the folder

Everything is done in a thread of its own, in order: a file server that does not answer must hold up no rank. Files are
closed after each write, because NFS shows to others what was written before a close, and to a reader what was there
when it opened (nfs(5), close-to-open consistency).
"""

import contextlib
import errno
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from ddpdiag.codec import encode_line
from ddpdiag.model import Arrival
from ddpdiag.model.recording import Line
from ddpdiag.runtime.control.messages import Shutdown
from ddpdiag.runtime.deadlines import DEADLINES

T = TypeVar("T")

RUN = "run.jsonl"
_HEARTBEAT, _VERDICT = "heartbeat", "verdict"
_HEARTBEAT_SECONDS = 1.0
_FOLLOW_SECONDS = 0.2
_REMOVALS = 3


def shared_folder(shared_dir: str, name: str, nonce: str) -> Path:
    """The folder of one run; `name` is that of its local folders."""
    return Path(shared_dir) / f"{name}-{nonce}"


class SharedFolder:
    """The run's folder, or that of its notes. Every method may wait for a file server, and raise OSError.

    The folder above it may be a group's, of which each member can put a link or another folder in the place of this
    one. So it is opened once, as a folder that only this user can write to, and all files are reached from there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def make(self) -> None:
        """Make it, if it is not there."""
        self.path.mkdir(mode=0o700, exist_ok=True)

    @property
    def folder(self) -> Path:
        """The opened folder, which stays the same whatever takes its name."""
        if self._descriptor is None:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            found = os.fstat(descriptor)
            if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                os.close(descriptor)
                raise PermissionError(errno.EACCES, "others may write to it", str(self.path))
            self._descriptor = descriptor
        return Path(f"/proc/self/fd/{self._descriptor}")

    def close(self) -> None:
        """Close it, to open the one that is there at the next look."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def mark(self, mark: str, rank: int) -> None:
        """Leave a mark of this rank."""
        (self.folder / f"{mark}-{rank}").touch(mode=0o600)

    def refresh(self, me: int) -> None:
        """See what the others did: a client of NFS may show a folder as it was 60 s ago (nfs(5), acdirmax).

        Unless it changes the folder itself.
        """
        look = self.folder / f"look-{me}"
        look.touch(mode=0o600)
        look.unlink(missing_ok=True)

    def ranks(self, mark: str, me: int) -> tuple[int, ...]:
        """Ranks that left this mark, in rising order."""
        self.refresh(me)
        found = (re.fullmatch(rf"{mark}-([0-9]+)", name) for name in os.listdir(self.folder))
        return tuple(sorted(int(match[1]) for match in found if match))

    def claim(self, turn: int, rank: int) -> bool:
        """Take rank 0's place; only one rank can in each turn."""
        try:
            append(self.folder / f"leader-{turn}", b"%d" % rank, os.O_EXCL)
        except FileExistsError:
            return False
        return True

    def heartbeat(self) -> bytes:
        """Rank 0's last sign of life."""
        try:
            return (self.folder / _HEARTBEAT).read_bytes()
        except FileNotFoundError:
            return b""

    def verdict(self) -> Shutdown | None:
        """The verdict, once there is one."""
        try:
            return msgspec.json.decode((self.folder / _VERDICT).read_bytes(), type=Shutdown)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def write_verdict(self, shutdown: Shutdown) -> None:
        """Write the verdict, whole or not at all."""
        new = self.folder / f"{_VERDICT}-{os.getpid()}"
        new.write_bytes(msgspec.json.encode(shutdown))
        new.replace(self.folder / _VERDICT)

    def wait_for_readers(self, ranks: Collection[int], me: int, seconds: float) -> None:
        """Wait until these ranks have read the verdict, at most so long."""
        end = time.monotonic() + seconds
        while not set(ranks) <= {*self.ranks("read", me), me} and time.monotonic() < end:
            time.sleep(_FOLLOW_SECONDS)

    def remove(self) -> None:
        """Remove the folder with all that is in it, and with what other ranks still add meanwhile."""
        for _ in range(_REMOVALS):
            # By the name of a folder in it: the descriptor's own name is a link, which rmtree refuses.
            shutil.rmtree(f"{self.folder}/.", ignore_errors=True)
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return


class SharedRunLog:
    """Rank 0's lines in the shared folder, as they happen, with a heartbeat, and at the end the verdict.

    `lines` gives all lines so far.
    """

    def __init__(self, folder: Path, lines: Callable[[], Sequence[Line]]) -> None:
        self._shared = SharedFolder(folder)
        self._lines = lines
        self._written = 0
        self._heartbeat_due = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="shared-run-log", daemon=True)
        self._tell: Callable[[SharedFolder], None] | None = None
        self._thread.start()

    def was_replaced(self, seconds: float) -> bool:
        """Did another rank take rank 0's place while this process did not run? It wrote the report, and may be over."""
        return not self._over.is_set() and bool(within(seconds, self._is_replaced))

    def _is_replaced(self) -> bool:
        return self._written > 0 and (not self._shared.path.exists() or bool(self._shared.ranks("leader", 0)))

    def close(self, shutdown: Shutdown, readers: Sequence[int], seconds: float) -> None:
        """Tell the verdict to `readers`, who do not hear rank 0, wait at most `seconds` for them; remove the folder."""

        def tell(_shared: SharedFolder) -> None:
            self._shared.write_verdict(shutdown)
            self._shared.wait_for_readers(readers, 0, seconds)

        self._tell = tell if readers else None
        self._over.set()
        self._thread.join(seconds + DEADLINES.tidy)

    def _follow(self) -> None:
        attempt(SharedFolder.make, self._shared)
        while not self._over.wait(_FOLLOW_SECONDS):
            attempt(self._catch_up, self._shared)
        if within(DEADLINES.tidy, self._is_replaced):
            return  # the rank that took over still reads all this, and removes it
        if self._tell is not None:
            attempt(self._tell, self._shared)
        attempt(SharedFolder.remove, self._shared)

    def _catch_up(self, shared: SharedFolder) -> None:
        if time.monotonic() >= self._heartbeat_due:
            self._heartbeat_due = time.monotonic() + _HEARTBEAT_SECONDS
            (shared.folder / _HEARTBEAT).write_text(str(time.monotonic()))
        lines = self._lines()
        if len(lines) > self._written:
            append(shared.folder / RUN, b"".join(map(encode_line, lines[self._written :])))
            self._written = len(lines)


def within(seconds: float, act: Callable[[], T]) -> T | None:
    """The result of `act`, or None if the file server does not answer in time."""
    try:
        return ThreadPoolExecutor(1).submit(act).result(seconds)
    except (TimeoutError, OSError):
        return None


def append(path: Path, data: bytes, flags: int = 0) -> None:
    """Add to a file of this user, and close it, so that others see it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | flags, 0o600)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def attempt(act: Callable[[SharedFolder], object], shared: SharedFolder) -> None:
    """A line that cannot be written costs the copy, not the run."""
    with contextlib.suppress(OSError):
        act(shared)


# Notes of missing ranks ----------------------------------------------------------------------------------------------

# A note is there only while its writer lives and looks for rank 0, which reads notes while it waits. One of a dead run
# is older than this one, and one of another user is not read.
_MOST_BYTES = 4096
_LOOK_SECONDS = 0.5
# Clocks of hosts and file servers differ.
_SKEW_SECONDS = 30.0


class Note(Struct, frozen=True):
    """The note of a rank that did not reach rank 0."""

    rank: int
    world_size: int
    node: str
    sentence: str


class NoteWriter:
    """A rank's own note; `name` is that of the run's local folders."""

    def __init__(self, shared_dir: str, name: str, arrival: Arrival) -> None:
        self._shared = _notes_folder(shared_dir, name)
        self._arrival = arrival
        self._name = f"rank-{arrival.place.rank}-{arrival.nonce}"
        self._executor = ThreadPoolExecutor(1)
        self._left = False

    def write(self, sentence: str) -> None:
        """Write it, in a thread; what fails costs the note, not the run."""
        self._left = True
        place = self._arrival.place
        note = Note(place.rank, place.world_size, place.node, sentence[: _MOST_BYTES // 4])

        def act(shared: SharedFolder) -> None:
            shared.make()
            append(shared.folder / self._name, msgspec.json.encode(note), os.O_EXCL)

        self._executor.submit(attempt, act, self._shared)

    def remove(self) -> None:
        """Remove it."""

        def act(shared: SharedFolder) -> None:
            (shared.folder / self._name).unlink(missing_ok=True)
            shared.path.rmdir()

        if self._left:
            with contextlib.suppress(TimeoutError):
                self._executor.submit(attempt, act, self._shared).result(DEADLINES.tidy)


class NoteReader:
    """Reads notes for rank 0, in a thread, until `stop`."""

    def __init__(self, shared_dir: str, name: str, *, world_size: int, wait_seconds: float) -> None:
        self._shared = _notes_folder(shared_dir, name)
        self._world_size = world_size
        self._since = time.time() - wait_seconds - _SKEW_SECONDS
        self._found: dict[int, Note] = {}
        self._over = threading.Event()
        threading.Thread(target=self._look, name="notes", daemon=True).start()

    @property
    def found(self) -> Mapping[int, Note]:
        """The last note of each rank, so far."""
        return dict(self._found)

    def stop(self) -> Mapping[int, Note]:
        """The last note of each rank."""
        self._over.set()
        return self.found

    def _look(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            with contextlib.suppress(OSError):
                notes = read_notes(self._shared, self._since)
                self._found |= {note.rank: note for note in notes if note.world_size == self._world_size}
            self._shared.close()


def read_notes(shared: SharedFolder, since: float) -> Iterator[Note]:
    """Our own user's notes that were written after `since` (Unix time), oldest first. OSError where there are none."""
    for path in sorted(shared.folder.glob("rank-*"), key=lambda path: path.lstat().st_mtime):
        state = path.lstat()
        plain = stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid()
        if plain and state.st_mtime >= since and state.st_size <= _MOST_BYTES:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                yield msgspec.json.decode(path.read_bytes(), type=Note)


def _notes_folder(shared_dir: str, name: str) -> SharedFolder:
    return SharedFolder(Path(shared_dir) / f"{name}-notes")
