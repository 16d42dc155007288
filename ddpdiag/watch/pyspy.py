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

from ddpdiag.probes.host.kernel import PROC, read_int, read_pairs
from ddpdiag.probes.host.programs import run_bounded

_TRIES = 3
_PAUSE_SECONDS = 0.05
_MOST_CHARACTERS = 160
_LATE = "py-spy did not answer in time"
_NO_PY_SPY = "py-spy is not installed (pip install 'ddpdiag[watch]')"
_SYS_PTRACE = 1 << 19  # include/uapi/linux/capability.h
_ASK = "give CAP_SYS_PTRACE (as root: setcap or sudo; in a container: --cap-add=SYS_PTRACE)"


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


def stacks(program: str | None, pid: int, end: float) -> Dump:
    """The stacks of a rank by this py-spy, or why they cannot be had; until `end` of the monotonic clock."""
    if program is None:
        return Dump(trouble=_NO_PY_SPY)
    seen = dump(program, pid, end)
    if seen.main or not (PROC / str(pid)).exists():
        return seen
    refused = seen.refused or not _readable(pid)
    return seen._replace(trouble=f"its memory may not be read: {refusal(pid)}") if refused else seen


def _readable(pid: int) -> bool:
    """May we see its mappings? Where py-spy gives another reason, this is the true one."""
    try:
        with (PROC / str(pid) / "maps").open("rb") as file:
            return bool(file.read(1))
    except OSError:
        return False


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
        said = run_bounded([program, "dump", "--nonblocking", "--json", "--pid", str(pid)], end)
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


# Why it is refused ----------------------------------------------------------------------------------------------------


def refusal(pid: int, root: Path = PROC) -> str:
    """Why the memory of a process may not be read, and which setting helps, as one sentence without its full stop.

    What the kernel asks (ptrace(2), "Ptrace access mode checking"): CAP_SYS_PTRACE, or the same user, a process that is
    dumpable, and none of its capabilities beyond ours; then Yama, if it is there, whether we are its ancestor.
    """
    own, other = read_pairs(root / "self" / "status", ":"), read_pairs(root / str(pid) / "status", ":")
    if _capabilities(own, "CapEff") & _SYS_PTRACE:
        return f"although we have CAP_SYS_PTRACE: a security module or a container's seccomp profile forbids it; {_ASK}"
    users = other.get("Uid", "").split()
    if users and set(users) != {str(os.geteuid())}:
        return f"it runs as user {users[0]}, we as user {os.geteuid()}: start both as one user, or {_ASK}"
    if _is_undumpable(pid, users, root):
        return f"it is not dumpable (prctl PR_SET_DUMPABLE, or a program with capabilities of its own): {_ASK}"
    if _capabilities(other, "CapPrm") & ~_capabilities(own, "CapPrm"):
        return f"it has capabilities that we lack: {_ASK}"
    scope = read_int(root / "sys" / "kernel" / "yama" / "ptrace_scope")
    if scope:
        helps = "" if scope == 3 else f" (as root: sysctl kernel.yama.ptrace_scope=0), or {_ASK}"
        return f"kernel.yama.ptrace_scope is {scope}: expected 0{helps}"
    return f"a container's seccomp profile or a security module forbids it: {_ASK}"


def _capabilities(status: dict[str, str], name: str) -> int:
    try:
        return int(status.get(name, "0"), 16)
    except ValueError:
        return 0


def _is_undumpable(pid: int, users: list[str], root: Path) -> bool:
    """Its files in /proc then belong to root (proc(5)), and where it is root's, their targets cannot be read."""
    folder = root / str(pid)
    try:
        if users and str(folder.stat().st_uid) != users[1]:
            return True
        os.readlink(folder / "exe")
    except PermissionError:
        return True
    except OSError:
        return False
    return False
