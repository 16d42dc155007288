"""Readers of /proc and /sys: small files, the boot, processes, TCP sockets, memory, RDMA devices."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

PROC = Path("/proc")
_MAX_ENVIRON_BYTES = 1 << 20


def read_text(path: Path) -> str | None:
    """Read a file, and strip white space at its ends; None if the file is missing or not readable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """Read a file that contains an integer; None if the file is missing or contains something else (such as "max")."""
    content = read_text(path)
    try:
        return int(content) if content else None
    except ValueError:
        return None


def read_pairs(path: Path, separator: str | None = None) -> dict[str, str]:
    """Read lines of "name<separator>value" as a mapping. Other lines are ignored; empty if the file is not readable."""
    rows = (line.split(separator, 1) for line in (read_text(path) or "").splitlines())
    return {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}


class Memory(Struct, frozen=True):
    total_bytes: int
    available_bytes: int


def names_in(folder: Path) -> tuple[str, ...] | None:
    """List the names in a folder, sorted; None if the folder cannot be read."""
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return None


def proc_root(env: Mapping[str, str]) -> Path:
    """The folder of procfs: $DDPDIAG_PROCFS (for containers with the host's tree, and for tests), else /proc."""
    return Path(env.get("DDPDIAG_PROCFS") or PROC)


def boot_id(root: Path = PROC) -> str:
    """Read the boot id, which is the same in all processes and containers of a host; "" if it is not readable."""
    return read_text(root / "sys" / "kernel" / "random" / "boot_id") or ""


def stat_of(process: Path) -> tuple[str, list[str]]:
    """Read the name of a process (a folder /proc/PID), and its fields in `stat` from field 3 (state) of proc(5) on."""
    # The name is in parentheses and may contain any character, including parentheses and blanks.
    head, _, rest = (read_text(process / "stat") or "").rpartition(")")
    return head.partition("(")[2], rest.split()


def process_state(pid: int, root: Path = PROC) -> tuple[str | None, str | None]:
    """Read a process's state letter (proc(5)), and the kernel function in which it waits; None for a hidden value."""
    _, fields = stat_of(root / str(pid))
    wchan = read_text(root / str(pid) / "wchan")
    return fields[0] if fields else None, wchan if wchan not in (None, "", "0") else None


def cpu_ticks(pid: int, root: Path = PROC) -> int | None:
    """Read a process's processor time (utime + stime of proc(5)), in ticks of usually 10 ms; None if it is hidden."""
    _, fields = stat_of(root / str(pid))
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else None


def voluntary_switches(pid: int, root: Path = PROC) -> int | None:
    """Read how often a process's main thread has begun to wait (for a lock, a message, a time); None if hidden."""
    count = read_pairs(root / str(pid) / "status", ":").get("voluntary_ctxt_switches", "")
    return int(count) if count.isdecimal() else None


def written_bytes(pid: int, root: Path = PROC) -> int | None:
    """Read how many bytes a process has written to files, terminals and pipes (wchar of proc(5)); None if hidden."""
    count = read_pairs(root / str(pid) / "io", ":").get("wchar", "")
    return int(count) if count.isdecimal() else None


def age_seconds(pid: int, root: Path = PROC) -> float | None:
    """Read how many seconds ago a process was started, to 10 ms (starttime of proc(5)); None if hidden."""
    _, fields = stat_of(root / str(pid))
    if len(fields) < 20:
        return None
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


def environ(pid: int, root: Path = PROC) -> dict[str, str] | None:
    """Read the environment with which a process was started; None if it cannot be read."""
    try:
        with (root / str(pid) / "environ").open("rb") as file:
            words = file.read(_MAX_ENVIRON_BYTES).decode(errors="replace").split("\0")
    except OSError:
        return None
    return dict(word.split("=", 1) for word in words if "=" in word)


def open_files(process: Path) -> Iterator[str]:
    """Yield the open files of a process (a folder /proc/PID) as paths, or text such as "socket:[123]".

    OSError if they cannot be listed.
    """
    for name in os.listdir(process / "fd"):
        with contextlib.suppress(OSError):  # the process has closed the file since
            yield os.readlink(process / "fd" / name)


def runnable_seconds(pid: int, root: Path = PROC) -> float | None:
    """Read how long a process's main thread was runnable: on a core, or waiting for a core. None if not readable.

    The source is /proc/PID/schedstat, in ns (Documentation/scheduler/sched-stats.rst).
    """
    fields = (read_text(root / str(pid) / "schedstat") or "").split()
    return (int(fields[0]) + int(fields[1])) / 1e9 if len(fields) > 1 else None


class TcpSocket(Struct, frozen=True):
    """The local end of a TCP socket, as in proc(5). `host` is in hexadecimal; `inode` is "0" in state TIME_WAIT."""

    family: socket.AddressFamily
    host: str
    port: int
    listens: bool
    uid: int
    inode: str

    @property
    def address(self) -> str:
        """The local IP address. In `host`, 8 hexadecimal digits are a word of 32 bits in the machine's byte order."""
        words = (int(self.host[start : start + 8], 16) for start in range(0, len(self.host), 8))
        return socket.inet_ntop(self.family, b"".join(word.to_bytes(4, sys.byteorder) for word in words))


def tcp_sockets() -> Iterator[TcpSocket]:
    """Yield the TCP sockets of this network namespace."""
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for fields in map(str.split, (read_text(PROC / "net" / table) or "").splitlines()[1:]):
            host, _, port = fields[1].rpartition(":")
            listens = fields[3] == "0A"  # include/net/tcp_states.h
            yield TcpSocket(family, host, int(port, 16), listens, int(fields[7]), fields[9])


def memory(root: Path) -> Memory | None:
    """Read the memory of the host; None if /proc/meminfo does not show it."""
    kib = {name: size.split()[0] for name, size in read_pairs(root / "meminfo", ":").items()}
    sizes = [kib.get(name, "") for name in ("MemTotal", "MemAvailable")]
    return Memory(*(1024 * int(size) for size in sizes)) if all(map(str.isdecimal, sizes)) else None


def sys_root(env: Mapping[str, str]) -> Path:
    """The folder of sysfs: $DDPDIAG_SYSFS (for containers with the host's tree, and for tests), else /sys."""
    return Path(env.get("DDPDIAG_SYSFS") or "/sys")


def rdma_devices(root: Path) -> tuple[str, ...] | None:
    """List the names of InfiniBand and RoCE devices; empty without an RDMA driver, None if /sys/class is hidden."""
    classes = names_in(root / "class")
    return None if classes is None else names_in(root / "class" / "infiniband") if "infiniband" in classes else ()
