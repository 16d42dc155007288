"""The process tree below a command: which processes are ranks, and what /proc shows of each.

Ranks are found by variables that their launcher put into their environment (/proc/PID/environ holds it as it was at
exec). Processes that a rank starts inherit these variables, so only the topmost process with a rank's variables counts.
"""

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct, structs

from ddpdiag.probes.host.environment import is_pseudo_step
from ddpdiag.probes.host.kernel import PROC, environ, names_in, read_text, stat_of
from ddpdiag.watch.evidence import FILE_NAMES, PIPE_NAME

# torchrun and all that use env://, Open MPI, PMIx, hydra's PMI, Slurm. torchrun may run under any of the others, so it
# comes first. A scheduler may set RANK for a whole host. torchrun itself then has it without being a rank, and only
# its ranks have a LOCAL_RANK as well. A batch script of Slurm has the SLURM_PROCID 0, and is no rank.
RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_RANK_VARIABLES = (("RANK", "LOCAL_RANK"), *((name, name) for name in RANK_NAMES))
WORLD_NAMES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
# Words on the command line of a child of multiprocessing's spawn, by which torch.multiprocessing.spawn starts ranks.
_SPAWNED = "from multiprocessing.spawn import spawn_main"
# torch names its processes (pt_main_thread). The name counts if the program's file is not shown.
_PYTHONS = ("python", "pypy", "pt_")

# Variables that show the rank of a process, and where its flight recorder is.
_KEPT = (*RANK_NAMES, *WORLD_NAMES, "LOCAL_RANK", "SLURM_STEP_ID", PIPE_NAME, *FILE_NAMES)


class Process(Struct, frozen=True):
    """A process: its parent, its name (comm of proc(5)) and its start in clock ticks since boot, which with the pid
    identifies it.

    `env_start` is the address of its environment, another one after each exec (0: not shown). `KnownProcesses` sets the
    others: `environ` are the variables that show its rank, and where its flight recorder is; `program` is the name of
    its program's file (None: not shown); `spawned`: multiprocessing's spawn started it.
    """

    pid: int
    parent: int
    name: str
    state: str
    start: int
    env_start: int = 0
    environ: dict[str, str] = {}
    program: str | None = None
    spawned: bool = False

    @property
    def is_python(self) -> bool:
        """Whether it runs Python: by its program's file if known, because setproctitle changes the name."""
        return (self.program or self.name).startswith(_PYTHONS)


class Ranks(Struct, frozen=True):
    """The processes that are ranks, by rank. `guessed`: no variable names the ranks; the order of their start does."""

    ranks: dict[int, Process]
    world_size: int | None = None
    guessed: bool = False


def read_process(pid: int, root: Path = PROC) -> Process | None:
    """One process, or None if it has ended; fields 2-4, 22 and 50 of proc(5)."""
    name, fields = stat_of(root / str(pid))
    if len(fields) < 20:
        return None
    env_start = int(fields[47]) if len(fields) > 47 else 0  # since Linux 3.5
    return Process(pid, int(fields[1]), name, fields[0], int(fields[19]), env_start)


def descendants(top: Iterable[int], root: Path = PROC) -> list[Process]:
    """The processes `top` and all their descendants, parents first. A process whose parent has ended is missing."""
    pids = [int(name) for name in names_in(root) or () if name.isdigit()]
    processes = {pid: process for pid in pids if (process := read_process(pid, root)) is not None}
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: list[Process] = []
    waiting = sorted(pid for pid in top if pid in processes)
    while waiting:
        pid = waiting.pop(0)
        found.append(processes[pid])
        waiting += sorted(children.get(pid, ()))
    return found


