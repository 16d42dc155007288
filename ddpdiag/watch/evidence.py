"""Evidence on a rank, read from outside: Python stacks by py-spy, and collectives from NCCL's flight recorder.

py-spy (https://github.com/benfred/py-spy) reads the memory of a process. By default it stops the process with ptrace
meanwhile. If py-spy is killed then, or if the process was stopped already, the process may stay stopped for ever
(py-spy issues 390 and 565). So it is called with --nonblocking. A process that runs meanwhile may give a torn stack or
none; then py-spy is called again. A call takes 30 ms (measured, 0.4.3), for a stopped process, too.

With TORCH_NCCL_DEBUG_INFO_PIPE_FILE and a size of the recorder, a process makes a named pipe STEM<rank>.pipe. The
thread that watches NCCL's heartbeat reads it each second. Once something was written into the pipe, the thread writes
the recorder to TORCH_FR_DUMP_TEMP_FILE<rank> (TORCH_NCCL_DEBUG_INFO_TEMP_FILE before torch 2.9), and the job goes on.
This needs no GIL, and works while the main thread hangs. NCCL's watchdog writes the same file at its time-out. gloo's
recorder can be read inside of the process only. (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, FlightRecorder.cpp)
The class of process groups that torch 2.15 uses for NCCL makes no pipe (c10d/nccl2/ProcessGroupNCCL.cpp).
The file is a pickle. It is read by a loader of plain data, which never looks up a name, so no code of it can run.
"""

import contextlib
import io
import os
import pickle
import re
import shutil
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple, NoReturn

import msgspec
from msgspec import Struct

from ddpdiag.codec import read_bytes
from ddpdiag.probes.collectives import BUFFER_NAMES, TraceDump, read_dump
from ddpdiag.probes.host.kernel import PROC, read_int, read_pairs
from ddpdiag.probes.host.programs import run_bounded

_TRIES = 3
_PAUSE_SECONDS = 0.05
_MOST_CHARACTERS = 160
_LATE = "py-spy did not respond in time"
NO_PY_SPY = "py-spy is not installed (python -m pip install py-spy)"
_ASK = "give CAP_SYS_PTRACE (as root: setcap or sudo; in a container: --cap-add=SYS_PTRACE)"


class Stacks(NamedTuple):
    """The stacks of the main thread and of the other threads: frames as "function (file:line)", innermost first.

    `holds_gil`: the main thread holds the GIL. `trouble`: why there is no stack. `refused`: reading is not permitted.
    """

    main: tuple[str, ...] = ()
    others: tuple[tuple[str, ...], ...] = ()
    holds_gil: bool | None = None
    refused: bool = False
    trouble: str = ""


class _Frame(Struct, frozen=True):
    name: str
    filename: str
    line: int


class _Thread(Struct, frozen=True):
    pid: int
    frames: tuple[_Frame, ...]
    os_thread_id: int | None = None
    owns_gil: bool = False


_threads: msgspec.json.Decoder[tuple[_Thread, ...]] = msgspec.json.Decoder(tuple[_Thread, ...])


