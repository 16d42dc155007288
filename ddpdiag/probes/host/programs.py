"""Other programs and processes of this host: holders of a port or a core, a bounded run, torchrun's error file."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.probes.host.kernel import PROC, age_seconds, environ, names_in, open_files, read_text, stat_of, tcp_sockets
from ddpdiag.sanitize import words_without_secrets

# Variables that name the job of a process. Nothing else of another process's environment is kept.
_JOB_NAMES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "PBS_JOBID", "LSB_JOBID")


def holder_of(port: int) -> str | None:
    """The holder of a port of this host, as "pid 8123 (torchrun train.py, user bob, for 2.0 h, SLURM_JOB_ID 4711)".

    None without one. Listeners come first: an outgoing connection, too, can have a port of the ephemeral range.
    """
    users = (own for own in tcp_sockets() if own.port == port and own.inode != "0")
    sockets = sorted(users, key=lambda own: not own.listens)
    for own in sockets:
        if (pid := _owner(own.inode)) is not None:
            age, uid = age_seconds(pid), own.uid
            since = None if age is None else f"for {span_text(age)}"
            said = ", ".join(filter(None, (_command(pid) or "gone by now", f"user {user_name(uid)}", since, _job(pid))))
            return f"pid {pid} ({said})" + ("" if own.listens else ", by an outgoing connection")
    if not sockets:
        return None
    uid = sockets[0].uid
    return "a process that cannot be seen from here" if uid == os.getuid() else f"another user's process (uid {uid})"


def _owner(inode: str) -> int | None:
    """A process that has the socket open; only root sees those of other users."""
    for process in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # not ours, or gone
            if f"socket:[{inode}]" in open_files(process):
                return int(process.name)
    return None


def _command(pid: int, root: Path = PROC) -> str:
    """The command line, shortened, without what looks like a secret; "" where it cannot be read."""
    try:
        words = (root / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    return " ".join(words_without_secrets(words)).strip()[:120]


def _job(pid: int) -> str | None:
    """Such as "SLURM_JOB_ID 4711"; the environment of another user's process cannot be read."""
    values = environ(pid) or {}
    for name in _JOB_NAMES:
        if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", values.get(name, "")) and values[name] != "none":
            return f"{name} {values[name]}"
    return None


def user_name(uid: int) -> str:
    """The user's name in /etc/passwd, else the number: a directory service might not answer."""
    for line in (read_text(Path("/etc/passwd")) or "").splitlines():
        fields = line.split(":")
        if len(fields) > 2 and fields[2] == str(uid):
            return fields[0]
    return str(uid)


