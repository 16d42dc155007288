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
_OUTCOME = b'{"type":"outcome"'
_PORT_FILE = "control-port"


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
        # One look, at the name itself: other users cannot replace this user's folder in a folder like /tmp.
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
            return folder
        return Path(tempfile.mkdtemp(prefix=name + "-"))
    except OSError as error:
        raise UsageError(f"no folder for the run's records: {error}; set TMPDIR to one that can be written") from error


class SharedRecord:
    """Lines of one rank, or of the coordinator, in `--shared-dir`, where they outlive the loss of rank 0.

    They are in `ddpdiag-<run id>-<nonce>/` (mode 0700), a folder for each run, which `ddpdiag judge` reads: `run.jsonl`
    holds the coordinator's lines, `rank-<n>.jsonl` those of another rank. A thread writes them in order, because a file
    server that does not answer must delay no rank; what cannot be written is left out. Files are closed after each
    write: NFS shows to other hosts what was written before a close (nfs(5), close-to-open consistency).
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
        """Write from now on, lines of before first; `nonce` is rank 0's, and names the folder."""
        if self.path is None:
            self.path = self._shared_dir / f"{folder_name(self._run_id)}-{nonce}"
            self._do(self._open)

    def write(self, line: Line) -> None:
        self._pending.append(line)
        if self.path is not None:
            self._do(self._append)

    def keep(self) -> Path | None:
        """Wait for what is still to be written; the folder, or None if the file server does not answer."""
        return self.path if self._wait(self._append) and self._folder >= 0 else None

    def remove(self, *, others: bool = False) -> None:
        """Remove this file and, with `others`, those of ranks that did not; the folder goes once it is empty."""
        self._wait(partial(self._remove, others=others))

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

    def _remove(self, *, others: bool) -> None:
        assert self.path is not None
        if self._folder >= 0:
            for name in os.listdir(self._folder) if others else (self._file,):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._folder)
            self.path.rmdir()

    def _wait(self, act: Callable[[], object]) -> bool:
        try:
            return self.path is not None and self._do(act).result(DEADLINES.tidy)
        except TimeoutError:
            return False

    def _do(self, act: Callable[[], object]) -> Future[bool]:
        return self._executor.submit(_succeeds, act)


def _succeeds(act: Callable[[], object]) -> bool:
    try:
        act()
    except OSError:
        return False
    return True


class Record:
    """One rank's lines in `rank-<n>.jsonl` (mode 0600), and its scratch folder beside it; `shared` gets them, too."""

    def __init__(self, folder: Path, rank: int, header: Header, shared: SharedRecord | None = None) -> None:
        self.rank = rank
        self._run_id = header.run_id
        self._shared = shared
        self.outcomes = 0
        self.nonce = ""  # rank 0's; it tells this run from others of its run id
        self._descriptor = -1
        self._lie_in(folder)
        with contextlib.suppress(OSError), alone_in(folder):  # a full disk loses the record, not the run
            if is_held(self.path):
                self._lie_in(Path(tempfile.mkdtemp(prefix=folder.name + "-", dir=folder.parent)))
            shutil.rmtree(self.scratch, ignore_errors=True)  # of a process that was killed
            self.scratch.mkdir(mode=0o700, exist_ok=True, parents=True)
            # An earlier run of the same id kept its record: it is evidence, and no part of this run.
            if self.path.exists():
                stamp = datetime.fromtimestamp(self.path.stat().st_mtime, UTC).strftime("%Y%m%dT%H%M%S")
                self.path.rename(self.folder / f"old-{stamp}-{self.path.name}")
            self._descriptor = os.open(self.path, _APPEND | os.O_TRUNC, 0o600)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.write(header)

    def _lie_in(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / f"rank-{self.rank}.jsonl"
        self.scratch = folder / f"scratch-{self.rank}"

    @property
    def is_in_run_folder(self) -> bool:
        """Whether the other ranks of this host find the record: the run's folder is not that of another run."""
        return self.folder == Path(tempfile.gettempdir()) / folder_name(self._run_id)

    def offer_port(self, port: int) -> None:
        """Write the port of rank 0's control server for the ranks of this host; the scratch folder's end removes it."""
        with contextlib.suppress(OSError):
            (self.scratch / _PORT_FILE).write_text(str(port))

    def port_of_rank_0(self) -> int | None:
        """The port that a living rank 0 wrote into this run's folder, if any."""
        if not is_held(self.folder / "rank-0.jsonl"):
            return None
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / "scratch-0" / _PORT_FILE).read_text())
        return None

    def set_nonce(self, nonce: str) -> None:
        """Rank 0 sent which of all runs with this run id this one is."""
        self.nonce = nonce
        if self._shared is not None and nonce:
            self._shared.open(nonce)

    def write(self, line: Line) -> None:
        self.outcomes += isinstance(line, Outcome)
        with contextlib.suppress(OSError):
            os.write(self._descriptor, encode_line(line))
        if self._shared is not None:
            self._shared.write(line)

    def keep(self) -> None:
        """Keep the record on disk, and nothing else: not this rank's scratch, and not that of rank 0, which is lost."""
        self._close()
        shutil.rmtree(self.scratch, ignore_errors=True)
        if self.nonce and _is_of(self.folder, 0, self.nonce):
            remove_scratch(self.folder, 0)

    def remove(self) -> None:
        """Remove this rank's files, and the folder when it is empty."""
        self._close()
        _remove_files(self.folder, self.rank)

    def remove_others(self, nonces: Mapping[int, str]) -> None:
        """Remove the files of ranks that cannot do it themselves, by their nonces, whatever host they were on."""
        for rank, nonce in nonces.items():
            if nonce and _is_of(self.folder, rank, nonce) and not is_held(self.folder / f"rank-{rank}.jsonl"):
                _remove_files(self.folder, rank)

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
    """Whether this is the record of a living process."""
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
    """Whether the rank's record in the folder is of the process with this nonce, and not of another run."""
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
