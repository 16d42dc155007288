"""Files in a directory that several hosts share: writing, locking, and torch's FileStore files."""

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

# How long a host looks for the others' files. NFS keeps attributes for 3 s at least, but asks its server at each open.
LOOK_SECONDS = 3.0
# A little longer (this share of it), so that the others find what this host wrote.
_LINGER_SHARE = 1 / 3
_POLL_SECONDS = 0.02
_DONE = "done"


class DirectoryLook(Struct, frozen=True):
    """The files of the other hosts as one host sees them.

    `unseen` are the ranks whose file did not appear. `lock_is_local`: it got a lock that the first host held (None: not
    tried).
    """

    unseen: tuple[int, ...] = ()
    lock_is_local: bool | None = None


def errno_name(error: OSError) -> str:
    """Such as "ENOSPC"."""
    return errno.errorcode.get(error.errno or 0, str(error))


def write(path: Path, content: str) -> str | None:
    """Write a new file down to the disk; the errno's name if that failed, and then nothing stays."""
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
    """A descriptor of a folder that only this user can write to; PermissionError for another one.

    In a folder that a group may write to, each member can put a link or another folder in the place of this one. Files
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
        with suppress(OSError):  # it was never written, or its file system became read-only
            path.unlink()


def lock(path: Path) -> str | None:
    """Take a lock (flock) without waiting, and release it; else the errno's name, EAGAIN if another holds it."""
    try:
        with path.open("r+b") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(file.fileno(), fcntl.LOCK_UN)
    except OSError as error:
        return errno_name(error)
    return None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a flock meanwhile, where that is possible."""
    with ExitStack() as stack:
        with suppress(OSError):
            fcntl.flock(stack.enter_context(path.open("r+b")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def content(path: Path) -> str | None:
    """The content of a file, or None: opened anew each time, so that a network file system asks its server."""
    try:
        with path.open("rb") as file:
            return file.read(256).decode(errors="replace")
    except OSError:
        return None


def watch(expected: Mapping[Path, str | None], end: float) -> set[Path]:
    """The files that had their expected content (None: that were gone) by `end` (monotonic)."""
    seen = set[Path]()
    while True:
        seen |= {path for path, text in expected.items() if path not in seen and content(path) == text}
        if len(seen) == len(expected) or time.monotonic() >= end:
            return seen
        time.sleep(_POLL_SECONDS)


def file_of(directory: Path, token: str) -> Path:
    """The file in which a host writes its token."""
    return directory / f".ddpdiag-{token}"


def done_of(own: Path) -> Path:
    """The file by which a host says that it has seen what there is to see."""
    return own.with_name(f"{own.name}.done")


def look(directory: Path, rank: int, tokens: Mapping[int, str], seconds: float = LOOK_SECONDS) -> DirectoryLook:
    """Look for the files of all others, and stay until they have seen this host's; `tokens` are "" without a file.

    The first rank returns, and its file is removed, when all others have written that they are done; the others return
    when that file is gone.
    """
    paths = {other: file_of(directory, token) for other, token in tokens.items() if token}
    own, first = paths.pop(rank), next(iter(tokens))
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
        write(done_of(own), _DONE)
        watch({paths.get(first, own): None}, late)
    return DirectoryLook(unseen, lock_is_local)


_MAX_ENTRIES = 1000
# The first bytes of a FileStore of torch 2.13: the length of a key, 4 bytes, and the key that counts the store's users.
_STORE = b"\t\0\0\0refcount/"


class Store(Struct, frozen=True):
    """A file that torch's FileStore wrote: its path, owner, bytes, and how long ago the last of these was written."""

    path: str
    owner: str
    bytes: int
    age_seconds: float


def stores(directory: Path) -> tuple[Store, ...]:
    """Files directly in a directory that torch's FileStore wrote, of the first thousand entries."""
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
        # Not blocking: what was a file may be a pipe by now.
        handle = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            about, head = os.fstat(handle), os.read(handle, len(_STORE))
        finally:
            os.close(handle)
    except OSError:
        return None
    if not stat.S_ISREG(about.st_mode) or head != _STORE:
        return None
    return Store(entry.path, user_name(about.st_uid), about.st_size, max(0.0, time.time() - about.st_mtime))


def unfit_for_url(path: str) -> str | None:
    """The first character with which torch cannot use a path in file://PATH; None if there is none.

    It splits the URL with urllib, which drops tabs and line breaks, and unquotes nothing (torch/distributed/
    rendezvous.py).
    """
    return next((character for character in path if character in "?#\t\r\n"), None)
