"""One report for each host, however many `ddpdiag watch` run there: `srun ddpdiag watch -- python train.py`.

Each `ddpdiag watch` binds an abstract Unix socket, which has no file and ends with its process. The socket's name holds
the launch, the process's number in it, its pid, and the pid of its command; /proc/net/unix lists all such names. The
one with the lowest number leads: it looks at the ranks of all, and only its output counts, as usually rank 0 prints.
"""

import contextlib
import os
import re
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ddpdiag.probes.host.environment import is_pseudo_step
from ddpdiag.probes.host.kernel import PROC, read_text
from ddpdiag.runtime.launchers.launch import digest

# Variables that all processes of one launch have in common, by launcher.
_JOBS = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("PMIX_NAMESPACE",),
    ("OMPI_MCA_ess_base_jobid",),
    ("MASTER_ADDR", "MASTER_PORT", "RANK"),
)
# Variables that number the processes of one launch, and those that distinguish trainings of one step.
_NUMBERS = ("SLURM_PROCID", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "RANK")
_RUNS = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")


class Peer(NamedTuple):
    """One `ddpdiag watch`: its number in its launch, its process, and the process that it started."""

    number: int
    pid: int
    command_pid: int


def job_name(env: Mapping[str, str]) -> str | None:
    """A name that all `ddpdiag watch` of one launch share. None if the environment shows no launch."""
    # In the shell of `salloc` and in a batch script more than one training may run.
    for names in _JOBS[2:] if is_pseudo_step(env) else _JOBS:
        values = {name: env.get(name, "") for name in names}
        if all(values.values()):
            runs = (env.get(name, "") for name in _RUNS)
            return digest(os.getuid(), *(value for name, value in values.items() if name != "RANK"), *runs)
    return None


class Peers:
    """All `ddpdiag watch` processes of one launch on this host, this one included."""

    def __init__(self, env: Mapping[str, str], command_pid: int) -> None:
        number = next((int(text) for name in _NUMBERS if (text := env.get(name, "")).isdecimal()), 0)
        self._own = Peer(number, os.getpid(), command_pid)
        self._name = job_name(env)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        if self._name is not None:
            with contextlib.suppress(OSError):
                self._socket.bind(f"\0ddpdiag-watch-{self._name}-{'-'.join(map(str, self._own))}")

    def all(self, root: Path = PROC) -> list[Peer]:
        """All peers that this user runs, the leader first."""
        found = {self._own}
        if self._name is not None:
            sockets = read_text(root / "net" / "unix") or ""
            names = re.findall(rf"@ddpdiag-watch-{self._name}-(\d+)-(\d+)-(\d+)$", sockets, re.MULTILINE)
            peers = (Peer(*map(int, row)) for row in names)
            found |= {peer for peer in peers if _is_ours(root / str(peer.pid))}
        return sorted(found)

    def leads(self) -> bool:
        """Whether this process reports for all peers."""
        return self.all()[0] == self._own

    def request_look(self) -> bool:
        """Whether this process leads, and so is to look now. If it does not, send SIGUSR1 to the leader."""
        leader = self.all()[0]
        if leader != self._own:
            with contextlib.suppress(OSError):
                os.kill(leader.pid, signal.SIGUSR1)
        return leader == self._own

    def close(self) -> None:
        """Close the socket. After that another peer leads."""
        self._socket.close()


def _is_ours(folder: Path) -> bool:
    try:
        return folder.stat().st_uid == os.getuid()
    except OSError:
        return False
