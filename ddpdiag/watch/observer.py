"""Find the ranks of a command for as long as it runs, and take looks at all of them.

The ranks are found by reading /proc, which is limited to a fiftieth of the time.
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
# How long, at least, a look measures the use of each rank's core.
_USE_SECONDS = 0.5
# How long ranks may take to end after SIGTERM: torchrun gives its ranks 30 s.
END_SECONDS = 35.0
_END_POLL_SECONDS = 0.1
_MOST_HELPERS = 64
_MOST_READERS = 32
_GRACE_SECONDS = 0.3
_LATE = Stacks(trouble="it could not be read in time")

_gpus: msgspec.json.Decoder[tuple[GpuUse, ...]] = msgspec.json.Decoder(tuple[GpuUse, ...])
T = TypeVar("T")


class Observer:
    """Knows the ranks among `tops()`, the processes that were started, and their descendants."""

    def __init__(self, tops: Callable[[], Sequence[int]]) -> None:
        self._tops = tops
        self._known = KnownProcesses()
        self._ranks = Ranks({})
        self._processes: list[Process] = []
        self._next_search = 0.0

    def refresh(self) -> None:
        """Search for the ranks again, if the last search was long enough ago."""
        begin = time.monotonic()
        if begin < self._next_search:
            return
        self._find()
        took = time.monotonic() - begin
        self._next_search = begin + max(_LEAST_TREE_SECONDS, took / _TREE_SHARE)

    def _find(self) -> None:
        self._processes = self._known.complete(descendants(self._tops()))
        self._ranks = self._with_lost(find_ranks(self._processes))

    def _with_lost(self, now: Ranks) -> Ranks:
        """The ranks `now`, and earlier ones that ended: they are kept while others continue, or if none is found."""
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
        """Send SIGTERM to the commands, which end their ranks; after END_SECONDS SIGKILL to whatever still runs."""
        processes = descendants(self._tops())
        for pid in self._tops():
            _kill(pid, signal.SIGTERM)
        end = time.monotonic() + END_SECONDS
        while (left := [process for process in processes if _is_running(process)]) and time.monotonic() < end:
            time.sleep(_END_POLL_SECONDS)
        for process in left:
            _kill(process.pid, signal.SIGKILL)

    def look(self, look: Look) -> Look:
        """Observe all ranks and GPUs within LOOK_SECONDS, and return `look` with their state."""
        end = time.monotonic() + LOOK_SECONDS
        self._find()
        ranks = self._ranks.ranks
        before = {rank: _use_of(process.pid) for rank, process in ranks.items()}
        measured = time.monotonic() + _USE_SECONDS
        # Reading the memory of a process may hang behind a lock of that process, so readers have a time limit.
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
        """Read each rank's flight recorder, or say why not. All are requested first, and then waited for."""
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
            state = "S"  # it was only passing through D
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
    """A rank at the time `at`: the `seconds` that its main thread has used or waited for a core (if that is not shown,
    that its process has used cores), and its state and wchan."""

    at: float
    seconds: float | None
    state: tuple[str | None, str | None]


def _use_of(pid: int) -> _Use:
    ticks = cpu_ticks(pid)
    seconds = core_seconds(pid) or (None if ticks is None else ticks / os.sysconf("SC_CLK_TCK"))
    return _Use(time.monotonic(), seconds, process_state(pid))


def read_gpu_uses(end: float) -> tuple[tuple[GpuUse, ...], str]:
    """Read the use of all GPUs in a subprocess until `end` of the monotonic clock; or say why it is not known."""
    try:
        completed = run_bounded(python_command("ddpdiag.probes.gpu.nvml"), end, env=with_home(os.environ))
        return ((), "NVML did not respond in time") if completed is None else (_gpus.decode(completed.out), "")
    except (OSError, msgspec.DecodeError):
        return (), "NVML shows nothing"


def _is_running(process: Process) -> bool:
    now = read_process(process.pid)
    return now is not None and now.start == process.start and now.state not in "ZX"


def _kill(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # sudo started it
        os.kill(pid, signum)


def _result(future: Future[T], end: float, otherwise: T) -> T:
    """Wait for a reader until shortly after `end`. Returns `otherwise` if the reader takes longer."""
    try:
        return future.result(timeout=max(0.0, end + _GRACE_SECONDS - time.monotonic()))
    except TimeoutError:
        return otherwise
