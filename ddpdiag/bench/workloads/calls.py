"""How long calls take, and how many there is time for.

Times are those of the monotonic clock on a CPU, of CUDA events on a GPU. A sweep ends by itself before its time is
over, with fewer calls or sizes.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from ddpdiag.bench.workloads.operations import Operation
from ddpdiag.model.bench import Bench, Blocking

# What gloo works on at once: it has two threads (ProcessGroupGloo's options, torch 2.13).
IN_FLIGHT = 2


def time_calls(operations: Sequence[Operation], calls: int, device: torch.device, how: Blocking) -> list[float]:
    """Seconds of each of `calls` calls; each calls all `operations` at once, and its time is divided by their number.

    Garbage is not collected meanwhile.
    """
    if not calls:
        return []
    gc.disable()
    try:
        if device.type == "cuda":
            seconds = _by_events(operations, calls, device, how)
        elif how is Blocking.PIPELINED:
            seconds = _pipelined(operations, calls)
        elif how is Blocking.WAIT and len(operations) == 1:
            seconds = one_by_one(operations[0].call, calls)
        else:
            seconds = [_at_once_by_clock(operations, how) for _ in range(calls)]
    finally:
        gc.enable()
    # The pipeline of a CPU goes round its buffers: each call is one operation.
    at_once = 1 if how is Blocking.PIPELINED and device.type != "cuda" else len(operations)
    return [each / at_once for each in seconds]


def one_by_one(call: Callable[[], object], calls: int) -> list[float]:
    """As a script times its calls: nothing of ours is done between clock and call."""
    seconds = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return seconds


def finish(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)


def _at_once_by_clock(operations: Sequence[Operation], how: Blocking) -> float:
    begin = time.perf_counter()
    _together(operations)
    if how is Blocking.BARRIER:
        dist.barrier()
    seconds = time.perf_counter() - begin
    if how is Blocking.APART:
        dist.barrier()
    return seconds


def _together(operations: Sequence[Operation]) -> None:
    """All at once; one alone is simply called."""
    if len(operations) == 1:
        operations[0].call()
        return
    for pending in [operation.issue() for operation in operations]:
        pending.wait()


def _pipelined(operations: Sequence[Operation], calls: int) -> list[float]:
    """A call is issued as long as fewer than all buffers are under way; its time is that from end to end."""
    ends = [time.perf_counter()]
    under_way = deque(operation.issue() for operation in operations[:calls])
    for number in range(calls):
        under_way.popleft().wait()
        ends.append(time.perf_counter())
        if number + len(operations) < calls:
            under_way.append(operations[number % len(operations)].issue())
    return [after - before for before, after in pairwise(ends)]


def _by_events(operations: Sequence[Operation], calls: int, device: torch.device, how: Blocking) -> list[float]:
    """Events between the calls on the current stream, which waits for each collective."""
    torch.cuda.synchronize(device)
    if how is Blocking.PIPELINED:
        # One event before the first call and one behind each: a small message shows what a second record takes.
        events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        events[0].record()
        for event in events[1:]:
            _together(operations)
            event.record()
        torch.cuda.synchronize(device)
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]
    begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(calls)] for _ in range(2))
    for begin, end in zip(begins, ends, strict=True):
        begin.record()
        _together(operations)
        if how is Blocking.BARRIER:
            dist.barrier()
        end.record()
        end.synchronize()
        if how is Blocking.APART:
            dist.barrier()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in zip(begins, ends, strict=True)]


# How many there is time for ------------------------------------------------------------------------------------------


# Fewer calls than this tell nothing; then a size is left out.
LEAST_CALLS = 3
# What lies ahead is not worth more than the size at hand: so much of the time left may go into it, less into checks.
_SHARE = 1 / 3
_CHECK_SHARE = 0.2
# A call of this size is over soon, and tells of bandwidth; smaller ones tell of sizes near to theirs.
PROBE_BYTES = 1 << 20
_NEAR = 64
# The first call of a size may take so much longer than the size before suggests: fresh memory, a slower protocol.
_DOUBT = 2.0


class CallBudget:
    """What calls take on this rank, and what is left until `end` on the monotonic clock.

    `modes` is how many modes each size is measured in. All ranks must agree on what comes out here.
    """

    def __init__(self, bench: Bench, end: float, modes: int) -> None:
        self._bench = bench
        self._end = end
        self._modes = modes
        self._last: tuple[int, float] | None = None

    @property
    def left(self) -> float:
        """Seconds until the time is over."""
        return max(0.0, self._end - time.monotonic())

    def knows(self, size_bytes: int) -> bool:
        """Does the last call tell how long one of this size takes? Not from a latency to a bandwidth."""
        return self._last is not None and (self._last[0] >= PROBE_BYTES or size_bytes <= _NEAR * self._last[0])

    def took(self, size_bytes: int, seconds: float) -> None:
        """A call of that size took so long."""
        self._last = (size_bytes, seconds)

    def has_time(self, size_bytes: int) -> bool:
        """Is there time for the fewest calls of a size, going by the one before?"""
        if self._last is None:
            return self.left > 0
        size, seconds = self._last
        expected = seconds * max(1.0, size_bytes / max(1, size))
        return expected * (_DOUBT + LEAST_CALLS) * self._bench.aggregate < self.left

    def checks(self, seconds: float) -> int:
        """How often the values can be checked, once at least, when one call takes so long."""
        return max(1, min(self._bench.checks, int(self.left * _CHECK_SHARE / max(seconds, 1e-9))))

    def calls(self, seconds: float, ahead: float) -> tuple[int, int]:
        """Calls that warm up, and calls that are timed; `ahead` is all that is to come, in sizes such as this one.

        What is to come takes as much longer as it is larger.
        """
        bench = self._bench
        wanted = bench.warmup + bench.iterations
        one = max(seconds * bench.aggregate * self._modes, 1e-9)
        affordable = max(self.left / (one * max(ahead, 1.0)), self.left * _SHARE / one)
        if affordable >= wanted:
            return bench.warmup, bench.iterations
        calls = int(affordable)
        warmup = min(bench.warmup, calls // 5)
        return warmup, min(bench.iterations, calls - warmup)