def find_py_spy() -> str | None:
    """The path of py-spy: in the folder of this Python, where pip installs it, else in PATH. None if not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def stacks_of(program: str | None, pid: int, end: float) -> Stacks:
    """Read the stacks of a rank by `program` (py-spy) until `end` of the monotonic clock; or say why it failed."""
    if program is None:
        return Stacks(trouble=NO_PY_SPY)
    seen = dump_stacks(program, pid, end)
    if seen.main or not (PROC / str(pid)).exists():
        return seen
    refused = seen.refused or not _readable(pid)
    return seen._replace(trouble=f"reading its memory is not permitted: {refusal(pid)}") if refused else seen


def _readable(pid: int) -> bool:
    """Whether the memory mappings of a process are readable. If not, that is why py-spy fails, whatever it prints."""
    try:
        with (PROC / str(pid) / "maps").open("rb") as file:
            return bool(file.read(1))
    except OSError:
        return False


def dump_stacks(program: str, pid: int, end: float) -> Stacks:
    """Read the stacks of a process by py-spy, with a few tries, until `end` of the monotonic clock."""
    seen = Stacks(trouble=_LATE)
    for _ in range(_TRIES):
        seen = _dump_once(program, pid, end)
        if seen.main or seen.refused or time.monotonic() > end:
            break
        time.sleep(_PAUSE_SECONDS)
    return seen


def _dump_once(program: str, pid: int, end: float) -> Stacks:
    try:
        completed = run_bounded([program, "dump", "--nonblocking", "--json", "--pid", str(pid)], end)
    except OSError as error:
        return Stacks(trouble=f"py-spy could not be started: {error.strerror or error}")
    if completed is None:
        return Stacks(trouble=_LATE)
    if completed.code != 0:
        refused = re.search(r"ermission [dD]enied|EPERM|not permitted", completed.err) is not None
        first = next((line.strip() for line in completed.err.splitlines() if line.strip()), "it failed")
        return Stacks(refused=refused, trouble=f"py-spy: {first.removeprefix('Error: ')[:_MOST_CHARACTERS]}")
    try:
        threads = _threads.decode(completed.out)
        main = next((thread for thread in threads if thread.os_thread_id == pid), None)
        others = tuple(_frames(thread) for thread in threads if thread is not main and thread.frames)
        if main is None or not main.frames:
            return Stacks(others=others, trouble="its main thread runs no Python")
        return Stacks(_frames(main), others, main.owns_gil)
    except msgspec.DecodeError as error:
        return Stacks(trouble=f"unexpected output of py-spy: {error}")


def _frames(thread: _Thread) -> tuple[str, ...]:
    return tuple(f"{f.name} ({os.path.basename(f.filename)}:{f.line})"[:_MOST_CHARACTERS] for f in thread.frames)


def refusal(pid: int, root: Path = PROC) -> str:
    """Name the reason why the memory of a process may not be read, and the setting that helps, without a full stop.

    The kernel requires CAP_SYS_PTRACE, or the same user, a process that is dumpable, and no capabilities beyond those
    of this process. Yama, if enabled, requires an ancestor, too (ptrace(2), "Ptrace access mode checking").
    """
    users = read_pairs(root / str(pid) / "status", ":").get("Uid", "").split()
    if users and set(users) != {str(os.geteuid())}:
        return f"it runs as user {users[0]}, ddpdiag as user {os.geteuid()}: start both as one user, or {_ASK}"
    scope = read_int(root / "sys" / "kernel" / "yama" / "ptrace_scope")
    if scope:
        helps = "" if scope == 3 else f" (as root: sysctl kernel.yama.ptrace_scope=0), or {_ASK}"
        return f"kernel.yama.ptrace_scope is {scope}: expected 0{helps}"
    return f"it is not dumpable, has capabilities of its own, or a container's seccomp profile forbids it: {_ASK}"


PIPE_NAME = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
FILE_NAMES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_PIPE_STEM, _FILE_STEM = "ask-", "rank-"
_NO_PIPE = "its process group has no recorder that can be read; in torch 2.15 and newer it needs TORCH_DIST_USE_NCCL2=0"
_LARGEST_BYTES = 16 << 20
# Entries that NCCL's flight recorder keeps; torch's tutorials use it.
_BUFFER_ENTRIES = "2000"


def recorder_variables(folder: str) -> dict[str, str]:
    """The variables by which NCCL's flight recorder can be requested, except those that the user has set."""
    pipe, file = f"{folder}/{_PIPE_STEM}", f"{folder}/{_FILE_STEM}"
    wanted = dict.fromkeys(BUFFER_NAMES, _BUFFER_ENTRIES) | {PIPE_NAME: pipe} | dict.fromkeys(FILE_NAMES, file)
    wanted["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    return {name: value for name, value in wanted.items() if name not in os.environ}


class Request(NamedTuple):
    """A request for a flight recorder: the file that the process will write, and when it was written before."""

    file: Path
    before_ns: int


def ask_recorder(pid: int, rank: int, env: Mapping[str, str], root: Path = PROC) -> Request | str:
    """Request the flight recorder of a process. Returns a sentence without its full stop if that fails."""
    stem = env.get(PIPE_NAME)
    file = next((env[name] for name in FILE_NAMES if env.get(name)), None)
    if not stem or not file:
        return f"{PIPE_NAME} and {FILE_NAMES[0]} are not both set (--flight-recorder sets them)"
    pipe, written = _seen_from(pid, f"{stem}{rank}.pipe", root), _seen_from(pid, f"{file}{rank}", root)
    if not os.path.lexists(pipe):
        return _NO_PIPE
    before_ns = _changed_ns(written)
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        return f"{stem}{rank}.pipe: {error.strerror or error}"
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return f"{stem}{rank}.pipe is not a pipe"
        with contextlib.suppress(BlockingIOError):  # full of requests that were not read
            os.write(descriptor, b"1\n")
    finally:
        os.close(descriptor)
    return Request(written, before_ns)


def recorder_answer(request: Request, end: float) -> TraceDump | str:
    """Wait until the process has written its whole recorder, or until `end` of the monotonic clock: a sentence."""
    while time.monotonic() < end:
        if _changed_ns(request.file) > request.before_ns and (trace := _load(request.file)) is not None:
            return trace
        time.sleep(0.05)
    return "it did not respond in time: it is stopped, or its heartbeat thread hangs, too"


def _seen_from(pid: int, path: str, root: Path) -> Path:
    """The path at which this process finds `path` of another one, with its current directory and container."""
    if not path.startswith("/"):
        return root / str(pid) / "cwd" / path
    inside = Path(f"{root / str(pid) / 'root'}{path}")
    return inside if os.access(inside.parent, os.R_OK) else Path(path)


def _changed_ns(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


class _PlainData(pickle._Unpickler):
    """An unpickler of numbers, texts, lists, tuples and dicts, which refuses whatever has a name.

    It is the one in Python, because the one in C takes 3 GB for 9 bytes that name a large place in its memo.
    """

    # Sets take 200 times as much memory as bytes in the pickle, and no dump has any.
    dispatch: ClassVar = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if bytes((code,)) not in (pickle.EMPTY_SET, pickle.FROZENSET, pickle.BYTEARRAY8)
    }

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} in a flight recorder's dump")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("a reference in a flight recorder's dump")


def load_trace(data: bytes) -> TraceDump | None:
    """The collectives in the dump of a flight recorder. None if `data` is something else, or cut off."""
    try:
        return read_dump(_PlainData(io.BytesIO(data)).load())
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, TypeError, AttributeError):
        return None
    except (MemoryError, OverflowError, RecursionError):  # an impossible length
        return None


def _load(file: Path) -> TraceDump | None:
    try:
        return load_trace(read_bytes(file, _LARGEST_BYTES))
    except OSError:
        return None
