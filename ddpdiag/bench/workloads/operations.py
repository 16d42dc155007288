"""The collectives with their buffers, and the values in these.

Inputs and expected results are exact in every dtype. Sums must stay exact in bfloat16 (whole numbers up to 256) and
int8 (up to 127), in any order of adding and for any number of ranks. So at most 16 ranks contribute to an element (a
weight from 1 to 7), the next 16 to the next element; the others contribute the neutral element. A rank that is left
out, counted twice or confused with another one changes the result.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddpdiag.bandwidth import Counts

REDUCING = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce")
OUT_OF_PLACE_ONLY = ("all_to_all", "send_recv")


_Call = Callable[..., object]


class Case(NamedTuple):
    """One collective as a row of the table has it; `op` "none" and `root` -1 where it has none."""

    collective: str
    dtype: str
    op: str
    root: int
    counts: Counts
    in_place: bool


class Operation(NamedTuple):
    """A collective with its buffers.

    `fill` writes this rank's values, `wrong` counts the incorrect elements of this rank's result.
    """

    call: Callable[[], object]
    fill: Callable[[], None]
    wrong: Callable[[], int]
    buffers: tuple[torch.Tensor, ...]


class Missing(Exception):
    """This torch, or this backend, has no such collective."""


def tensor_collective(*names: str) -> _Call:
    """The first of these functions that this torch has: 2.13 renamed all_gather_into_tensor to all_gather_single."""
    for name in names:
        if (function := getattr(dist, name, None)) is not None:
            return function  # type: ignore[no-any-return]
    raise Missing(f"torch {torch.__version__} has no {names[-1]}")


def prepare(case: Case, device: torch.device) -> Operation:
    """Buffers and calls for a case on this rank, in the default group; Missing if torch lacks the function."""
    return _BUILDERS[case.collective](case, _Own(case, device))


class _Own:
    """The inputs of all builders: rank and world size, empty buffers, and the values."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._op = case.op
        self._dtype, self._device = DTYPES[case.dtype], device
        self._values = Values(case.op if case.op in OPS else "sum", self.ranks)

    def reducing(self, function: _Call) -> _Call:
        """A collective with its op; the default, a sum, is left out as in most scripts."""
        return function if self._op == "sum" else partial(function, op=OPS[self._op])

    def empty(self, count: int) -> torch.Tensor:
        """A buffer of zeros: sums of sums never overflow while calls are timed."""
        return torch.zeros(count, dtype=self._dtype, device=self._device)

    def put(self, buffer: torch.Tensor) -> None:
        """Fill a buffer with this rank's input."""
        put(self._values.of(self.rank), buffer)

    def wrong_sum(self, got: torch.Tensor, start: int = 0) -> int:
        """Elements that are not the reduction of all ranks' parts."""
        return differing(got, self._values.reduced(), self._values.tolerance(got.dtype), start)

    def wrong_part(self, got: torch.Tensor, rank: int, start: int = 0) -> int:
        """Elements that are not the input of a rank."""
        given = self._values.of(rank)
        return differing(got, given, torch.zeros(len(given), dtype=torch.float64), start)


def _operation(own: _Own, call: _Call, wrong: Callable[[], int], *buffers: torch.Tensor) -> Operation:
    """An operation that is called as a script would call it; this rank's values go into the first buffer."""

    def fill() -> None:
        # The result of an earlier call must not pass for that of the next one.
        for buffer in buffers:
            buffer.zero_()
        own.put(buffers[0])

    return Operation(call, fill, wrong, buffers)


def _in_place(case: Case, own: _Own, function: _Call, wrong: Callable[[torch.Tensor], int]) -> Operation:
    """A collective that torch has in place only; out of place a copy precedes it, as a part of the call."""
    result = own.empty(case.counts.send)
    call = partial(function, result)
    if case.in_place:
        return _operation(own, call, lambda: wrong(result), result)
    given = own.empty(case.counts.send)

    def copied() -> None:
        result.copy_(given)
        call()

    return _operation(own, copied, lambda: wrong(result), given, result)


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

    return _operation(own, partial(gather, result, given), wrong, given, result)


def _reduce_scatter(case: Case, own: _Own) -> Operation:
    scatter = tensor_collective("reduce_scatter_single", "reduce_scatter_tensor")
    count = case.counts.receive
    start = own.rank * count
    given = own.empty(case.counts.send)
    result = given[start : start + count] if case.in_place else own.empty(count)
    call = partial(own.reducing(scatter), result, given)
    return _operation(own, call, lambda: own.wrong_sum(result, start), given, result)


def _all_to_all(case: Case, own: _Own) -> Operation:
    exchange = tensor_collective("all_to_all_single")
    given, result = own.empty(case.counts.send), own.empty(case.counts.receive)
    count = len(result) // own.ranks

    def wrong() -> int:
        parts = enumerate(result.split(count))
        return sum(own.wrong_part(part, rank, own.rank * count) for rank, part in parts)

    return _operation(own, partial(exchange, result, given), wrong, given, result)


