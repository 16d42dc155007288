"""The collectives with their buffers and known values.

Inputs and sums are exact in every dtype, also in bfloat16 (whole numbers up to 256) and int8 (up to 127), in any order
of adding and for any number of ranks. For this, only 16 ranks contribute to an element (weights from 1 to 7), and the
other ranks contribute 0. The window of 16 ranks moves by one rank from element to element. A rank that is left out,
counted twice or confused with another one changes the result.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddpdiag.bandwidth import Counts
from ddpdiag.model.bench import IN_PLACE

ACTIVE = 16
_WEIGHTS = 7
# Elements that are filled or compared at once, so that a comparison needs less memory than its operands.
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


class Missing(Exception):
    """This torch, or this backend, has no such collective."""


class Operation(NamedTuple):
    """A collective with its buffers in the default group.

    `call` runs the collective once, `wrong` counts the incorrect elements of this rank's result.
    """

    call: Callable[[], object]
    wrong: Callable[[], int]
    buffers: tuple[torch.Tensor, ...]

    def fill(self) -> None:
        """Write this rank's values into the first buffer, and zero the other one, which may hold an earlier result."""
        self.clear()
        put(values(dist.get_rank(), dist.get_world_size()), self.buffers[0])

    def clear(self) -> None:
        """Zero all buffers, so that repeated sums in place do not overflow while calls are timed."""
        for buffer in self.buffers:
            buffer.zero_()


def prepare(collective: str, dtype: str, counts: Counts, device: torch.device) -> Operation:
    """Allocate buffers for a collective, and return it with them. Raises Missing if torch lacks the function."""
    given = torch.zeros(counts.send, dtype=DTYPES[dtype], device=device)
    if collective in IN_PLACE:
        return Operation(_call(collective, given, given), partial(_wrong, collective, given), (given,))
    result = torch.zeros(counts.receive, dtype=DTYPES[dtype], device=device)
    return Operation(_call(collective, given, result), partial(_wrong, collective, result), (given, result))


def _call(collective: str, given: torch.Tensor, result: torch.Tensor) -> Callable[[], object]:
    """A function that runs the collective once, with rank 0 as its root."""
    match collective:
        case "all_reduce":
            return partial(dist.all_reduce, given)
        case "broadcast":
            return partial(dist.broadcast, given, src=0)
        case "reduce":
            return partial(dist.reduce, given, dst=0)
        case "all_gather":
            return partial(_function("all_gather_single", "all_gather_into_tensor"), result, given)
        case "reduce_scatter":
            return partial(_function("reduce_scatter_single", "reduce_scatter_tensor"), result, given)
        case "all_to_all":
            return partial(_function("all_to_all_single"), result, given)
        case _:
            return partial(_send_recv, given, result)


def _function(*names: str) -> Callable[..., object]:
    """The first of these functions that this torch has: 2.13 renamed all_gather_into_tensor to all_gather_single."""
    for name in names:
        if (function := getattr(dist, name, None)) is not None:
            return function  # type: ignore[no-any-return]
    raise Missing(f"torch {torch.__version__} has no {names[-1]}")


def _send_recv(given: torch.Tensor, result: torch.Tensor) -> None:
    """Send to the next rank, and receive from the previous rank, as nccl-tests' sendrecv does."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sends = dist.P2POp(dist.isend, given, (rank + 1) % ranks)
    receives = dist.P2POp(dist.irecv, result, (rank - 1) % ranks)
    for pending in dist.batch_isend_irecv([sends, receives]):
        pending.wait()


def _wrong(collective: str, result: torch.Tensor) -> int:
    """The number of incorrect elements in this rank's result."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    match collective:
        case "all_reduce":
            return differing(result, total(ranks))
        case "reduce":
            return differing(result, total(ranks)) if rank == 0 else 0
        case "reduce_scatter":
            return differing(result, total(ranks), rank * len(result))
        case "broadcast":
            return differing(result, values(0, ranks))
        case "send_recv":
            return differing(result, values((rank - 1) % ranks, ranks))
        case _:
            parts = enumerate(result.split(len(result) // ranks))
            start = rank * (len(result) // ranks) if collective == "all_to_all" else 0
            return sum(differing(part, values(other, ranks), start) for other, part in parts)


def values(rank: int, ranks: int) -> torch.Tensor:
    """One period of a rank's input as int64. The input is this period, repeated along the tensor."""
    index = torch.arange(2 * _WEIGHTS * _WEIGHTS * ranks)
    given = _weights(index, torch.full_like(index, rank))
    return torch.where((index - rank) % ranks < ACTIVE, given, torch.zeros_like(given))


def total(ranks: int) -> torch.Tensor:
    """One period of the sum of all ranks' inputs as int64."""
    index = torch.arange(2 * _WEIGHTS * _WEIGHTS * ranks)
    parts = (_weights(index, (index - back) % ranks) for back in range(min(ACTIVE, ranks)))
    return sum(parts, torch.zeros_like(index))


def _weights(index: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    # Ranks that are equal modulo 7 differ in the next seven elements, up to 49 ranks; others differ by their window.
    turn = index // _WEIGHTS * (1 + rank // _WEIGHTS)
    return 1 + (index + 3 * rank + turn) % _WEIGHTS


def put(table: torch.Tensor, buffer: torch.Tensor) -> None:
    """Fill `buffer` with repetitions of `table`."""
    for start in range(0, len(buffer), _CHUNK):
        part = buffer[start : start + _CHUNK]
        part.copy_(repeated(table, start, part))


def repeated(table: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """The elements of a repeated `table` from element `start` on, with the length, dtype and device of `like`."""
    turned = table.roll(-(start % len(table))).to(dtype=like.dtype, device=like.device)
    return turned.repeat(-(-len(like) // len(table)))[: len(like)]


def differing(result: torch.Tensor, table: torch.Tensor, start: int = 0) -> int:
    """Count elements of `result` that differ from a repeated `table`, from element `start` on."""
    wrong = 0
    for first in range(0, len(result), _CHUNK):
        part = result[first : first + _CHUNK]
        wrong += int((part != repeated(table, start + first, part)).sum().item())
    return wrong
