"""Limits of this process (resource limits, processors, shared memory, control groups), and its measured throughput.

A limit of a control group (version 1 or 2) applies to all processes in the group and in groups below. So every group
from that of this process up to the mount is read, and the group with the smallest unused part of its limit is reported.

Throughput is measured for copies in memory, and for a TCP stream over the loopback interface. gloo sends over TCP even
within a host, so both limit its rate there. (Measured on 2 cores: 2 GB/s over loopback, 11 to 15 GB/s copied.)
"""

import contextlib
import os
import resource
import socket
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from ddpdiag.probes.host.kernel import names_in, read_int, read_pairs, read_text

SHM = Path("/dev/shm")


class ResourceLimits(Struct, frozen=True, kw_only=True):
    """Soft limits of this process: open files, locked memory in bytes, processes of the user; None means unlimited."""

    nofile: int | None
    memlock: int | None
    nproc: int | None


class SharedMemory(Struct, frozen=True):
    """Size and free space of /dev/shm. `error` is the reason why a small file could not be allocated, or None."""

    size_bytes: int
    free_bytes: int
    error: str | None


def rlimits() -> ResourceLimits | None:
    """Read the resource limits of this process, which may differ from a login shell's; None if not readable."""
    try:
        return ResourceLimits(
            nofile=_limit(resource.RLIMIT_NOFILE),
            memlock=_limit(resource.RLIMIT_MEMLOCK),
            nproc=_limit(resource.RLIMIT_NPROC),
        )
    except OSError:  # a seccomp filter
        return None


def _limit(which: int) -> int | None:
    soft, _hard = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def affinity() -> tuple[int, ...]:
    """The numbers of the processors on which this process may run, sorted; empty if they are not readable."""
    try:
        return tuple(sorted(os.sched_getaffinity(0)))
    except OSError:
        return ()


def shared_memory(directory: Path = SHM, probe_bytes: int = 1 << 20) -> SharedMemory | None:
    """Read size and free space of `directory`, and try to allocate `probe_bytes` there; None if it cannot be read."""
    try:
        status = os.statvfs(directory)
    except OSError:
        return None
    problem = None
    try:
        # The file has no name, so no file remains even if this process is killed.
        with tempfile.TemporaryFile(dir=directory) as file:
            # On a full tmpfs ftruncate would succeed, and the first write would end the process with SIGBUS.
            os.posix_fallocate(file.fileno(), 0, probe_bytes)
    except OSError as error:
        problem = error.strerror or str(error)
    return SharedMemory(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize, problem)


def user_processes(proc_root: Path) -> int | None:
    """Count the processes of this user in /proc, without threads; None if /proc is not readable."""
    if (names := names_in(proc_root)) is None:
        return None
    number = 0
    for name in filter(str.isdecimal, names):
        with contextlib.suppress(OSError):  # the process has ended since the list was read
            number += (proc_root / name).stat().st_uid == os.getuid()
    return number


# Version 1 writes the highest multiple of the page size for "no limit". No machine has 2**60 bytes.
_UNLIMITED = 1 << 60


class LimitUse(Struct, frozen=True):
    """A limit, and how much of it is used, in the same unit."""

    limit: int
    used: int

    @property
    def unused(self) -> int:
        return max(0, self.limit - self.used)


class Cgroup(Struct, frozen=True, kw_only=True):
    """The limits of control groups on this process; None means that there is no limit, or that it is not readable.

    `cpus` is a number of cores, such as 2.5. `memory` is in bytes, and page cache that the kernel can drop does not
    count as used. `pids` counts processes and threads. `oom_kills` counts processes killed for lack of memory.
    """

    cpus: float | None = None
    memory: LimitUse | None = None
    pids: LimitUse | None = None
    oom_kills: int | None = None


