"""The collectives, each ready to be called again and again on buffers of its own, and how long calls take.

Times are those of the monotonic clock on a CPU, of CUDA events on a GPU.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from ddpdiag.bandwidth import Counts
from ddpdiag.bench.workloads.values import DTYPES, OPS, Values, differing, put
from ddpdiag.model.bench import Blocking

REDUCING = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce")
# torch has these in place only; out of place a copy comes first, and is a part of the call.
IN_PLACE_ONLY = ("all_reduce", "broadcast", "reduce")
OUT_OF_PLACE_ONLY = ("all_to_all", "send_recv")


class Pending(Protocol):
    """A call that was issued."""

    def wait(self) -> object:
        """Wait until it is over; on a GPU, let the current stream wait."""


class Done:
    """A call that was over at once."""

    def wait(self) -> None:
        """Nothing to wait for."""


class All(NamedTuple):
    """Several calls as one."""

    parts: tuple[Pending, ...]

    def wait(self) -> None:
        """Wait for all of them."""
        for part in self.parts:
            part.wait()


class Case(NamedTuple):
    """One collective as a row of the table has it; `op` "none" and `root` -1 where it has none."""

    collective: str
    dtype: str
    op: str
    root: int
    counts: Counts
    in_place: bool


class Operation(NamedTuple):
    """A collective with its buffers. `call` makes it; `issue` does not wait for it. `fill` puts the ranks' values in,
    `wrong` counts the elements of this rank's result that are not what they must be. `buffers` are all it holds."""

    call: Callable[[], object]
    issue: Callable[[], Pending]
    fill: Callable[[], None]
    wrong: Callable[[], int]
    buffers: tuple[torch.Tensor, ...]


class Missing(Exception):
    """This torch, or this backend, has no such collective."""


def tensor_collective(*names: str) -> Callable[..., Pending | None]:
    """The first of these functions that this torch has: 2.13 renamed all_gather_into_tensor to all_gather_single."""
    for name in names:
        if (function := getattr(dist, name, None)) is not None:
            return function  # type: ignore[no-any-return]
    raise Missing(f"torch {torch.__version__} has no {names[-1]}")


def prepare(case: Case, device: torch.device) -> Operation:
    """Buffers and calls for a case on this rank, in the default group; Missing if torch lacks the function."""
    return _BUILDERS[case.collective](case, _Own(case, device))


class _Own:
    """What all builders need: who we are, empty buffers, and the values."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._op = case.op
        self._dtype, self._device = DTYPES[case.dtype], device
        self._values = Values(case.op if case.op in OPS else "sum", self.ranks)

    def reducing(self, function: Callable[..., Pending | None]) -> Callable[..., Pending | None]:
        """A collective with its op; a sum is what torch does unasked, and what most scripts leave unsaid."""
        return function if self._op == "sum" else partial(function, op=OPS[self._op])

    def empty(self, count: int) -> torch.Tensor:
        """A buffer of zeros: sums of sums never overflow while calls are timed."""
        return torch.zeros(count, dtype=self._dtype, device=self._device)

    def put(self, buffer: torch.Tensor, rank: int) -> None:
        """What a rank gives."""
        put(self._values.of(rank), buffer)

    def wrong_sum(self, got: torch.Tensor, start: int = 0) -> int:
        """Elements that are not the reduction of all ranks' parts."""
        return differing(got, self._values.reduced(), self._values.tolerance(got.dtype), start)

    def wrong_part(self, got: torch.Tensor, rank: int, start: int = 0) -> int:
        """Elements that are not what a rank gave."""
        given = self._values.of(rank)
        return differing(got, given, torch.zeros(len(given), dtype=torch.float64), start)


def _operation(
    begin: Callable[..., Pending | None],
    fill: Callable[[], None],
    wrong: Callable[[], int],
    *buffers: torch.Tensor,
) -> Operation:
    """`begin` takes `async_op`; it is called as a script would call it, with nothing of ours in between."""

    def fresh() -> None:
        # What a call before has left must not pass for the result of the next one.
        for buffer in buffers:
            buffer.zero_()
        fill()

    return Operation(begin, lambda: begin(async_op=True) or Done(), fresh, wrong, buffers)