def find_ranks(processes: Sequence[Process]) -> Ranks:
    """Find the ranks among `processes`, in which parents come first."""
    for name, beside in _RANK_VARIABLES:
        tops: dict[int, Process] = {}  # the topmost process of each rank, of those that have both variables
        for process in processes:
            value = process.environ.get(name, "")
            is_step = name != "SLURM_PROCID" or not is_pseudo_step(process.environ)
            if value.isdecimal() and beside in process.environ and is_step:
                tops.setdefault(int(value), process)
        if tops:
            ranks = {rank: _trainer(top, processes) for rank, top in sorted(tops.items())}
            values = (
                process.environ.get(name, "") for process in (*ranks.values(), *tops.values()) for name in WORLD_NAMES
            )
            return Ranks(ranks, next((int(value) for value in values if value.isdecimal()), None))
    born = {process.pid: process for process in processes if process.spawned and process.state not in "ZX"}
    parents = [process for process in born.values() if process.parent not in born]  # the others are helpers of these
    if len(parents) > 1:
        return Ranks(dict(enumerate(sorted(parents, key=lambda process: (process.start, process.pid)))), None, True)
    if not processes:
        return Ranks({})
    # A script without Python may start anything, one process after the other. Only the script itself stays.
    return Ranks({0: _python(processes[0], processes) or processes[0]}, None, True)


def _trainer(top: Process, processes: Sequence[Process]) -> Process:
    """The process that trains, below wrappers such as a shell or numactl. Without any Python it is the last one of a
    chain of processes that each started one process and wait for it."""
    if (python := _python(top, processes)) is not None:
        return python
    last = top
    while len(children := [process for process in processes if process.parent == last.pid]) == 1:
        last = children[0]
    return last


def _python(top: Process, processes: Sequence[Process]) -> Process | None:
    """The only Python at or below `top`; `top` itself if there are several, since any may train; None without Python.

    A Python below another Python does not count.
    """
    pythons: list[Process] = []
    others: set[int] = set()
    for process in processes:  # parents first
        if process.pid != top.pid and process.parent not in others:
            continue
        if process.is_python:
            pythons.append(process)
        else:
            others.add(process.pid)
    living = [process for process in pythons if process.state not in "ZX"] or pythons
    if not living:
        return None
    return living[0] if len(living) == 1 else top


class KnownProcesses:
    """Every process below a command, as it was when first seen. Pid and start together identify a process.

    Later a process may be dead, or have made itself unreadable, or written a title over its environment (setproctitle).
    It is read again only after it has started another program, as `bash -c 'export RANK=..; exec python train.py'`
    does, which gives its environment another address (env_start of proc(5), 0: not shown).
    """

    def __init__(self, root: Path = PROC) -> None:
        self._root = root
        self._known: dict[tuple[int, int], Process] = {}

    def complete(self, processes: Sequence[Process]) -> list[Process]:
        """`processes` with the fields that /proc shows of each. Reads those that are new, or run another program."""
        completed = []
        for process in processes:
            before = self._known.get((process.pid, process.start))
            if before is None or process.env_start not in (0, before.env_start):
                before = self._read(process) or before
            if before is not None:
                self._known[process.pid, process.start] = before
                process = structs.replace(
                    process, environ=before.environ, program=before.program, spawned=before.spawned
                )
            completed.append(process)
        return completed

    def _read(self, process: Process) -> Process | None:
        """Read the program and variables of a process. None if /proc shows neither."""
        env = environ(process.pid, self._root) or {}
        folder = self._root / str(process.pid)
        program = None
        with contextlib.suppress(OSError):
            program = os.path.basename(os.readlink(folder / "exe"))
        if not env and program is None:
            return None
        words = (read_text(folder / "cmdline") or "").replace("\0", " ")
        kept = {name: env[name] for name in _KEPT if name in env}
        return structs.replace(process, environ=kept, program=program, spawned=_SPAWNED in words)


# Launchers of other hosts: Slurm; Open MPI and PRRTE; MPICH, Intel MPI, MVAPICH; Flux; LSF and CORAL; Cray ALPS and
# PALS; TACC; PBS; Tianhe; CEA; Horovod. ReFrame's list of launchers (reframe/core/launchers) has most.
LAUNCHERS = frozenset(
    {
        "srun", "mpirun", "mpiexec", "orterun", "prterun", "prun", "mpirun_rsh", "flux", "jsrun", "lrun", "blaunch",
        "aprun", "ibrun", "pbsdsh", "yhrun", "ccc_mprun", "horovodrun", "ssh", "pdsh", "clush",
    }
)  # fmt: skip
