"""The flight recorder of another process, asked for from outside. NCCL only.

With TORCH_NCCL_DEBUG_INFO_PIPE_FILE, and a buffer, a process makes a named pipe STEM<rank>.pipe; once something is
written into it, the thread that watches NCCL's heartbeat, which looks there each second, writes the recorder to
TORCH_FR_DUMP_TEMP_FILE<rank> (TORCH_NCCL_DEBUG_INFO_TEMP_FILE before torch 2.9) and the job goes on. It does so while
the main thread hangs, without the GIL. It is the same file that NCCL's own watchdog writes at its time-out. gloo's
recorder is read inside of the process only. (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, FlightRecorder.cpp)

The file is a pickle. It is read by a loader that knows plain data only: no name is ever looked up, so nothing can run.
"""

import contextlib
import io
import os
import pickle
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from ddpdiag.probes.collectives import TraceDump, read_dump
from ddpdiag.probes.host.kernel import PROC

PIPE_NAME = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
FILE_NAMES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
BUFFER_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_LARGEST_BYTES = 64 << 20
# Entries that NCCL's flight recorder keeps; torch's tutorials use it.
_BUFFER_ENTRIES = "2000"


def recorder_variables(folder: str) -> dict[str, str]:
    """What lets an outsider ask NCCL for its flight recorder; what the user has set stays."""
    pipe, file = f"{folder}/ask-", f"{folder}/rank-"
    wanted = dict.fromkeys(BUFFER_NAMES, _BUFFER_ENTRIES) | {PIPE_NAME: pipe} | dict.fromkeys(FILE_NAMES, file)
    wanted["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    return {name: value for name, value in wanted.items() if name not in os.environ}


class Asked(NamedTuple):
    """A process that was asked for its recorder, the file that it writes, and that file's age before."""

    file: Path
    before_ns: int


def ask(pid: int, rank: int, env: Mapping[str, str], root: Path = PROC) -> Asked | str:
    """Ask a process; a sentence without its full stop where that cannot be done."""
    stem = env.get(PIPE_NAME)
    file = next((env[name] for name in FILE_NAMES if env.get(name)), None)
    if not stem or not file:
        return f"{PIPE_NAME} and {FILE_NAMES[0]} are not both set (--flight-recorder sets them)"
    pipe, written = _seen_from(pid, f"{stem}{rank}.pipe", root), _seen_from(pid, f"{file}{rank}", root)
    before = _changed_ns(written)
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        return f"{stem}{rank}.pipe: {error.strerror or error} (only NCCL makes it, with its first group)"
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return f"{stem}{rank}.pipe is no pipe"
        with contextlib.suppress(BlockingIOError):  # full of questions that were not read
            os.write(descriptor, b"1\n")
    finally:
        os.close(descriptor)
    return Asked(written, before)


def answer(asked: Asked, end: float) -> TraceDump | str:
    """What the process wrote, once it is whole, until `end` of the monotonic clock; or a sentence."""
    while time.monotonic() < end:
        if _changed_ns(asked.file) > asked.before_ns and (trace := _load(asked.file)) is not None:
            return trace
        time.sleep(0.05)
    return "it did not answer in time: stopped, or its heartbeat thread hangs, too"


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


class _PlainData(pickle.Unpickler):
    """Numbers, texts, lists, tuples and dicts; anything that has a name is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} in a flight recorder's dump")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("a reference in a flight recorder's dump")


def load(data: bytes) -> TraceDump | None:
    """The collectives in a dump; None for anything else, or one that is not written to its end."""
    try:
        return read_dump(_PlainData(io.BytesIO(data)).load())
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, TypeError, AttributeError):
        return None
    except (MemoryError, OverflowError, RecursionError):  # a length that nobody wrote
        return None


def _load(file: Path) -> TraceDump | None:
    try:
        with file.open("rb") as opened:
            data = opened.read(_LARGEST_BYTES + 1)
    except OSError:
        return None
    return load(data) if len(data) <= _LARGEST_BYTES else None
