"""What is known of every process below a command, from the moment that it was met.

Later it may be dead, or have made itself unreadable, or written a title over its environment (setproctitle). It is read
again only when it has started another program, as `bash -c 'export RANK=..; exec python train.py'` does: then its
environment lies elsewhere (env_start of proc(5), 0 where that is not shown).
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from ddpdiag.probes import flight_dump
from ddpdiag.probes.host.procfs import PROC
from ddpdiag.probes.host.variables import is_recorded
from ddpdiag.probes.tree import RANK_NAMES, WORLD_NAMES, Task, environ, is_spawned, program

_KEPT = (*RANK_NAMES, *WORLD_NAMES, "LOCAL_RANK", "SLURM_STEP_ID", flight_dump.PIPE_NAME, *flight_dump.FILE_NAMES)


class _Met(Struct, frozen=True):
    """The program that a process runs, and how that was started."""

    env_start: int
    environ: dict[str, str]
    program: str | None
    spawned: bool


class Acquaintances:
    """By pid and start, which together are of one process only."""

    def __init__(self, root: Path = PROC) -> None:
        self._root = root
        self._met: dict[tuple[int, int], _Met] = {}
        self.variables: dict[str, str] = {}  # what decides how torch and NCCL talk, of the first that has any

    def meet(self, tasks: Sequence[Task]) -> None:
        """Read those that are new, or run something else than before."""
        for task in tasks:
            before = self._met.get((task.pid, task.start))
            if before is not None and task.env_start in (0, before.env_start):
                continue
            env, own = environ(task.pid, self._root) or {}, program(task.pid, self._root)
            if env or own is not None:
                self._met[task.pid, task.start] = _Met(
                    env_start=task.env_start,
                    environ={name: env[name] for name in _KEPT if name in env},
                    program=own,
                    spawned=is_spawned(task.pid, self._root),
                )
                self.variables = self.variables or {n: v for n, v in env.items() if is_recorded(n)}

    def environ(self, task: Task) -> Mapping[str, str]:
        """Those of its variables that say who it is, and where its flight recorder is."""
        met = self._met.get((task.pid, task.start))
        return met.environ if met is not None else {}

    def environs(self, tasks: Sequence[Task]) -> dict[int, Mapping[str, str]]:
        return {task.pid: self.environ(task) for task in tasks}

    def programs(self, tasks: Sequence[Task]) -> dict[int, str]:
        """The names of their programs' files, as far as they are known."""
        met = {task.pid: self._met.get((task.pid, task.start)) for task in tasks}
        return {pid: own.program for pid, own in met.items() if own is not None and own.program}

    def spawned(self, tasks: Sequence[Task]) -> frozenset[int]:
        """Those that multiprocessing's spawn started."""
        met = {task.pid: self._met.get((task.pid, task.start)) for task in tasks}
        return frozenset(pid for pid, own in met.items() if own is not None and own.spawned)

    def all(self) -> Collection[tuple[int, int]]:
        """The pids and starts of all that were ever met."""
        return self._met.keys()
