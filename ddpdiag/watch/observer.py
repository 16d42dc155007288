"""The processes that are ranks of a command, over its whole life, and one look at all of them.

The processes are found by reading /proc, which is limited to a fiftieth of the time.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import structs

from ddpdiag.model import ProcessState
from ddpdiag.probes.collectives import TraceDump
from ddpdiag.probes.gpu.nvml import GpuUse
from ddpdiag.probes.gpu.visibility import holds_gpu, nvidia_gpus
from ddpdiag.probes.host.kernel import core_seconds, cpu_ticks, proc_root, process_state
from ddpdiag.probes.host.programs import python_command, run_bounded, with_home
from ddpdiag.runtime.supervisor.hang_evidence import MOST_FRAMES, MOST_THREAD_FRAMES, MOST_THREADS, shortened
from ddpdiag.watch.evidence import Stacks, ask_recorder, find_py_spy, recorder_answer, stacks_of
from ddpdiag.watch.look import Helper, Look, Witness
from ddpdiag.watch.processes import (
    KnownProcesses,
    Process,
    Ranks,
    descendants,
    find_ranks,
    read_process,
)

# The most that a look takes: its report is promised 5 s after the stall.
LOOK_SECONDS = 3.5
_TREE_SHARE = 0.02
_LEAST_TREE_SECONDS = 1.0
# How long a rank's use of its core is measured, at least, before a look.
_USE_SECONDS = 0.5
# torchrun gives its ranks 30 s.
END_SECONDS = 35.0
_END_POLL_SECONDS = 0.1
_MOST_HELPERS = 64
_MOST_READERS = 32
_GRACE_SECONDS = 0.3
_LATE = Stacks(trouble="it could not be read in time")

_gpus: msgspec.json.Decoder[tuple[GpuUse, ...]] = msgspec.json.Decoder(tuple[GpuUse, ...])
T = TypeVar("T")


class Observer:
    """Knows the ranks below `tops()`, the processes that were started."""

    def __init__(self, tops: Callable[[], Sequence[int]]) -> None:
        self._tops = tops
        self._known = KnownProcesses()
        self._ranks = Ranks({})
        self._processes: list[Process] = []
        self._again = 0.0

    def refresh(self) -> None:
        """Find the processes of the command again, if it is time to."""
        begin = time.monotonic()
        if begin < self._again:
            return
        self._find()
        took = time.monotonic() - begin
        self._again = begin + max(_LEAST_TREE_SECONDS, took / _TREE_SHARE)

    def _find(self) -> None:
        self._processes = self._known.complete(descendants(self._tops()))
        self._ranks = self._with_lost(find_ranks(self._processes))

    def _with_lost(self, now: Ranks) -> Ranks:
        """These ranks, and lost ones: a rank that ended is kept while the other ranks continue, or none is found."""
        before = self._ranks
        if before.guessed or not before.ranks:
            return now
        if now.guessed:
            return before
        stayed = [rank for rank in before.ranks if rank in now.ranks]
        if not stayed or any(before.ranks[rank].start != now.ranks[rank].start for rank in stayed):
            return now
        return Ranks({**before.ranks, **now.ranks}, now.world_size, now.guessed)

    def end_all(self) -> None:
        """SIGTERM to the commands, which end their ranks; SIGKILL to what still runs after the grace."""
        processes = descendants(self._tops())
        for pid in self._tops():
            _kill(pid, signal.SIGTERM)
        end = time.monotonic() + END_SECONDS
        while (left := [process for process in processes if _is_running(process)]) and time.monotonic() < end:
            time.sleep(_END_POLL_SECONDS)
        for process in left:
            _kill(process.pid, signal.SIGKILL)

    def look(self, look: Look) -> Look:
        """`look` with the state of all ranks and GPUs, within LOOK_SECONDS."""
        end = time.monotonic() + LOOK_SECONDS
        self._find()
        ranks = self._ranks.ranks
        before = {rank: _use_of(process.pid) for rank, process in ranks.items()}
        measured = time.monotonic() + _USE_SECONDS
        # Whatever reads the memory of a process may hang behind a lock of that process: it is not waited for.
        pool = ThreadPoolExecutor(max_workers=min(_MOST_READERS, len(ranks) + 2))
        gpus = pool.submit(read_gpu_uses, end) if nvidia_gpus(proc_root(os.environ)) else None
        traces = pool.submit(self._traces, end)
        program = find_py_spy()
        stacks = {rank: pool.submit(stacks_of, program, process.pid, end) for rank, process in ranks.items()}
        dumps = {rank: _result(stack, end, _LATE) for rank, stack in stacks.items()}
        traced = _result(traces, end, {})
        cards, unseen = _result(gpus, end, ((), "NVML did not respond in time")) if gpus is not None else ((), "")
        pool.shutdown(wait=False, cancel_futures=True)
        time.sleep(max(0.0, measured - time.monotonic()))
        seen = tuple(
            self._rank(rank, process, dumps[rank], traced.get(rank, _LATE.trouble), before[rank])
            for rank, process in ranks.items()
        )
        return structs.replace(
            look,
            unix_seconds=time.time(),
            world_size=self._ranks.world_size,
            guessed=self._ranks.guessed,
            ranks=seen,
            gpus=cards,
            gpus_unseen=unseen,
        )

    def _traces(self, end: float) -> Mapping[int, TraceDump | str]:
        """Each rank's recorder: all are asked first, and then waited for."""
        requests = {
            rank: ask_recorder(process.pid, rank, process.environ) for rank, process in self._ranks.ranks.items()
        }
        return {rank: one if isinstance(one, str) else recorder_answer(one, end) for rank, one in requests.items()}

    def _rank(self, rank: int, process: Process, dump: Stacks, trace: TraceDump | str, before: "_Use") -> Witness:
        known = read_process(process.pid)
        if known is None or known.start != process.start:
            return Witness(rank=rank, pid=process.pid)
        now = _use_of(process.pid)
        state, wchan = now.state
        if state == "D" and before.state != now.state:
            state = "S"  # on its way through
        share = None
        if now.seconds is not None and before.seconds is not None:
            share = (now.seconds - before.seconds) / (now.at - before.at)
        shown = ProcessState(
            pid=process.pid,
            state=state,
            wchan=wchan,
            stack=shortened(dump.main, MOST_FRAMES),
            threads=tuple(shortened(frames, MOST_THREAD_FRAMES) for frames in dump.others[:MOST_THREADS]),
        )
        posted = None if isinstance(trace, str) else trace.newest_unix_seconds
        children = [child for child in self._processes if child.parent == process.pid][:_MOST_HELPERS]
        states = [process_state(child.pid) for child in children]
        return Witness(
            rank=rank,
            pid=process.pid,
            process=shown,
            core_share=None if share is None else round(share, 2),
            holds_gpu=holds_gpu(process.pid),
            holds_gil=dump.holds_gil,
            no_stack=dump.trouble if state not in ("Z", "X") else "",
            helpers=tuple(
                Helper(pid=child.pid, name=child.name, state=state, wchan=wchan)
                for child, (state, wchan) in zip(children, states, strict=True)
            ),
            collectives=None if isinstance(trace, str) else trace.collectives,
            no_collectives=trace if isinstance(trace, str) else "",
            posted_seconds=None if posted is None else max(0.0, time.time() - posted),
        )