def span_text(seconds: float) -> str:
    """Such as "5 s" or "2.0 h"."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


# A process that uses less of a core is not recorded, nor are more than so many.
_LEAST_CORES, _MOST_PROCESSES = 0.02, 32


class BusyProcess(Struct, frozen=True, kw_only=True):
    """A process by the cores that it used on average, and the last one; `command` is "[name]" if it is not shown."""

    pid: int
    cores: float
    last_core: int | None
    user: str
    command: str


class CoreUse(Struct, frozen=True, kw_only=True):
    """The use of the cores during `seconds`, as one rank's process saw it.

    `own_seconds` is its processor time; `waited_seconds` is how long its threads could run and had no core, None if the
    kernel does not say. `pids` are the process and its parent. Only one rank of a host reads the rest: the seconds that
    each core was busy, and that the hypervisor gave it to others (steal), by its number; and the busiest processes.
    """

    seconds: float
    own_seconds: float
    waited_seconds: float | None
    pids: tuple[int, ...]
    busy_seconds: dict[int, float] = {}
    steal_seconds: dict[int, float] = {}
    processes: tuple[BusyProcess, ...] = ()

    @property
    def waited_share(self) -> float | None:
        """The share of the time in which its threads could run that they waited for a core."""
        if self.waited_seconds is None:
            return None
        return self.waited_seconds / max(1e-9, self.waited_seconds + self.own_seconds)


class CoreWatch:
    """Watches the use of the cores from its construction on; those of the whole host if `whole_host`."""

    def __init__(self, *, whole_host: bool, root: Path = PROC) -> None:
        self._whole_host, self._root = whole_host, root
        self._ticks_per_second = os.sysconf("SC_CLK_TCK")
        self._processes = self._ticks()
        self._cores = self._core_ticks()
        self._waited = _waited_seconds(root)
        self._own, self._begin = time.process_time(), time.monotonic()

    def use(self) -> CoreUse:
        """The use since the construction."""
        seconds, own = max(1e-9, time.monotonic() - self._begin), time.process_time() - self._own
        waited, cores = _waited_seconds(self._root), self._core_ticks()
        deltas = {
            core: [max(0, now - then) / self._ticks_per_second for now, then in zip(ticks, old, strict=True)]
            for core, ticks in cores.items()
            if (old := self._cores.get(core)) is not None
        }
        return CoreUse(
            seconds=seconds,
            own_seconds=own,
            waited_seconds=None if waited is None or self._waited is None else max(0.0, waited - self._waited),
            pids=(os.getpid(), os.getppid()),
            busy_seconds={core: busy for core, (busy, _) in deltas.items()},
            steal_seconds={core: steal for core, (_, steal) in deltas.items() if steal},
            processes=tuple(self._busiest(seconds)),
        )

    def _busiest(self, seconds: float) -> Iterator[BusyProcess]:
        used = {}
        for process, (ticks, core) in self._ticks().items():
            # One that is new has used all of its time since.
            since = (ticks - self._processes.get(process, (0, core))[0]) / self._ticks_per_second
            used[process] = since / seconds, core
        for (pid, _), (cores, core) in sorted(used.items(), key=lambda item: -item[1][0])[:_MOST_PROCESSES]:
            folder = self._root / str(pid)
            name, fields = stat_of(folder)
            # Ranks that share a fork server have one parent.
            if cores < _LEAST_CORES or len(fields) < 2 or fields[1] == str(os.getppid()):
                continue
            with contextlib.suppress(OSError):  # it has ended
                user, command = user_name(folder.stat().st_uid), _command(pid, self._root) or f"[{name}]"
                yield BusyProcess(pid=pid, cores=cores, last_core=core, user=user, command=command)

    def _ticks(self) -> dict[tuple[int, str], tuple[int, int]]:
        """Ticks on a core and the last core of each process, by pid and start; fields of proc_pid_stat(5)."""
        found: dict[tuple[int, str], tuple[int, int]] = {}
        for name in filter(str.isdecimal, names_in(self._root) or () if self._whole_host else ()):
            _, fields = stat_of(self._root / name)
            if len(fields) > 36:
                found[int(name), fields[19]] = int(fields[11]) + int(fields[12]), int(fields[36])
        return found

    def _core_ticks(self) -> dict[int, tuple[int, int]]:
        """Ticks in which each core was busy (user, nice, system) and stolen, by its number; proc_stat(5).

        Interrupts are left out: those of the ranks' own messages are among them.
        """
        found: dict[int, tuple[int, int]] = {}
        for line in (read_text(self._root / "stat") or "").splitlines() if self._whole_host else ():
            name, *fields = line.split()
            if name.startswith("cpu") and name[3:].isdecimal() and len(fields) > 7:
                found[int(name[3:])] = sum(map(int, fields[:3])), int(fields[7])
        return found


def _waited_seconds(root: Path) -> float | None:
    """Seconds for which threads of this process could run and waited for a core; None if the kernel does not say.

    The second field of /proc/PID/task/TID/schedstat, in ns (Documentation/scheduler/sched-stats.rst).
    """
    threads = [(read_text(path) or "").split() for path in (root / "self" / "task").glob("*/schedstat")]
    times = [(int(fields[0]), int(fields[1])) for fields in threads if len(fields) > 1]
    # Without its accounting the kernel writes zeros.
    return sum(waited for _, waited in times) / 1e9 if any(ran for ran, _ in times) else None


_BURY_SECONDS = 0.2
_LARGEST_BYTES = 8 << 20


def python_command(module: str, *arguments: str) -> list[str]:
    """The words that run a module in this Python; `with_home` gives the environment to run them in.

    -P: no file in the user's current directory, in which other users may write, takes the place of a module.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def with_home(env: Mapping[str, str]) -> dict[str, str]:
    """The environment in which `-P` finds this package, too, where it runs from a source tree and is not installed."""
    home = str(Path(__file__).parents[3])
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    if home in (*paths, *sys.path[1:]) or sys.path[0] not in ("", home) or os.getcwd() != home:
        return dict(env)
    return {**env, "PYTHONPATH": os.pathsep.join((*paths, home))}


class Said(NamedTuple):
    """Exit code (negative: the signal), standard output and error."""

    code: int
    out: bytes
    err: str


def run_bounded(
    command: Sequence[str], end: float, given: bytes = b"", *, env: Mapping[str, str] | None = None
) -> Said | None:
    """Run it until `end` of the monotonic clock; None if it took longer. OSError if it cannot be started.

    A child that is stuck in the kernel and survives SIGKILL is left behind. `given` is its standard input, for secrets:
    every user can list arguments.
    """
    out, err, into = (os.memfd_create(name) for name in ("out", "err", "in"))
    try:
        os.write(into, given)
        os.lseek(into, 0, os.SEEK_SET)
        # Files, not pipes: a pipe that a killed child's own children hold open never ends.
        child = subprocess.Popen(command, stdin=into, stdout=out, stderr=err, env=env)
        try:
            child.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_BURY_SECONDS)
            return None
        return Said(child.returncode, os.pread(out, _LARGEST_BYTES, 0), os.pread(err, 4096, 0).decode(errors="replace"))
    finally:
        for descriptor in (out, err, into):
            os.close(descriptor)


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def write_error_file(env: Mapping[str, str], sentence: str) -> None:
    """Leave the sentence for torchrun's summary, if torchrun is there; a courtesy, so failing to write is no error.

    torchrun turns every exit code but 0 into 1 and prints "traceback : <message>" for each rank, which says nothing
    unless the rank left such a file (torch.distributed.elastic.multiprocessing.errors.ErrorHandler).
    """
    path = env.get(ERROR_FILE)
    # Moving a file onto /dev/null as root would break the machine.
    if not path or (os.path.exists(path) and not os.path.isfile(path)):
        return
    with contextlib.suppress(OSError):
        # The form that torchrun can also give an exit code; without "py_callstack" it shows "message".
        message = {"message": sentence, "extraInfo": {"timestamp": str(int(time.time()))}}
        # By another name first, and moved: torchrun may read at any moment, and dies of a file that is cut off.
        descriptor, temporary = tempfile.mkstemp(prefix=".ddpdiag-", dir=os.path.dirname(path) or ".")
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump({"message": message}, file)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
