"""Evidence on a rank, read from outside: Python stacks by py-spy, and collectives from NCCL's flight recorder.

py-spy (https://github.com/benfred/py-spy) reads the memory of a process. By default py-spy stops the process with
ptrace meanwhile. If py-spy is killed then, or if the process was stopped already, the process may stay stopped for ever
(py-spy issues 390 and 565). So py-spy is called with --nonblocking. Then the stack of a running process may be torn or
missing, and py-spy is called again. A call takes 30 ms (measured, 0.4.3), also for a stopped process.

If TORCH_NCCL_DEBUG_INFO_PIPE_FILE=STEM and the recorder's size are set, a rank makes a named pipe STEM<rank>.pipe. Once
something was written into this pipe, the thread that watches NCCL's heartbeat dumps the recorder into the file
TORCH_FR_DUMP_TEMP_FILE<rank> (TORCH_NCCL_DEBUG_INFO_TEMP_FILE before torch 2.9), and the job continues. This needs no
GIL, and works while the main thread hangs. NCCL's watchdog writes the same file at its time-out. gloo's recorder can be
read only inside of the process (torch/csrc/distributed/c10d: ProcessGroupNCCL.cpp, FlightRecorder.cpp). The process
groups of torch 2.15 make no pipe (nccl2/ProcessGroupNCCL.cpp). The dump is a pickle; reading it runs no code.
"""

import contextlib
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from ddpdiag.evidence.dumps import read_dump
from ddpdiag.evidence.recorder import BUFFER_NAMES
from ddpdiag.evidence.witness import Witness
from ddpdiag.probes.host.kernel import PROC, read_int, read_pairs
from ddpdiag.probes.host.programs import run_until
from ddpdiag.watch.look import UserFrame

_TRIES = 3
_PAUSE_SECONDS = 0.05
_MAX_CHARACTERS = 160
_TOO_LATE = "py-spy did not respond in time"
# Code that the user did not write: frozen and generated modules, packages, Python's library, console scripts.
_LIBRARY_PATH = re.compile(
    r"^<|/(site|dist)-packages/|/lib(64)?/(python|pypy)[\d.]+t?(\.zip)?/|/torchinductor_|/bin/[^/.]+$"
)
_MAX_USER_FRAMES = 16
NO_PY_SPY = "py-spy is not installed (python -m pip install py-spy)"
_PERMIT_HINT = "give CAP_SYS_PTRACE (as root: setcap or sudo; in a container: --cap-add=SYS_PTRACE)"


class Stacks(NamedTuple):
    """The stacks of the main thread and of the other threads: frames as "function (file:line)", innermost first.

    `user_frames` are the frames of the main thread that are neither in Python's library nor in an installed package.
    `holds_gil` is whether the main thread holds the GIL (None: not known). `why_missing` says why `main` is empty.
    `is_refused` is whether py-spy was not permitted to read the process.
    """

    main: tuple[str, ...] = ()
    others: tuple[tuple[str, ...], ...] = ()
    holds_gil: bool | None = None
    is_refused: bool = False
    why_missing: str = ""
    user_frames: tuple[UserFrame, ...] = ()


class _Frame(Struct, frozen=True):
    name: str
    filename: str
    line: int


class _Thread(Struct, frozen=True):
    pid: int
    frames: tuple[_Frame, ...]
    os_thread_id: int | None = None
    owns_gil: bool = False


def find_py_spy() -> str | None:
    """The path of py-spy in the folder of this Python, where pip installs it, else in PATH. None: not installed."""
    sibling = Path(sys.executable).with_name("py-spy")
    return str(sibling) if os.access(sibling, os.X_OK) else shutil.which("py-spy")


def stacks_of(program: str | None, pid: int, end: float) -> Stacks:
    """Read the stacks by dump_stacks until `end` (time.monotonic); `program` is None if py-spy is not installed. If the
    process's memory may not be read, `why_missing` says why, and what permits it."""
    if program is None:
        return Stacks(why_missing=NO_PY_SPY)
    stacks = dump_stacks(program, pid, end)
    if stacks.main or not (PROC / str(pid)).exists():
        return stacks
    is_refused = stacks.is_refused or not _has_readable_memory(pid)
    if not is_refused:
        return stacks
    return stacks._replace(is_refused=True, why_missing=f"reading its memory is not permitted: {refusal(pid)}")


def _has_readable_memory(pid: int) -> bool:
    """Whether the memory mappings of a process are readable. If they are not, py-spy fails for this reason."""
    with contextlib.suppress(OSError), (PROC / str(pid) / "maps").open("rb") as file:
        return bool(file.read(1))
    return False


def dump_stacks(program: str, pid: int, end: float) -> Stacks:
    """Read the stacks of a process by py-spy, with at most _TRIES calls, until `end` (time.monotonic)."""
    stacks = Stacks(why_missing=_TOO_LATE)
    for _ in range(_TRIES):
        stacks = _dump_once(program, pid, end)
        if stacks.main or stacks.is_refused or time.monotonic() > end:
            break
        time.sleep(_PAUSE_SECONDS)
    return stacks


