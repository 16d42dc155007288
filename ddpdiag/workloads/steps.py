"""The seconds of each phase of a training step on this rank, which show the rank that the other ranks wait for.

All ranks finish an all-reduce together, so the last rank to start it spends the least time in it. DDP runs its
all-reduces during the backward pass. The timed steps run one all-reduce after the backward pass instead (`no_sync`).

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
from ddpdiag.workloads.collectives import minima_over_ranks
from ddpdiag.workloads.devices import synchronize, time_call
from ddpdiag.workloads.mnist import Digits
from ddpdiag.workloads.proof import batch, proof_network

# A rank that shares its cores is late in some steps only, so a window is the mean of several steps.
STEPS_PER_WINDOW, WARMUP_STEPS = 5, 3
IMAGES = 16
# DDP's default bucket_cap_mb.
BUCKET_BYTES = 25 << 20
_BUCKET_CALLS = 3
# If the all-reduce of a bucket would take longer, a smaller message is timed, of at least _MIN_BUCKET_BYTES.
_BUCKET_SECONDS, _MIN_BUCKET_BYTES = 1.0, 1 << 20
_OVERLAP_STEPS = 5


def time_steps(ctx: Context, digits: Digits, device: torch.device, windows: int) -> Steps:
    """Time `windows` windows of steps, DDP's overlap and a bucket. All ranks call it. torch's errors are not caught."""
    model = DistributedDataParallel(proof_network(device), device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = [
        time_step(ctx, model, optimizer, digits, step, device)
        for step in range(WARMUP_STEPS + windows * STEPS_PER_WINDOW)
    ][WARMUP_STEPS:]
    steps_by_window = (steps[start : start + STEPS_PER_WINDOW] for start in range(0, len(steps), STEPS_PER_WINDOW))
    overlap = measure_overlap(ctx, model, optimizer, digits, device)
    size, seconds = time_bucket(ctx, device)
    windows_of_rank = tuple(map(mean_window, steps_by_window))
    return Steps(windows=windows_of_rank, bucket_bytes=size, bucket_seconds=seconds, overlap=overlap)


def time_step(
    ctx: Context, model: DistributedDataParallel, optimizer: Optimizer, digits: Digits, step: int, device: torch.device
) -> Window:
    """Run one step, with the gradients averaged after the backward pass. Returns the phases' seconds and core share."""
    moments: list[float] = []

    def lap() -> None:
        synchronize(device)
        moments.append(time.perf_counter())

    synchronize(device)
    ctx.step(f"watched step {step + 1}")
    core_begin = time.process_time()
    lap()
    first_image = (step * dist.get_world_size() + dist.get_rank()) * IMAGES
    images, labels = batch(digits, range(first_image, first_image + IMAGES), device)
    lap()
    with model.no_sync():  # without DDP's all-reduce
        loss = cross_entropy(model(images), labels)
        lap()
        optimizer.zero_grad()
        loss.backward()
    lap()
    core_seconds = time.process_time() - core_begin
    average_gradients(model)
    lap()
    optimizer.step()
    lap()
    data, forward, backward, wait, optimize = (later - sooner for sooner, later in pairwise(moments))
    return Window(data, forward, backward, wait, optimize, core_seconds / max(1e-9, data + forward + backward))


def average_gradients(model: nn.Module) -> None:
    """Replace the gradients by their means over all ranks, with one all-reduce."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    all_gradients = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(all_gradients)
    all_gradients /= dist.get_world_size()
    means = all_gradients.split([gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


def mean_window(timed_steps: list[Window]) -> Window:
    """The mean of each field of `Window` over these steps."""
    return Window(*(fmean(getattr(step, name) for step in timed_steps) for name in Window.__struct_fields__))


def measure_overlap(
    ctx: Context, model: DistributedDataParallel, optimizer: Optimizer, digits: Digits, device: torch.device
) -> float | None:
    """Run ordinary steps. Returns the share of communication hidden by the backward pass; None if DDP logs none."""
    ctx.step("ordinary steps, for the overlap")
    model._set_ddp_runtime_logging_sample_rate(1)
    for step in range(_OVERLAP_STEPS):
        images, labels = batch(digits, range(step * IMAGES, (step + 1) * IMAGES), device)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    times = model._get_ddp_logging_data()
    total, hidden = times.get("avg_backward_comm_time"), times.get("avg_backward_compute_comm_overlap_time")
    if not isinstance(total, int | float) or not isinstance(hidden, int | float) or total <= 0:
        return None
    return min(1.0, hidden / total)


def time_bucket(ctx: Context, device: torch.device) -> tuple[int, float]:
    """Time all-reduces of a bucket's bytes, or fewer on a slow network. Returns the bytes, and the shortest seconds."""
    ctx.step("a small bucket")
    seconds = shortest_all_reduce(_MIN_BUCKET_BYTES, 2, device)
    affordable = int(_MIN_BUCKET_BYTES * _BUCKET_SECONDS / max(seconds, 1e-6))
    (size,) = minima_over_ranks([max(_MIN_BUCKET_BYTES, min(BUCKET_BYTES, affordable - affordable % 4))], device)
    ctx.step(f"a bucket of {size} B")
    return size, shortest_all_reduce(size, _BUCKET_CALLS, device)


def shortest_all_reduce(size: int, calls: int, device: torch.device) -> float:
    """Run `calls` all-reduces of `size` bytes, and return the seconds of the fastest."""
    tensor = torch.zeros(size // 4, device=device)
    return min(time_call(lambda: dist.all_reduce(tensor), device) for _ in range(calls))
