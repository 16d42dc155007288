"""The time of calls, and how many of them the time allows.

Times are those of the monotonic clock on a CPU, of CUDA events on a GPU. A sweep ends by itself before its time is
over, with fewer calls or sizes.
"""

import gc
import time
from collections.abc import Callable
from itertools import pairwise

import torch

from ddpdiag.model.bench import Bench


def time_calls(call: Callable[[], object], calls: int, device: torch.device) -> list[float]:
    """Seconds of each of `calls` calls, without garbage collection meanwhile.

    A CPU waits for each call. On a GPU the calls follow each other on the stream, with an event between them.
    """
    if not calls:
        return []
    gc.disable()
    try:
        return _by_events(call, calls, device) if device.type == "cuda" else one_by_one(call, calls)
    finally:
        gc.enable()


def one_by_one(call: Callable[[], object], calls: int) -> list[float]:
    """Seconds of each call by the clock, with nothing but the call between two readings."""
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


def _by_events(call: Callable[[], object], calls: int, device: torch.device) -> list[float]:
    """Seconds by events on the current stream, which waits for each collective."""
    torch.cuda.synchronize(device)
    # One event before the first call and one behind each: a small message shows what a second record takes.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


# The number of calls -------------------------------------------------------------------------------------------


# Fewer calls than this show nothing; then a size is left out.
LEAST_CALLS = 3
# What lies ahead is not worth more than the size at hand: so much of the time left may go into it.
_SHARE = 1 / 3
# A call of this size is over soon, and shows bandwidth; smaller ones predict only sizes near to theirs.
PROBE_BYTES = 1 << 20
_NEAR = 64
# The first call of a size may take so much longer than the size before suggests: fresh memory, a slower protocol.
_DOUBT = 2.0


class CallBudget:
    """Seconds that calls take on this rank, and seconds left until `end` on the monotonic clock.

    Each size is measured in `modes` modes. The ranks must agree on the results.
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
        """Whether the last call predicts one of this size; a latency does not predict a bandwidth."""
        return self._last is not None and (self._last[0] >= PROBE_BYTES or size_bytes <= _NEAR * self._last[0])

    def took(self, size_bytes: int, seconds: float) -> None:
        """Note the seconds of a call of this size."""
        self._last = (size_bytes, seconds)

    def has_time(self, size_bytes: int) -> bool:
        """Whether there is time for the fewest calls of a size, judged by the size before."""
        if self._last is None:
            return self.left > 0
        size, seconds = self._last
        expected = seconds * max(1.0, size_bytes / max(1, size))
        return expected * (_DOUBT + LEAST_CALLS) < self.left

    def calls(self, seconds: float, ahead: float) -> tuple[int, int]:
        """Untimed and timed calls of a size; `ahead` is the sum of all sizes left, as a multiple of this one."""
        bench = self._bench
        wanted = bench.warmup_iters + bench.iters
        one = max(seconds * self._modes, 1e-9)
        affordable = max(self.left / (one * max(ahead, 1.0)), self.left * _SHARE / one)
        if affordable >= wanted:
            return bench.warmup_iters, bench.iters
        calls = int(affordable)
        warmup = min(bench.warmup_iters, calls // 5)
        return warmup, min(bench.iters, calls - warmup)
