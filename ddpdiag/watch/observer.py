"""`Observer`: find the ranks of a command as long as the command runs, and read the state of all ranks for a look.

The ranks are found by reading /proc, for which at most a fiftieth of the time is used.
"""

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import structs

from ddpdiag.evidence.witness import Witness
from ddpdiag.model import ProcessState
from ddpdiag.probes.gpu.nvml import GpuUse
from ddpdiag.probes.gpu.visibility import holds_gpu, openable_gpus
from ddpdiag.probes.host.kernel import (
    cpu_ticks,
    proc_root,
    process_state,
    runnable_seconds,
    voluntary_switches,
    written_bytes,
)
from ddpdiag.probes.host.programs import python_command, run_until, with_package_path
from ddpdiag.runtime.supervisor.hang_evidence import MAX_MAIN_FRAMES, MAX_OTHER_FRAMES, MAX_THREADS, first_frames
from ddpdiag.text import ranks_text
from ddpdiag.watch.evidence import Stacks, await_dump, dump_stacks, find_py_spy, request_dump, stacks_of
from ddpdiag.watch.look import Helper, Look, RankState, RasEvidence
from ddpdiag.watch.pitfalls import find_pitfalls
from ddpdiag.watch.processes import KnownProcesses, Process, RankProcesses, descendants, find_ranks, read_process
from ddpdiag.watch.ras import RasReader

# The time limit of a look: `ddpdiag watch` promises a report 5 s after the stall.
LOOK_SECONDS = 3.5
_SEARCH_SHARE = 0.02
_MIN_SEARCH_SECONDS = 1.0
# The shortest time over which a look measures the use of cores.
_USE_SECONDS = 0.5
# How long commands may take to end after SIGTERM: torchrun gives its ranks 30 s.
END_SECONDS = 35.0
_END_POLL_SECONDS = 0.1
_MAX_HELPERS = 64
# How many stacks of helpers are read in a look, for ranks that wait for them.
_MAX_HELPER_STACKS = 4
_TRACKER = "multiprocessing.resource_tracker"
# The name that torch gives to workers of a data loader.
_WORKER_NAME = "pt_data_worker"
_MAX_READERS = 32
_GRACE_SECONDS = 0.3
_TOO_LATE = Stacks(why_missing="it could not be read in time")
_RAS_TOO_LATE = RasEvidence(why_missing="it did not respond in time")
_NVML_TOO_LATE = "NVML did not respond in time"
T = TypeVar("T")


class Observer:
    """Finds and observes the ranks among the processes `command_pids()` and their descendants.

    If `all_started`, a rank that this host should have but that does not run is observed as one that has ended.
    """

    def __init__(self, command_pids: Callable[[], Sequence[int]], *, all_started: bool = False) -> None:
        self._command_pids = command_pids
        self._all_started = all_started
        self._known = KnownProcesses()
        self._ras = RasReader()
        self._ranks = RankProcesses({})
        self._processes: list[Process] = []
        self._next_search = 0.0

    @property
    def ranks(self) -> Mapping[int, Process]:
        """The ranks found so far, with those that have ended."""
        return self._ranks.by_rank

    def refresh(self) -> None:
        """Search for the ranks, unless the last search was a short time ago."""
        begin = time.monotonic()
        if begin >= self._next_search:
            self._find_ranks()
            self._next_search = begin + max(_MIN_SEARCH_SECONDS, (time.monotonic() - begin) / _SEARCH_SHARE)

    def _find_ranks(self) -> None:
        self._processes = self._known.complete(descendants(self._command_pids()))
        self._ranks = self._with_ended_ranks(find_ranks(self._processes))

    def _with_ended_ranks(self, current: RankProcesses) -> RankProcesses:
        """`current` and the earlier ranks that have ended; without these if they were guessed or started anew."""
        earlier = self._ranks
        if earlier.are_guessed or not earlier.by_rank:
            return current
        if current.are_guessed:
            return earlier
        remaining = [rank for rank in earlier.by_rank if rank in current.by_rank]
        if not remaining or any(earlier.by_rank[rank].start != current.by_rank[rank].start for rank in remaining):
            return current
        return RankProcesses({**earlier.by_rank, **current.by_rank}, current.world_size, current.are_guessed)

    def rank_pids(self) -> tuple[int, ...]:
        """The processes of the ranks, as of the last search."""
        return tuple(process.pid for process in self._ranks.by_rank.values())

    def end_all(self) -> None:
        """Send SIGTERM to the commands, which end their ranks. After END_SECONDS send SIGKILL to what still runs."""
        processes = descendants(self._command_pids())
        for pid in self._command_pids():
            _send_signal(pid, signal.SIGTERM)
        end = time.monotonic() + END_SECONDS
        while (survivors := [process for process in processes if _is_running(process)]) and time.monotonic() < end:
            time.sleep(_END_POLL_SECONDS)
        for process in survivors:
            _send_signal(process.pid, signal.SIGKILL)

    def observe(self, look: Look) -> Look:
        """Read the state of all ranks and GPUs within about LOOK_SECONDS. Returns a copy of `look` with this state."""
        end = time.monotonic() + LOOK_SECONDS
        self._find_ranks()
        ranks = self._ranks.by_rank
        before = {rank: _use_of(process.pid) for rank, process in ranks.items()}
        use_measured_at = time.monotonic() + _USE_SECONDS
        # Reading the memory of a process may hang behind a lock of that process, so readers have a time limit.
        pool = ThreadPoolExecutor(max_workers=min(_MAX_READERS, len(ranks) + 3))
        gpu_reader = pool.submit(read_gpu_uses, end) if openable_gpus(proc_root(os.environ)) else None
        trace_reader = pool.submit(self._traces, end)
        ras_reader = pool.submit(self._ras.read, list(ranks.values()), self._ranks.world_size, end)
        py_spy = find_py_spy()
        stack_readers = {rank: pool.submit(stacks_of, py_spy, process.pid, end) for rank, process in ranks.items()}
        stacks_by_rank = {rank: _result(stack, end, _TOO_LATE) for rank, stack in stack_readers.items()}
        traces = _result(trace_reader, end, {})
        ras_evidence = _result(ras_reader, end, _RAS_TOO_LATE)
        gpus, why_no_gpus = _result(gpu_reader, end, ((), _NVML_TOO_LATE)) if gpu_reader is not None else ((), "")
        pool.shutdown(wait=False, cancel_futures=True)
        time.sleep(max(0.0, use_measured_at - time.monotonic()))
        states = tuple(
            self._rank_state(rank, process, stacks_by_rank[rank], traces.get(rank, _TOO_LATE.why_missing), before[rank])
            for rank, process in ranks.items()
        )
        # dump_stacks, unlike stacks_of, reads nothing of a process that may hang.
        states = with_helper_stacks(states, lambda pid: dump_stacks(py_spy, pid, end) if py_spy else Stacks())
        missing = self._ranks.missing if self._all_started else ()
        states += tuple(RankState(rank=rank, pid=0) for rank in missing)
        note = f"No process of {ranks_text(missing)} runs here: it has ended, or was never started."
        return structs.replace(
            look,
            unix_seconds=time.time(),
            world_size=self._ranks.world_size,
            ranks_are_guessed=self._ranks.are_guessed,
            ranks=tuple(sorted(states, key=lambda state: state.rank)),
            pitfalls=find_pitfalls(states),
            gpus=gpus,
            why_no_gpus=why_no_gpus,
            ras=ras_evidence,
            missing_evidence=(*look.missing_evidence, *([note] if missing else [])),
        )

    def _traces(self, end: float) -> Mapping[int, Witness | str]:
        """Read each rank's flight recorder, or say why it cannot be read. All ranks dump at the same time."""
        requests = {rank: request_dump(each.pid, rank, each.environ) for rank, each in self._ranks.by_rank.items()}
        return {rank: each if isinstance(each, str) else await_dump(each, end) for rank, each in requests.items()}

    def _rank_state(
        self, rank: int, process: Process, stacks: Stacks, trace: Witness | str, before: "_Use"
    ) -> RankState:
        """The state of one rank now. Its use of a core is measured since `before`."""
        current = read_process(process.pid)
        if current is None or current.start != process.start:
            return RankState(rank=rank, pid=process.pid)
        now = _use_of(process.pid)
        state, wchan = now.state
        if state == "D" and before.state != now.state:
            state = "S"  # it was only passing through D
        share = None
        if now.seconds is not None and before.seconds is not None:
            share = (now.seconds - before.seconds) / (now.at - before.at)
        evidence = ProcessState(
            pid=process.pid,
            state=state,
            wchan=wchan,
            stack=first_frames(stacks.main, MAX_MAIN_FRAMES),
            threads=tuple(first_frames(frames, MAX_OTHER_FRAMES) for frames in stacks.others[:MAX_THREADS]),
        )
        posted = None if isinstance(trace, str) else trace.newest_unix_seconds
        return RankState(
            rank=rank,
            pid=process.pid,
            process=evidence,
            core_share=None if share is None else round(share, 2),
            switches=now.switches,
            written_bytes=written_bytes(process.pid),
            holds_gpu=holds_gpu(process.pid),
            holds_gil=stacks.holds_gil,
            user_frames=stacks.user_frames,
            why_no_stack=stacks.why_missing if state not in ("Z", "X") else "",
            helpers=tuple(self._helpers(process.pid)),
            witness=None if isinstance(trace, str) else trace,
            why_no_collectives=trace if isinstance(trace, str) else "",
            posted_age_seconds=None if posted is None else max(0.0, time.time() - posted),
        )

    def _helpers(self, rank_pid: int) -> Iterator[Helper]:
        """Yield the descendants of a rank that have no children themselves, except multiprocessing's tracker."""
        tree = [rank_pid]
        for process in self._processes:  # parents first
            if process.parent in tree:
                tree.append(process.pid)
        parents = {process.parent for process in self._processes}
        leaves = [process for process in self._processes if process.pid in tree[1:] and process.pid not in parents]
        for process in [each for each in leaves if _TRACKER not in each.command][:_MAX_HELPERS]:
            state, wchan = process_state(process.pid)
            yield Helper(pid=process.pid, name=process.name, state=state, wchan=wchan)


