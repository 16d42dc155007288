"""Fork servers that ranks of a host share, if a shared server's workers are the same as those of a rank's private one.

A worker inherits from the process that forks it: user, control group, namespaces, cores, limits, working directory. The
kernel must show the same values for the rank and for the server. Their environments must be equal, too, except for
variables that are not read at exec or at the import of torch.

The ranks connect to a socket in the run's folder, which other users cannot enter. Its name is a digest of the values
that must be equal, so that ranks that differ (in their cores, say) use different servers.
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

# Read at exec or at the import of torch: to override one of these, a trial needs a new process.
EXEC_TIME = re.compile(
    r"(OMP|KMP|GOMP|MKL|MALLOC|LD)_.*|PYTHON.*|PYTORCH_(.*_)?ALLOC_CONF|TORCH_DISTRIBUTED_DEBUG|TORCH_CPP_LOG_LEVEL"
)
# Variables that each worker sets. Launchers number their processes under many names, and torch's import reads none of
# them; shells keep their last command in "_".
_OF_A_RANK = re.compile(
    r"_|RANK|LOCAL_RANK|ROLE_RANK|MASTER_.*|CUDA_VISIBLE_DEVICES|(NCCL|GLOO)_.*|TORCHINDUCTOR_CACHE_DIR"
    r"|TORCHELASTIC_ERROR_FILE|(OMPI|PMIX?)_.*|MPI_LOCALRANKID|SLURM_(PROCID|LOCALID|TASK_PID)"
)
_STATUS = re.compile(
    r"^((?:Uid|Gid|Groups|Umask|Cap\w+|NoNewPrivs|Seccomp\w*|Cpus_allowed|Mems_allowed):.*)$", re.MULTILINE
)
# Only rank 0 raises its soft limit, for the control server.
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

    Files in folders of the module path (.pth) are not examined: ranks with equal `traits` have the same files.
    """
    at_start = [getattr(sys.modules.get(name), "__file__", None) for name in ("sitecustomize", "usercustomize")]
    options = (sys.flags, sys._xoptions, sys.warnoptions, sys.path)
    product = (ddpdiag.__version__, ddpdiag.__file__, at_start)
    prefixes = (sys.version, sys.prefix, sys.exec_prefix)
    return digest(sys.executable, os.readlink("/proc/self/exe"), *prefixes, *options, *product)


def traits(pid: int | str = "self") -> dict[str, str]:
    """Properties that a process passes on to its children, read from /proc; OSError if they may not be read."""
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
    """The first trait in which two processes differ, or None."""
    return next((name for name in {**server, **other} if server.get(name) != other.get(name)), None)


def is_alike(channel: socket.socket) -> bool:
    """Whether the process at the other end of the channel has the same user and traits as this process."""
    pid, uid = peer(channel)
    try:
        return uid == os.geteuid() and difference(traits(), traits(pid)) is None
    except (OSError, IndexError):  # it has ended, or is in another PID namespace
        return False


def variable_that_differs(server: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The first variable in which two environments differ although they must not, or None."""
    common = _common(server)
    return next((name for name in {**common, **_common(other)} if server.get(name) != other.get(name)), None)


def socket_name(env: Mapping[str, str], attempt: int) -> str | None:
    """The name of the socket, in the run's folder, for all ranks of this host that are like this rank.

    None if the kernel does not show all that must be equal. The digest contains no secret. `attempt` is the number of
    servers lost before.
    """
    if not is_possible():
        return None
    common = sorted((name, value) for name, value in _common(env).items() if not is_secret(name))
    try:
        shown = sorted(traits().items())
    except (OSError, IndexError):
        return None
    # With the boot id, because the folder may be on a file server, and other hosts cannot connect to this socket.
    return f"imports-{digest(boot_id(), os.geteuid(), OPEN_FILES, shown, common, attempt)}"


def _common(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not _OF_A_RANK.fullmatch(name)}


def peer(channel: socket.socket) -> tuple[int, int]:
    """Pid and user of the process at the other end of a channel, from the kernel."""
    pid, uid, _gid = _PEER.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid
