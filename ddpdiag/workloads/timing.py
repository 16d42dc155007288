"""How long calls take: the monotonic clock on a CPU, CUDA events on a GPU."""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
import torch.distributed as dist

from ddpdiag.model.bench import Blocking
from ddpdiag.workloads.operations import Operation

# What gloo works on at once: it has two threads (ProcessGroupGloo's options, torch 2.13).
IN_FLIGHT = 2


def time_calls(operations: Sequence[Operation], calls: int, device: torch.device, how: Blocking) -> list[float]:
    """Seconds of each of `calls` calls; each calls all `operations` at once, and its time is divided by their number.

    Garbage is not collected meanwhile.
    """
    if not calls:
        return []
    with _without_garbage_collection():
        if device.type == "cuda":
            seconds = _by_events(operations, calls, device, how)
        elif how is Blocking.PIPELINED:
            seconds = _pipelined(operations, calls)
        elif how is Blocking.WAIT and len(operations) == 1:
            seconds = one_by_one(operations[0].call, calls)
        else:
            seconds = [_at_once_by_clock(operations, how) for _ in range(calls)]
    return [each / _at_once(operations, device, how) for each in seconds]


def _at_once(operations: Sequence[Operation], device: torch.device, how: Blocking) -> int:
    # The pipeline of a CPU goes round its buffers: each call is one operation.
    return 1 if how is Blocking.PIPELINED and device.type != "cuda" else len(operations)


def one_by_one(call: Callable[[], object], calls: int) -> list[float]:
    """As a script times its calls: nothing of ours is done between clock and call."""
    seconds = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return seconds


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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
    begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(calls)] for _ in range(2))
    for begin, end in zip(begins, ends, strict=True):
        begin.record()
        _together(operations)
        if how is Blocking.BARRIER:
            dist.barrier()
        end.record()
        if how is not Blocking.PIPELINED:
            end.synchronize()
        if how is Blocking.APART:
            dist.barrier()
    torch.cuda.synchronize(device)
    if how is Blocking.PIPELINED:
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise([begins[0], *ends])]
    return [begin.elapsed_time(end) / 1e3 for begin, end in zip(begins, ends, strict=True)]
