"""Files in a directory that several hosts share: writing, locking, and the files of torch's FileStore."""

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

# Time for finding the other hosts' files. NFS caches attributes for 3 s at least, but asks its server at each open.
LOOK_SECONDS = 3.0
# A host waits this share longer, so that the other hosts find its file.
_LINGER_SHARE = 1 / 3
_POLL_SECONDS = 0.02
_DONE = "done"


class DirectoryLook(Struct, frozen=True):
    """The files of the other hosts as one host sees them.

    `unseen` are the ranks whose file did not appear. `lock_is_local` says that this host got a lock that the first host
    held (None: not tried).
    """

    unseen: tuple[int, ...] = ()
    lock_is_local: bool | None = None


def errno_name(error: OSError) -> str:
    """The name of the error's number, such as "ENOSPC"."""
    return errno.errorcode.get(error.errno or 0, str(error))


def write(path: Path, content: str) -> str | None:
    """Write a new file down to the disk; None on success. Else remove it, and return the errno's name."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, content.encode())
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        remove((path,))
        return errno_name(error)
    return None


def open_private_folder(path: Path) -> int:
    """Open a folder that only this user can write to, and return its descriptor. PermissionError for any other folder.

    If a group may write to the parent folder, each member can replace this folder by a link or another folder. Files
    that are opened relative to the descriptor stay in the folder that was checked.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    state = os.fstat(descriptor)
    if state.st_uid != os.geteuid() or state.st_mode & 0o022:
        os.close(descriptor)
        raise PermissionError(errno.EACCES, "others may write to it", str(path))
    return descriptor


def remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):  # the file was never written, or its file system became read-only
            path.unlink()


def lock(path: Path) -> str | None:
    """Take a lock (flock) without waiting, and release it; None on success, else the errno's name (EAGAIN: held)."""
    try:
        with path.open("r+b") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(file.fileno(), fcntl.LOCK_UN)
    except OSError as error:
        return errno_name(error)
    return None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Try to hold a flock during the block; without the lock, the block runs as well."""
    with ExitStack() as stack:
        with suppress(OSError):
            fcntl.flock(stack.enter_context(path.open("r+b")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def content(path: Path) -> str | None:
    """Read the start of a file, or None. It is opened each time, so that a network file system asks its server."""
    try:
        with path.open("rb") as file:
            return file.read(256).decode(errors="replace")
    except OSError:
        return None


def watch(expected: Mapping[Path, str | None], end: float) -> set[Path]:
    """Wait for the expected content (None: no file) until `end` (monotonic), and return the files that had it."""
    seen = set[Path]()
    while True:
        seen |= {path for path, text in expected.items() if path not in seen and content(path) == text}
        if len(seen) == len(expected) or time.monotonic() >= end:
            return seen
        time.sleep(_POLL_SECONDS)


def file_of(directory: Path, token: str) -> Path:
    """The path of the file in which a host writes its token."""
    return directory / f".ddpdiag-{token}"


def done_of(file: Path) -> Path:
    """The path of the file by which the host with this token file announces that its search is finished."""
    return file.with_name(f"{file.name}.done")


def look(directory: Path, rank: int, tokens: Mapping[int, str], seconds: float = LOOK_SECONDS) -> DirectoryLook:
    """Wait for the files of all other hosts, and until these hosts are done, too; `tokens` are "" without a file.

    The first rank returns when all others have written that they are done, and its file is removed then. The others
    return when that file is gone.
    """
    paths = {other: file_of(directory, token) for other, token in tokens.items() if token}
    own_file, first = paths.pop(rank), next(iter(tokens))
    end = time.monotonic() + seconds
    late = end + seconds * _LINGER_SHARE
    seen = watch({path: tokens[other] for other, path in paths.items()}, end)
    unseen = tuple(other for other, path in paths.items() if path not in seen)
    lock_is_local = None
    if rank == first:
        watch({done_of(path): _DONE for path in paths.values()}, late)
    else:
        if first in paths and first not in unseen:
            lock_is_local = {None: True, "EAGAIN": False}.get(lock(paths[first]))
        write(done_of(own_file), _DONE)
        watch({paths.get(first, own_file): None}, late)
    return DirectoryLook(unseen, lock_is_local)


_MAX_ENTRIES = 1000
# The first bytes of a FileStore of torch 2.13: the length of a key, 4 bytes, and the key that counts the store's users.
_STORE = b"\t\0\0\0refcount/"


class Store(Struct, frozen=True):
    """A file that torch's FileStore wrote: its path, owner, size in bytes, and the seconds since the last write."""

    path: str
    owner: str
    bytes: int
    age_seconds: float


def stores(directory: Path) -> tuple[Store, ...]:
    """Find the files directly in a directory that torch's FileStore wrote, among its first thousand entries."""
    try:
        with os.scandir(directory) as entries:
            found = [_store(entry) for entry in islice(entries, _MAX_ENTRIES)]
    except OSError:
        return ()
    return tuple(sorted((store for store in found if store is not None), key=lambda store: store.path))


def _store(entry: os.DirEntry[str]) -> Store | None:
    try:
        if not entry.is_file(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_size < len(_STORE):
            return None
        # O_NONBLOCK, since a pipe may have replaced the file meanwhile.
        handle = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            status, head = os.fstat(handle), os.read(handle, len(_STORE))
        finally:
            os.close(handle)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode) or head != _STORE:
        return None
    return Store(entry.path, user_name(status.st_uid), status.st_size, max(0.0, time.time() - status.st_mtime))


def unfit_for_url(path: str) -> str | None:
    """The first character that torch cannot read in the path of a file://PATH; None if there is none.

    torch splits the URL with urllib, which drops tabs and line breaks, and unquotes nothing
    (torch/distributed/rendezvous.py).
    """
    return next((character for character in path if character in "?#\t\r\n"), None)