def _dump_once(program: str, pid: int, end: float) -> Stacks:
    try:
        completed = run_until([program, "dump", "--nonblocking", "--json", "--pid", str(pid)], end)
    except OSError as error:
        return Stacks(why_missing=f"py-spy could not be started: {error.strerror or error}")
    if completed is None:
        return Stacks(why_missing=_TOO_LATE)
    if completed.code != 0:
        is_refused = re.search(r"ermission [dD]enied|EPERM|not permitted", completed.stderr) is not None
        first = next((line.strip() for line in completed.stderr.splitlines() if line.strip()), "it failed")
        return Stacks(is_refused=is_refused, why_missing=f"py-spy: {first.removeprefix('Error: ')[:_MAX_CHARACTERS]}")
    try:
        threads = msgspec.json.decode(completed.stdout, type=tuple[_Thread, ...])
        main = next((thread for thread in threads if thread.os_thread_id == pid), None)
        others = tuple(_frames(thread) for thread in threads if thread is not main and thread.frames)
        if main is None or not main.frames:
            return Stacks(others=others, why_missing="its main thread runs no Python")
        return Stacks(_frames(main), others, main.owns_gil, user_frames=_user_frames(main))
    except msgspec.DecodeError as error:
        return Stacks(why_missing=f"unexpected output of py-spy: {error}")


def _frames(thread: _Thread) -> tuple[str, ...]:
    return tuple(f"{f.name} ({os.path.basename(f.filename)}:{f.line})"[:_MAX_CHARACTERS] for f in thread.frames)


def _user_frames(thread: _Thread) -> tuple[UserFrame, ...]:
    frames = [
        UserFrame(f.name[:_MAX_CHARACTERS], f.filename, f.line)
        for f in thread.frames
        if not _LIBRARY_PATH.search(f.filename)
    ]
    return tuple(frames[:_MAX_USER_FRAMES])


def refusal(pid: int, root: Path = PROC) -> str:
    """The reason why the memory of a process may not be read, and the setting that permits it, without a full stop.

    Without CAP_SYS_PTRACE the process must belong to the same user, be dumpable, and have no more capabilities than
    this process. Yama, if enabled, also requires a descendant (ptrace(2), "Ptrace access mode checking").
    """
    users = read_pairs(root / str(pid) / "status", ":").get("Uid", "").split()
    if users and set(users) != {str(os.geteuid())}:
        hint = f"run `ddpdiag watch` as user {users[0]}, or {_PERMIT_HINT}"
        return f"it runs as user {users[0]}, ddpdiag as user {os.geteuid()}: {hint}"
    scope = read_int(root / "sys" / "kernel" / "yama" / "ptrace_scope")
    if scope:
        hint = "" if scope == 3 else f" (as root: sysctl kernel.yama.ptrace_scope=0), or {_PERMIT_HINT}"
        return f"kernel.yama.ptrace_scope is {scope}: expected 0{hint}"
    return (
        f"it is not dumpable, has capabilities of its own, or a container's seccomp profile forbids it: {_PERMIT_HINT}"
    )


PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
FILE_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_NO_PIPE = "its process group has no recorder that can be read; in torch 2.15 and newer it needs TORCH_DIST_USE_NCCL2=0"
# The number of entries that NCCL's flight recorder keeps, as in torch's tutorials.
_BUFFER_ENTRIES = "2000"


def recorder_variables(folder: str) -> dict[str, str]:
    """The variables that make NCCL put its recorder's pipes and dumps into `folder`, except those set in os.environ."""
    pipe, file = f"{folder}/ask-", f"{folder}/rank-"
    variables = dict.fromkeys(BUFFER_NAMES, _BUFFER_ENTRIES) | dict.fromkeys(FILE_VARIABLES, file)
    variables |= {PIPE_VARIABLE: pipe, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    return {name: value for name, value in variables.items() if name not in os.environ}


class Request(NamedTuple):
    """A request for a rank's dump: the file that the process will write, and the time of the file before (0: none)."""

    rank: int
    file: Path
    previous_ns: int


def request_dump(pid: int, rank: int, env: Mapping[str, str], root: Path = PROC) -> Request | str:
    """Ask a process to dump its flight recorder. If that is not possible, return the reason, without a full stop."""
    stem = env.get(PIPE_VARIABLE)
    file = next((env[name] for name in FILE_VARIABLES if env.get(name)), None)
    if not stem or not file:
        return f"{PIPE_VARIABLE} and {FILE_VARIABLES[0]} are not both set (--flight-recorder sets them)"
    pipe, dump = path_from_here(pid, f"{stem}{rank}.pipe", root), path_from_here(pid, f"{file}{rank}", root)
    if not os.path.lexists(pipe):
        return _NO_PIPE
    previous_ns = _modified_ns(dump)
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        return f"{stem}{rank}.pipe: {error.strerror or error}"
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return f"{stem}{rank}.pipe is not a pipe"
        with contextlib.suppress(BlockingIOError):  # the pipe is full of requests that the process has not read
            os.write(descriptor, b"1\n")
    finally:
        os.close(descriptor)
    return Request(rank, dump, previous_ns)


def await_dump(request: Request, end: float) -> Witness | str:
    """Wait until the process has written its dump, and return that. After `end` (time.monotonic) return a sentence."""
    while time.monotonic() < end:
        if _modified_ns(request.file) > request.previous_ns:
            with contextlib.suppress(OSError):
                if (trace := read_dump(request.file, request.rank)) is not None:
                    return trace
        time.sleep(_PAUSE_SECONDS)
    return "it did not respond in time: it is stopped, or its heartbeat thread hangs, too"


def path_from_here(pid: int, path: str, proc: Path = PROC) -> Path:
    """The path by which this process can open `path` of process `pid`, which may be in another folder or container."""
    if not path.startswith("/"):
        return proc / str(pid) / "cwd" / path
    inside = Path(f"{proc / str(pid) / 'root'}{path}")
    return inside if os.access(inside.parent, os.R_OK) else Path(path)


def _modified_ns(file: Path) -> int:
    with contextlib.suppress(OSError):
        return file.stat().st_mtime_ns
    return 0
