"""The files in which each rank keeps its part of the recording, and its folder for temporary files (scratch folder).

Each outcome is written to the rank's record before it is sent to rank 0, so that the record survives a loss of rank 0.
A record is locked while its process lives. Two runs on one host may have the same run id, because the id is derived
from the port alone if people start ranks by hand. The locks prevent such runs from changing each other's files.
"""

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from ddpdiag.codec import encode_line
from ddpdiag.errors import UsageError
from ddpdiag.model import Header, Outcome
from ddpdiag.model.recording import Line
from ddpdiag.probes.host.shared_files import open_private_folder
from ddpdiag.runtime.deadlines import DEADLINES

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
_OUTCOME_START = b'{"type":"outcome"'
_PORT_FILE = "control-port"


def folder_name(run_id: str) -> str:
    """`ddpdiag-<run id>`, as a plain name."""
    return "ddpdiag-" + re.sub(r"[^A-Za-z0-9_.-]", "_", run_id)[:80]


def make_run_folder(run_id: str) -> Path:
    """Create the run's folder on this host, `$TMPDIR/ddpdiag-<run id>`, to which only this user can write.

    If another user owns that name, the folder gets a random suffix. UsageError if no folder can be made.
    """
    name = folder_name(run_id)
    try:
        folder = Path(tempfile.gettempdir()) / name
        folder.mkdir(mode=0o700, exist_ok=True)
        # lstat follows no link. In a folder like /tmp (sticky) other users cannot replace this user's folder.
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022:
            return folder
        return Path(tempfile.mkdtemp(prefix=name + "-"))
    except OSError as error:
        raise UsageError(f"no folder for the run's records: {error}; set TMPDIR to one that can be written") from error


class SharedRecord:
    """A record in `--shared-dir`, of one rank or of the coordinator, which survives the loss of rank 0's host.

    Each run has a folder `ddpdiag-<run id>-<nonce>/` (mode 0700), which `ddpdiag judge` reads. `run.jsonl` holds the
    coordinator's lines, `rank-<n>.jsonl` those of another rank. A thread writes the lines in order, so that a file
    server that does not answer delays no rank. Lines that cannot be written are lost. The file is closed after each
    write, because NFS shows other hosts only data that was written before a close (nfs(5), close-to-open consistency).
    """

    def __init__(self, shared_dir: str, run_id: str, file: str) -> None:
        self._shared_dir = Path(shared_dir)
        self._run_id = run_id
        self._file = file
        self._folder = -1
        self._pending: deque[Line] = deque()
        self._executor = ThreadPoolExecutor(1)
        self.path: Path | None = None

    def open(self, nonce: str) -> None:
        """Create the folder, named after the `nonce` of rank 0, and write all lines that came before this call."""
        if self.path is None:
            self.path = self._shared_dir / f"{folder_name(self._run_id)}-{nonce}"
            self._submit(self._open)

    def write(self, line: Line) -> None:
        self._pending.append(line)
        if self.path is not None:
            self._submit(self._append)

    def keep(self) -> Path | None:
        """Wait until all lines are written. Returns the folder, or None if the file server does not answer in time."""
        return self.path if self._wait(self._append) and self._folder >= 0 else None

    def remove(self, *, all_files: bool) -> None:
        """Remove this record or, with `all_files`, all files in the folder; then the folder, if it is empty."""
        self._wait(partial(self._remove, all_files=all_files))

    def _open(self) -> None:
        assert self.path is not None
        self.path.mkdir(mode=0o700, exist_ok=True)
        self._folder = open_private_folder(self.path)
        self._append()

    def _append(self) -> None:
        lines = [self._pending.popleft() for _ in range(len(self._pending))]
        if lines and self._folder >= 0:
            descriptor = os.open(self._file, _APPEND, 0o600, dir_fd=self._folder)
            try:
                os.write(descriptor, b"".join(map(encode_line, lines)))
            finally:
                os.close(descriptor)

    def _remove(self, *, all_files: bool) -> None:
        assert self.path is not None
        if self._folder >= 0:
            for name in os.listdir(self._folder) if all_files else (self._file,):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._folder)
            self.path.rmdir()

    def _wait(self, call: Callable[[], object]) -> bool:
        try:
            return self.path is not None and self._submit(call).result(DEADLINES.file_server)
        except TimeoutError:
            return False

    def _submit(self, call: Callable[[], object]) -> Future[bool]:
        return self._executor.submit(_run_without_error, call)


def _run_without_error(call: Callable[[], object]) -> bool:
    try:
        call()
    except OSError:
        return False
    return True


