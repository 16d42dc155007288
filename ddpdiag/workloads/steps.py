"""The seconds of each phase of a training step on this rank, which show the rank that all others wait for.

All ranks finish an all-reduce together, so the rank that starts last has a short time in it, and the others have long
ones. DDP runs it during the backward pass; these steps average the gradients afterwards instead (`no_sync`), timed.

The gradients of a small network say nothing about bandwidth, so a message as large as a bucket of DDP is timed as well.
"""

import time
from itertools import pairwise
from statistics import fmean

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddpdiag.model.measurements import Steps, Window
from ddpdiag.model.trial import Context
from ddpdiag.workloads.collectives import least
from ddpdiag.workloads.devices import synchronize, timed
from ddpdiag.workloads.mnist import Digits
from ddpdiag.workloads.proof import batch, seeded

# A rank that shares its cores is late in some steps only, so a window is the mean of several steps.
STEPS_PER_WINDOW, WARMUP_STEPS = 5, 3
IMAGES = 16
# DDP's default bucket_cap_mb.
BUCKET_BYTES = 25 << 20
_BUCKET_CALLS = 3
# If the all-reduce of a bucket would take longer, a smaller one is timed, but of at least _LEAST_BUCKET_BYTES.
_BUCKET_SECONDS, _LEAST_BUCKET_BYTES = 1.0, 1 << 20
_OVERLAP_STEPS = 5


def watch_steps(ctx: Context, digits: Digits, device: torch.device, windows: int) -> Steps:
    """Time `windows` windows of steps, the overlap and a bucket. All ranks call this; torch's errors are not caught."""
    model = DistributedDataParallel(seeded(device), device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    laps = [
        watched_step(ctx, model, optimizer, digits, step, device)
        for step in range(WARMUP_STEPS + windows * STEPS_PER_WINDOW)
    ][WARMUP_STEPS:]
    laps_of_windows = (laps[start : start + STEPS_PER_WINDOW] for start in range(0, len(laps), STEPS_PER_WINDOW))
    overlap = overlap_of(ctx, model, optimizer, digits, device)
    bucket_bytes, bucket_seconds = bucket(ctx, device)
    return Steps(
        windows=tuple(map(window, laps_of_windows)),
        bucket_bytes=bucket_bytes,
        bucket_seconds=bucket_seconds,
        overlap=overlap,
    )


def watched_step(
    ctx: Context, model: DistributedDataParallel, optimizer: Optimizer, digits: Digits, step: int, device: torch.device
) -> Window:
    """Run one step with the gradients averaged after the backward pass: the seconds of each phase on the device."""
    moments: list[float] = []

    def lap() -> None:
        synchronize(device)
        moments.append(time.perf_counter())

    synchronize(device)
    ctx.step(f"watched step {step + 1}")
    begin = time.process_time()
    lap()
    first = (step * dist.get_world_size() + dist.get_rank()) * IMAGES
    images, labels = batch(digits, range(first, first + IMAGES), device)
    lap()
    with model.no_sync():  # without DDP's all-reduce
        loss = cross_entropy(model(images), labels)
        lap()
        optimizer.zero_grad()
        loss.backward()
    lap()
    core = time.process_time() - begin
    average(model)
    lap()
    optimizer.step()
    lap()
    data, forward, backward, wait, stepped = (later - sooner for sooner, later in pairwise(moments))
    return Window(data, forward, backward, wait, stepped, core / max(1e-9, data + forward + backward))


def average(model: nn.Module) -> None:
    """Replace the gradients by their means over all ranks, in one message, as DDP does during the backward pass."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    together = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(together)
    together /= dist.get_world_size()
    for gradient, mean in zip(gradients, together.split([own.numel() for own in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def window(laps: list[Window]) -> Window:
    """The mean of each phase over some steps."""
    return Window(*(fmean(getattr(lap, name) for lap in laps) for name in Window.__struct_fields__))


def overlap_of(
    ctx: Context, model: DistributedDataParallel, optimizer: Optimizer, digits: Digits, device: torch.device
) -> float | None:
    """Run ordinary steps: the share of communication during the backward pass by DDP's times; None without these."""
    ctx.step("ordinary steps, for the overlap")
    model._set_ddp_runtime_logging_sample_rate(1)
    for step in range(_OVERLAP_STEPS):
        images, labels = batch(digits, range(step * IMAGES, (step + 1) * IMAGES), device)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    times = model._get_ddp_logging_data()
    whole, hidden = times.get("avg_backward_comm_time"), times.get("avg_backward_compute_comm_overlap_time")
    if not isinstance(whole, int | float) or not isinstance(hidden, int | float) or whole <= 0:
        return None
    return min(1.0, hidden / whole)


def bucket(ctx: Context, device: torch.device) -> tuple[int, float]:
    """Time all-reduces of the size of a DDP bucket, or less on a slow network: the bytes, and the shortest seconds."""
    ctx.step("a small bucket")
    seconds = reduced(_LEAST_BUCKET_BYTES, 2, device)
    affords = int(_LEAST_BUCKET_BYTES * _BUCKET_SECONDS / max(seconds, 1e-6))
    (size,) = least([max(_LEAST_BUCKET_BYTES, min(BUCKET_BYTES, affords - affords % 4))], device)
    ctx.step(f"a bucket of {size} B")
    return size, reduced(size, _BUCKET_CALLS, device)


def reduced(size: int, calls: int, device: torch.device) -> float:
    """The shortest seconds of `calls` all-reduces of `size` bytes."""
    tensor = torch.zeros(size // 4, device=device)
    return min(timed(lambda: dist.all_reduce(tensor), device) for _ in range(calls))
