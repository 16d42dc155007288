"""What one process computes without a peer: a product on each device, and the sum of a group of one."""

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ddpdiag.errors import AbsentBackend
from ddpdiag.model.measurements import Group, Product
from ddpdiag.model.trial import Context
from ddpdiag.workloads.devices import choose_device, describe
from ddpdiag.workloads.group import close_group, group_timeout, unknown_backend

SIZE = 512
# Products of such integers stay below 2^24, so float32 holds every partial sum exactly, in whatever order they are
# added; TensorFloat-32 holds the factors.
_LARGEST = 8
_SUMMED = 1024


def products(ctx: Context) -> Iterator[Product]:
    """One on each GPU that torch shows; on the CPU where it shows none."""
    left, right = factors()
    exact = left.to(torch.int64) @ right.to(torch.int64)
    count = torch.cuda.device_count() if torch.version.cuda or torch.version.hip else 0
    for index in range(count):
        ctx.step(f"multiply on GPU {index}")
        yield multiplied(torch.device("cuda", index), left, right, exact)
    if not count:
        ctx.step("multiply on the CPU")
        yield multiplied(torch.device("cpu"), left, right, exact)


def factors() -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices of small integers as float32 [SIZE, SIZE], always the same."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randint(-_LARGEST, _LARGEST + 1, (2, SIZE, SIZE), generator=generator)
    return left.float(), right.float()


def multiplied(device: torch.device, left: torch.Tensor, right: torch.Tensor, exact: torch.Tensor) -> Product:
    """The product on one device, held against the exact one; what torch raises is an answer."""
    name = "the CPU" if device.type == "cpu" else f"GPU {device.index}"
    begin = time.perf_counter()
    try:
        uuid = describe(device).uuid
        found = (left.to(device) @ right.to(device)).cpu()
    except RuntimeError as error:
        return Product(device=name, size=SIZE, error=_first_line(error))
    seconds = time.perf_counter() - begin
    wrong = int((found.to(torch.float64) != exact).sum())
    return Product(device=name, size=SIZE, uuid=uuid, wrong=wrong, seconds=seconds)


def group_of_one(ctx: Context, backend: str) -> Group:
    """Open a process group of this rank alone over a store in memory, sum once, and close it."""
    if (unknown := unknown_backend(backend)) is not None:
        return Group(backend=backend, error=str(unknown))
    ctx.step(f"a group of one over {backend}")
    begin = time.perf_counter()
    try:
        device = choose_device(backend, ctx.place.local_rank)
        timeout = group_timeout(ctx)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        mine = torch.arange(_SUMMED, dtype=torch.float32, device=device)
        dist.all_reduce(mine)
        right = torch.equal(mine.cpu(), torch.arange(_SUMMED, dtype=torch.float32))
        close_group()
    except (RuntimeError, ValueError, AbsentBackend) as error:
        return Group(backend=backend, error=_first_line(error))
    return Group(backend=backend, right=right, seconds=time.perf_counter() - begin)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__
