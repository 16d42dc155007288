"""Files in a directory that several hosts share: writing, locking, and what others see of them."""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from msgspec import Struct

# How long a host looks for the others' files. NFS keeps attributes for 3 s at least, but asks its server at each open.
LOOK_SECONDS = 3.0
# A little longer (this share of it), so that the others find what this host wrote.
_LINGER_SHARE = 1 / 3
_POLL_SECONDS = 0.02
_DONE = "done"


class View(Struct, frozen=True):
    """What a host saw of the others' files: whose it did not, the seconds until the last of the others appeared, and
    whether it got a lock that the first host held (None: not tried)."""

    unseen: tuple[int, ...] = ()
    seconds: float = 0.0
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


def remove(paths: Iterable[Path]) -> None:
    """Remove what is there."""
    for path in paths:
        with suppress(OSError):  # it was never written, or its file system became read-only
            path.unlink()


def lock(path: Path, take: Callable[[int, int], object]) -> str | None:
    """Take a lock (`fcntl.flock` or `fcntl.lockf`) without waiting, and give it back; the errno's name if that failed.

    EAGAIN says that somebody else has it.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            take(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            take(handle, fcntl.LOCK_UN)
        finally:
            os.close(handle)
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
    """What is in a file, or None: opened anew each time, so that a network file system asks its server."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(handle, 256).decode(errors="replace")
        finally:
            os.close(handle)
    except OSError:
        return None


def watch(expected: Mapping[Path, str | None], end: float) -> dict[Path, float]:
    """Seconds until each file had its expected content (None: until it is gone); those not so by `end` are left out.

    `end` is of the monotonic clock.
    """
    begin, waiting, seen = time.monotonic(), dict(expected), dict[Path, float]()
    while waiting:
        for path in [path for path, text in waiting.items() if content(path) == text]:
            seen[path] = time.monotonic() - begin
            del waiting[path]
        if time.monotonic() >= end:
            break
        if waiting:
            time.sleep(_POLL_SECONDS)
    return seen


def file_of(directory: Path, token: str) -> Path:
    """The file in which a host writes its token."""
    return directory / f".ddpdiag-{token}"


def done_of(own: Path) -> Path:
    """The file by which a host says that it has seen what there is to see."""
    return own.with_name(f"{own.name}.done")


def look(directory: Path, rank: int, tokens: Mapping[int, str], seconds: float = LOOK_SECONDS) -> View:
    """Look for the files of all others, and stay until they have seen ours; `tokens` are "" where none was written.

    The first rank leaves, and removes its file, when all others say by a file that they are done; the others leave
    when that file is gone. Nobody needs to be told anything by another way.
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
            lock_is_local = {None: True, "EAGAIN": False}.get(lock(paths[first], fcntl.flock))
        write(done_of(own), _DONE)
        watch({paths.get(first, own): None}, late)
    return View(unseen, max(seen.values(), default=0.0), lock_is_local)
