"""Run a sweep: all ranks of the process group measure one collective, one dtype and size after the other.

Calls are timed by a monotonic clock on a CPU, and by CUDA events on a GPU. If time is short, a sweep makes fewer calls
or leaves out sizes.
"""

import gc
import math
import re
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from msgspec import structs

from ddpdiag.bandwidth import MessageSize, rounded_size
from ddpdiag.bench.data import Data, rank_row
from ddpdiag.bench.workloads.operations import DTYPES, MissingCollective, Operation, prepare
from ddpdiag.model.bench import BenchRequest, RankRow
from ddpdiag.text import size_text
from ddpdiag.workloads.devices import synchronize

# Messages of torch and its backends about an unsupported dtype. All other errors are raised: a GPU that fails in its
# first call must not be reported as a wrong option.
_UNSUPPORTED = re.compile(
    r"not (yet )?(support|implement)|unsupported|only supports|invalid scalar type|cannot use|can(not|'t) be cast|"
    r"no backend type",
    re.IGNORECASE,
)
# The share of the free memory that buffers may use: torch and gloo need some memory as well.
_MEMORY_SHARE = 0.7
# A call needs twice its data, because gloo copies into its segments, and torch gathers into a buffer first.
_MEMORY_FACTOR = 2
# All ranks finish these collectives together, so the time of a rank's call shows when it started.
_FINISHED_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# A size is left out if there is time for fewer calls than this.
MIN_CALLS = 3
# A size may use at least this share of the time left, even if much larger sizes follow.
_MIN_TIME_SHARE = 1 / 3
# A call of this size is short, yet shows bandwidth. The time of a smaller call, mostly latency, predicts no large one.
PROBE_BYTES = 1 << 20
# The first call of a size may take so many times as long as the previous size suggests: new memory, a slower protocol.
_FIRST_CALL_FACTOR = 2.0


class SweepContext(NamedTuple):
    """The input of a sweep. `memory_bytes` are free for this rank. The sweep must end at `end` on the monotonic clock.
    It calls `announce_step` before each step, and `on_row` with each row as soon as the row is measured."""

    bench: BenchRequest
    collective: str
    device: torch.device
    memory_bytes: int
    end: float
    announce_step: Callable[[str], None]
    on_row: Callable[[RankRow], None]


def sweep(context: SweepContext, empty_data: Data) -> Data:
    """Measure all sizes of all dtypes while there is time, and return `empty_data` with the rows and notes.

    All ranks of the group must call this function.
    """
    context.announce_step(f"{context.collective}: try every dtype")
    reasons = {dtype: _why_unsupported(context.collective, dtype, context.device) for dtype in context.bench.datatype}
    dtypes = [dtype for dtype, reason in reasons.items() if reason is None]
    subject = f"{dist.get_backend()} cannot do {context.collective}"
    run = _SweepRun(context)
    had_time = all(run.measure_dtype(dtype, len(dtypes) - number) for number, dtype in enumerate(dtypes))
    return structs.replace(
        empty_data,
        rows=tuple(run.rows),
        notes=run.all_notes,
        unsupported=tuple(f"{subject} of {dtype}: {reason}" for dtype, reason in reasons.items() if reason is not None),
        is_complete=had_time and run.has_room,
    )


def _why_unsupported(collective: str, dtype: str, device: torch.device) -> str | None:
    """Try one element. Returns why torch or the backend lacks the collective or dtype, or None if neither does."""
    try:
        prepare(collective, dtype, counts_of(collective, dtype, 1), device).call()
        synchronize(device)
    except (MissingCollective, NotImplementedError) as error:
        return _first_line(error)
    except (RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, dist.DistBackendError | torch.OutOfMemoryError) or not _UNSUPPORTED.search(str(error)):
            raise
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def counts_of(collective: str, dtype: str, wanted_bytes: int) -> MessageSize:
    """The size of a message of about `wanted_bytes`, rounded to whole elements for each rank of the process group."""
    return rounded_size(collective, wanted_bytes, DTYPES[dtype].itemsize, dist.get_world_size())


