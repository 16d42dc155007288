"""Readers of /proc and /sys: small files, this boot, processes, TCP sockets, memory, RDMA devices."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

PROC = Path("/proc")
_LARGEST_ENVIRON = 1 << 20


def read_text(path: Path) -> str | None:
    """The stripped content, or None if the file is missing or not readable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """The content as a number, or None if it is missing or something else (such as "max")."""
    content = read_text(path)
    try:
        return int(content) if content else None
    except ValueError:
        return None


def read_pairs(path: Path, separator: str | None = None) -> dict[str, str]:
    """Lines of "name<separator>value" by name, without those that lack a value; empty if unreadable."""
    rows = (line.split(separator, 1) for line in (read_text(path) or "").splitlines())
    return {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}


class Memory(Struct, frozen=True):
    """Memory of the whole host in bytes."""

    total_bytes: int
    available_bytes: int


def names_in(folder: Path) -> tuple[str, ...] | None:
    """The names in a folder, in order; None if it cannot be looked at."""
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return None


def proc_root(env: Mapping[str, str]) -> Path:
    """The folder of procfs: $DDPDIAG_PROCFS (a host's tree mounted into a container, or a test's fake), else /proc."""
    return Path(env.get("DDPDIAG_PROCFS") or PROC)


def boot_id(root: Path = PROC) -> str:
    """The kernel's boot id, alike for every process and container of one host; "" if the kernel does not say."""
    return read_text(root / "sys" / "kernel" / "random" / "boot_id") or ""


def stat_of(process: Path) -> tuple[str, list[str]]:
    """The name of a process or thread, and the fields behind it: the state, then from field 4 of proc(5) on."""
    # The name stands in parentheses and may hold any character, a parenthesis and a blank included.
    head, _, rest = (read_text(process / "stat") or "").rpartition(")")
    return head.partition("(")[2], rest.split()


def process_state(pid: int, root: Path = PROC) -> tuple[str | None, str | None]:
    """State letter of proc(5) and the kernel function in which a process waits; None for what is not shown."""
    _, fields = stat_of(root / str(pid))
    wchan = read_text(root / str(pid) / "wchan")
    return fields[0] if fields else None, wchan if wchan not in (None, "", "0") else None


def cpu_ticks(pid: int, root: Path = PROC) -> int | None:
    """Time on a core so far, in clock ticks of usually 10 ms (utime and stime of proc(5)); None if it is not shown."""
    _, fields = stat_of(root / str(pid))
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else None


def age_seconds(pid: int, root: Path = PROC) -> float | None:
    """Seconds since a process was started, to 10 ms (starttime of proc(5), in ticks since boot); None if not shown."""
    _, fields = stat_of(root / str(pid))
    if len(fields) < 20:
        return None
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


def environ(pid: int, root: Path = PROC) -> dict[str, str] | None:
    """The environment that a process was started with; None where it cannot be read."""
    try:
        with (root / str(pid) / "environ").open("rb") as file:
            words = file.read(_LARGEST_ENVIRON).decode(errors="replace").split("\0")
    except OSError:
        return None
    return dict(word.split("=", 1) for word in words if "=" in word)


def open_files(process: Path) -> Iterator[str]:
    """The open files of a process: paths, or such as "socket:[123]"; OSError if its files are not ours to see."""
    for name in os.listdir(process / "fd"):
        with contextlib.suppress(OSError):  # closed since
            yield os.readlink(process / "fd" / name)


def core_seconds(pid: int, root: Path = PROC) -> float | None:
    """Seconds that a process's main thread has spent on a core or waiting for one; None if the kernel does not say.

    /proc/PID/schedstat, in ns (Documentation/scheduler/sched-stats.rst).
    """
    fields = (read_text(root / str(pid) / "schedstat") or "").split()
    return (int(fields[0]) + int(fields[1])) / 1e9 if len(fields) > 1 else None


class TcpSocket(Struct, frozen=True):
    """The local end of a TCP socket, as proc(5) has it; inode "0" is a closed connection in TIME_WAIT."""

    family: socket.AddressFamily
    host: str
    port: int
    listens: bool
    uid: int
    inode: str

    @property
    def address(self) -> str:
        """The host's address: words of 32 bits in the machine's order of bytes, each as 8 hexadecimal digits."""
        words = (int(self.host[start : start + 8], 16) for start in range(0, len(self.host), 8))
        return socket.inet_ntop(self.family, b"".join(word.to_bytes(4, sys.byteorder) for word in words))


def tcp_sockets() -> Iterator[TcpSocket]:
    """The TCP sockets of this network namespace."""
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for fields in map(str.split, (read_text(PROC / "net" / table) or "").splitlines()[1:]):
            host, _, port = fields[1].rpartition(":")
            listens = fields[3] == "0A"  # include/net/tcp_states.h
            yield TcpSocket(family, host, int(port, 16), listens, int(fields[7]), fields[9])


def memory(root: Path) -> Memory | None:
    """Memory of the host, or None if /proc/meminfo does not say."""
    kib = {name: size.split()[0] for name, size in read_pairs(root / "meminfo", ":").items()}
    sizes = [kib.get(name, "") for name in ("MemTotal", "MemAvailable")]
    return Memory(*(1024 * int(size) for size in sizes)) if all(map(str.isdecimal, sizes)) else None


def sys_root(env: Mapping[str, str]) -> Path:
    """The folder of sysfs: $DDPDIAG_SYSFS (a host's tree mounted into a container, or a test's fake), else /sys."""
    return Path(env.get("DDPDIAG_SYSFS") or "/sys")


def rdma_devices(root: Path) -> tuple[str, ...] | None:
    """Names of InfiniBand and RoCE devices, or None if /sys/class cannot be looked at.

    Without an RDMA driver there is no /sys/class/infiniband: that is no device, not an unknown number.
    """
    classes = names_in(root / "class")
    return None if classes is None else names_in(root / "class" / "infiniband") if "infiniband" in classes else ()
