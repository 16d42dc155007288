"""The process tree below a command: which processes are ranks, and what /proc shows of each process.

A launcher puts variables into the environment of its ranks, by which they are found (/proc/PID/environ shows the
environment at exec). Processes that a rank starts inherit these variables, so only the topmost one is a rank.
"""

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct, structs

from ddpdiag.evidence.ras import ADDRESS_VARIABLE, ENABLE_VARIABLE
from ddpdiag.probes.host.environment import is_pseudo_step
from ddpdiag.probes.host.kernel import PROC, environ, names_in, read_text, stat_of
from ddpdiag.watch.evidence import FILE_VARIABLES, PIPE_VARIABLE

# The rank's variable of torchrun and all that use env://, Open MPI, PMIx, hydra's PMI, Slurm. torchrun is first, since
# it may run under any of the others. A scheduler may set RANK for a host, and so for torchrun itself, but only ranks
# have LOCAL_RANK as well. A batch script of Slurm has SLURM_PROCID 0, and is no rank.
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_REQUIRED_VARIABLES = (("RANK", "LOCAL_RANK"), *((name, name) for name in RANK_VARIABLES))
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
WORLD_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
# Part of the command line of a child of multiprocessing's spawn, by which torch.multiprocessing.spawn starts ranks.
_SPAWN_MARK = "from multiprocessing.spawn import spawn_main"
# How names of Python programs begin. torch names its processes pt_main_thread; this counts if the file is not known.
_PYTHON_NAMES = ("python", "pypy", "pt_")

# The variables that are kept: they show the rank of a process, and where its flight recorder and NCCL's RAS are.
_RAS_VARIABLES = (ADDRESS_VARIABLE, ENABLE_VARIABLE)
_RECORDER_VARIABLES = (PIPE_VARIABLE, *FILE_VARIABLES)
_KEPT_VARIABLES = (
    *RANK_VARIABLES,
    *WORLD_VARIABLES,
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "SLURM_STEP_ID",
    *_RECORDER_VARIABLES,
    *_RAS_VARIABLES,
)
_MAX_COMMAND_CHARACTERS = 1000
_MAX_LOCAL_RANKS = 4096
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Process(Struct, frozen=True):
    """A process: its parent, its name (comm of proc(5)) and its start in clock ticks since boot.

    Pid and start identify a process. `env_start` is the address of its environment, which changes with each exec (0:
    not known). `KnownProcesses` sets the other fields: `environ` has its _KEPT_VARIABLES (`is_hidden`: they may not be
    read), `program` is the name of its program's file (None: not known), `command` is its command line, and
    `is_spawned` is whether multiprocessing's spawn started it.
    """

    pid: int
    parent: int
    name: str
    state: str
    start: int
    env_start: int = 0
    environ: dict[str, str] = {}
    is_hidden: bool = False
    program: str | None = None
    command: str = ""

    @property
    def is_spawned(self) -> bool:
        return _SPAWN_MARK in self.command

    @property
    def is_python(self) -> bool:
        """Whether the process runs Python, by its program's file if known, because setproctitle changes the name."""
        return (self.program or self.name).startswith(_PYTHON_NAMES)


class RankProcesses(Struct, frozen=True):
    """The processes that are ranks. `are_guessed`: no variable names the ranks, so they are numbered by their start."""

    by_rank: dict[int, Process]
    world_size: int | None = None
    are_guessed: bool = False

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that this host should have, as far as the environment of the others shows, but that do not run."""
        if not self.by_rank:
            return ()
        rank, process = next(iter(self.by_rank.items()))
        first, size = 0, self.world_size if process.environ.get("MASTER_ADDR") in _LOOPBACK else 0
        local_rank, local_size = (process.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        if local_rank.isdecimal() and local_size.isdecimal():  # torchrun numbers the ranks of a host without a gap
            first, size = rank - int(local_rank), int(local_size)
        expected = range(first, first + min(size or 0, _MAX_LOCAL_RANKS))
        return tuple(other for other in expected if other not in self.by_rank)


def read_process(pid: int, root: Path = PROC) -> Process | None:
    """Read one process from /proc (fields 2-4, 22 and 50 of proc_pid_stat(5)); None if it has ended."""
    name, fields = stat_of(root / str(pid))
    if len(fields) < 20:
        return None
    env_start = int(fields[47]) if len(fields) > 47 else 0  # since Linux 3.5
    return Process(pid, int(fields[1]), name, fields[0], int(fields[19]), env_start)


def descendants(pids: Iterable[int], root: Path = PROC) -> list[Process]:
    """The processes `pids` and their descendants, parents first. A process whose parent has ended is missing."""
    all_pids = [int(name) for name in names_in(root) or () if name.isdigit()]
    processes = {pid: process for pid in all_pids if (process := read_process(pid, root)) is not None}
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    ordered: list[Process] = []
    waiting = sorted(pid for pid in pids if pid in processes)
    while waiting:
        pid = waiting.pop(0)
        ordered.append(processes[pid])
        waiting += sorted(children.get(pid, ()))
    return ordered


def find_ranks(processes: Sequence[Process]) -> RankProcesses:
    """Find the ranks among `processes`, which must have parents before their children."""
    for name, required_name in _REQUIRED_VARIABLES:
        top_processes: dict[int, Process] = {}  # the topmost process with both variables, by rank
        for process in processes:
            value = process.environ.get(name, "")
            is_step = name != "SLURM_PROCID" or not is_pseudo_step(process.environ)
            if value.isdecimal() and required_name in process.environ and is_step:
                top_processes.setdefault(int(value), process)
        if top_processes:
            ranks = {rank: _training_process(top, processes) for rank, top in sorted(top_processes.items())}
            holders = (*ranks.values(), *top_processes.values())
            world_sizes = (process.environ.get(name, "") for process in holders for name in WORLD_VARIABLES)
            return RankProcesses(ranks, next((int(value) for value in world_sizes if value.isdecimal()), None))
    spawned = {process.pid: process for process in processes if process.is_spawned and process.state not in "ZX"}
    parents = [process for process in spawned.values() if process.parent not in spawned]  # others are their helpers
    if len(parents) > 1:
        parents.sort(key=lambda process: (process.start, process.pid))
        return RankProcesses(dict(enumerate(parents)), None, True)
    if not processes:
        return RankProcesses({})
    if hidden := _hidden_ranks(processes):
        return RankProcesses(dict(enumerate(hidden)), None, True)
    # Without a single Python, the command may start one process after another, so the command itself is rank 0.
    return RankProcesses({0: _python_process(processes[0], processes) or processes[0]}, None, True)


def _hidden_ranks(processes: Sequence[Process]) -> list[Process]:
    """The ranks of a launcher whose environment may not be read: its Python children with one command line.

    A worker of a data loader has its parent's command line instead, since it is forked, or multiprocessing's.
    """
    groups: dict[tuple[int, str], list[Process]] = {}
    parents = {process.pid: process for process in processes}
    for process in processes:
        parent = parents.get(process.parent)
        if parent is None or not (process.is_hidden and process.is_python) or process.state in "ZX":
            continue
        if parent.is_python and process.command != parent.command and "multiprocessing" not in process.command:
            groups.setdefault((parent.pid, process.command), []).append(process)
    ranks = max(groups.values(), key=len, default=[])
    return sorted(ranks, key=lambda process: (process.start, process.pid)) if len(ranks) > 1 else []


def _training_process(top: Process, processes: Sequence[Process]) -> Process:
    """The process that trains, below wrappers such as a shell or numactl: the Python process or, without one, the last
    in a chain of processes that have each started a single process."""
    if (python := _python_process(top, processes)) is not None:
        return python
    last = top
    while len(children := [process for process in processes if process.parent == last.pid]) == 1:
        last = children[0]
    return last


def _python_process(top: Process, processes: Sequence[Process]) -> Process | None:
    """The only Python process at or below `top`, not counting those below another Python. None if there is none.

    If there are several, any of them may train, so the result is `top`.
    """
    python_processes: list[Process] = []
    wrappers: set[int] = set()
    for process in processes:  # parents first
        if process.pid != top.pid and process.parent not in wrappers:
            continue
        if process.is_python:
            python_processes.append(process)
        else:
            wrappers.add(process.pid)
    living = [process for process in python_processes if process.state not in "ZX"] or python_processes
    if not living:
        return None
    return living[0] if len(living) == 1 else top


class KnownProcesses:
    """Remembers the environment and program of every process, as read the first time.

    Later a process may have ended, become unreadable, or written a title over its environment (setproctitle). So a
    process is read again only after an exec of another program, as in `bash -c 'export RANK=..; exec python train.py'`.
    """

    def __init__(self, root: Path = PROC) -> None:
        self._root = root
        self._known: dict[tuple[int, int], Process] = {}

    def complete(self, processes: Sequence[Process]) -> list[Process]:
        """`processes` with all fields. Reads those that are new or run another program from /proc."""
        completed = []
        for process in processes:
            known = self._known.get((process.pid, process.start))
            if known is None or process.env_start not in (0, known.env_start):
                known = self._read(process) or known
            if known is not None:
                self._known[process.pid, process.start] = known
                process = structs.replace(
                    process,
                    environ=known.environ,
                    is_hidden=known.is_hidden,
                    program=known.program,
                    command=known.command,
                )
            completed.append(process)
        return completed

    def _read(self, process: Process) -> Process | None:
        """`process` with its program, command line and variables, read from /proc. None if /proc shows none."""
        env = environ(process.pid, self._root)
        folder = self._root / str(process.pid)
        program = None
        with contextlib.suppress(OSError):
            program = os.path.basename(os.readlink(folder / "exe"))
        command = (read_text(folder / "cmdline") or "").replace("\0", " ")[:_MAX_COMMAND_CHARACTERS]
        if not env and program is None and not command:
            return None
        variables = {name: env[name] for name in _KEPT_VARIABLES if name in env} if env else {}
        return structs.replace(process, environ=variables, is_hidden=env is None, program=program, command=command)


# Programs that start processes on other hosts: Slurm; Open MPI and PRRTE; MPICH, Intel MPI, MVAPICH; Flux; LSF and
# CORAL; Cray ALPS and PALS; TACC; PBS; Tianhe; CEA; Horovod. Most are in ReFrame's list (reframe/core/launchers).
LAUNCHERS = frozenset(
    {
        "srun", "mpirun", "mpiexec", "orterun", "prterun", "prun", "mpirun_rsh", "flux", "jsrun", "lrun", "blaunch",
        "aprun", "ibrun", "pbsdsh", "yhrun", "ccc_mprun", "horovodrun", "ssh", "pdsh", "clush",
    }
)  # fmt: skip
