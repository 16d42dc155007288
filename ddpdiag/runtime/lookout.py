"""Who the ranks of a command are, over its whole life, and one look at all of them.

To find the processes costs reading /proc, of which as much is done as fits into a fiftieth of the time.
"""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from ddpdiag.codec import readable
from ddpdiag.model import ProcessState
from ddpdiag.model.watch import GpuUse, Helper, RankSeen
from ddpdiag.probes import flight_dump, ptrace, pyspy
from ddpdiag.probes.far import far_process
from ddpdiag.probes.gpu_use import read_uses
from ddpdiag.probes.host.procfs import core_seconds, cpu_ticks, nvidia_gpus, proc_root, process_state
from ddpdiag.probes.recorder import Flown
from ddpdiag.probes.tree import Crew, Task, below, crew, holds_gpu, read_task, thread_names
from ddpdiag.runtime.acquaintances import Acquaintances
from ddpdiag.runtime.stacks import MOST_FRAMES, MOST_THREAD_FRAMES, MOST_THREADS, shortened

# What a look may take: 5 s after the stall its report is promised.
LOOK_SECONDS = 3.5
_TREE_SHARE = 0.02
_LEAST_TREE_SECONDS = 1.0
# How long a rank's use of its core is measured, at least, before a look.
_USE_SECONDS = 0.5
_MOST_HELPERS = 64
_MOST_READERS = 32
_GRACE_SECONDS = 0.3
_LATE = pyspy.Dump(trouble="it could not be read in time")

T = TypeVar("T")

NO_PY_SPY = "py-spy is not installed (pip install 'ddpdiag[watch]')"


class Look(NamedTuple):
    """What one look saw."""

    ranks: tuple[RankSeen, ...]
    world_size: int | None
    guessed: bool
    gpus: tuple[GpuUse, ...]
    gpus_unseen: str
    variables: dict[str, str]
    far_launcher: str


