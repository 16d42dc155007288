"""Fixed-seed steps and collectives whose results must be equal, bit for bit, on all ranks with equal devices.

A step computes a matrix product and a short training, a pure function of its number, and runs an all-reduce and a
broadcast of known values. After each step the ranks exchange digests of the results. In the first step with a
difference each rank repeats its own part, which shows whether it agrees with itself.
"""

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b

import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor

from ddpdiag.model.measurements import Soak, SoakDifference
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.environment import driver_version
from ddpdiag.probes.host.kernel import proc_root, read_pairs
from ddpdiag.text import count
from ddpdiag.workloads.collectives import check_all_reduce, check_broadcast, minima_over_ranks
from ddpdiag.workloads.devices import describe, time_call
from ddpdiag.workloads.mnist import Digits
from ddpdiag.workloads.proof import SEED, compute_gradient, flatten, proof_network, without_tf32

# The dtypes of products in turn.
_DTYPES_ON_CPU, _DTYPES = (torch.float32, torch.float64), (torch.float32, torch.bfloat16, torch.float16)
# A product has at most _MAX_ROWS rows, and fewer where it would take longer than about _PRODUCT_SECONDS.
_MIN_ROWS, _MAX_ROWS, _PRODUCT_SECONDS = 512, 4096, 0.02
_IMAGES_ON_CPU, _IMAGES = 16, 256
_BATCHES = 2
# Bytes of a collective in turn: NCCL changes its algorithm in between. An odd number of elements is badly aligned.
_SIZES = tuple(size + 12 for size in (8, 4 << 10, 256 << 10, 1 << 20, 4 << 20))
_REPETITIONS = 2
_END_SECONDS = 3.0  # to finish a step, and to close the group, before the deadline
_REPORT_SECONDS = 5.0
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def deterministic() -> Iterator[None]:
    """Let torch use only algorithms that give the same bits each time. It raises RuntimeError where it has none."""
    was_on = torch.are_deterministic_algorithms_enabled()
    # Without this variable torch refuses products on GPUs (documentation of use_deterministic_algorithms).
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        with without_tf32():
            yield
    finally:
        torch.use_deterministic_algorithms(was_on)


def name_device(device: torch.device) -> str:
    """Describe the device and the software: others may round otherwise, although nothing is wrong."""
    proc = proc_root(os.environ)
    facts = f"{describe(device).name}, driver {driver_version(proc) or 'unknown'}"
    if device.type == "cpu":
        model = read_pairs(proc / "cpuinfo", ":").get("model name", platform.machine())
        facts = f"{model}, {torch.backends.cpu.get_cpu_capability()}, {count(torch.get_num_threads(), 'thread')}"
    return f"{facts}, torch {torch.__version__}"


def dtypes_of(device: torch.device) -> tuple[torch.dtype, ...]:
    return _DTYPES_ON_CPU if device.type == "cpu" else _DTYPES


def affordable_rows(device: torch.device) -> int:
    """Measure how many rows a square matrix may have, so that a product takes some milliseconds in each dtype."""
    rows = _MIN_ROWS
    while rows < _MAX_ROWS:
        matrices = [torch.zeros((rows, rows), dtype=dtype, device=device) for dtype in dtypes_of(device)]
        calls = [partial(torch.matmul, matrix, matrix) for matrix in matrices]
        # The first call loads kernels.
        slowest = max(min(time_call(call, device) for _ in range(3)) for call in calls)
        if 8 * slowest > _PRODUCT_SECONDS:  # the seconds of twice as many rows
            break
        rows *= 2
    return rows


def draw_matrix(rows: int, device: torch.device) -> Tensor:
    """Draw the square matrix that each step multiplies, the same on every rank: float32."""
    return torch.rand((rows, rows), generator=torch.Generator().manual_seed(SEED)).sub_(0.5).to(device)


