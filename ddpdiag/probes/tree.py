"""The processes below one: which of them are ranks, and what /proc shows of each.

Ranks are found by what their launcher put into their environment (/proc/PID/environ holds it as it was at exec). All
that a rank starts inherits that, so that of a rank's processes the topmost counts.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct

from ddpdiag.probes.host.files import read_text
from ddpdiag.probes.host.procfs import PROC
from ddpdiag.probes.host.variables import is_pseudo_step

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
_LARGEST_ENVIRON = 1 << 20

# NVIDIA; AMD (ROCm opens kfd and a render node); Intel; accelerators of the kernel's accel class; WSL.
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/renderD", "/dev/accel", "/dev/dxg")


class Task(Struct, frozen=True):
    """A process: its parent, its name (comm of proc(5)) and its start in clock ticks since boot, which with the pid
    tells it from every other one.

    `env_start` is where its environment lies: elsewhere after each exec, 0 where that is not shown.
    """

    pid: int
    parent: int
    name: str
    state: str
    start: int
    env_start: int = 0


class Crew(Struct, frozen=True):
    """The processes that are ranks, by rank. `guessed`: nothing names them, they are numbered as they were started."""

    ranks: dict[int, Task]
    world_size: int | None = None
    guessed: bool = False


def read_task(pid: int, root: Path = PROC) -> Task | None:
    """One process, or None if it is gone; fields 2-4, 22 and 50 of proc(5)."""
    content = read_text(root / str(pid) / "stat")
    if not content:
        return None
    head, _, rest = content.rpartition(")")
    fields = rest.split()
    if len(fields) < 20:
        return None
    name = head.partition("(")[2]
    env_start = int(fields[47]) if len(fields) > 47 else 0  # since Linux 3.5
    return Task(pid, int(fields[1]), name, fields[0], int(fields[19]), env_start)


def below(top: Iterable[int], root: Path = PROC) -> list[Task]:
    """These processes and all that descend from them, parents first, as far as they are still linked."""
    try:
        pids = [int(name) for name in os.listdir(root) if name.isdigit()]
    except OSError:
        return []
    tasks = {pid: task for pid in pids if (task := read_task(pid, root)) is not None}
    children: dict[int, list[int]] = {}
    for task in tasks.values():
        children.setdefault(task.parent, []).append(task.pid)
    found: list[Task] = []
    waiting = sorted(pid for pid in top if pid in tasks)
    while waiting:
        pid = waiting.pop(0)
        found.append(tasks[pid])
        waiting += sorted(children.get(pid, ()))
    return found


def environ(pid: int, root: Path = PROC) -> dict[str, str] | None:
    """The environment that a process was started with; None where it cannot be read."""
    try:
        with (root / str(pid) / "environ").open("rb") as file:
            words = file.read(_LARGEST_ENVIRON).decode(errors="replace").split("\0")
    except OSError:
        return None
    return dict(word.split("=", 1) for word in words if "=" in word)


def crew(
    tasks: Sequence[Task],
    environs: Mapping[int, Mapping[str, str]],
    spawned: Collection[int] = frozenset(),
    programs: Mapping[int, str] = MappingProxyType({}),
) -> Crew:
    """The ranks among some processes, parents first, given what could be read: environments, who was spawned, and the
    names of the programs' files."""
    for name, beside in _TOLD:
        if tops := _topmost(tasks, environs, name, beside):
            ranks = {rank: _trainer(top, tasks, programs) for rank, top in sorted(tops.items())}
            return Crew(ranks, _world(environs, (*ranks.values(), *tops.values())))
    born = {task.pid: task for task in tasks if task.pid in spawned and task.state not in "ZX"}
    own = [task for task in born.values() if task.parent not in born]  # the others are helpers of these
    if len(own) > 1:
        return Crew(dict(enumerate(sorted(own, key=lambda task: (task.start, task.pid)))), None, True)
    # What a script without any Python starts may be anything, one after the other: only the script stays.
    return Crew({0: _python(tasks[0], tasks, programs) or tasks[0]}, None, True) if tasks else Crew({})


