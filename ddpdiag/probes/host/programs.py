"""Other programs on this host: users of a port or of the cores, commands with a deadline, torchrun's error file."""

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

# Variables that name the job of a process. Only these are used from another process's environment.
_JOB_NAMES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "PBS_JOBID", "LSB_JOBID")


def port_user(port: int) -> str | None:
    """Describe the process that uses a port of this host, preferably a listener; None if no process uses the port.

    For example "pid 8123 (torchrun train.py, user bob, for 2.0 h, SLURM_JOB_ID 4711)".
    """
    users = (sock for sock in tcp_sockets() if sock.port == port and sock.inode != "0")
    sockets = sorted(users, key=lambda sock: not sock.listens)
    for sock in sockets:
        if (pid := _socket_owner(sock.inode)) is not None:
            age, uid = age_seconds(pid), sock.uid
            since = None if age is None else f"for {duration_text(age)}"
            facts = (_command_text(pid) or "gone by now", f"user {user_name(uid)}", since, _job_text(pid))
            text = ", ".join(filter(None, facts))
            return f"pid {pid} ({text})" + ("" if sock.listens else ", by an outgoing connection")
    if not sockets:
        return None
    uid = sockets[0].uid
    return "a process that cannot be seen from here" if uid == os.getuid() else f"another user's process (uid {uid})"


def _socket_owner(inode: str) -> int | None:
    """Find a process that has the socket open; None if there is none, or if it is hidden (another user's process)."""
    for process in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process of another user, or one that has ended
            if f"socket:[{inode}]" in open_files(process):
                return int(process.name)
    return None


