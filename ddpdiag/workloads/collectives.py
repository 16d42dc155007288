"""All-reduces and broadcasts with known values: their seconds on this rank, and the ranks whose values are wrong."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ddpdiag.model.trial import CONNECT_STEP, Context
from ddpdiag.workloads.devices import synchronize, timed

# The values of a tensor repeat after _PERIOD elements, and those of rank r are equal to those of rank r + RANK_PERIOD:
# sums stay exact in float32 up to 37,000 ranks.
_PERIOD = 7
RANK_PERIOD = 64


class Checked(NamedTuple):
    """One all-reduce: bytes per rank, seconds on this rank, and the number of wrong elements in this rank's result."""

    bytes: int
    seconds: float
    wrong: int


def connect(ctx: Context, device: torch.device) -> None:
    """Run one tiny all-reduce. NCCL connects its ranks in the first one, for seconds, so it counts as group opening."""
    begin = time.perf_counter()
    ctx.step(f"{CONNECT_STEP}: post")
    work = dist.all_reduce(torch.zeros(1, device=device), async_op=True)
    if dist.get_backend() != "gloo":
        # Wait until the slowest rank has posted, as the all-reduce itself would.
        ctx.step(f"{CONNECT_STEP}: posted")
        store = dist.PrefixStore("ddpdiag-posted", _get_default_store())
        if store.add("ranks", 1) == dist.get_world_size():
            store.set("all", "")
        store.wait(["all"])
        ctx.timed(CONNECT_STEP, time.perf_counter() - begin)
    ctx.step(f"{CONNECT_STEP}: wait")
    if work is not None:
        work.wait()
    synchronize(device)
    ctx.timed("group", time.perf_counter() - begin)


def check_all_reduce(ctx: Context, size: int, device: torch.device) -> Checked:
    """All-reduce `size` bytes of float32, and compare the result with the known sum."""
    count = max(1, size // 4)
    tensor = pattern(count, dist.get_rank(), device)
    begin = time.perf_counter()
    _step_by_step(ctx, tensor, f"all_reduce {size} B")
    seconds = time.perf_counter() - begin
    expected = total(count, dist.get_world_size(), device)
    return Checked(count * 4, seconds, int((tensor != expected).sum().item()))


def time_all_reduce(ctx: Context, size: int, device: torch.device, calls: tuple[int, int]) -> list[float]:
    """Time all-reduces of `size` bytes: the seconds of each on this rank.

    `calls` are the numbers of untimed and of timed all-reduces. All ranks use the smallest numbers of any rank.
    """
    label = f"all_reduce {size} B"
    ctx.step(f"{label}: agree on the number of calls")
    warmup, iterations = least(calls, device)
    ctx.step(f"{label}: {warmup} + {iterations} calls")
    tensor = torch.zeros(max(1, size // 4), device=device)
    for _ in range(warmup):
        dist.all_reduce(tensor)
    return [timed(lambda: dist.all_reduce(tensor), device) for _ in range(iterations)]


def fewest(ctx: Context, number: int, device: torch.device) -> int:
    """The smallest `number` of any rank, below 2^31. A collective: all ranks call it."""
    ctx.step("agree on the size")
    return least([number], device)[0]


def least(numbers: Sequence[int], device: torch.device) -> list[int]:
    """For each of these numbers (below 2^31), the smallest of any rank. A collective: all ranks call it."""
    smallest = torch.tensor(numbers, dtype=torch.int32, device=device)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return [int(number) for number in smallest.tolist()]


def on_any_rank(ctx: Context, condition: bool) -> bool:
    """Whether `condition` is true on any rank. Compared through the store, since a collective may give wrong values."""
    ctx.step("compare notes")
    store = dist.PrefixStore(f"ddpdiag-notes-{ctx.trial.number}", _get_default_store())
    store.add("holds", int(condition))
    if store.add("told", 1) == dist.get_world_size():
        store.set("answer", str(store.add("holds", 0)))
    return int(store.get("answer")) > 0


def broadcasts(ctx: Context, size: int, device: torch.device, most: int) -> tuple[int, tuple[int, ...]]:
    """Let one rank after the other broadcast its pattern: the number of senders, and those with a wrong pattern here.

    `most` of rank 0 limits the number of senders. A sender checks its local copy as well.
    """
    count, wrong = max(1, size // 4), []
    store = dist.PrefixStore(f"ddpdiag-broadcasts-{ctx.trial.number}", _get_default_store())
    if dist.get_rank() == 0:
        store.set("senders", str(min(most, dist.get_world_size())))
    senders = int(store.get("senders"))
    for sender in range(senders):
        ctx.step(f"broadcast {count * 4} B from rank {ctx.group[sender]}")
        expected = pattern(count, sender, device)
        tensor = expected.clone() if sender == dist.get_rank() else torch.zeros_like(expected)
        dist.broadcast(tensor, src=sender)
        if bool((tensor != expected).any().item()):
            wrong.append(ctx.group[sender])
    return senders, tuple(wrong)


def _step_by_step(ctx: Context, tensor: torch.Tensor, label: str) -> None:
    """Run an all-reduce in two announced steps: a rank that never posts it differs from ranks that wait for it."""
    ctx.step(f"{label}: post")
    work = dist.all_reduce(tensor, async_op=True)
    ctx.step(f"{label}: wait")
    if work is not None:
        work.wait()
    synchronize(tensor.device)


def pattern(count: int, rank: int, device: torch.device) -> torch.Tensor:
    """The input of `rank`: `count` small integers, 1, 2, ... 7, 1, 2, ... times the rank's weight; exact in float32."""
    return _ramp(count, device).mul_(rank % RANK_PERIOD + 1)


def total(count: int, world_size: int, device: torch.device) -> torch.Tensor:
    """The sum of the inputs (`pattern`) of all ranks."""
    return _ramp(count, device).mul_(sum(rank % RANK_PERIOD + 1 for rank in range(world_size)))


def _ramp(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device, dtype=torch.int32).remainder_(_PERIOD).add_(1).to(torch.float32)