def compute_step(digits: Digits, matrix: Tensor, step: int) -> dict[str, int]:
    """Compute the local part of a step on the device of `matrix`. Returns a digest of each result, by its name."""
    device, dtypes = matrix.device, dtypes_of(matrix.device)
    dtype, images = dtypes[step % len(dtypes)], _IMAGES_ON_CPU if device.type == "cpu" else _IMAGES
    product = torch.mm(matrix.roll(step, 0).to(dtype), matrix.to(dtype))
    model = proof_network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in range(step * _BATCHES, (step + 1) * _BATCHES):
        gradient = compute_gradient(model, digits, range(batch * images, (batch + 1) * images), device)
        optimizer.step()
    return {
        f"matrix product in {str(dtype).removeprefix('torch.')}": digest(product),
        "gradient": digest(gradient),
        "parameters": digest(flatten([*model.parameters()])),
    }


def digest(tensor: Tensor) -> int:
    """Sum the words of a tensor, each times another odd number, modulo 2^64, whatever the order of the additions.

    If one word changes, the sum changes, because odd numbers have an inverse modulo 2^64.
    """
    words = tensor.detach().reshape(-1).view(_WORDS[tensor.element_size()]).to(torch.int64)
    return int((words * torch.arange(1, 2 * len(words), 2, device=words.device)).sum())


def gather(numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """Return the `numbers` (of 64 bits) of each rank. Runs a collective: all ranks call it."""
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    rows = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return [row.tolist() for row in rows]


def run_steps(
    ctx: Context, digits: Digits, device: torch.device, first_step: int, seconds: float, report: Callable[[Soak], None]
) -> Soak:
    """Run and compare steps for `seconds`, by the clock of the group's first rank. All ranks call it.

    Calls `report` every few seconds, and after the first difference. torch's errors are not caught.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    result = Soak(device=name_device(device), uuid=describe(device).uuid)
    ctx.step("compare the devices")
    devices = gather([int.from_bytes(blake2b(result.device.encode(), digest_size=7).digest())], device)
    peers = [peer for peer in range(world_size) if devices[peer] == devices[rank]]
    ctx.step("agree on the size of the products")
    matrix = draw_matrix(minima_over_ranks([affordable_rows(device)], device)[0], device)
    begin = reported_at = time.monotonic()
    end, is_over = min(begin + seconds, ctx.end - _END_SECONDS), False
    while not is_over:
        step = first_step + result.steps
        ctx.step(f"soak step {step}: compute")
        digests = compute_step(digits, matrix, step)
        # Each sender has each size in turn, whatever the number of ranks.
        size, sender = _SIZES[(step + step // world_size) % len(_SIZES)], step % world_size
        local = len(digests)
        digests[f"all_reduce of {size} B"] = check_all_reduce(ctx, size, device).wrong
        digests[f"broadcast of {size} B from rank {ctx.group[sender]}"] = check_broadcast(ctx, size, sender, device)
        ctx.step(f"soak step {step}: compare")
        own = [*digests.values()]
        table = gather([*own, time.monotonic() >= end], device)
        is_over = bool(table[0][-1])
        differs = any(table[peer][:-1] != own for peer in peers) or any(any(row[local:-1]) for row in table)
        first = result.first_difference
        if differs and first is None:
            ctx.step(f"soak step {step}: repeat")
            repeated = tuple(_as_text(compute_step(digits, matrix, step)) for _ in range(_REPETITIONS))
            first = SoakDifference(step=step, digests=_as_text(digests), repeated=repeated)
        is_news = first is not result.first_difference
        result = structs.replace(
            result,
            steps=result.steps + 1,
            bytes=result.bytes + 2 * size,
            seconds=time.monotonic() - begin,
            different_steps=result.different_steps + differs,
            first_difference=first,
        )
        # The first step, too: of a soak that is interrupted soon, the report says what was tried.
        if is_news or result.steps == 1 or time.monotonic() - reported_at >= _REPORT_SECONDS:
            reported_at = time.monotonic()
            report(result)
    return result


def _as_text(digests: dict[str, int]) -> dict[str, str]:
    return {name: f"{number % (1 << 64):016x}" for name, number in digests.items()}
