"""Fork servers shared by ranks of a host: those whose workers would be the same processes without it.

A worker inherits from the process that forks it what its own rank would have given to it: user, control group,
namespaces, cores, limits, working directory. What the kernel shows of the rank and of the server must be equal, and
so must their environments but for variables that nothing reads at exec or at the import of torch.

The ranks connect to a socket in the run's folder, which other users cannot enter. Its name is a digest of what must be
equal, so that ranks that differ (in their cores, say) use different ones.
"""

import os
import re
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

import ddpdiag
from ddpdiag.probes.host.kernel import boot_id
from ddpdiag.runtime.launchers.launch import digest
from ddpdiag.runtime.supervisor.processes import OPEN_FILES
from ddpdiag.sanitize import is_secret

# Read when a process is exec'ed or when torch is imported: an override takes effect only in a worker of its own.
EXEC_TIME = re.compile(
    r"(OMP|KMP|GOMP|MKL|MALLOC|LD)_.*|PYTHON.*|PYTORCH_(.*_)?ALLOC_CONF|TORCH_DISTRIBUTED_DEBUG|TORCH_CPP_LOG_LEVEL"
)
# What each worker sets for itself. Launchers number their processes under many names, and torch's import reads none;
# shells leave their last command in "_".
_OF_A_RANK = re.compile(
    r"_|RANK|LOCAL_RANK|ROLE_RANK|MASTER_.*|CUDA_VISIBLE_DEVICES|(NCCL|GLOO)_.*|TORCHINDUCTOR_CACHE_DIR"
    r"|TORCHELASTIC_ERROR_FILE|(OMPI|PMIX?)_.*|MPI_LOCALRANKID|SLURM_(PROCID|LOCALID|TASK_PID)"
)
_STATUS = re.compile(
    r"^((?:Uid|Gid|Groups|Umask|Cap\w+|NoNewPrivs|Seccomp\w*|Cpus_allowed|Mems_allowed):.*)$", re.MULTILINE
)
# Rank 0 raises its own soft limit for the control server, and no other process's.
_SOFT_OPEN_FILES = re.compile(r"(?<=Max open files) +\S+")
_LINKS = ("cwd", "root")
# Holds `interpreter()` in the environment of a fork server, so that it is compared like any other variable.
INTERPRETER = "DDPDIAG_INTERPRETER"
_PEER = struct.Struct("3i")


def is_possible() -> bool:
    """Whether this kernel has the files of /proc that the comparison reads."""
    return sys.platform == "linux" and os.path.exists("/proc/self/ns")


def interpreter() -> str:
    """A digest of this process's Python: program, flags, module path, ddpdiag, and the modules that run at its start.

    Files in folders of the module path (.pth) need no look: ranks that are compared share them by `traits`.
    """
    at_start = [getattr(sys.modules.get(name), "__file__", None) for name in ("sitecustomize", "usercustomize")]
    options = (sys.flags, sys._xoptions, sys.warnoptions, sys.path)
    product = (ddpdiag.__version__, ddpdiag.__file__, at_start)
    prefixes = (sys.version, sys.prefix, sys.exec_prefix)
    return digest(sys.executable, os.readlink("/proc/self/exe"), *prefixes, *options, *product)


def traits(pid: int | str = "self") -> dict[str, str]:
    """Properties that a process passes on to its children, from /proc; OSError if they may not be read."""
    folder = Path("/proc", str(pid))
    stat = (folder / "stat").read_text().rpartition(")")[2].split()
    found = {
        "control group": (folder / "cgroup").read_text(),
        "limits": _SOFT_OPEN_FILES.sub("", (folder / "limits").read_text()),
        "oom_score_adj": (folder / "oom_score_adj").read_text(),
        "priority and scheduling policy": " ".join((stat[16], stat[37], stat[38])),
        "user, capabilities or cores": "\n".join(_STATUS.findall((folder / "status").read_text())),
        **{name: os.readlink(folder / name) for name in _LINKS},
    }
    names = sorted(os.listdir(folder / "ns"))
    return found | {f"{name} namespace": os.readlink(folder / "ns" / name) for name in names}


def difference(server: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The first trait in which two processes differ."""
    return next((name for name in {**server, **other} if server.get(name) != other.get(name)), None)


def is_alike(channel: socket.socket) -> bool:
    """Whether the process at the other end is of this user and has the same traits."""
    pid, uid = peer(channel)
    try:
        return uid == os.geteuid() and difference(traits(), traits(pid)) is None
    except (OSError, IndexError):  # it has ended, or is in another PID namespace
        return False


def variable_that_differs(server: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The first variable in which two environments differ, and must not."""
    common = _common(server)
    return next((name for name in {**common, **_common(other)} if server.get(name) != other.get(name)), None)


def socket_name(env: Mapping[str, str], attempt: int) -> str | None:
    """The name, in the run's folder, of the socket for ranks of this host that are like this one.

    None where the kernel does not show what must be equal. No secret goes into the digest. `attempt` counts the servers
    that were lost.
    """
    if not is_possible():
        return None
    common = sorted((name, value) for name, value in _common(env).items() if not is_secret(name))
    try:
        shown = sorted(traits().items())
    except (OSError, IndexError):
        return None
    # The folder may be on a file server: other hosts do not connect to this socket.
    return f"imports-{digest(boot_id(), os.geteuid(), OPEN_FILES, shown, common, attempt)}"


def _common(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not _OF_A_RANK.fullmatch(name)}


def peer(channel: socket.socket) -> tuple[int, int]:
    """Pid and user of the process at the other end, from the kernel."""
    pid, uid, _gid = _PEER.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid
