"""Evidence on a rank, read from outside: Python stacks by py-spy, and collectives from NCCL's flight recorder.

py-spy (https://github.com/benfred/py-spy) reads the memory of a process. Always with --nonblocking: usually it stops
the process with ptrace while it reads, and one that is killed then, or meets a process that is stopped already, may
leave it stopped for ever (py-spy issues 390 and 565). A process that runs meanwhile may give a torn stack, or none:
then it is asked again. Takes 30 ms (measured, 0.4.3), on stopped ones, too.

With TORCH_NCCL_DEBUG_INFO_PIPE_FILE, and a buffer, a process makes a named pipe STEM<rank>.pipe; once something is
written into it, the thread that watches NCCL's heartbeat, which looks there each second, writes the recorder to
TORCH_FR_DUMP_TEMP_FILE<rank> (TORCH_NCCL_DEBUG_INFO_TEMP_FILE before torch 2.9) and the job goes on. It does so while
the main thread hangs, without the GIL. It is the same file that NCCL's own watchdog writes at its time-out. gloo's
recorder is read inside of the process only. (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, FlightRecorder.cpp)
The class of process groups that torch 2.15 takes for NCCL makes no pipe (c10d/nccl2/ProcessGroupNCCL.cpp).
The file is a pickle. It is read by a loader that knows plain data only: no name is ever looked up, so nothing can run.
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
    """Frames, innermost first, as "function (file:line)", of the main thread and of the others; or why there are none.

    `holds_gil` is whether the main thread does.
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
    """The program: beside this Python, where pip installs it, else in PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def stacks_of(program: str | None, pid: int, end: float) -> Stacks:
    """The stacks of a rank by this py-spy, or why they cannot be had; until `end` of the monotonic clock."""
    if program is None:
        return Stacks(trouble=NO_PY_SPY)
    seen = dump_stacks(program, pid, end)
    if seen.main or not (PROC / str(pid)).exists():
        return seen
    refused = seen.refused or not _readable(pid)
    return seen._replace(trouble=f"reading its memory is not permitted: {refusal(pid)}") if refused else seen


def _readable(pid: int) -> bool:
    """Whether its memory mappings are readable; if not, this is the true reason, whatever py-spy prints."""
    try:
        with (PROC / str(pid) / "maps").open("rb") as file:
            return bool(file.read(1))
    except OSError:
        return False


def dump_stacks(program: str, pid: int, end: float) -> Stacks:
    """The stacks of a process, until `end` of the monotonic clock."""
    seen = Stacks(trouble=_LATE)
    for _ in range(_TRIES):
        seen = _once(program, pid, end)
        if seen.main or seen.refused or time.monotonic() > end:
            break
        time.sleep(_PAUSE_SECONDS)
    return seen


def _once(program: str, pid: int, end: float) -> Stacks:
    try:
        said = run_bounded([program, "dump", "--nonblocking", "--json", "--pid", str(pid)], end)
    except OSError as error:
        return Stacks(trouble=f"py-spy could not be started: {error.strerror or error}")
    if said is None:
        return Stacks(trouble=_LATE)
    if said.code != 0:
        refused = re.search(r"ermission [dD]enied|EPERM|not permitted", said.err) is not None
        first = next((line.strip() for line in said.err.splitlines() if line.strip()), "it failed")
        return Stacks(refused=refused, trouble=f"py-spy: {first.removeprefix('Error: ')[:_MOST_CHARACTERS]}")
    try:
        threads = _threads.decode(said.out)
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
    of this process; then Yama, if it is there, requires an ancestor (ptrace(2), "Ptrace access mode checking").
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
    """Variables that let another process ask NCCL for its flight recorder, but for those that the user has set."""
    pipe, file = f"{folder}/{_PIPE_STEM}", f"{folder}/{_FILE_STEM}"
    wanted = dict.fromkeys(BUFFER_NAMES, _BUFFER_ENTRIES) | {PIPE_NAME: pipe} | dict.fromkeys(FILE_NAMES, file)
    wanted["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    return {name: value for name, value in wanted.items() if name not in os.environ}


class Request(NamedTuple):
    """A process that was asked for its recorder, the file that it writes, and when that was written before."""

    file: Path
    before_ns: int


def ask_recorder(pid: int, rank: int, env: Mapping[str, str], root: Path = PROC) -> Request | str:
    """Ask a process for its recorder; a sentence without its full stop where that cannot be done."""
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
        with contextlib.suppress(BlockingIOError):  # full of questions that were not read
            os.write(descriptor, b"1\n")
    finally:
        os.close(descriptor)
    return Request(written, before_ns)


def recorder_answer(request: Request, end: float) -> TraceDump | str:
    """The recorder that the process wrote, once it is whole, until `end` of the monotonic clock; or a sentence."""
    while time.monotonic() < end:
        if _changed_ns(request.file) > request.before_ns and (trace := _load(request.file)) is not None:
            return trace
        time.sleep(0.05)
    return "it did not respond in time: it is stopped, or its heartbeat thread hangs, too"


def _seen_from(pid: int, path: str, root: Path) -> Path:
    """A path as the process means it: relative to its own directory, in its own container."""
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
    """Numbers, texts, lists, tuples and dicts; anything that has a name is refused.

    The one of Python and not that in C, which takes 3 GB for the 9 bytes of a number in its memo.
    """

    # Sets take 200 times the bytes that ask for them, and no dump has any.
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
    """The collectives in a dump; None for anything else, or one that is not written to its end."""
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