class _Use(NamedTuple):
    """The time that a rank's main thread used or waited for a core until a moment (where that is not shown, the time
    that its process used cores), and its state and wchan."""

    at: float
    seconds: float | None
    state: tuple[str | None, str | None]


def _use_of(pid: int) -> _Use:
    ticks = cpu_ticks(pid)
    seconds = core_seconds(pid) or (None if ticks is None else ticks / os.sysconf("SC_CLK_TCK"))
    return _Use(time.monotonic(), seconds, process_state(pid))


def read_gpu_uses(end: float) -> tuple[tuple[GpuUse, ...], str]:
    """The GPUs, or why they cannot be seen; `end` is of the monotonic clock."""
    try:
        said = run_bounded(python_command("ddpdiag.probes.gpu.nvml"), end, env=with_home(os.environ))
        return ((), "NVML did not respond in time") if said is None else (_gpus.decode(said.out), "")
    except (OSError, msgspec.DecodeError):
        return (), "NVML shows nothing"


def _is_running(process: Process) -> bool:
    now = read_process(process.pid)
    return now is not None and now.start == process.start and now.state not in "ZX"


def _kill(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # sudo started it
        os.kill(pid, signum)


def _result(future: Future[T], end: float, otherwise: T) -> T:
    """The result of a reader, or `otherwise` if that takes too long."""
    try:
        return future.result(timeout=max(0.0, end + _GRACE_SECONDS - time.monotonic()))
    except TimeoutError:
        return otherwise