class Record:
    """One rank's lines in `rank-<n>.jsonl` (mode 0600), and its scratch folder. `shared` gets a copy of each line."""

    def __init__(self, folder: Path, rank: int, header: Header, shared: SharedRecord | None = None) -> None:
        self.rank = rank
        self._run_id = header.run_id
        self._shared = shared
        self.outcome_count = 0
        self.nonce = ""  # rank 0's nonce, which no other run with this run id has
        self._descriptor = -1
        self._set_paths(folder)
        with contextlib.suppress(OSError), lock_folder(folder):  # if the disk is full, the run goes on without a record
            if is_locked(self.path):
                self._set_paths(Path(tempfile.mkdtemp(prefix=folder.name + "-", dir=folder.parent)))
            shutil.rmtree(self.scratch, ignore_errors=True)  # left by a process that was killed
            self.scratch.mkdir(mode=0o700, exist_ok=True, parents=True)
            # A record of an earlier run with the same run id is renamed, because it is evidence of that run.
            if self.path.exists():
                stamp = datetime.fromtimestamp(self.path.stat().st_mtime, UTC).strftime("%Y%m%dT%H%M%S")
                self.path.rename(self.folder / f"old-{stamp}-{self.path.name}")
            self._descriptor = os.open(self.path, _APPEND | os.O_TRUNC, 0o600)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.write(header)

    def _set_paths(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / f"rank-{self.rank}.jsonl"
        self.scratch = folder / f"scratch-{self.rank}"

    @property
    def is_in_run_folder(self) -> bool:
        """Whether the record is in the run's usual folder, which the other ranks of this host know."""
        return self.folder == Path(tempfile.gettempdir()) / folder_name(self._run_id)

    def publish_port(self, port: int) -> None:
        """Write the port of rank 0's control server to a file, for the other ranks of this host."""
        with contextlib.suppress(OSError):
            (self.scratch / _PORT_FILE).write_text(str(port))

    def read_port_of_rank_0(self) -> int | None:
        """The port that rank 0 has published in the run's folder. None if there is no port, or if rank 0 has ended."""
        if not is_locked(self.folder / "rank-0.jsonl"):
            return None
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / "scratch-0" / _PORT_FILE).read_text())
        return None

    def set_rank_0_nonce(self, nonce: str) -> None:
        """Set the nonce of rank 0, and open the shared record, whose folder is named after it."""
        self.nonce = nonce
        if self._shared is not None and nonce:
            self._shared.open(nonce)

    def write(self, line: Line) -> None:
        self.outcome_count += isinstance(line, Outcome)
        with contextlib.suppress(OSError):
            os.write(self._descriptor, encode_line(line))
        if self._shared is not None:
            self._shared.write(line)

    def keep(self) -> None:
        """Close and keep the record; remove the scratch folders of this rank and of rank 0, which is lost."""
        self._close()
        shutil.rmtree(self.scratch, ignore_errors=True)
        if self.nonce and _belongs_to(self.folder, 0, self.nonce):
            remove_scratch(self.folder, 0)

    def remove(self) -> None:
        """Remove this rank's files, and the folder when it is empty."""
        self._close()
        _remove_files(self.folder, self.rank)

    def remove_files_of(self, nonces: Mapping[int, str]) -> None:
        """Remove the files of ranks that cannot do so themselves. `nonces` holds the nonce of each such rank."""
        for rank, nonce in nonces.items():
            if nonce and _belongs_to(self.folder, rank, nonce) and not is_locked(self.folder / f"rank-{rank}.jsonl"):
                _remove_files(self.folder, rank)

    def remove_files_of_killed(self) -> None:
        """Remove the files of ranks that were killed before their first outcome, because they contain no evidence."""
        for path in self.folder.glob("rank-*.jsonl"):
            rank = path.stem.removeprefix("rank-")
            if rank.isdecimal() and not is_locked(path) and not _contains(path, _OUTCOME_START):
                _remove_files(self.folder, int(rank))

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock of this record."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not _lock(descriptor)
    finally:
        os.close(descriptor)


def remove_scratch(folder: Path, rank: int) -> None:
    """Remove a rank's scratch folder with its files, and then the run's folder if it is empty."""
    shutil.rmtree(folder / f"scratch-{rank}", ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _remove_files(folder: Path, rank: int) -> None:
    with contextlib.suppress(OSError):
        (folder / f"rank-{rank}.jsonl").unlink()
    remove_scratch(folder, rank)


def _belongs_to(folder: Path, rank: int, nonce: str) -> bool:
    """Whether the process with this nonce wrote the rank's record in the folder, and no process of another run."""
    return _contains(folder / f"rank-{rank}.jsonl", f'"nonce":"{nonce}"'.encode())


def _contains(path: Path, text: bytes) -> bool:
    try:
        return text in path.read_bytes()
    except OSError:
        return False


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[int]:
    """Lock a run's folder, and yield a descriptor of it. After 1 s, go on without the lock."""
    folder.mkdir(mode=0o700, exist_ok=True)  # another process may have removed it as empty just now
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        end = time.monotonic() + DEADLINES.open_record
        while not _lock(descriptor) and time.monotonic() < end:
            time.sleep(0.005)
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock a file without waiting. Returns False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
