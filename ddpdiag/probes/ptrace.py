"""Why the memory of another process may not be read, and which setting would allow it.

What the kernel asks (ptrace(2), "Ptrace access mode checking"): CAP_SYS_PTRACE, or the same user, a process that is
dumpable, and none of its capabilities beyond ours; then Yama, if it is there, whether we are its ancestor.
"""

import os
from pathlib import Path

from ddpdiag.probes.host.files import read_int, read_pairs
from ddpdiag.probes.host.procfs import PROC

_SYS_PTRACE = 1 << 19  # include/uapi/linux/capability.h
_ASK = "give CAP_SYS_PTRACE (as root: setcap or sudo; in a container: --cap-add=SYS_PTRACE)"


def refusal(pid: int, root: Path = PROC) -> str:
    """Why py-spy is refused a process, and what would help, as one sentence without its full stop."""
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
