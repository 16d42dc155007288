"""All-reduce: are the values right, and how long does it take on this rank?"""

import time
from collections.abc import Callable
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


class Calls(NamedTuple):
    """How many calls warm up, and how many are timed."""

    warmup: int
    timed: int


def connect(ctx: Context, device: torch.device) -> None:
    """One tiny all-reduce, counted as opening the group: in the first one NCCL connects its ranks, for seconds."""
    begin = time.perf_counter()
    _step_by_step(ctx, torch.zeros(1, device=device), "connect all ranks")
    ctx.timed("group", time.perf_counter() - begin)


def time_all_reduce(ctx: Context, size: int, device: torch.device, afford: Callable[[float], Calls]) -> Timing:
    """All-reduce `size` bytes of float32: once with its values checked, then as often as all ranks can afford.

    `afford` gives this rank's own number of calls from the seconds that the checked one took.
    """
    count = max(1, size // 4)
    label = f"all_reduce {size} B"
    tensor = pattern(count, dist.get_rank(), device)
    begin = time.perf_counter()
    _step_by_step(ctx, tensor, label)
    calls = afford(time.perf_counter() - begin)
    wrong = int((tensor != total(count, dist.get_world_size(), device)).sum().item())
    ctx.step(f"{label}: agree on the number of calls")
    warmup, iterations = _least(calls, device)
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


def _least(calls: Calls, device: torch.device) -> Calls:
    """What the rank with the fewest can afford: all must make the same number of calls."""
    own = torch.tensor(calls, dtype=torch.int32, device=device)
    dist.all_reduce(own, op=dist.ReduceOp.MIN)
    warmup, timed = own.tolist()
    return Calls(warmup, timed)


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
