"""What the kernel grants this process: resource limits, processors, shared memory."""

import contextlib
import errno
import os
import resource
import tempfile
from pathlib import Path

from msgspec import Struct

SHM = Path("/dev/shm")
# What open(2) gives for O_TMPFILE where the file system, or a kernel before 3.11, does not know it.
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR)


class Limit(Struct, frozen=True):
    """A resource limit, soft and hard; None means unlimited."""

    soft: int | None
    hard: int | None


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of this process: open files and processes are counts, locked memory and stack are bytes."""

    nofile: Limit
    memlock: Limit
    nproc: Limit
    stack: Limit


class SharedMemory(Struct, frozen=True):
    """/dev/shm in bytes. `error` says why a small file could not be given its pages there; None means that it could."""

    size_bytes: int
    free_bytes: int
    error: str | None


def limits() -> Limits | None:
    """Resource limits as the launcher left them, which may differ from those of a login shell; None if refused."""
    try:
        return Limits(
            nofile=_limit(resource.RLIMIT_NOFILE),
            memlock=_limit(resource.RLIMIT_MEMLOCK),
            nproc=_limit(resource.RLIMIT_NPROC),
            stack=_limit(resource.RLIMIT_STACK),
        )
    except OSError:  # a seccomp filter
        return None


def _limit(which: int) -> Limit:
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which))
    return Limit(soft, hard)


def cores() -> int | None:
    """Processors of the host that are switched on, or None if the system does not say."""
    import psutil

    try:
        count: int | None = psutil.cpu_count()
    except OSError:
        return None
    return count


def affinity() -> tuple[int, ...]:
    """Numbers of the processors on which this process may run, in rising order; empty if the system does not say."""
    try:
        return tuple(sorted(os.sched_getaffinity(0)))
    except OSError:
        return ()


def shared_memory(directory: Path = SHM, probe_bytes: int = 1 << 20) -> SharedMemory | None:
    """Size and room of `directory`, and whether `probe_bytes` can be had there; None if there is no such place."""
    try:
        seen = os.statvfs(directory)
    except OSError:
        return None
    error = _allocation_error(directory, probe_bytes)
    return SharedMemory(seen.f_blocks * seen.f_frsize, seen.f_bavail * seen.f_frsize, error)


def _allocation_error(directory: Path, probe_bytes: int) -> str | None:
    # ftruncate would succeed on a full tmpfs, and the first write die of SIGBUS.
    try:
        file = _unnamed_file(directory)
        try:
            os.posix_fallocate(file, 0, probe_bytes)
        finally:
            os.close(file)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _unnamed_file(directory: Path) -> int:
    """A descriptor of a file without a name. O_TMPFILE leaves none behind even when this process is killed."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    file, path = tempfile.mkstemp(prefix=".ddpdiag-", dir=directory)
    os.unlink(path)
    return file


def user_processes(proc_root: Path) -> int | None:
    """Processes of this user that /proc shows, or None if it is not readable; RLIMIT_NPROC counts threads as well."""
    try:
        entries = [entry for entry in proc_root.iterdir() if entry.name.isdecimal()]
    except OSError:
        return None
    return sum(_is_own(entry) for entry in entries)


def _is_own(entry: Path) -> bool:
    with contextlib.suppress(OSError):  # it has ended since the list was read
        return entry.stat().st_uid == os.getuid()
    return False
