"""The conditions under which ranks of a host may share a fork server.

A worker inherits user, control group, namespaces, cores, limits and working directory from the server that forks it.
/proc must show the same values for the rank's supervisor. Supervisor and server must also have equal environments,
except for variables that are not read at exec or at the import of torch.

The ranks connect to a socket in the run's folder, which other users cannot enter. The name of the socket is a digest of
the values that must be equal, so that ranks that differ (for example in their cores) use different servers.
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
from ddpdiag.runtime.supervisor.processes import OPEN_FILES_LIMITS
from ddpdiag.sanitize import is_secret

# Variables that are read at exec or at the import of torch. A trial that overrides one of them needs a new process.
EXEC_TIME_VARIABLES = re.compile(
    r"(OMP|KMP|GOMP|MKL|MALLOC|LD)_.*|PYTHON.*|PYTORCH_(.*_)?ALLOC_CONF|TORCH_DISTRIBUTED_DEBUG|TORCH_CPP_LOG_LEVEL"
)
# Variables that may differ between ranks, because each worker sets its own and torch's import does not read them.
# Launchers number their processes under many names. Shells keep their last command in "_".
_RANK_VARIABLES = re.compile(
    r"_|RANK|LOCAL_RANK|ROLE_RANK|MASTER_.*|CUDA_VISIBLE_DEVICES|(NCCL|GLOO)_.*|TORCHINDUCTOR_CACHE_DIR"
    r"|TORCHELASTIC_ERROR_FILE|(OMPI|PMIX?)_.*|MPI_LOCALRANKID|SLURM_(PROCID|LOCALID|TASK_PID)"
)
_STATUS_LINES = re.compile(
    r"^((?:Uid|Gid|Groups|Umask|Cap\w+|NoNewPrivs|Seccomp\w*|Cpus_allowed|Mems_allowed):.*)$", re.MULTILINE
)
# Only rank 0 raises its soft limit, for the control server.
_SOFT_OPEN_FILES = re.compile(r"(?<=Max open files) +\S+")
# Holds `interpreter_digest()` in the environment of a fork server, so that it is compared like other variables.
INTERPRETER_VARIABLE = "DDPDIAG_INTERPRETER"
_PEER = struct.Struct("3i")


def is_possible() -> bool:
    """Whether this kernel has the files in /proc that the comparison reads."""
    return sys.platform == "linux" and os.path.exists("/proc/self/ns")


def interpreter_digest() -> str:
    """A digest of this process's Python: program, flags, module path, ddpdiag, and the modules run at its start.

    The .pth files in the module path are not examined, because ranks with equal traits have the same files.
    """
    start_modules = [getattr(sys.modules.get(name), "__file__", None) for name in ("sitecustomize", "usercustomize")]
    options = (sys.flags, sys._xoptions, sys.warnoptions, sys.path)
    package = (ddpdiag.__version__, ddpdiag.__file__, start_modules)
    prefixes = (sys.version, sys.prefix, sys.exec_prefix)
    return digest(sys.executable, os.readlink("/proc/self/exe"), *prefixes, *options, *package)


def inherited_traits(pid: int | str = "self") -> dict[str, str]:
    """The properties that children inherit from a process, read from /proc. OSError if they may not be read."""
    folder = Path("/proc", str(pid))
    stat = (folder / "stat").read_text().rpartition(")")[2].split()
    values = {
        "control group": (folder / "cgroup").read_text(),
        "limits": _SOFT_OPEN_FILES.sub("", (folder / "limits").read_text()),
        "oom_score_adj": (folder / "oom_score_adj").read_text(),
        "priority and scheduling policy": " ".join((stat[16], stat[37], stat[38])),
        "user, capabilities or cores": "\n".join(_STATUS_LINES.findall((folder / "status").read_text())),
        **{name: os.readlink(folder / name) for name in ("cwd", "root")},
    }
    names = sorted(os.listdir(folder / "ns"))
    return values | {f"{name} namespace": os.readlink(folder / "ns" / name) for name in names}


def first_difference(server: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The first name whose values differ, or None."""
    return next((name for name in {**server, **other} if server.get(name) != other.get(name)), None)


def has_equal_traits(channel: socket.socket) -> bool:
    """Whether the process at the other end of the channel has the same user and traits as this process."""
    pid, uid = pid_and_uid_of_peer(channel)
    try:
        return uid == os.geteuid() and first_difference(inherited_traits(), inherited_traits(pid)) is None
    except (OSError, IndexError):  # it has ended, or is in another PID namespace
        return False


def variable_that_differs(server: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The first variable in which two environments must not differ, but do, or None."""
    return first_difference(_compared_variables(server), _compared_variables(other))


def socket_name(env: Mapping[str, str], lost_servers: int) -> str | None:
    """The name of the socket, in the run's folder, at which equal ranks of this host find their shared fork server.

    None if /proc does not show all values that must be equal. No secret is part of the digest in the name.
    `lost_servers` is the number of shared servers that this rank has lost before.
    """
    if not is_possible():
        return None
    common = sorted((name, value) for name, value in _compared_variables(env).items() if not is_secret(name))
    try:
        shown = sorted(inherited_traits().items())
    except (OSError, IndexError):
        return None
    # The boot id is part of it, because the folder may be on a file server, and other hosts cannot use this socket.
    return f"imports-{digest(boot_id(), os.geteuid(), OPEN_FILES_LIMITS, shown, common, lost_servers)}"


def _compared_variables(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not _RANK_VARIABLES.fullmatch(name)}


def pid_and_uid_of_peer(channel: socket.socket) -> tuple[int, int]:
    """The pid and the uid of the process at the other end of a channel, as the kernel reports them."""
    pid, uid, _gid = _PEER.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid
