"""The process tree below a command: which processes are ranks, what /proc shows of each, and programs that start ranks
where a look from here does not see them, on other hosts or through a daemon.

Ranks are found by what their launcher put into their environment (/proc/PID/environ holds it as it was at exec). All
that a rank starts inherits that, so that of a rank's processes the topmost counts.
"""

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from msgspec import Struct, structs

from ddpdiag.codec import open_file, readable
from ddpdiag.errors import UsageError
from ddpdiag.probes.host.environment import is_pseudo_step, is_recorded
from ddpdiag.probes.host.kernel import PROC, environ, names_in, read_text, stat_of
from ddpdiag.watch.evidence import FILE_NAMES, PIPE_NAME

# torchrun and all who speak env://, Open MPI, PMIx, hydra's PMI, Slurm. torchrun may run under any of the others, so it
# comes first. A scheduler may give a whole host a RANK, which torchrun then has and is not: only its ranks have a
# LOCAL_RANK as well. A batch script of Slurm has the SLURM_PROCID 0, and is no rank.
RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_TOLD = (("RANK", "LOCAL_RANK"), *((name, name) for name in RANK_NAMES))
WORLD_NAMES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
# What multiprocessing's spawn writes on the command line of a child, as torch.multiprocessing.spawn starts its ranks.
_SPAWNED = "from multiprocessing.spawn import spawn_main"
# torch gives its processes names (pt_main_thread), which count where the program's file is not shown.
_PYTHONS = ("python", "pypy", "pt_")

# Variables that show the rank of a process, and where its flight recorder is.
_KEPT = (*RANK_NAMES, *WORLD_NAMES, "LOCAL_RANK", "SLURM_STEP_ID", PIPE_NAME, *FILE_NAMES)


class Process(Struct, frozen=True):
    """A process: its parent, its name (comm of proc(5)) and its start in clock ticks since boot, which with the pid
    identifies it.

    `env_start` is where its environment lies: elsewhere after each exec, 0 where that is not shown. `KnownProcesses`
    adds the rest: `environ` are those of its variables that show its rank, and where its flight recorder is; `program`
    is the name of its program's file (None: not shown); `spawned`: multiprocessing's spawn started it.
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
        """By its program's file where that is known: a console script and setproctitle give it another name."""
        return (self.program or self.name).startswith(_PYTHONS)


class Ranks(Struct, frozen=True):
    """The processes that are ranks, by rank. `guessed`: nothing names them, they are numbered as they were started."""

    ranks: dict[int, Process]
    world_size: int | None = None
    guessed: bool = False


def start_unix_seconds(process: Process) -> float:
    """When it was started, Unix time."""
    since_boot = process.start / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


def read_process(pid: int, root: Path = PROC) -> Process | None:
    """One process, or None if it has ended; fields 2-4, 22 and 50 of proc(5)."""
    name, fields = stat_of(root / str(pid))
    if len(fields) < 20:
        return None
    env_start = int(fields[47]) if len(fields) > 47 else 0  # since Linux 3.5
    return Process(pid, int(fields[1]), name, fields[0], int(fields[19]), env_start)


def descendants(top: Iterable[int], root: Path = PROC) -> list[Process]:
    """These processes and all that descend from them, parents first, as far as they are still linked."""
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
    """The ranks among some processes, parents first."""
    for name, beside in _TOLD:
        tops: dict[int, Process] = {}  # the topmost process of each rank, of those that have both variables
        for process in processes:
            value = process.environ.get(name, "")
            is_step = name != "SLURM_PROCID" or not is_pseudo_step(process.environ)
            if value.isdecimal() and beside in process.environ and is_step:
                tops.setdefault(int(value), process)
        if tops:
            ranks = {rank: _trainer(top, processes) for rank, top in sorted(tops.items())}
            values = (own.environ.get(name, "") for own in (*ranks.values(), *tops.values()) for name in WORLD_NAMES)
            return Ranks(ranks, next((int(value) for value in values if value.isdecimal()), None))
    born = {process.pid: process for process in processes if process.spawned and process.state not in "ZX"}
    parents = [process for process in born.values() if process.parent not in born]  # the others are helpers of these
    if len(parents) > 1:
        return Ranks(dict(enumerate(sorted(parents, key=lambda process: (process.start, process.pid)))), None, True)
    if not processes:
        return Ranks({})
    # What a script without any Python starts may be anything, one after the other: only the script stays.
    return Ranks({0: _python(processes[0], processes) or processes[0]}, None, True)