def cgroup(proc_root: Path, sys_root: Path) -> Cgroup:
    """Read the limits that control groups set on this process."""
    mounted = sys_root / "fs" / "cgroup"
    paths: dict[str, str] = {}  # the path of this process's group by controller; "" is version 2
    for line in (read_text(proc_root / "self" / "cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths |= dict.fromkeys(controllers.split(","), path)
    cpu, memory, pids = (_levels(mounted, paths, name) for name in ("cpu", "memory", "pids"))
    events = (read_pairs(level / "memory.events") or read_pairs(level / "memory.oom_control") for level in memory)
    kills = (counts.get("oom_kill", "") for counts in events)
    return Cgroup(
        cpus=min((quota for level in cpu if (quota := _quota(level)) is not None), default=None),
        memory=_least_unused(_memory_use(level) for level in memory),
        pids=_least_unused(_limit_use(level, "pids.max", "pids.current") for level in pids),
        oom_kills=next((int(number) for number in kills if number.isdecimal()), None),
    )


def _levels(mounted: Path, paths: dict[str, str], controller: str) -> list[Path]:
    """The folders of this process's group and of all groups above, up to the mount; without those that are hidden."""
    mount, path = (mounted / controller, paths[controller]) if controller in paths else (mounted, paths.get("", "/"))
    group = mount / path.lstrip("/")
    return [level for level in (group, *group.parents) if level.is_relative_to(mount) and level.is_dir()]


def _quota(level: Path) -> float | None:
    quota, _, period = (read_text(level / "cpu.max") or "").partition(" ")
    if quota.isdecimal() and period.isdecimal() and int(period) > 0:
        return int(quota) / int(period)
    quota_us, period_us = read_int(level / "cpu.cfs_quota_us"), read_int(level / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us is not None and period_us and quota_us > 0 else None


def _memory_use(level: Path) -> LimitUse | None:
    stat = read_pairs(level / "memory.stat")
    droppable = int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)
    found = _limit_use(level, "memory.max", "memory.current")
    found = found or _limit_use(level, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return None if found is None else LimitUse(found.limit, max(0, found.used - droppable))


def _limit_use(level: Path, limit_name: str, used_name: str) -> LimitUse | None:
    limit, used = read_int(level / limit_name), read_int(level / used_name)
    return LimitUse(limit, used) if limit is not None and used is not None and limit < _UNLIMITED else None


def _least_unused(uses: Iterable[LimitUse | None]) -> LimitUse | None:
    return min((use for use in uses if use is not None), key=lambda use: use.unused, default=None)


# Larger than the caches of a core, but small enough for many ranks on one host.
COPY_BYTES = 16 << 20
# gloo sends segments of 1 MiB at most (allreduce.cc).
_SEGMENT_BYTES = 1 << 20
_CONNECT_SECONDS = 1.0


class Copier:
    """Measures the rate of copies between two buffers. They are allocated only once, because fresh memory is slower."""

    def __init__(self, size_bytes: int = COPY_BYTES) -> None:
        self._source = memoryview(bytearray(size_bytes))
        self._target = memoryview(bytearray(size_bytes))
        self._target[:] = self._source

    def bytes_per_s(self, seconds: float) -> float:
        """Copy for about `seconds`, at least once. Returns the copied bytes per second."""
        begin = time.perf_counter()
        copies, elapsed = 0, 0.0
        while copies == 0 or elapsed < seconds:
            self._target[:] = self._source
            copies += 1
            elapsed = time.perf_counter() - begin
        return copies * len(self._source) / max(elapsed, 1e-9)


def loopback_bytes_per_s(seconds: float) -> float | None:
    """Measure the rate of a TCP stream from this process to itself over 127.0.0.1; None if that fails.

    One thread sends and receives, as in gloo (transport/tcp/loop.cc), with gloo's segments.
    """
    try:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            sender = stack.enter_context(socket.create_connection(listener.getsockname(), _CONNECT_SECONDS))
            receiver = stack.enter_context(listener.accept()[0])
            sender.setblocking(False)
            receiver.setblocking(False)
            source, target = memoryview(bytearray(COPY_BYTES)), memoryview(bytearray(COPY_BYTES))
            begin, sent, received = time.perf_counter(), 0, 0
            while time.perf_counter() - begin < seconds:
                start, end = sent % COPY_BYTES, received % COPY_BYTES
                with contextlib.suppress(BlockingIOError):
                    sent += sender.send(source[start : start + _SEGMENT_BYTES])
                with contextlib.suppress(BlockingIOError):
                    received += receiver.recv_into(target[end : end + _SEGMENT_BYTES])
            return received / max(time.perf_counter() - begin, 1e-9)
    except OSError:
        return None
