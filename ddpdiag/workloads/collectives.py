"""All-reduce: are the values right, and how long does it take on this rank?"""

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddpdiag.check import Context

# Values repeat with this period along the tensor, and over the ranks with the next: sums stay exact in float32 up to
# 37,000 ranks.
_PERIOD = 7
_RANK_PERIOD = 64


class Timing(NamedTuple):
    """One size: bytes per rank, seconds of each timed call on this rank, and how many elements were wrong."""

    bytes: int
    seconds: list[float]
    wrong: int


def time_all_reduce(ctx: Context, size: int, device: torch.device, *, warmup: int, iterations: int) -> Timing:
    """All-reduce `size` bytes of float32: once with its values checked, then `warmup` and `iterations` times."""
    count = max(1, size // 4)
    label = f"all_reduce {size} B"
    tensor = pattern(count, dist.get_rank(), device)
    _step_by_step(ctx, tensor, label)
    wrong = int((tensor != total(count, dist.get_world_size(), device)).sum().item())
    ctx.step(f"{label}: {warmup} + {iterations} calls")
    tensor.zero_()
    for _ in range(warmup):
        dist.all_reduce(tensor)
    seconds = []
    for _ in range(iterations):
        _finish(device)
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        _finish(device)
        seconds.append(time.perf_counter() - begin)
    return Timing(count * 4, seconds, wrong)


def _step_by_step(ctx: Context, tensor: torch.Tensor, label: str) -> None:
    """One all-reduce in two steps: a rank that never posts it is told apart from those that wait for it."""
    ctx.step(f"{label}: post")
    work = dist.all_reduce(tensor, async_op=True)
    ctx.step(f"{label}: wait")
    if work is not None:
        work.wait()
    _finish(tensor.device)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pattern(count: int, rank: int, device: torch.device) -> torch.Tensor:
    """This rank's part: `count` small integers that depend on rank and position, exact in float32."""
    ramp = torch.arange(count, device=device, dtype=torch.int32).remainder_(_PERIOD).add_(1)
    return ramp.mul_(rank % _RANK_PERIOD + 1).to(torch.float32)


def total(count: int, world_size: int, device: torch.device) -> torch.Tensor:
    """The sum of all ranks' parts."""
    weight = sum(rank % _RANK_PERIOD + 1 for rank in range(world_size))
    ramp = torch.arange(count, device=device, dtype=torch.int32).remainder_(_PERIOD).add_(1)
    return ramp.mul_(weight).to(torch.float32)
