"""Stacks of a Python process from outside, by py-spy (https://github.com/benfred/py-spy), which reads its memory.

Always with --nonblocking: usually py-spy stops the process with ptrace while it reads, and one that is killed then, or
meets a process that is stopped already, may leave it stopped for ever (py-spy issues 390 and 565). A process that runs
meanwhile may give a torn stack, or none: then it is asked again. Takes 30 ms (measured, 0.4.3), on stopped ones, too.
"""

import os
import shutil
import sys
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from ddpdiag.probes.process.bounded import run

_TRIES = 3
_PAUSE_SECONDS = 0.05
_MOST_CHARACTERS = 160
_LATE = "py-spy did not answer in time"


class Dump(NamedTuple):
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


def find() -> str | None:
    """The program: beside our own Python, as pip installs it, else in PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def dump(program: str, pid: int, end: float) -> Dump:
    """The stacks of a process, until `end` of the monotonic clock."""
    seen = Dump(trouble=_LATE)
    for _ in range(_TRIES):
        seen = _once(program, pid, end)
        if seen.main or seen.refused or time.monotonic() > end:
            break
        time.sleep(_PAUSE_SECONDS)
    return seen


def _once(program: str, pid: int, end: float) -> Dump:
    try:
        said = run([program, "dump", "--nonblocking", "--json", "--pid", str(pid)], end)
    except OSError as error:
        return Dump(trouble=f"py-spy could not be started: {error.strerror or error}")
    if said is None:
        return Dump(trouble=_LATE)
    if said.code != 0:
        return _failed(said.err)
    try:
        return _read(_threads.decode(said.out), pid)
    except msgspec.DecodeError as error:
        return Dump(trouble=f"py-spy wrote something unknown: {error}")


def _failed(said: str) -> Dump:
    refused = "ermission denied" in said or "ermission Denied" in said or "EPERM" in said or "not permitted" in said
    first = next((line.strip() for line in said.splitlines() if line.strip()), "it failed")
    return Dump(refused=refused, trouble=f"py-spy: {first.removeprefix('Error: ')[:_MOST_CHARACTERS]}")


def _read(threads: tuple[_Thread, ...], pid: int) -> Dump:
    main = next((thread for thread in threads if thread.os_thread_id == pid), None)
    others = tuple(_frames(thread) for thread in threads if thread is not main and thread.frames)
    if main is None or not main.frames:
        return Dump(others=others, trouble="its main thread runs no Python")
    return Dump(_frames(main), others, main.owns_gil)


def _frames(thread: _Thread) -> tuple[str, ...]:
    return tuple(f"{f.name} ({os.path.basename(f.filename)}:{f.line})"[:_MOST_CHARACTERS] for f in thread.frames)