def _in_place(
    case: Case,
    own: _Own,
    begin: Callable[..., Pending | None],
    wrong: Callable[[torch.Tensor], int],
) -> Operation:
    """A collective of which torch has the form in place only."""
    result = own.empty(case.counts.send)
    call = partial(begin, result)
    if case.in_place:
        return _operation(call, lambda: own.put(result, own.rank), lambda: wrong(result), result)
    given = own.empty(case.counts.send)

    def copied(*, async_op: bool = False) -> Pending | None:
        result.copy_(given)
        return call(async_op=async_op)

    return _operation(copied, lambda: own.put(given, own.rank), lambda: wrong(result), given, result)


def _all_reduce(case: Case, own: _Own) -> Operation:
    return _in_place(case, own, own.reducing(dist.all_reduce), own.wrong_sum)


def _reduce(case: Case, own: _Own) -> Operation:
    def wrong(got: torch.Tensor) -> int:
        return own.wrong_sum(got) if own.rank == case.root else 0

    return _in_place(case, own, partial(own.reducing(dist.reduce), dst=case.root), wrong)


def _broadcast(case: Case, own: _Own) -> Operation:
    return _in_place(case, own, partial(dist.broadcast, src=case.root), lambda got: own.wrong_part(got, case.root))


def _all_gather(case: Case, own: _Own) -> Operation:
    gather = tensor_collective("all_gather_single", "all_gather_into_tensor")
    count = case.counts.send
    result = own.empty(case.counts.receive)
    slot = result[own.rank * count : (own.rank + 1) * count]
    given = slot if case.in_place else own.empty(count)

    def wrong() -> int:
        return sum(own.wrong_part(part, rank) for rank, part in enumerate(result.split(count)))

    return _operation(partial(gather, result, given), lambda: own.put(given, own.rank), wrong, given, result)


def _reduce_scatter(case: Case, own: _Own) -> Operation:
    scatter = tensor_collective("reduce_scatter_single", "reduce_scatter_tensor")
    count = case.counts.receive
    start = own.rank * count
    given = own.empty(case.counts.send)
    result = given[start : start + count] if case.in_place else own.empty(count)
    return _operation(
        partial(own.reducing(scatter), result, given),
        lambda: own.put(given, own.rank),
        lambda: own.wrong_sum(result, start),
        given,
        result,
    )


def _all_to_all(case: Case, own: _Own) -> Operation:
    exchange = tensor_collective("all_to_all_single")
    given, result = own.empty(case.counts.send), own.empty(case.counts.receive)
    count = len(result) // own.ranks

    def wrong() -> int:
        parts = enumerate(result.split(count))
        return sum(own.wrong_part(part, rank, own.rank * count) for rank, part in parts)

    return _operation(partial(exchange, result, given), lambda: own.put(given, own.rank), wrong, given, result)


def _send_recv(case: Case, own: _Own) -> Operation:
    """To the next rank, and from the one before, as nccl-tests' sendrecv."""
    given, result = own.empty(case.counts.send), own.empty(case.counts.receive)
    ahead, behind = (own.rank + 1) % own.ranks, (own.rank - 1) % own.ranks

    def begin(*, async_op: bool = False) -> Pending | None:
        sends = dist.P2POp(dist.isend, given, ahead)
        receives = dist.P2POp(dist.irecv, result, behind)
        pending = All(tuple(dist.batch_isend_irecv([sends, receives])))
        if not async_op:
            pending.wait()
        return pending

    return _operation(begin, lambda: own.put(given, own.rank), lambda: own.wrong_part(result, behind), given, result)


_BUILDERS: dict[str, Callable[[Case, _Own], Operation]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
}


# Their times ---------------------------------------------------------------------------------------------------------

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


def finish(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)


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
