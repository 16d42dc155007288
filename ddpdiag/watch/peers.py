"""One report for each host, however many `ddpdiag watch` run on it: `srun ddpdiag watch -- python train.py`.

Each `ddpdiag watch` binds an abstract Unix socket, which has no file and ends with its process. The name of the socket
contains the launch, the number of this `ddpdiag watch` in the launch, its pid, and the pid of its command.
/proc/net/unix lists all such names. The `ddpdiag watch` with the lowest number leads: it reports on the ranks of all of
them. It checks the output of its own command only, because usually only rank 0 prints.
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
_JOB_VARIABLES = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("PMIX_NAMESPACE",),
    ("OMPI_MCA_ess_base_jobid",),
    ("MASTER_ADDR", "MASTER_PORT", "RANK"),
)
# Variables that number the processes of one launch, and variables that distinguish the trainings of one Slurm step.
_NUMBER_VARIABLES = ("SLURM_PROCID", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "RANK")
_RUN_VARIABLES = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")


class Peer(NamedTuple):
    """One `ddpdiag watch`: its number in its launch, its process, and the process that it started."""

    number: int
    pid: int
    command_pid: int


def job_name(env: Mapping[str, str]) -> str | None:
    """A name that is the same for all `ddpdiag watch` of one launch. None if the environment shows no launch."""
    # The shell of `salloc` or a batch script may start several trainings with the same Slurm variables.
    for names in _JOB_VARIABLES[2:] if is_pseudo_step(env) else _JOB_VARIABLES:
        values = {name: env.get(name, "") for name in names}
        if all(values.values()):
            runs = (env.get(name, "") for name in _RUN_VARIABLES)
            return digest(os.getuid(), *(value for name, value in values.items() if name != "RANK"), *runs)
    return None


class Peers:
    """All `ddpdiag watch` processes of one launch on this host, this one included."""

    def __init__(self, env: Mapping[str, str], command_pid: int) -> None:
        number = next((int(text) for name in _NUMBER_VARIABLES if (text := env.get(name, "")).isdecimal()), 0)
        self._this_peer = Peer(number, os.getpid(), command_pid)
        self._name = job_name(env)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        if self._name is not None:
            with contextlib.suppress(OSError):
                self._socket.bind(f"\0ddpdiag-watch-{self._name}-{'-'.join(map(str, self._this_peer))}")

    def all(self, root: Path = PROC) -> list[Peer]:
        """The peers of this user, this process included, the leader first."""
        sockets = read_text(root / "net" / "unix") or "" if self._name is not None else ""
        rows = re.findall(rf"@ddpdiag-watch-{self._name}-(\d+)-(\d+)-(\d+)$", sockets, re.MULTILINE)
        peers = (Peer(*map(int, row)) for row in rows)
        return sorted({self._this_peer, *(peer for peer in peers if _is_of_this_user(root / str(peer.pid)))})

    def is_leader(self) -> bool:
        """Whether this process reports for all peers."""
        return self.all()[0] == self._this_peer

    def request_look(self) -> bool:
        """Whether this process leads, so that the caller must look now. If not, send SIGUSR1 to the leader."""
        leader = self.all()[0]
        if leader != self._this_peer:
            with contextlib.suppress(OSError):
                os.kill(leader.pid, signal.SIGUSR1)
        return leader == self._this_peer

    def close(self) -> None:
        """Close the socket, so that another peer leads."""
        self._socket.close()


def _is_of_this_user(folder: Path) -> bool:
    try:
        return folder.stat().st_uid == os.getuid()
    except OSError:
        return False