def with_helper_stacks(states: Sequence[RankState], read_stacks: Callable[[int], Stacks]) -> tuple[RankState, ...]:
    """`states` with the stacks of some processes for which ranks wait, in equal numbers for each of these ranks."""
    waiting = [state for state in states if state.waits_for_child]
    share = max(1, _MAX_HELPER_STACKS // max(1, len(waiting)))
    pids = [helper.pid for state in waiting for helper in _by_suspicion(state.helpers)[:share]]
    stacks = {pid: read_stacks(pid) for pid in pids[:_MAX_HELPER_STACKS]}

    def completed(helper: Helper) -> Helper:
        if (known := stacks.get(helper.pid)) is None:
            return helper
        stack = first_frames(known.main, MAX_OTHER_FRAMES)
        return structs.replace(helper, stack=stack, user_frames=known.user_frames)

    return tuple(structs.replace(state, helpers=tuple(map(completed, state.helpers))) for state in states)


def _by_suspicion(helpers: Sequence[Helper]) -> list[Helper]:
    """Sort helpers: those that are stopped, stuck or dead, then workers of data loaders, the most unlike others first.

    Workers that wait for work all wait in the same kernel function.
    """
    counts = Counter((each.state, each.wchan) for each in helpers)
    return sorted(helpers, key=lambda h: (h.state in ("R", "S"), h.name != _WORKER_NAME, counts[h.state, h.wchan]))


class _Use(NamedTuple):
    """A process from its start until `at` (time.monotonic): its use of cores, its state and its switches.

    `seconds`: how long its main thread used a core or waited for one, else the processor time of all threads, if known.
    `state` includes the wchan. `switches` is how often the main thread has begun to wait.
    """

    at: float
    seconds: float | None
    state: tuple[str | None, str | None]
    switches: int | None


def _use_of(pid: int) -> _Use:
    ticks = cpu_ticks(pid)
    seconds = runnable_seconds(pid) or (None if ticks is None else ticks / os.sysconf("SC_CLK_TCK"))
    return _Use(time.monotonic(), seconds, process_state(pid), voluntary_switches(pid))


def read_gpu_uses(end: float) -> tuple[tuple[GpuUse, ...], str]:
    """Read the use of all GPUs in a subprocess until `end` (time.monotonic). If that fails, the text says why."""
    try:
        completed = run_until(python_command("ddpdiag.probes.gpu.nvml"), end, env=with_package_path(os.environ))
        if completed is None:
            return (), _NVML_TOO_LATE
        return msgspec.json.decode(completed.stdout, type=tuple[GpuUse, ...]), ""
    except (OSError, msgspec.DecodeError):
        return (), "NVML shows nothing"


def _is_running(process: Process) -> bool:
    now = read_process(process.pid)
    return now is not None and now.start == process.start and now.state not in "ZX"


def _send_signal(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # sudo started it
        os.kill(pid, signum)


def _result(future: Future[T], end: float, default: T) -> T:
    """The result of a reader, or `default` if it has none by _GRACE_SECONDS after `end`."""
    try:
        return future.result(timeout=max(0.0, end + _GRACE_SECONDS - time.monotonic()))
    except TimeoutError:
        return default