def _command_text(pid: int, root: Path = PROC) -> str:
    """Read a process's command line, shortened and without likely secrets; "" if it cannot be read."""
    try:
        words = (root / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    return " ".join(words_without_secrets(words)).strip()[:120]


def _job_text(pid: int) -> str | None:
    """Read the job of a process, such as "SLURM_JOB_ID 4711"; None without a job, or if the environment is hidden."""
    values = environ(pid) or {}
    for name in _JOB_NAMES:
        if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", values.get(name, "")) and values[name] != "none":
            return f"{name} {values[name]}"
    return None


def user_name(uid: int) -> str:
    """Read the user's name from /etc/passwd, else return the number: a directory service might not answer."""
    for line in (read_text(Path("/etc/passwd")) or "").splitlines():
        fields = line.split(":")
        if len(fields) > 2 and fields[2] == str(uid):
            return fields[0]
    return str(uid)


def duration_text(seconds: float) -> str:
    """A duration as text, such as "5 s" or "2.0 h"."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


# Processes that use fewer cores are not recorded, and at most this many processes are recorded.
_MIN_CORES, _MAX_PROCESSES = 0.02, 32


class BusyProcess(Struct, frozen=True, kw_only=True):
    """A process, how many cores it used on average, and its last core. `command` is "[name]" if it is hidden."""

    pid: int
    cores: float
    last_core: int | None
    user: str
    command: str


class CoreUse(Struct, frozen=True, kw_only=True):
    """The use of the cores during `seconds`, as the process of one rank measured it.

    `own_seconds` is this process's processor time. `waited_seconds` is how long its threads were ready but had no core,
    None if the kernel does not say. `pids` are the process and its parent. One rank per host measures the last three
    fields: by core, the busy seconds and those that the hypervisor gave to other guests; and the busiest processes.
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
        """The share of its runnable time that the process waited for a core; None if the kernel does not say."""
        if self.waited_seconds is None:
            return None
        return self.waited_seconds / max(1e-9, self.waited_seconds + self.own_seconds)


class CoreUseMeter:
    """Measures the use of the cores from its construction on: of this process, and with `whole_host` of the host."""

    def __init__(self, *, whole_host: bool, root: Path = PROC) -> None:
        self._whole_host, self._root = whole_host, root
        self._ticks_per_second = os.sysconf("SC_CLK_TCK")
        self._processes = self._process_ticks()
        self._cores = self._core_ticks()
        self._waited = _waited_seconds(root)
        self._begin_own, self._begin = time.process_time(), time.monotonic()

    def use(self) -> CoreUse:
        """Measure the use from the construction until now."""
        seconds, process_seconds = max(1e-9, time.monotonic() - self._begin), time.process_time() - self._begin_own
        waited, cores = _waited_seconds(self._root), self._core_ticks()
        deltas = {
            core: [max(0, now - then) / self._ticks_per_second for now, then in zip(ticks, old, strict=True)]
            for core, ticks in cores.items()
            if (old := self._cores.get(core)) is not None
        }
        return CoreUse(
            seconds=seconds,
            own_seconds=process_seconds,
            waited_seconds=None if waited is None or self._waited is None else max(0.0, waited - self._waited),
            pids=(os.getpid(), os.getppid()),
            busy_seconds={core: busy for core, (busy, _) in deltas.items()},
            steal_seconds={core: steal for core, (_, steal) in deltas.items() if steal},
            processes=tuple(self._busiest_processes(seconds)),
        )

    def _busiest_processes(self, seconds: float) -> Iterator[BusyProcess]:
        used = {}
        for process, (ticks, core) in self._process_ticks().items():
            # A new process has used all of its time since the construction.
            used_seconds = (ticks - self._processes.get(process, (0, core))[0]) / self._ticks_per_second
            used[process] = used_seconds / seconds, core
        for (pid, _), (cores, core) in sorted(used.items(), key=lambda item: -item[1][0])[:_MAX_PROCESSES]:
            folder = self._root / str(pid)
            name, fields = stat_of(folder)
            # Ranks that share a fork server have one parent.
            if cores < _MIN_CORES or len(fields) < 2 or fields[1] == str(os.getppid()):
                continue
            with contextlib.suppress(OSError):  # the process has ended
                user, command = user_name(folder.stat().st_uid), _command_text(pid, self._root) or f"[{name}]"
                yield BusyProcess(pid=pid, cores=cores, last_core=core, user=user, command=command)

    def _process_ticks(self) -> dict[tuple[int, str], tuple[int, int]]:
        """Read each process's ticks on a core and its last core, by pid and start time; fields of proc_pid_stat(5)."""
        found: dict[tuple[int, str], tuple[int, int]] = {}
        for name in filter(str.isdecimal, names_in(self._root) or () if self._whole_host else ()):
            _, fields = stat_of(self._root / name)
            if len(fields) > 36:
                found[int(name), fields[19]] = int(fields[11]) + int(fields[12]), int(fields[36])
        return found

    def _core_ticks(self) -> dict[int, tuple[int, int]]:
        """Read each core's ticks by its number: busy (user, nice, system) and stolen ones, from proc_stat(5).

        Interrupts do not count as busy, since the ranks' own messages cause some of them.
        """
        found: dict[int, tuple[int, int]] = {}
        for line in (read_text(self._root / "stat") or "").splitlines() if self._whole_host else ():
            name, *fields = line.split()
            if name.startswith("cpu") and name[3:].isdecimal() and len(fields) > 7:
                found[int(name[3:])] = sum(map(int, fields[:3])), int(fields[7])
        return found


def _waited_seconds(root: Path) -> float | None:
    """Read how many seconds the threads of this process were ready but had no core; None if the kernel does not say.

    The source is the second field of /proc/PID/task/TID/schedstat, in ns (Documentation/scheduler/sched-stats.rst).
    """
    threads = [(read_text(path) or "").split() for path in (root / "self" / "task").glob("*/schedstat")]
    times = [(int(fields[0]), int(fields[1])) for fields in threads if len(fields) > 1]
    # The kernel writes zeros if its accounting is off.
    return sum(waited for _, waited in times) / 1e9 if any(ran for ran, _ in times) else None


_REAP_SECONDS = 0.2
_MAX_BYTES = 8 << 20


def python_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module in this Python; `with_package_path` returns the environment to run it in.

    With -P, no file in the current directory, where other users may write, can replace a module.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def with_package_path(env: Mapping[str, str]) -> dict[str, str]:
    """`env` with a PYTHONPATH with which `python -P` finds this package, even if it is not installed."""
    home = str(Path(__file__).parents[3])
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    # The first entry is the current directory (python -m), or the folder to which ddpdiag.pyz was unpacked.
    is_first = sys.path[0] == home or (sys.path[0] == "" and os.getcwd() == home)
    if home in (*paths, *sys.path[1:]) or not is_first:
        return dict(env)
    return {**env, "PYTHONPATH": os.pathsep.join((*paths, home))}


class Result(NamedTuple):
    """The result of a command: exit code (negative: the signal that ended it), standard output and error."""

    code: int
    stdout: bytes
    stderr: str


def run_until(
    command: Sequence[str], end: float, stdin_bytes: bytes = b"", *, env: Mapping[str, str] | None = None
) -> Result | None:
    """Run a command. Kill it and return None if it runs past `end` (monotonic). OSError if it cannot start.

    A child that is stuck in the kernel and survives SIGKILL keeps running. `stdin_bytes` is the standard input. Secrets
    are passed there, because every user can list arguments.
    """
    stdout, stderr, stdin = (os.memfd_create(name) for name in ("stdout", "stderr", "stdin"))
    try:
        os.write(stdin, stdin_bytes)
        os.lseek(stdin, 0, os.SEEK_SET)
        # Files, not pipes: a pipe does not end while children of the killed child hold it open.
        child = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=env)
        try:
            child.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_REAP_SECONDS)
            return None
        output, errors = os.pread(stdout, _MAX_BYTES, 0), os.pread(stderr, 4096, 0)
        return Result(child.returncode, output, errors.decode(errors="replace"))
    finally:
        for descriptor in (stdout, stderr, stdin):
            os.close(descriptor)


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def write_error_file(env: Mapping[str, str], sentence: str, *, keep: bool = False) -> None:
    """Write the sentence to torchrun's error file, if torchrun started this process. A failure to write is ignored.

    With `keep`, an error that is in the file stays, with its traceback and exit code, and the sentence precedes it.

    torchrun turns every exit code but 0 into 1, and prints "traceback : <message>" for each rank. The message is empty
    unless the rank wrote such a file (torch.distributed.elastic.multiprocessing.errors.ErrorHandler).
    """
    path = env.get(ERROR_FILE)
    # The path may be /dev/null. As root, moving a file onto it would break the machine.
    if not path or (os.path.exists(path) and not os.path.isfile(path)):
        return
    # torchrun can add the exit code to a file of this form. Without "py_callstack", it shows "message".
    message: dict[str, object] = {"message": sentence, "extraInfo": {"timestamp": str(int(time.time()))}}
    if keep and (earlier := _error_in(path)):
        message = {**message, **earlier, "message": f"{sentence}\n{earlier.get('message', '')}"}
    text = json.dumps({"message": message})
    try:
        _replace(path, text)
    except OSError:
        # /dev/termination-log of a container in Kubernetes is a mounted file, in a folder of root.
        with contextlib.suppress(OSError):
            if os.path.isfile(path):
                Path(path).write_text(text)


def _replace(path: str, text: str) -> None:
    """Write to another name and rename the file: torchrun may read at any moment, and fails on a partial file."""
    descriptor, temporary = tempfile.mkstemp(prefix=".ddpdiag-", dir=os.path.dirname(path) or ".")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def _error_in(path: str) -> dict[str, object]:
    """The error in a file of torchrun, a text alone or with details; empty if there is none."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        error = json.loads(Path(path).read_text()).get("message", {})
        return {"message": error} if isinstance(error, str) else dict(error)
    return {}