class Lookout:
    """Keeps sight of the ranks below `tops`, the processes that were started."""

    def __init__(self, tops: Sequence[int]) -> None:
        self.tops = list(tops)
        self.host = readable(socket.gethostname())
        self._known = Acquaintances()
        self._crew = Crew({})
        self._tasks: list[Task] = []
        self._again = 0.0
        self.far_launcher = ""

    def keep_sight(self) -> None:
        """Look who is there, if it is time to."""
        begin = time.monotonic()
        if begin < self._again:
            return
        self._find()
        took = time.monotonic() - begin
        self._again = begin + max(_LEAST_TREE_SECONDS, took / _TREE_SHARE)

    def _find(self) -> None:
        self._tasks = below(self.tops)
        self._known.meet(self._tasks)
        known, spawned = self._known.environs(self._tasks), self._known.spawned(self._tasks)
        programs = self._known.programs(self._tasks)
        self._crew = self._with_lost(crew(self._tasks, known, spawned, programs))
        far = far_process(self._tasks, programs)
        self.far_launcher = readable(far.name) if far is not None else ""

    def _with_lost(self, now: Crew) -> Crew:
        """A rank that is no longer there, while all that were there with it go on, or nobody is, is lost, and stays."""
        before = self._crew
        if before.guessed or not before.ranks:
            return now
        if now.guessed:
            return before
        stayed = [rank for rank in before.ranks if rank in now.ranks]
        if not stayed or any(before.ranks[rank].start != now.ranks[rank].start for rank in stayed):
            return now
        return Crew({**before.ranks, **now.ranks}, now.world_size, now.guessed)

    def living(self, spared: Sequence[int] = ()) -> list[int]:
        """All processes of the command that are still there, also those whose parent is gone.

        Of what was started by `spared` nothing; then orphans are left out, for they may be theirs.
        """
        self._find()
        own = {(task.pid, task.start) for task in self._tasks}
        own = own - {(task.pid, task.start) for task in below(spared)} if spared else own | set(self._known.all())
        tasks = [(start, task) for pid, start in sorted(own) if (task := read_task(pid)) is not None]
        return [task.pid for start, task in tasks if task.start == start and task.state not in "ZX"]

    def look(self) -> Look:
        """All ranks, within LOOK_SECONDS."""
        end = time.monotonic() + LOOK_SECONDS
        self._find()
        ranks = self._crew.ranks
        uses = self._begin_use()
        # Whatever reads the memory of a process may hang behind a lock of that process: it is not waited for.
        pool = ThreadPoolExecutor(max_workers=min(_MOST_READERS, len(ranks) + 2))
        gpus = pool.submit(read_uses, end) if nvidia_gpus(proc_root(os.environ)) else None
        flights = pool.submit(self._flights, end)
        program = pyspy.find()
        stacks = {rank: pool.submit(_stacks, program, task.pid, end) for rank, task in ranks.items()}
        dumps = {rank: _result(stack, end, _LATE) for rank, stack in stacks.items()}
        flown = _result(flights, end, {})
        cards, unseen = _result(gpus, end, ((), "NVML did not answer in time")) if gpus is not None else ((), "")
        pool.shutdown(wait=False, cancel_futures=True)
        time.sleep(max(0.0, uses.begin + _USE_SECONDS - time.monotonic()))
        seen = tuple(
            self._rank(rank, task, dumps[rank], flown.get(rank, _LATE.trouble), uses) for rank, task in ranks.items()
        )
        return Look(
            seen, self._crew.world_size, self._crew.guessed, cards, unseen, self._known.variables, self.far_launcher
        )

    def _flights(self, end: float) -> Mapping[int, Flown | str]:
        """Each rank's recorder: all are asked first, and then waited for."""
        asked = {
            rank: flight_dump.ask(task.pid, rank, self._known.environ(task)) for rank, task in self._crew.ranks.items()
        }
        return {rank: one if isinstance(one, str) else flight_dump.answer(one, end) for rank, one in asked.items()}

    def _begin_use(self) -> "_Uses":
        ranks = self._crew.ranks
        seconds = {rank: used for rank, task in ranks.items() if (used := _used_seconds(task.pid)) is not None}
        return _Uses(time.monotonic(), seconds, {rank: process_state(task.pid) for rank, task in ranks.items()})

    def _rank(self, rank: int, task: Task, dump: pyspy.Dump, flight: Flown | str, uses: "_Uses") -> RankSeen:
        now = read_task(task.pid)
        if now is None or now.start != task.start:
            return RankSeen(rank=rank, pid=task.pid)
        state, wchan = process_state(task.pid)
        if state == "D" and uses.states[rank] != (state, wchan):
            state = "S"  # on its way through
        used, before = _used_seconds(task.pid), uses.seconds.get(rank)
        share = None if used is None or before is None else (used - before) / (time.monotonic() - uses.begin)
        process = ProcessState(
            pid=task.pid,
            state=state,
            wchan=wchan,
            stack=shortened(dump.main, MOST_FRAMES),
            threads=tuple(shortened(frames, MOST_THREAD_FRAMES) for frames in dump.others[:MOST_THREADS]),
        )
        return RankSeen(
            rank=rank,
            pid=task.pid,
            process=process,
            core_share=None if share is None else round(share, 2),
            holds_gpu=holds_gpu(task.pid),
            holds_gil=dump.holds_gil,
            no_stack=dump.trouble if state not in ("Z", "X") else "",
            threads=() if dump.main else thread_names(task.pid),
            helpers=self._helpers(task),
            flight=None if isinstance(flight, str) else flight.collectives,
            no_flight=flight if isinstance(flight, str) else "",
            posted_seconds=_age(flight),
        )

    def _helpers(self, task: Task) -> tuple[Helper, ...]:
        """What the rank itself has started."""
        own = [other for other in self._tasks if other.parent == task.pid][:_MOST_HELPERS]
        states = {other.pid: process_state(other.pid) for other in own}
        return tuple(Helper(pid=o.pid, name=o.name, state=states[o.pid][0], wchan=states[o.pid][1]) for o in own)


class _Uses(NamedTuple):
    """How much of a core each rank had used at the begin of a look, and how it stood."""

    begin: float
    seconds: dict[int, float]
    states: dict[int, tuple[str | None, str | None]]


def _result(future: Future[T], end: float, otherwise: T) -> T:
    """What was read, or something else if that takes too long."""
    try:
        return future.result(timeout=max(0.0, end + _GRACE_SECONDS - time.monotonic()))
    except TimeoutError:
        return otherwise


def _used_seconds(pid: int) -> float | None:
    """What its main thread had of a core or waited for; without that the whole process's time on cores."""
    ticks = cpu_ticks(pid)
    return core_seconds(pid) or (None if ticks is None else ticks / os.sysconf("SC_CLK_TCK"))


def _age(flight: Flown | str) -> float | None:
    if isinstance(flight, str) or flight.newest_unix_seconds is None:
        return None
    return max(0.0, time.time() - flight.newest_unix_seconds)


def _stacks(program: str | None, pid: int, end: float) -> pyspy.Dump:
    """The stacks of a rank, or why they cannot be had."""
    if program is None:
        return pyspy.Dump(trouble=NO_PY_SPY)
    seen = pyspy.dump(program, pid, end)
    if seen.main or not Path(f"/proc/{pid}").exists():
        return seen
    refused = seen.refused or not _readable(pid)
    return seen._replace(trouble=f"its memory may not be read: {ptrace.refusal(pid)}") if refused else seen


def _readable(pid: int) -> bool:
    """May we see its mappings? Where py-spy gives another reason, this is the true one."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            return bool(file.read(1))
    except OSError:
        return False