def _send_recv(case: Case, own: _Own) -> Operation:
    """To the next rank, and from the one before, as nccl-tests' sendrecv."""
    given, result = own.empty(case.counts.send), own.empty(case.counts.receive)
    ahead, behind = (own.rank + 1) % own.ranks, (own.rank - 1) % own.ranks

    def call() -> None:
        sends = dist.P2POp(dist.isend, given, ahead)
        receives = dist.P2POp(dist.irecv, result, behind)
        for pending in dist.batch_isend_irecv([sends, receives]):
            pending.wait()

    return _operation(own, call, lambda: own.wrong_part(result, behind), given, result)


_BUILDERS: dict[str, Callable[[Case, _Own], Operation]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
}


# Their values ---------------------------------------------------------------------------------------------------------


ACTIVE = 16
# 2**6 fits int8.
_FACTORS = 6
_MIDDLE = 50
_WEIGHTS = 7
# Elements that are compared at once: a comparison must not need as much memory as its operands.
_CHUNK = 1 << 22

DTYPES = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
    "bfloat16": torch.bfloat16,
}
OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}


class Values(NamedTuple):
    """The values of `ranks` ranks under `op`. They repeat along the tensor with `period`."""

    op: str
    ranks: int

    @property
    def period(self) -> int:
        """Elements after which the values repeat."""
        return 2 * _WEIGHTS * _WEIGHTS * self.ranks

    def of(self, rank: int) -> torch.Tensor:
        """One period of a rank's input, int64 [period]."""
        index = torch.arange(self.period)
        given, neutral = self._given(index, torch.full_like(index, rank))
        if self.ranks <= self._most:
            return given
        distance = (index - rank) % self.ranks
        return torch.where(distance < self._most, given, torch.full_like(given, neutral))

    def reduced(self) -> torch.Tensor:
        """One period of the reduction of all inputs, float64 [period]; exact but for "avg"."""
        index = torch.arange(self.period)
        parts = (self._given(index, (index - back) % self.ranks)[0] for back in range(min(self._most, self.ranks)))
        whole = reduce(_TOGETHER[self.op], parts).double()
        return whole / self.ranks if self.op == "avg" else whole

    def tolerance(self, dtype: torch.dtype) -> torch.Tensor:
        """Allowed distance of a correct result from `reduced`, float64 [period].

        Only an average is rounded: NCCL multiplies every part by 1/n before it adds (reduce_kernel.h, FuncPreMulSum),
        integers are cut off.
        """
        if self.op != "avg":
            return torch.zeros(self.period, dtype=torch.float64)
        if not dtype.is_floating_point:
            return torch.ones(self.period, dtype=torch.float64)
        return self.reduced().abs() * torch.finfo(dtype).eps * (ACTIVE + 2)

    @property
    def _most(self) -> int:
        """Ranks that contribute to one element; of several extremes one could be missing unnoticed."""
        return {"prod": _FACTORS, "min": 1, "max": 1}.get(self.op, ACTIVE)

    def _given(self, index: torch.Tensor, rank: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Inputs of contributing ranks, and the neutral element."""
        # Ranks that are equal modulo 7 differ in the next seven elements, up to 49 ranks; windows distinguish more.
        turn = index // _WEIGHTS * (1 + rank // _WEIGHTS)
        weight = 1 + (index + 3 * rank + turn) % _WEIGHTS
        match self.op:
            case "prod":
                return 1 + weight % 2, 1
            case "max":
                return _MIDDLE + weight, _MIDDLE
            case "min":
                return _MIDDLE - weight, _MIDDLE
            case _:
                return weight, 0


_TOGETHER: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


def put(table: torch.Tensor, buffer: torch.Tensor) -> None:
    """Fill `buffer` with repetitions of `table`."""
    for start in range(0, len(buffer), _CHUNK):
        part = buffer[start : start + _CHUNK]
        part.copy_(spread(table, start, len(part), part))


def spread(table: torch.Tensor, start: int, count: int, like: torch.Tensor) -> torch.Tensor:
    """`count` elements of a repeated `table`, from element `start` on, with the dtype and device of `like`."""
    period = len(table)
    turned = table.roll(-(start % period)).to(dtype=like.dtype, device=like.device)
    return turned.repeat(-(-count // period))[:count]


def differing(got: torch.Tensor, table: torch.Tensor, tolerance: torch.Tensor, start: int) -> int:
    """Count elements of `got` that differ from a repeated `table`, from element `start` on, beyond the tolerance."""
    exact = not bool(tolerance.any())
    wrong = 0
    for first in range(0, len(got), _CHUNK):
        part = got[first : first + _CHUNK]
        if exact:
            differs = part != spread(table, start + first, len(part), part)
        else:
            double = part.double()
            off = (double - spread(table, start + first, len(part), double)).abs()
            # NaN is no less than anything.
            differs = ~(off <= spread(tolerance, start + first, len(part), double))
        wrong += int(differs.sum().item())
    return wrong
