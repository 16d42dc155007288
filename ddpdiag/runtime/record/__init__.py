"""Each supervisor's own record: written before anything is sent, so that it outlives rank 0.

A living record is locked. Two runs on one host may have the same run id (people start ranks by hand, and it comes from
the port alone), and then neither touches the files of the other.
"""

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from ddpdiag.codec import encode_line
from ddpdiag.errors import UsageError
from ddpdiag.model import Header, Outcome
from ddpdiag.model.recording import Line
from ddpdiag.runtime.deadlines import DEADLINES
from ddpdiag.runtime.record.shared_folder import SharedFolder, append, attempt, shared_folder

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
_OUTCOME = b'{"type":"outcome"'


def folder_name(run_id: str) -> str:
    """`ddpdiag-<run id>`, as a plain name."""
    return "ddpdiag-" + re.sub(r"[^A-Za-z0-9_.-]", "_", run_id)[:80]


def run_folder(run_id: str) -> Path:
    """The run's folder on this host, `$TMPDIR/ddpdiag-<run id>`, made for this user alone.

    If another user owns one of that name, a folder with a random suffix is made.
    """
    name = folder_name(run_id)
    try:
        folder = Path(tempfile.gettempdir()) / name
        folder.mkdir(mode=0o700, exist_ok=True)
        # One look, at the name itself: what is ours in a folder like /tmp nobody else can replace afterwards.
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
            return folder
        return Path(tempfile.mkdtemp(prefix=name + "-"))
    except OSError as error:
        raise UsageError(f"no folder for the run's records: {error}; set TMPDIR to one that can be written") from error


class RecordCopy:
    """One rank's lines in the shared folder, once rank 0 has named it. What cannot be written is left out."""

    def __init__(self, shared_dir: str, name: str, rank: int) -> None:
        self._where = (shared_dir, name)
        self._rank = rank
        self._early: list[bytes] = []
        self._executor = ThreadPoolExecutor(1)
        self.shared: SharedFolder | None = None

    def open(self, nonce: str) -> None:
        """From now on lines are written, those of before first."""
        if self.shared is None:
            self.shared = SharedFolder(shared_folder(*self._where, nonce))
            self._do(SharedFolder.make)
            self.write(b"".join(self._early))
            self._early.clear()

    def write(self, data: bytes) -> None:
        """Append to the copy."""
        if self.shared is None:
            self._early.append(data)
        else:
            self._do(lambda shared: append(shared.folder / f"rank-{self._rank}.jsonl", data))

    def mark(self, mark: str) -> Future[None] | None:
        """Leave a mark, after what was written so far."""
        return self._do(lambda shared: shared.mark(mark, self._rank))

    def remove(self) -> None:
        """Remove the copy; rank 0, or the rank in its place, removes the folder."""

        def act(shared: SharedFolder) -> None:
            (shared.folder / f"rank-{self._rank}.jsonl").unlink(missing_ok=True)
            shared.path.rmdir()  # empty only if rank 0 removed it while this rank was still writing

        if (done := self._do(act)) is not None:
            with contextlib.suppress(TimeoutError):
                done.result(DEADLINES.tidy)

    def _do(self, act: Callable[[SharedFolder], object]) -> Future[None] | None:
        return None if self.shared is None else self._executor.submit(attempt, act, self.shared)


