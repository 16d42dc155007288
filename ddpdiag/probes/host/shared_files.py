"""Files in a directory that several hosts share: whether they can be written, seen and locked; torch's FileStores."""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path

from msgspec import Struct

from ddpdiag.probes.host.programs import user_name

# Time to find the other hosts' files. NFS caches attributes for at least 3 s, but asks its server at each open.
SEARCH_SECONDS = 3.0
# A host keeps its file for this share of the time longer, so that the other hosts find the file.
_LINGER_SHARE = 1 / 3
_POLL_SECONDS = 0.02
_DONE = "done"


class HostFiles(Struct, frozen=True):
    """The files of the other hosts as one host sees them.

    `missing_ranks` are the ranks whose file did not appear. `lock_is_local` says that this host could lock the file of
    the first host although that host held the lock (None: not tried).
    """

    missing_ranks: tuple[int, ...] = ()
    lock_is_local: bool | None = None


def errno_name(error: OSError) -> str:
    """The symbolic name of the error's number, such as "ENOSPC"."""
    return errno.errorcode.get(error.errno or 0, str(error))


def write_new(path: Path, content: str) -> str | None:
    """Write a new file, and flush it to the disk. If that fails, remove it and return the errno's name."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, content.encode())
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        remove_files((path,))
        return errno_name(error)
    return None


def open_private_folder(path: Path) -> int:
    """Open a folder that only this user can write to, and return its descriptor. PermissionError for any other folder.

    Callers open files relative to the descriptor, so that these are in the folder that was checked, even if a user who
    may write to the parent folder replaces this folder by a link or another folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    state = os.fstat(descriptor)
    if state.st_uid != os.geteuid() or state.st_mode & 0o022:
        os.close(descriptor)
        raise PermissionError(errno.EACCES, "others may write to it", str(path))
    return descriptor


def remove_files(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):  # the file was never written, or its file system became read-only
            path.unlink()


def try_lock(path: Path) -> str | None:
    """Lock the file (flock) without waiting, and unlock it. Returns None, or the errno's name (EAGAIN: locked)."""
    try:
        with path.open("r+b") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(file.fileno(), fcntl.LOCK_UN)
    except OSError as error:
        return errno_name(error)
    return None


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Lock the file (flock) during the block. The block also runs if the file cannot be locked."""
    with ExitStack() as stack:
        with suppress(OSError):
            fcntl.flock(stack.enter_context(path.open("r+b")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def read_start(path: Path) -> str | None:
    """Read the first 256 bytes of a file; None if that fails. Opening makes a network file system ask its server."""
    try:
        with path.open("rb") as file:
            return file.read(256).decode(errors="replace")
    except OSError:
        return None


def wait_for_contents(expected: Mapping[Path, str | None], end: float) -> set[Path]:
    """Wait for the expected contents (None: no file) until `end` (monotonic), and return the files that had them."""
    matched = set[Path]()
    while True:
        matched |= {path for path, text in expected.items() if path not in matched and read_start(path) == text}
        if len(matched) == len(expected) or time.monotonic() >= end:
            return matched
        time.sleep(_POLL_SECONDS)


def token_path(directory: Path, token: str) -> Path:
    """The path of the file in which a host writes its token."""
    return directory / f".ddpdiag-{token}"


def done_path(file: Path) -> Path:
    """The path of the file that the host of this token file writes when its search is finished."""
    return file.with_name(f"{file.name}.done")


def find_files(directory: Path, rank: int, tokens: Mapping[int, str], seconds: float = SEARCH_SECONDS) -> HostFiles:
    """Search for the files of all other hosts. `tokens` has the token of each host's rank, "" if it wrote no file.

    Each host then waits, so that no file is removed too early: all hosts but the first announce that they are done, and
    wait until the first host's file is gone. The first host waits for these announcements.
    """
    paths = {other: token_path(directory, token) for other, token in tokens.items() if token}
    own_file, first = paths.pop(rank), next(iter(tokens))
    end = time.monotonic() + seconds
    linger_end = end + seconds * _LINGER_SHARE
    found_paths = wait_for_contents({path: tokens[other] for other, path in paths.items()}, end)
    missing = tuple(other for other, path in paths.items() if path not in found_paths)
    lock_is_local = None
    if rank == first:
        wait_for_contents({done_path(path): _DONE for path in paths.values()}, linger_end)
    else:
        if first in paths and first not in missing:
            lock_is_local = {None: True, "EAGAIN": False}.get(try_lock(paths[first]))
        write_new(done_path(own_file), _DONE)
        wait_for_contents({paths.get(first, own_file): None}, linger_end)
    return HostFiles(missing, lock_is_local)


_MAX_ENTRIES = 1000
# The first bytes of a FileStore of torch 2.13: a key's length (4 bytes), and the key that counts its users.
_STORE_HEAD = b"\t\0\0\0refcount/"


class StoreFile(Struct, frozen=True):
    """A file that torch's FileStore wrote: its path, owner, size in bytes, and the seconds since the last write."""

    path: str
    owner: str
    bytes: int
    age_seconds: float


def find_store_files(directory: Path) -> tuple[StoreFile, ...]:
    """Find the files in a directory that torch's FileStore wrote. Only the first thousand entries are read."""
    try:
        with os.scandir(directory) as entries:
            found = [_read_store(entry) for entry in islice(entries, _MAX_ENTRIES)]
    except OSError:
        return ()
    return tuple(sorted((store for store in found if store is not None), key=lambda store: store.path))


def _read_store(entry: os.DirEntry[str]) -> StoreFile | None:
    try:
        if not entry.is_file(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_size < len(_STORE_HEAD):
            return None
        # O_NONBLOCK, because a pipe may have replaced the file since.
        handle = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            status, head = os.fstat(handle), os.read(handle, len(_STORE_HEAD))
        finally:
            os.close(handle)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode) or head != _STORE_HEAD:
        return None
    return StoreFile(entry.path, user_name(status.st_uid), status.st_size, max(0.0, time.time() - status.st_mtime))


def unusable_url_character(path: str) -> str | None:
    """The first character of a path that cannot be used in file://PATH; None if all can.

    torch parses the URL with urllib, which removes tabs and line breaks, and torch does not unquote the path
    (torch/distributed/rendezvous.py).
    """
    return next((character for character in path if character in "?#\t\r\n"), None)
