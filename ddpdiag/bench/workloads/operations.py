"""The collectives of the benchmark, with their buffers, inputs and expected results.

Inputs and sums are whole numbers that every dtype holds exactly (bfloat16 up to 256, int8 up to 127), for any number of
ranks and in any order of adding. For this, only 16 ranks contribute to an element, each a weight from 1 to 7; the other
ranks contribute 0. From each element to the next, the window of 16 ranks moves on by one rank. If a rank is left out,
counted twice or confused with another rank, the result changes.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddpdiag.bandwidth import MessageSize
from ddpdiag.model.bench import IN_PLACE

CONTRIBUTING_RANKS = 16
_WEIGHT_COUNT = 7
# The number of elements that are filled or compared at once, so that a comparison needs little memory.
_CHUNK_ELEMENTS = 1 << 22

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


class MissingCollective(Exception):
    """Raised if this version of torch has no function for the collective."""


class Operation(NamedTuple):
    """A collective over torch's default process group, with its buffers.

    `call` runs the collective once. `count_wrong` returns the number of incorrect elements in this rank's result. The
    first of the `buffers` is the input; the second, if there is one, is the result.
    """

    call: Callable[[], object]
    count_wrong: Callable[[], int]
    buffers: tuple[torch.Tensor, ...]

    def fill(self) -> None:
        """Write this rank's input into the first buffer, and zero the second, which may hold an earlier result."""
        self.clear()
        fill_buffer(input_period(dist.get_rank(), dist.get_world_size()), self.buffers[0])

    def clear(self) -> None:
        """Zero all buffers. Otherwise, sums in place would overflow after many timed calls."""
        for buffer in self.buffers:
            buffer.zero_()


def prepare(collective: str, dtype: str, counts: MessageSize, device: torch.device) -> Operation:
    """Make an operation with new, zeroed buffers. Raises MissingCollective if torch lacks the collective's function."""
    source = torch.zeros(counts.send, dtype=DTYPES[dtype], device=device)
    is_in_place = collective in IN_PLACE
    result = source if is_in_place else torch.zeros(counts.receive, dtype=DTYPES[dtype], device=device)
    buffers = (source,) if is_in_place else (source, result)
    return Operation(_bound_call(collective, source, result), partial(_count_wrong, collective, result), buffers)


def _bound_call(collective: str, source: torch.Tensor, result: torch.Tensor) -> Callable[[], object]:
    """Return a function that runs the collective once. The root is rank 0."""
    match collective:
        case "all_reduce":
            return partial(dist.all_reduce, source)
        case "broadcast":
            return partial(dist.broadcast, source, src=0)
        case "reduce":
            return partial(dist.reduce, source, dst=0)
        case "all_gather":
            return partial(_torch_function("all_gather_single", "all_gather_into_tensor"), result, source)
        case "reduce_scatter":
            return partial(_torch_function("reduce_scatter_single", "reduce_scatter_tensor"), result, source)
        case "all_to_all":
            return partial(_torch_function("all_to_all_single"), result, source)
        case _:
            return partial(_send_recv, source, result)


def _torch_function(*names: str) -> Callable[..., object]:
    """The first of `names` that this torch has, because version 2.13 renamed some. Raises MissingCollective if none."""
    for name in names:
        if (function := getattr(dist, name, None)) is not None:
            return function  # type: ignore[no-any-return]
    raise MissingCollective(f"torch {torch.__version__} has no {names[-1]}")


def _send_recv(source: torch.Tensor, result: torch.Tensor) -> None:
    """Send `source` to the next rank, and receive `result` from the previous one, as nccl-tests' sendrecv does."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sends = dist.P2POp(dist.isend, source, (rank + 1) % ranks)
    receives = dist.P2POp(dist.irecv, result, (rank - 1) % ranks)
    for pending in dist.batch_isend_irecv([sends, receives]):
        pending.wait()


def _count_wrong(collective: str, result: torch.Tensor) -> int:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    match collective:
        case "all_reduce":
            return count_differing(result, sum_period(ranks))
        case "reduce":
            return count_differing(result, sum_period(ranks)) if rank == 0 else 0
        case "reduce_scatter":
            return count_differing(result, sum_period(ranks), rank * len(result))
        case "broadcast":
            return count_differing(result, input_period(0, ranks))
        case "send_recv":
            return count_differing(result, input_period((rank - 1) % ranks, ranks))
        case _:
            parts_by_rank = enumerate(result.split(len(result) // ranks))
            start = rank * (len(result) // ranks) if collective == "all_to_all" else 0
            return sum(count_differing(part, input_period(other, ranks), start) for other, part in parts_by_rank)


def input_period(rank: int, ranks: int) -> torch.Tensor:
    """One period of a rank's input as int64. The input consists of repetitions of this period."""
    index = torch.arange(2 * _WEIGHT_COUNT * _WEIGHT_COUNT * ranks)
    weights = _weights(index, torch.full_like(index, rank))
    return torch.where((index - rank) % ranks < CONTRIBUTING_RANKS, weights, torch.zeros_like(weights))


def sum_period(ranks: int) -> torch.Tensor:
    """One period of the expected sum of all ranks' inputs, as int64."""
    index = torch.arange(2 * _WEIGHT_COUNT * _WEIGHT_COUNT * ranks)
    inputs = (_weights(index, (index - back) % ranks) for back in range(min(CONTRIBUTING_RANKS, ranks)))
    return sum(inputs, torch.zeros_like(index))


def _weights(index: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    # Ranks that are equal modulo 7 differ in the next seven elements (up to 49 ranks), or else by their windows.
    shift = index // _WEIGHT_COUNT * (1 + rank // _WEIGHT_COUNT)
    return 1 + (index + 3 * rank + shift) % _WEIGHT_COUNT


def fill_buffer(period: torch.Tensor, buffer: torch.Tensor) -> None:
    """Fill `buffer` with repetitions of `period`."""
    for start in range(0, len(buffer), _CHUNK_ELEMENTS):
        chunk = buffer[start : start + _CHUNK_ELEMENTS]
        chunk.copy_(repeat_period(period, start, chunk))


def repeat_period(period: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """Repeat `period` from its element `start` on, up to the length of `like`, with the dtype and device of `like`."""
    rotated = period.roll(-(start % len(period))).to(dtype=like.dtype, device=like.device)
    return rotated.repeat(-(-len(like) // len(period)))[: len(like)]


def count_differing(result: torch.Tensor, period: torch.Tensor, start: int = 0) -> int:
    """Count the elements of `result` that differ from repetitions of `period`, begun at its element `start`."""
    wrong = 0
    for first in range(0, len(result), _CHUNK_ELEMENTS):
        chunk = result[first : first + _CHUNK_ELEMENTS]
        wrong += int((chunk != repeat_period(period, start + first, chunk)).sum().item())
    return wrong