class Record:
    """One rank's lines in `rank-<n>.jsonl` (mode 0600), and its scratch folder beside it.

    `copy` gets every line, too; it lies where other hosts can read it.
    """

    def __init__(self, folder: Path, rank: int, header: Header, copy: RecordCopy | None = None) -> None:
        self.rank = rank
        self.copy = copy
        self.outcomes = 0
        self._nonce = ""  # rank 0's; it tells this run from others of its run id
        self._descriptor = -1
        self._lie_in(folder)
        with contextlib.suppress(OSError), alone_in(folder):  # a full disk loses the record, not the run
            if is_held(self.path):
                self._lie_in(Path(tempfile.mkdtemp(prefix=folder.name + "-", dir=folder.parent)))
            self.scratch.mkdir(mode=0o700, exist_ok=True, parents=True)
            # An earlier run of the same id kept its record: it is evidence, and no part of this run.
            if self.path.exists():
                stamp = datetime.fromtimestamp(self.path.stat().st_mtime, UTC).strftime("%Y%m%dT%H%M%S")
                self.path.rename(self.folder / f"old-{stamp}-{self.path.name}")
            self._descriptor = os.open(self.path, _FLAGS, 0o600)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.write(header)

    def _lie_in(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / f"rank-{self.rank}.jsonl"
        self.scratch = folder / f"scratch-{self.rank}"

    def set_nonce(self, nonce: str) -> None:
        """Rank 0 sent which of all runs with this run id this one is."""
        self._nonce = nonce
        if self.copy is not None and nonce:
            self.copy.open(nonce)

    def write(self, line: Line) -> None:
        """Append a line. A full disk loses the record, not the run."""
        self.outcomes += isinstance(line, Outcome)
        data = encode_line(line)
        with contextlib.suppress(OSError):
            os.write(self._descriptor, data)
        if self.copy is not None:
            self.copy.write(data)

    def mark(self, mark: str) -> None:
        """Leave a mark for the other hosts, where there is a shared folder."""
        if self.copy is not None:
            self.copy.mark(mark)

    def keep(self) -> None:
        """Keep the record on disk, and nothing else: not this rank's scratch, and not that of rank 0, which is lost."""
        self._close()
        shutil.rmtree(self.scratch, ignore_errors=True)
        if self._nonce and _is_of(self.folder, 0, self._nonce):
            remove_scratch(self.folder, 0)

    def remove(self, others: Mapping[int, str] | None = None) -> None:
        """Remove this rank's files, and the folder when it is empty.

        `others` are ranks that cannot do it themselves, with their nonces, whatever host they were on.
        """
        self._close()
        for rank, nonce in (others or {}).items():
            if nonce and _is_of(self.folder, rank, nonce):
                _remove_files(self.folder, rank)
        _remove_files(self.folder, self.rank)
        if self.copy is not None:
            self.copy.remove()

    def remove_killed(self) -> None:
        """Remove the files of ranks that were killed before they had an outcome: they contain nothing useful."""
        for path in self.folder.glob("rank-*.jsonl"):
            rank = path.stem.removeprefix("rank-")
            if rank.isdecimal() and not is_held(path) and not _has(path, _OUTCOME):
                _remove_files(self.folder, int(rank))

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def is_held(path: Path) -> bool:
    """Is this the record of a living process?"""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not _locked(descriptor)
    finally:
        os.close(descriptor)


def remove_scratch(folder: Path, rank: int) -> None:
    """Remove a rank's scratch folder, whatever torch put into it, and the run's folder if that is empty now."""
    shutil.rmtree(folder / f"scratch-{rank}", ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _remove_files(folder: Path, rank: int) -> None:
    with contextlib.suppress(OSError):
        (folder / f"rank-{rank}.jsonl").unlink()
    remove_scratch(folder, rank)


def _is_of(folder: Path, rank: int, nonce: str) -> bool:
    """Is the record that lies there of the process with this nonce, and not of another run's rank?"""
    return _has(folder / f"rank-{rank}.jsonl", f'"nonce":"{nonce}"'.encode())


def _has(path: Path, text: bytes) -> bool:
    try:
        return text in path.read_bytes()
    except OSError:
        return False


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[int]:
    """Hold the lock of a run's folder, for a second at most; yields a descriptor of the folder."""
    folder.mkdir(mode=0o700, exist_ok=True)  # another process may have removed it as empty just now
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        end = time.monotonic() + DEADLINES.open_record
        while not _locked(descriptor) and time.monotonic() < end:
            time.sleep(0.005)
        yield descriptor
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
