"""Other programs and processes of this host: the holder of a port, a bounded run, torchrun's error file."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ddpdiag.probes.host.kernel import PROC, age_seconds, environ, open_files, read_text, tcp_sockets
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
