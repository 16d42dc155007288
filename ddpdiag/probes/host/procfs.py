"""What /proc shows: this boot, other processes, memory, and the NVIDIA driver."""

import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from ddpdiag.probes.host.files import read_pairs, read_text

PROC = Path("/proc")
DEV = Path("/dev")


class ProcGpu(Struct, frozen=True):
    """A GPU that the loaded driver drives. `uuid` is None while the driver has not asked the card."""

    pci: str
    model: str | None
    uuid: str | None


class Memory(Struct, frozen=True):
    """Memory of the whole host in bytes."""

    total_bytes: int
    available_bytes: int


def proc_root(env: Mapping[str, str]) -> Path:
    """Where procfs lies: $DDPDIAG_PROCFS (a host's tree mounted into a container, or a test's fake), else /proc."""
    return Path(env.get("DDPDIAG_PROCFS") or PROC)


def boot_id(root: Path = PROC) -> str:
    """The kernel's boot id, alike for every process and container of one host; "" if the kernel does not say."""
    return read_text(root / "sys" / "kernel" / "random" / "boot_id") or ""


def process_state(pid: int, root: Path = PROC) -> tuple[str | None, str | None]:
    """State letter of proc(5) and the kernel function in which a process waits; None for what is not shown."""
    content = read_text(root / str(pid) / "stat")
    # The name stands in parentheses and may hold any character, a parenthesis and a blank included.
    fields = content.rpartition(")")[2].split() if content else []
    wchan = read_text(root / str(pid) / "wchan")
    return fields[0] if fields else None, wchan if wchan not in (None, "", "0") else None


def cpu_ticks(pid: int, root: Path = PROC) -> int | None:
    """Time on a core so far, in clock ticks of usually 10 ms (utime and stime of proc(5)); None if it is not shown."""
    fields = (read_text(root / str(pid) / "stat") or "").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else None


def age_seconds(pid: int, root: Path = PROC) -> float | None:
    """Seconds since a process was started, to 10 ms (starttime of proc(5), in ticks since boot); None if not shown."""
    fields = (read_text(root / str(pid) / "stat") or "").rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    return max(0.0, now - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


def core_seconds(pid: int, root: Path = PROC) -> float | None:
    """Seconds that a process's main thread has spent on a core or waiting for one; None if the kernel does not say.

    /proc/PID/schedstat, in ns (Documentation/scheduler/sched-stats.rst).
    """
    fields = (read_text(root / str(pid) / "schedstat") or "").split()
    return (int(fields[0]) + int(fields[1])) / 1e9 if len(fields) > 1 else None


def nvidia_gpus(root: Path, dev: Path = DEV) -> tuple[ProcGpu, ...] | None:
    """GPUs of the loaded NVIDIA driver in bus order, or None if no driver shows itself.

    A container may list all GPUs of the host (CDI does not hide them) and hold the device files of its own only; in a
    device cgroup (Slurm's ConstrainDevices) all files are there, and some cannot be opened. Both kinds are left out.
    Without any such file nothing was opened yet, and all count.
    """
    listed = _listed(root)
    if listed is None:
        return None
    files = [(gpu, None if number is None else dev / f"nvidia{number}") for gpu, number in listed]
    if not any(file is None or file.exists() for _, file in files):
        return tuple(gpu for gpu, _ in files)
    return tuple(gpu for gpu, file in files if file is None or _can_open(file))


def _can_open(file: Path) -> bool:
    """access(2) asks the device cgroup, too (inode_permission in Linux' fs/namei.c).

    open(2) would start a GPU that no process uses, for a second or for ever.
    """
    return os.access(file, os.R_OK | os.W_OK)


def withheld_gpus(root: Path, dev: Path = DEV) -> int:
    """How many GPUs the driver lists that this container or cgroup was not given."""
    return len(_listed(root) or ()) - len(nvidia_gpus(root, dev) or ())


def _listed(root: Path) -> list[tuple[ProcGpu, str | None]] | None:
    """GPUs, with the numbers of their device files."""
    try:
        entries = sorted((root / "driver" / "nvidia" / "gpus").iterdir())
    except OSError:
        return None
    return [_proc_gpu(entry) for entry in entries]


def _proc_gpu(entry: Path) -> tuple[ProcGpu, str | None]:
    facts = read_pairs(entry / "information", ":")
    uuid = facts.get("GPU UUID", "")
    # A card that was never opened says "GPU-????????-????-...".
    gpu = ProcGpu(entry.name, facts.get("Model"), uuid if uuid and "?" not in uuid else None)
    return gpu, facts.get("Device Minor")


def memory(root: Path) -> Memory | None:
    """Memory of the host, or None if /proc/meminfo does not say."""
    import psutil

    usual, psutil.PROCFS_PATH = psutil.PROCFS_PATH, str(root)
    try:
        with warnings.catch_warnings():
            # It warns of fields that are missing and that nobody asked for.
            warnings.simplefilter("ignore", RuntimeWarning)
            seen = psutil.virtual_memory()
    except (OSError, KeyError, ValueError, IndexError):
        return None
    finally:
        psutil.PROCFS_PATH = usual
    return Memory(seen.total, seen.available)
