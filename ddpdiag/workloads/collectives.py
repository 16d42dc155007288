"""All-reduces and broadcasts over the open process group, which are timed on this rank or checked for wrong values."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ddpdiag.model.trial import CONNECT_STEP, Context
from ddpdiag.workloads.devices import synchronize, time_call

# The values of a tensor repeat after _PERIOD elements, and rank r has the same values as rank r + RANK_PERIOD. So sums
# stay exact in float32 up to 37,000 ranks.
_PERIOD = 7
RANK_PERIOD = 64


class AllReduceCheck(NamedTuple):
    """The result of one all-reduce on this rank: bytes per rank, seconds, and the number of wrong elements."""

    bytes: int
    seconds: float
    wrong: int


def connect(ctx: Context, device: torch.device) -> None:
    """Run the group's first all-reduce, which connects the ranks. Times `group` and, except for gloo, CONNECT_STEP."""
    begin = time.perf_counter()
    ctx.step(f"{CONNECT_STEP}: post")
    work = dist.all_reduce(torch.zeros(1, device=device), async_op=True)
    if dist.get_backend() != "gloo":
        # Wait until the slowest rank has posted its all-reduce. The all-reduce itself would wait as long.
        ctx.step(f"{CONNECT_STEP}: posted")
        store = dist.PrefixStore("ddpdiag-posted", _get_default_store())
        if store.add("ranks", 1) == dist.get_world_size():
            store.set("all", "")
        store.wait(["all"])
        ctx.add_timing(CONNECT_STEP, time.perf_counter() - begin)
    ctx.step(f"{CONNECT_STEP}: wait")
    work.wait()
    synchronize(device)
    ctx.add_timing("group", time.perf_counter() - begin)


def check_all_reduce(ctx: Context, size: int, device: torch.device) -> AllReduceCheck:
    """All-reduce `size` bytes of float32 per rank, and compare the result with the known sum."""
    count = max(1, size // 4)
    tensor = pattern(count, dist.get_rank(), device)
    begin = time.perf_counter()
    # Two steps, so that a rank that never posts its all-reduce differs from ranks that wait for it.
    ctx.step(f"all_reduce {size} B: post")
    work = dist.all_reduce(tensor, async_op=True)
    ctx.step(f"all_reduce {size} B: wait")
    work.wait()
    synchronize(device)
    seconds = time.perf_counter() - begin
    expected = expected_sum(count, dist.get_world_size(), device)
    return AllReduceCheck(count * 4, seconds, int((tensor != expected).sum().item()))


def time_all_reduce(ctx: Context, size: int, device: torch.device, calls: tuple[int, int]) -> list[float]:
    """Run all-reduces of `size` bytes per rank, and return the seconds of each timed one on this rank.

    `calls` are the numbers of untimed and of timed all-reduces. Each is reduced to the smallest number of any rank.
    """
    label = f"all_reduce {size} B"
    ctx.step(f"{label}: agree on the number of calls")
    warmup, timed_calls = minima_over_ranks(calls, device)
    ctx.step(f"{label}: {warmup} warm-up and {timed_calls} timed calls")
    tensor = torch.zeros(max(1, size // 4), device=device)
    for _ in range(warmup):
        dist.all_reduce(tensor)
    return [time_call(lambda: dist.all_reduce(tensor), device) for _ in range(timed_calls)]


def minimum_over_ranks(ctx: Context, number: int, device: torch.device) -> int:
    """Return the smallest `number` (below 2^31) that any rank passes. Runs a collective, so all ranks must call it."""
    ctx.step("agree on the size")
    return minima_over_ranks([number], device)[0]


def minima_over_ranks(numbers: Sequence[int], device: torch.device) -> list[int]:
    """Return for each position the smallest number (below 2^31) of any rank. Runs a collective: all ranks call it."""
    smallest = torch.tensor(numbers, dtype=torch.int32, device=device)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return [int(number) for number in smallest.tolist()]


def is_true_on_any_rank(ctx: Context, condition: bool) -> bool:
    """Whether `condition` is true on any rank. Uses the store: an all-reduce may be wrong. All ranks call it."""
    ctx.step("compare results")
    store = dist.PrefixStore(f"ddpdiag-notes-{ctx.trial.number}", _get_default_store())
    store.add("true", int(condition))
    if store.add("ranks", 1) == dist.get_world_size():
        store.set("answer", str(store.add("true", 0)))
    return int(store.get("answer")) > 0


def check_broadcasts(ctx: Context, size: int, device: torch.device, max_senders: int) -> tuple[int, tuple[int, ...]]:
    """Let one rank after the other broadcast its `pattern`. Returns the number of senders, and the wrong senders.

    A sender is wrong if its values differ from its `pattern` on this rank. A sender also checks its own copy. Rank 0's
    `max_senders` limits the number of senders.
    """
    wrong = []
    store = dist.PrefixStore(f"ddpdiag-broadcasts-{ctx.trial.number}", _get_default_store())
    if dist.get_rank() == 0:
        store.set("senders", str(min(max_senders, dist.get_world_size())))
    senders = int(store.get("senders"))
    for sender in range(senders):
        if check_broadcast(ctx, size, sender, device):
            wrong.append(ctx.group[sender])
    return senders, tuple(wrong)


def check_broadcast(ctx: Context, size: int, sender: int, device: torch.device) -> int:
    """Let the group's rank `sender` broadcast `size` bytes of its `pattern`. Returns the wrong elements here."""
    count = max(1, size // 4)
    ctx.step(f"broadcast {count * 4} B from rank {ctx.group[sender]}")
    expected = pattern(count, sender, device)
    tensor = expected.clone() if sender == dist.get_rank() else torch.zeros_like(expected)
    dist.broadcast(tensor, src=sender)
    return int((tensor != expected).sum().item())


def pattern(count: int, rank: int, device: torch.device) -> torch.Tensor:
    """The input of `rank`: `count` numbers 1, 2, ... 7, 1, 2, ... times `rank % RANK_PERIOD + 1`, exact in float32."""
    return _ramp(count, device).mul_(rank % RANK_PERIOD + 1)


def expected_sum(count: int, world_size: int, device: torch.device) -> torch.Tensor:
    """The exact sum of the inputs (`pattern`) of all ranks."""
    return _ramp(count, device).mul_(sum(rank % RANK_PERIOD + 1 for rank in range(world_size)))


def _ramp(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device, dtype=torch.int32).remainder_(_PERIOD).add_(1).to(torch.float32)