def _topmost(
    tasks: Sequence[Task], environs: Mapping[int, Mapping[str, str]], name: str, beside: str
) -> dict[int, Task]:
    """The topmost process of each rank, of those that have both variables."""
    tops: dict[int, Task] = {}
    for task in tasks:
        own = environs.get(task.pid, {})
        value = own.get(name, "")
        if value.isdecimal() and beside in own and not (name == "SLURM_PROCID" and is_pseudo_step(own)):
            tops.setdefault(int(value), task)
    return tops


def _trainer(top: Task, tasks: Sequence[Task], programs: Mapping[int, str]) -> Task:
    """The process that trains, behind a shell, numactl and such; without any Python the end of a chain of processes
    that start one and wait for it."""
    own = _python(top, tasks, programs)
    if own is not None:
        return own
    own = top
    while len(children := [task for task in tasks if task.parent == own.pid]) == 1:
        own = children[0]
    return own


def _python(top: Task, tasks: Sequence[Task], programs: Mapping[int, str]) -> Task | None:
    """The only Python, at this process or below; the process itself where there are more, for any of them may train."""
    pythons = _topmost_pythons(top, tasks, programs)
    living = [task for task in pythons if task.state not in "ZX"] or pythons
    if not living:
        return None
    return living[0] if len(living) == 1 else top


def _topmost_pythons(top: Task, tasks: Sequence[Task], programs: Mapping[int, str]) -> list[Task]:
    """It, or those below it that are below no other Python."""
    found: list[Task] = []
    others: set[int] = set()
    for task in tasks:  # parents first
        if task.pid != top.pid and task.parent not in others:
            continue
        if is_python(task, programs):
            found.append(task)
        else:
            others.add(task.pid)
    return found


def is_python(task: Task, programs: Mapping[int, str]) -> bool:
    """By its program's file where that is known: a console script and setproctitle give a process another name."""
    return programs.get(task.pid, task.name).startswith(_PYTHONS)


def _world(environs: Mapping[int, Mapping[str, str]], ranks: Iterable[Task]) -> int | None:
    for task in ranks:
        for name in WORLD_NAMES:
            value = environs.get(task.pid, {}).get(name, "")
            if value.isdecimal():
                return int(value)
    return None


def program(pid: int, root: Path = PROC) -> str | None:
    """The name of its program's file, such as "python3.11"; None where that is not shown."""
    try:
        return os.path.basename(os.readlink(root / str(pid) / "exe"))
    except OSError:
        return None


def is_spawned(pid: int, root: Path = PROC) -> bool:
    """Was it started by multiprocessing's spawn?"""
    return _SPAWNED in (read_text(root / str(pid) / "cmdline") or "").replace("\0", " ")


def thread_names(pid: int, most: int = 12, root: Path = PROC) -> tuple[str, ...]:
    """Threads as "3 x pt_autograd_0 (S)", which every user may read, even where stacks are refused."""
    counts: Counter[tuple[str, str]] = Counter()
    for thread in _threads(root / str(pid) / "task"):
        content = read_text(thread / "stat")
        if content:
            head, _, rest = content.rpartition(")")
            counts[head.partition("(")[2], rest.split()[0]] += 1
    return tuple(
        f"{number} x {name} ({state})" if number > 1 else f"{name} ({state})"
        for (name, state), number in counts.most_common(most)
    )


def _threads(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(folder.iterdir())
    except OSError:
        return


def holds_gpu(pid: int, root: Path = PROC) -> bool | None:
    """Has it a device file of a GPU or another accelerator open? None where its open files cannot be seen."""
    folder = root / str(pid) / "fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    return any(_target(folder / name).startswith(_DEVICES) for name in names)


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed since
        return ""