class _SweepRun:
    """A sweep in progress. `rows` has the finished rows; `has_room` is False if a size needed too much memory."""

    def __init__(self, context: SweepContext) -> None:
        self.rows: list[RankRow] = []
        self.has_room = True
        self._notes: dict[str, None] = {}
        self._reduced_calls: dict[int, int] = {}
        self._context = context
        # Bytes and seconds of the last call, from which the time of the next size is estimated.
        self._last_call: tuple[int, float] | None = None

    def measure_dtype(self, dtype: str, dtypes_left: int) -> bool:
        """Measure all sizes of a dtype. Returns False if the time was too short. `dtypes_left` includes this dtype."""
        context = self._context
        # Sizes that round to the same number of elements are measured once, and only if all ranks have memory for them.
        width = DTYPES[dtype].itemsize * _MEMORY_FACTOR
        wanted = sorted(
            {counts_of(context.collective, dtype, size) for size in context.bench.sizes},
            key=lambda each: each.size_bytes,
        )
        max_bytes = context.memory_bytes * _MEMORY_SHARE
        fitting = [each for each in wanted if (each.send + each.receive) * width <= max_bytes]
        (fit_count,) = self._minimum_over_ranks([len(fitting)])
        if fit_count < len(wanted):
            self.has_room = False
            omitted_sizes = _sizes_text([each.size_bytes for each in wanted[fit_count:]])
            note = f"{context.collective} of {dtype}: {omitted_sizes} left out: too little memory"
            self._add_note(f"{note} ({context.memory_bytes >> 20} MiB are free for each rank, or less)")
        sizes = [each.size_bytes for each in wanted[:fit_count]]
        for number, each in enumerate(wanted[:fit_count]):
            bytes_left = sum(sizes[number:]) + (dtypes_left - 1) * sum(sizes)
            row = self._measure_size(dtype, each, each.size_bytes / bytes_left)
            if row is None:
                self._add_note(f"the time was over before {size_text(each.size_bytes)} could be measured")
                return False
            self.rows.append(row)
            context.on_row(row)
        return True

    def _measure_size(self, dtype: str, counts_of_size: MessageSize, time_share: float) -> RankRow | None:
        """Check the values of one size, agree on the number of calls, and time them. None if the time is too short."""
        context, bench, size_bytes = self._context, self._context.bench, counts_of_size.size_bytes
        label = f"{context.collective} {size_bytes} B {dtype}"
        context.announce_step(f"{label}: is there time?")
        if size_bytes > PROBE_BYTES and (self._last_call is None or self._last_call[0] < PROBE_BYTES):
            # Time one short call first, to find out whether there is time for a large one.
            probe_counts = counts_of(context.collective, dtype, PROBE_BYTES)
            operation = prepare(context.collective, dtype, probe_counts, context.device)
            operation.call()  # the first call connects the ranks, and is not timed
            self._last_call = (probe_counts.size_bytes, self._time_call(operation))
        left_seconds = max(0.0, context.end - time.monotonic())
        if not self._minimum_over_ranks([int(has_time(size_bytes, self._last_call, left_seconds))])[0]:
            return None
        operation = prepare(context.collective, dtype, counts_of_size, context.device)
        wrong, seconds = self._check_values(operation, label)
        self._last_call = (size_bytes, seconds)
        context.announce_step(f"{label}: agree on the number of calls")
        left_seconds = max(0.0, context.end - time.monotonic())
        warmup, calls = self._minimum_over_ranks([*affordable_calls(bench, seconds, left_seconds, time_share)])
        if calls < min(MIN_CALLS, bench.iters):
            return None
        if calls < bench.iters:
            self._reduced_calls[size_bytes] = min(calls, self._reduced_calls.get(size_bytes, calls))
        context.announce_step(f"{label}: {warmup} warm-up and {calls} timed calls")
        time_calls(operation.call, warmup, context.device)
        # The extremes over all ranks have whole nanoseconds as well, and are compared with these times.
        times = [round(each * 1e9) / 1e9 for each in time_calls(operation.call, calls, context.device)]
        extremes = self._extremes_over_ranks(times) if context.collective in _FINISHED_TOGETHER else None
        return rank_row(counts_of_size, dtype, times, wrong, extremes)

    def _time_call(self, operation: Operation) -> float:
        begin = time.perf_counter()
        operation.call()
        synchronize(self._context.device)
        return time.perf_counter() - begin

    def _check_values(self, operation: Operation, label: str) -> tuple[int | None, float]:
        """Run and time one call. Returns the number of wrong elements (None without a check), and the seconds."""
        self._context.announce_step(f"{label}: first call")
        if not self._context.bench.check:
            return None, self._time_call(operation)
        operation.fill()
        seconds = self._time_call(operation)
        wrong = operation.count_wrong()
        operation.clear()
        return wrong, seconds

    def _add_note(self, text: str) -> None:
        self._notes[text] = None

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The notes on rows left out, and one note on the sizes with fewer calls than requested."""
        if not self._reduced_calls:
            return tuple(self._notes)
        sizes, fewest_calls = _sizes_text(sorted(self._reduced_calls)), min(self._reduced_calls.values())
        few = f"{self._context.collective} of {sizes}: {fewest_calls} calls"
        return (*self._notes, f"{few} at least instead of {self._context.bench.iters}: the time was too short")

    def _minimum_over_ranks(self, numbers: list[int]) -> list[int]:
        """For each of `numbers`, the smallest value on any rank. The ranks also wait for each other here."""
        smallest = torch.tensor(numbers, dtype=torch.int64, device=self._context.device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        return [int(number) for number in smallest.tolist()]

    def _extremes_over_ranks(self, seconds: list[float]) -> tuple[list[float], list[float]]:
        """For each call, the shortest and the longest time of any rank in seconds. All ranks must call this."""
        # Whole nanoseconds, because a rank with faulty arithmetic may change floating-point numbers.
        times = [round(each * 1e9) for each in seconds]
        shortest, longest = self._minimum_over_ranks(times), self._minimum_over_ranks([-each for each in times])
        return [each / 1e9 for each in shortest], [-each / 1e9 for each in longest]


def _sizes_text(sizes: Sequence[int]) -> str:
    """The range of sizes as text: "64 MiB to 1 GiB", or "64 MiB" if the first and the last size are equal."""
    return " to ".join(dict.fromkeys(size_text(size) for size in (sizes[0], sizes[-1])))


def has_time(size_bytes: int, last: tuple[int, float] | None, left_seconds: float) -> bool:
    """Whether MIN_CALLS calls of a size fit into the time left, judged by the (bytes, seconds) of the `last` call."""
    size, seconds = last or (1, 0.0)
    return left_seconds > seconds * max(1.0, size_bytes / size) * (_FIRST_CALL_FACTOR + MIN_CALLS)


def affordable_calls(bench: BenchRequest, seconds: float, left_seconds: float, time_share: float) -> tuple[int, int]:
    """The numbers of untimed and of timed calls, of `seconds` each, that fit into a size's share of the time left."""
    affordable = math.floor(left_seconds / max(seconds, 1e-9) * max(time_share, _MIN_TIME_SHARE))
    if affordable >= bench.warmup_iters + bench.iters:
        return bench.warmup_iters, bench.iters
    warmup = min(bench.warmup_iters, affordable // 5)
    return warmup, min(bench.iters, affordable - warmup)


def time_calls(call: Callable[[], object], calls: int, device: torch.device) -> list[float]:
    """Run `calls` calls without garbage collection, and return the seconds of each.

    On a CPU, each call ends before the next begins. On a GPU, all calls are queued on the stream, with events between.
    """
    if not calls:
        return []
    gc.disable()
    try:
        return _time_by_events(call, calls, device) if device.type == "cuda" else time_one_by_one(call, calls)
    finally:
        gc.enable()


def time_one_by_one(call: Callable[[], object], calls: int) -> list[float]:
    """Run calls that return when they are done, and return the seconds of each by the clock."""
    seconds = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return seconds


def _time_by_events(call: Callable[[], object], calls: int, device: torch.device) -> list[float]:
    """Queue the calls on the current stream, which waits for each collective. Returns their seconds by CUDA events."""
    torch.cuda.synchronize(device)
    # One event before the first call and one after each call. Two events for each call would slow small messages down.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]
