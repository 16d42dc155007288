"""A sweep: this rank's part in a benchmark of one collective, one size after the other, over the open group.

Times are measured with the monotonic clock on a CPU, with CUDA events on a GPU. To end in time, a sweep makes fewer
calls or leaves out sizes.
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

from ddpdiag.bandwidth import Counts, counts
from ddpdiag.bench.data import row_of
from ddpdiag.bench.workloads.operations import DTYPES, Missing, Operation, prepare
from ddpdiag.model.bench import Bench, RankRow
from ddpdiag.text import size_text
from ddpdiag.workloads.devices import synchronize

# Messages of torch and its backends for a dtype that they lack. All other errors are raised: a GPU that fails in its
# first call must not be reported as a wrong option.
_LACKS = re.compile(
    r"not (yet )?(support|implement)|unsupported|only supports|invalid scalar type|cannot use|can(not|'t) be cast|"
    r"no backend type",
    re.IGNORECASE,
)
# The share of the free memory that buffers may use: torch and gloo need some memory as well.
_MEMORY_SHARE = 0.7
# A call needs twice its data, because gloo copies into its segments, and torch gathers into a buffer first.
_MEMORY_FACTOR = 2
# All ranks finish these collectives together, so the time of each rank shows when it started.
_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# If there is time for fewer calls than this, a size is left out.
LEAST_CALLS = 3
# A size may use at least this share of the time left, even if much larger sizes follow.
_SHARE = 1 / 3
# A call of this size is short, and shows bandwidth. The time of a smaller one, mostly latency, predicts no large one's.
PROBE_BYTES = 1 << 20
# The first call of a size may take this many times as long as the size before suggests: new memory, a slower protocol.
_DOUBT = 2.0


class SweepContext(NamedTuple):
    """The input of a sweep. `memory_bytes` are free for this rank. The sweep must end at `end` on the monotonic clock.
    It announces each step with `step`, and calls `on_row` with each row as soon as it is measured."""

    bench: Bench
    collective: str
    device: torch.device
    memory_bytes: int
    end: float
    step: Callable[[str], None]
    on_row: Callable[[RankRow], None]


class SweepResult(NamedTuple):
    """The rows, notes on rows left out, and the dtypes that the backend or torch lacks. `whole` is False if time or
    memory was too short for some sizes."""

    rows: tuple[RankRow, ...]
    notes: tuple[str, ...]
    unsupported: tuple[str, ...]
    whole: bool


def sweep(context: SweepContext) -> SweepResult:
    """Measure all sizes of all dtypes, as long as there is time. All ranks of the group call this function."""
    context.step(f"{context.collective}: try every dtype")
    lacks = {dtype: _why_not(context.collective, dtype, context.device) for dtype in context.bench.datatype}
    dtypes = [dtype for dtype, why in lacks.items() if why is None]
    name = f"{dist.get_backend()} cannot do {context.collective}"
    run = _Run(context)
    is_complete = all(run.dtype(dtype, len(dtypes) - number) for number, dtype in enumerate(dtypes))
    return SweepResult(
        rows=tuple(run.rows),
        notes=run.all_notes,
        unsupported=tuple(f"{name} of {dtype}: {why}" for dtype, why in lacks.items() if why is not None),
        whole=is_complete and run.has_room,
    )


def _why_not(collective: str, dtype: str, device: torch.device) -> str | None:
    """Call with one element: the reason if the backend or torch lacks the collective or dtype, or None."""
    try:
        prepare(collective, dtype, counts_of(collective, dtype, 1), device).call()
        synchronize(device)
    except (Missing, NotImplementedError) as error:
        return _first_line(error)
    except (RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, dist.DistBackendError | torch.OutOfMemoryError) or not _LACKS.search(str(error)):
            raise
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def counts_of(collective: str, dtype: str, wanted_bytes: int) -> Counts:
    """The elements to send and receive for a size of about `wanted_bytes` in the open group."""
    return counts(collective, wanted_bytes, DTYPES[dtype].itemsize, dist.get_world_size())


class _Run:
    """A sweep in progress: `dtype` measures one dtype, and adds to `rows` and `all_notes`."""

    def __init__(self, context: SweepContext) -> None:
        self.rows: list[RankRow] = []
        self.has_room = True
        self._notes: dict[str, None] = {}
        self._fewer: dict[int, int] = {}
        self._context = context
        # Bytes and seconds of the last call, from which the time of the next size is estimated.
        self._last: tuple[int, float] | None = None

    def dtype(self, dtype: str, dtypes_left: int) -> bool:
        """Measure all sizes of one dtype; False if the time was too short. `dtypes_left` includes this dtype."""
        context = self._context
        # Sizes are rounded to whole elements; equal ones are measured once. Only those for which all ranks have memory.
        width = DTYPES[dtype].itemsize * _MEMORY_FACTOR
        wanted = sorted(
            {counts_of(context.collective, dtype, size) for size in context.bench.sizes},
            key=lambda each: each.size_bytes,
        )
        fits = [each for each in wanted if (each.send + each.receive) * width <= context.memory_bytes * _MEMORY_SHARE]
        (least,) = self._agree([len(fits)])
        if least < len(wanted):
            self.has_room = False
            left_out = _sizes_text([each.size_bytes for each in wanted[least:]])
            note = f"{context.collective} of {dtype}: {left_out} left out: too little memory"
            self._note(f"{note} ({context.memory_bytes >> 20} MiB are free for each rank, or less)")
        sizes = [each.size_bytes for each in wanted[:least]]
        for number, each in enumerate(wanted[:least]):
            ahead = sum(sizes[number:]) + (dtypes_left - 1) * sum(sizes)
            row = self._row(dtype, each, ahead / each.size_bytes)
            if row is None:
                self._note(f"the time was over before {size_text(each.size_bytes)} could be measured")
                return False
            self.rows.append(row)
            context.on_row(row)
        return True

    def _row(self, dtype: str, sizes: Counts, ahead: float) -> RankRow | None:
        """Measure one size: check values, agree on the number of calls (a barrier), time them; None if the time is too
        short. `ahead` is the sum of this and all later sizes, divided by this size."""
        context, bench, size = self._context, self._context.bench, sizes.size_bytes
        label = f"{context.collective} {size} B {dtype}"
        context.step(f"{label}: is there time?")
        if size > PROBE_BYTES and (self._last is None or self._last[0] < PROBE_BYTES):
            # Time one short call first, so that no large size is started for which the time is too short.
            small = counts_of(context.collective, dtype, PROBE_BYTES)
            operation = prepare(context.collective, dtype, small, context.device)
            operation.call()  # the first call connects the ranks, and is not timed
            self._last = (small.size_bytes, self._seconds(operation))
        left = max(0.0, context.end - time.monotonic())
        if not self._agree([int(has_time(size, self._last, left))])[0]:
            return None
        operation = prepare(context.collective, dtype, sizes, context.device)
        wrong, seconds = self._check(operation, label)
        self._last = (size, seconds)
        context.step(f"{label}: agree on the number of calls")
        left = max(0.0, context.end - time.monotonic())
        warmup, calls = self._agree([*affordable_calls(bench, seconds, left, ahead)])
        if calls < min(LEAST_CALLS, bench.iters):
            return None
        if calls < bench.iters:
            self._fewer[size] = min(calls, self._fewer.get(size, calls))
        context.step(f"{label}: {warmup} + {calls} calls")
        time_calls(operation.call, warmup, context.device)
        # Rounded to whole nanoseconds, as the other ranks' times are.
        times = [round(each * 1e9) / 1e9 for each in time_calls(operation.call, calls, context.device)]
        extremes = self._extremes(times) if context.collective in _TOGETHER else None
        return row_of(sizes, dtype, times, wrong, extremes)

    def _seconds(self, operation: Operation) -> float:
        begin = time.perf_counter()
        operation.call()
        synchronize(self._context.device)
        return time.perf_counter() - begin

    def _check(self, operation: Operation, label: str) -> tuple[int | None, float]:
        """Run one call: the wrong elements of its result (None: not checked), and its seconds."""
        self._context.step(f"{label}: first call")
        if not self._context.bench.check:
            return None, self._seconds(operation)
        operation.fill()
        seconds = self._seconds(operation)
        wrong = operation.wrong()
        operation.clear()
        return wrong, seconds

    def _note(self, text: str) -> None:
        self._notes[text] = None

    @property
    def all_notes(self) -> tuple[str, ...]:
        """All notes, including one for the sizes with fewer calls than requested."""
        if not self._fewer:
            return tuple(self._notes)
        few = f"{self._context.collective} of {_sizes_text(sorted(self._fewer))}: {min(self._fewer.values())} calls"
        return (*self._notes, f"{few} at least instead of {self._context.bench.iters}: the time was too short")

    def _agree(self, numbers: list[int]) -> list[int]:
        """For each number the smallest of any rank, since all ranks must make the same calls. A barrier as well."""
        smallest = torch.tensor(numbers, dtype=torch.int64, device=self._context.device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        return [int(number) for number in smallest.tolist()]

    def _extremes(self, seconds: list[float]) -> tuple[list[float], list[float]]:
        """The shortest and the longest seconds of any rank in each call. All ranks call this function."""
        # In whole nanoseconds, so that a rank that changes floating-point numbers does not change the times.
        times = [round(each * 1e9) for each in seconds]
        shortest, longest = self._agree(times), self._agree([-each for each in times])
        return [each / 1e9 for each in shortest], [-each / 1e9 for each in longest]


def _sizes_text(sizes: Sequence[int]) -> str:
    """The first and the last size in words, such as "64 MiB to 1 GiB", or "64 MiB" if they are equal."""
    return " to ".join(dict.fromkeys(size_text(size) for size in (sizes[0], sizes[-1])))


def has_time(size_bytes: int, last: tuple[int, float] | None, left_seconds: float) -> bool:
    """Whether there is time for LEAST_CALLS calls of a size, judged by the bytes and seconds of the `last` call."""
    size, seconds = last or (1, 0.0)
    return left_seconds > seconds * max(1.0, size_bytes / size) * (_DOUBT + LEAST_CALLS)


def affordable_calls(bench: Bench, seconds: float, left_seconds: float, ahead: float) -> tuple[int, int]:
    """The untimed and timed calls, of `seconds` each, that fit into a size's share of the time left. `ahead` is the sum
    of this and all later sizes, divided by this size."""
    affordable = math.floor(left_seconds / max(seconds, 1e-9) * max(1 / max(ahead, 1.0), _SHARE))
    if affordable >= bench.warmup_iters + bench.iters:
        return bench.warmup_iters, bench.iters
    warmup = min(bench.warmup_iters, affordable // 5)
    return warmup, min(bench.iters, affordable - warmup)


def time_calls(call: Callable[[], object], calls: int, device: torch.device) -> list[float]:
    """Run `calls` calls without garbage collection, and return the seconds of each.

    On a CPU each call is waited for. On a GPU the calls follow each other on the stream, with an event between them.
    """
    if not calls:
        return []
    gc.disable()
    try:
        return _by_events(call, calls, device) if device.type == "cuda" else one_by_one(call, calls)
    finally:
        gc.enable()


def one_by_one(call: Callable[[], object], calls: int) -> list[float]:
    """Run the calls one after the other, and return the seconds of each by the clock."""
    seconds = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return seconds


def _by_events(call: Callable[[], object], calls: int, device: torch.device) -> list[float]:
    """Run the calls: the seconds of each by events on the current stream, which waits for each collective."""
    torch.cuda.synchronize(device)
    # One event before the first call and one after each call. Two events for each call would slow small messages down.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]
