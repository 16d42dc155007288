"""Who has a port of this host: process, user, age and job, as far as /proc shows them."""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from ddpdiag.foreign import words_without_secrets
from ddpdiag.probes.host.files import read_text

PROC = Path("/proc")
# Column 4 of /proc/net/tcp, from include/net/tcp_states.h.
TCP_LISTEN = "0A"
# Variables that name the job of a process. Nothing else of a stranger's environment is read out.
_JOB_NAMES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "PBS_JOBID", "LSB_JOBID")


class Socket(Struct, frozen=True):
    """A TCP socket whose own end has the port; inode 0 is a connection that waits for its end (TIME_WAIT)."""

    inode: str
    uid: int
    listens: bool


def holder_of(port: int) -> str | None:
    """Who has a port of this host, as "pid 8123 (torchrun train.py, user bob, for 2.0 h, SLURM_JOB_ID 4711)".

    `None` if nobody does. Listeners come first: an outgoing connection, too, can have a port of the ephemeral range.
    """
    sockets = sorted(_sockets(port), key=lambda own: not own.listens)
    for own in sockets:
        if (pid := _owner(own.inode)) is not None:
            return f"pid {pid} ({described(pid, own.uid)})" + ("" if own.listens else ", by an outgoing connection")
    if not sockets:
        return None
    uid = sockets[0].uid
    return "a process that cannot be seen from here" if uid == os.getuid() else f"another user's process (uid {uid})"


def described(pid: int, uid: int) -> str:
    """Command line, user, age and job of a process."""
    age = _age_seconds(pid)
    since = None if age is None else f"for {span_text(age)}"
    return ", ".join(filter(None, (_command(pid), f"user {user_name(uid)}", since, _job(pid))))


def _sockets(port: int) -> Iterator[Socket]:
    """Every socket on the port that somebody has open; the columns are those of proc(5)."""
    for table in ("tcp", "tcp6"):
        for fields in map(str.split, (read_text(PROC / "net" / table) or "").splitlines()[1:]):
            if int(fields[1].rpartition(":")[2], 16) == port and fields[9] != "0":
                yield Socket(fields[9], int(fields[7]), fields[3] == TCP_LISTEN)


def _owner(inode: str) -> int | None:
    """A process that has the socket open; only our own user's can be seen, unless we are root."""
    for process in PROC.glob("[0-9]*"):
        if f"socket:[{inode}]" in _open_files(process / "fd"):
            return int(process.name)
    return None


def _open_files(directory: Path) -> Iterator[str]:
    """Targets of the links in /proc/<pid>/fd that can be read; none of a process that is not ours, or gone."""
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):  # closed since
            yield os.readlink(directory / name)


def _command(pid: int) -> str:
    """The command line, shortened, without what looks like a secret."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "gone by now"
    return " ".join(words_without_secrets(words)).strip()[:120]


def user_name(uid: int) -> str:
    """The user's name in /etc/passwd, else the number: a directory service might not answer."""
    for line in (read_text(Path("/etc/passwd")) or "").splitlines():
        fields = line.split(":")
        if len(fields) > 2 and fields[2] == str(uid):
            return fields[0]
    return str(uid)


def _age_seconds(pid: int) -> float | None:
    """Seconds since a process started: proc(5) counts its start in ticks since boot, in field 22."""
    fields = (read_text(PROC / str(pid) / "stat") or "").rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


def span_text(seconds: float) -> str:
    """Such as "5 s" or "2.0 h"."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def _job(pid: int) -> str | None:
    """Such as "SLURM_JOB_ID 4711"; the environment of another user's process cannot be read."""
    try:
        words = (PROC / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    values = dict(word.split("=", 1) for word in words if "=" in word)
    for name in _JOB_NAMES:
        if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", values.get(name, "")) and values[name] != "none":
            return f"{name} {values[name]}"
    return None