def _trainer(top: Process, processes: Sequence[Process]) -> Process:
    """The process that trains, behind a shell, numactl and such; without any Python the end of a chain of processes
    that start one and wait for it."""
    if (python := _python(top, processes)) is not None:
        return python
    last = top
    while len(children := [process for process in processes if process.parent == last.pid]) == 1:
        last = children[0]
    return last


def _python(top: Process, processes: Sequence[Process]) -> Process | None:
    """The only Python, at this process or below; the process itself where there are more, for any of them may train.

    Pythons below another Python do not count.
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


def thread_names(pid: int, most: int = 12, root: Path = PROC) -> tuple[str, ...]:
    """Threads as "3 x pt_autograd_0 (S)", which every user may read, even where stacks are refused."""
    counts: Counter[tuple[str, str]] = Counter()
    for thread in names_in(root / str(pid) / "task") or ():
        name, fields = stat_of(root / str(pid) / "task" / thread)
        if fields:
            counts[name, fields[0]] += 1
    return tuple(
        f"{number} x {name} ({state})" if number > 1 else f"{name} ({state})"
        for (name, state), number in counts.most_common(most)
    )


class KnownProcesses:
    """Every process below a command, as it was when first seen; by pid and start, which together are of one only.

    Later it may be dead, or have made itself unreadable, or written a title over its environment (setproctitle). It is
    read again only when it has started another program, as `bash -c 'export RANK=..; exec python train.py'` does: then
    its environment lies elsewhere (env_start of proc(5), 0 where that is not shown).
    """

    def __init__(self, root: Path = PROC) -> None:
        self._root = root
        self._known: dict[tuple[int, int], Process] = {}
        self.variables: dict[str, str] = {}  # what decides how torch and NCCL talk, of the first that has any

    def complete(self, processes: Sequence[Process]) -> list[Process]:
        """The same, with what is known of their programs; those that are new, or run something else, are read."""
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
        """The process with its program; None where /proc shows nothing of that."""
        env = environ(process.pid, self._root) or {}
        folder = self._root / str(process.pid)
        program = None
        with contextlib.suppress(OSError):
            program = os.path.basename(os.readlink(folder / "exe"))
        if not env and program is None:
            return None
        self.variables = self.variables or {name: value for name, value in env.items() if is_recorded(name)}
        words = (read_text(folder / "cmdline") or "").replace("\0", " ")
        kept = {name: env[name] for name in _KEPT if name in env}
        return structs.replace(process, environ=kept, program=program, spawned=_SPAWNED in words)

    def all(self) -> Collection[tuple[int, int]]:
        """The pids and starts of all that were ever seen."""
        return self._known.keys()


# Launchers of other hosts ---------------------------------------------------------------------------------------------

# Slurm; Open MPI and PRRTE; MPICH, Intel MPI, MVAPICH; Flux; LSF and CORAL; Cray ALPS and PALS; TACC; PBS; Tianhe; CEA;
# Horovod. ReFrame's list of launchers (reframe/core/launchers) has most.
LAUNCHERS = frozenset(
    {
        "srun", "mpirun", "mpiexec", "orterun", "prterun", "prun", "mpirun_rsh", "flux", "jsrun", "lrun", "blaunch",
        "aprun", "ibrun", "pbsdsh", "yhrun", "ccc_mprun", "horovodrun",
    }
)  # fmt: skip
# These may as well do something else beside a training, as git does with ssh.
REMOTE_SHELLS = frozenset({"ssh", "rsh", "pdsh", "clush"})
_REMOTE = LAUNCHERS | REMOTE_SHELLS
# Programs that train, or start ranks on this host: the words behind them name no launchers.
_TRAINS_HERE = re.compile(r"(python|pypy)[\d.]*t?|torchrun|accelerate|deepspeed|.*\.py")
_WORD = re.compile(r"[;&|(){}`]|[^\s;&|(){}`]+")
_SEPARATORS = ";&|(){}`"
# Behind these a shell still expects a command, and behind their options, numbers and variables.
_BEFORE = frozenset(
    {
        "if", "then", "elif", "else", "while", "until", "do", "!", "$", "exec", "time", "timeout", "nohup", "nice",
        "env", "eval", "command",
    }
)  # fmt: skip
_PASSED_OVER = re.compile(r"-.*|[\d.]+[smhd]?|[A-Za-z_]\w*=.*")
_COMMENT = re.compile(r"(^|\s)#.*")
_LARGEST_SCRIPT = 1 << 20
_INLINE = re.compile("-[a-z]*c")  # a shell's option, as -c and -lc


def is_remote(word: str) -> bool:
    """Does this word of a command line name such a program? "/opt/bin/mpiexec.hydra" does."""
    return os.path.basename(word).partition(".")[0] in _REMOTE


def in_script(text: str) -> tuple[int, str] | None:
    """The first line of a shell script that starts such a program, from 1, and which."""
    for number, line in enumerate(text.splitlines(), 1):
        found = next(filter(is_remote, _started(_COMMENT.sub("", line))), None)
        if found is not None:
            return number, os.path.basename(found)
    return None


def _started(line: str) -> Iterator[str]:
    """The words of a line of a script at places where a shell expects a command."""
    expected = True
    for word in _WORD.findall(line):
        if word in _SEPARATORS:
            expected = True
        elif expected and word not in _BEFORE and not _PASSED_OVER.fullmatch(word):
            expected = False
            yield word


def remote_launcher(processes: Sequence[Process]) -> Process | None:
    """Such a program among these processes; a remote shell only where no Python runs beside it."""
    wanted = LAUNCHERS if any(process.is_python for process in processes) else _REMOTE
    names = ((process, {process.program or process.name, process.name}) for process in processes)
    return next((own for own, called in names if any(name.partition(".")[0] in wanted for name in called)), None)


# On the command line --------------------------------------------------------------------------------------------------


def refuse_remote_launchers(command: Sequence[str], *, flight_recorder: bool) -> None:
    """UsageError where the ranks start on other hosts: NCCL ends a rank that cannot make its pipe in the directory.

    A script is searched for launchers by name. Launchers that a program starts show only once it runs.
    """
    found = _named_by(command) if flight_recorder else None
    if found is not None:
        where, launcher = found
        raise UsageError(
            f"--flight-recorder: {where}{launcher} starts ranks on other hosts, where its files do not exist; start "
            f"`ddpdiag watch` on each host: `{launcher} ddpdiag watch --flight-recorder -- COMMAND`"
        )


def _named_by(command: Sequence[str]) -> tuple[str, str] | None:
    """Which remote launcher a command line names, or the script that it starts; and where that is, with ": ".

    Words behind a script, or behind the program that trains, are arguments of it.
    """
    for before, word in pairwise(("", *command)):
        inline = _INLINE.fullmatch(before) is not None
        text = word if inline else _script(word)
        if _TRAINS_HERE.fullmatch(os.path.basename(word)) or (text is not None and "python" in text.partition("\n")[0]):
            return None
        if is_remote(word):
            return "", os.path.basename(word)
        if text is not None:
            found = in_script(text)
            return None if found is None else (f"{readable(word)}:{found[0]}: " if not inline else "", found[1])
    return None


def _script(word: str) -> str | None:
    """The text of a file of the command's that is one."""
    try:
        with open_file(word) as file:
            data = file.read(_LARGEST_SCRIPT)
    except (OSError, ValueError):
        return None
    return None if b"\0" in data else data.decode(errors="replace")
