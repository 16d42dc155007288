"""What each rank puts into a collective, and what must come out, exactly, in every dtype.

Sums must stay exact in bfloat16 (whole numbers up to 256) and int8 (up to 127), in any order of adding, however many
ranks there are. So each element has at most 16 ranks that give something (a weight from 1 to 7), the next element the
next 16; the others give what changes nothing. A rank that is left out, counted twice or taken for another one shows.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

ACTIVE = 16
# 2**6 fits int8.
_FACTORS = 6
_MIDDLE = 50
_WEIGHTS = 7
# Elements that are compared at once: a comparison must not need as much memory as what it compares.
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
        """After so many elements everything is as at the start."""
        return 2 * _WEIGHTS * _WEIGHTS * self.ranks

    def of(self, rank: int) -> torch.Tensor:
        """One period of what a rank gives, int64 [period]."""
        index = torch.arange(self.period)
        given, neutral = self._given(index, torch.full_like(index, rank))
        if self.ranks <= self._most:
            return given
        distance = (index - rank) % self.ranks
        return torch.where(distance < self._most, given, torch.full_like(given, neutral))

    def reduced(self) -> torch.Tensor:
        """One period of what the ranks give together, float64 [period]; exact but for "avg"."""
        index = torch.arange(self.period)
        parts = (self._given(index, (index - back) % self.ranks)[0] for back in range(min(self._most, self.ranks)))
        whole = next(parts)
        for part in parts:
            whole = _TOGETHER[self.op](whole, part)
        return whole.double() / self.ranks if self.op == "avg" else whole.double()

    def tolerance(self, dtype: torch.dtype) -> torch.Tensor:
        """How far a right result may be from `reduced`, float64 [period].

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
        """How many ranks give something to one element; of several extremes one could be missing unnoticed."""
        return {"prod": _FACTORS, "min": 1, "max": 1}.get(self.op, ACTIVE)

    def _given(self, index: torch.Tensor, rank: torch.Tensor) -> tuple[torch.Tensor, int]:
        """What ranks give that give something, and what the others give."""
        # Ranks that are alike modulo 7 differ in the next seven elements, up to 49 ranks; windows tell more ones apart.
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
    """Fill `buffer` with what repeats as `table`."""
    for start in range(0, len(buffer), _CHUNK):
        part = buffer[start : start + _CHUNK]
        part.copy_(spread(table, start, len(part), part))


def spread(table: torch.Tensor, start: int, count: int, like: torch.Tensor) -> torch.Tensor:
    """`count` elements of what repeats as `table`, from the element `start` on, of the dtype and device of `like`."""
    period = len(table)
    turned = table.roll(-(start % period)).to(dtype=like.dtype, device=like.device)
    return turned.repeat(-(-count // period))[:count]


def differing(got: torch.Tensor, table: torch.Tensor, tolerance: torch.Tensor, start: int) -> int:
    """How many elements of `got` differ from what repeats as `table`, from the element `start` on, by more than it."""
    exact = not bool(tolerance.any())
    wrong = 0
    for first in range(0, len(got), _CHUNK):
        part = got[first : first + _CHUNK]
        if exact:
            wrong += int((part != spread(table, start + first, len(part), part)).sum().item())
            continue
        double = part.double()
        off = (double - spread(table, start + first, len(part), double)).abs()
        # NaN is no less than anything.
        wrong += int((~(off <= spread(tolerance, start + first, len(part), double))).sum().item())
    return wrong
