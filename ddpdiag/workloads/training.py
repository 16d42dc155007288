"""A training with DistributedDataParallel, and the evaluation of the trained network.

The ConvNet of the classic MNIST tutorials learns handwritten digits for a fixed number of steps, over a process group
that is already open. The code is that of an ordinary training script with one process per GPU.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import cast

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler

from ddpdiag.model import Depth
from ddpdiag.model.measurements import Training
from ddpdiag.model.trial import Context
from ddpdiag.workloads.collectives import minima_over_ranks
from ddpdiag.workloads.devices import synchronize
from ddpdiag.workloads.mnist import CLASSES, Digits

# Mean and standard deviation of the pixels of MNIST's training set, scaled to 0 to 1, as in every tutorial.
PIXEL_MEAN, PIXEL_DEVIATION = 0.1307, 0.3081
# The loss of one step is noisy, so `last_loss` is the mean over this many last steps.
LAST_STEPS = 5
EVALUATION_BATCH = 100


class Schedule(Struct, frozen=True, kw_only=True):
    """The steps, batch and learning rates of a training, which are the same for any world size.

    `global_batch` counts images over all ranks. The learning rate rises to `learning_rate` in the first
    `warmup_share` of the steps, and falls to zero in the rest.
    """

    steps: int
    global_batch: int
    learning_rate: float
    warmup_share: float = 0.45
    seed: int = 0

    def rank_batch(self, world_size: int) -> int:
        """Images per rank and step, equal on all ranks: then the mean over ranks is the mean over images."""
        return math.ceil(self.global_batch / world_size)

    def learning_rate_share(self, step: int) -> float:
        """The learning rate in `step`, as a share of the highest rate `learning_rate`."""
        warmup_steps = max(1.0, self.warmup_share * self.steps)
        return min((step + 1) / warmup_steps, (self.steps - step) / (self.steps - warmup_steps + 1))


# Found by search over 1 to 64 ranks and several seeds; tests/torch/test_schedule.py repeats the measurement.
SCHEDULES = {
    Depth.QUICK: Schedule(steps=56, global_batch=64, learning_rate=9e-3),
    Depth.STANDARD: Schedule(steps=250, global_batch=64, learning_rate=9e-3),
    Depth.DEEP: Schedule(steps=250, global_batch=64, learning_rate=9e-3),
}


def network(
    norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    activation: Callable[[], nn.Module] = nn.ReLU,
    pool: Callable[[int], nn.Module] = nn.MaxPool2d,
) -> nn.Sequential:
    """The ConvNet of the tutorials, from images [n, 1, 28, 28] to logits [n, 10], with 29,034 parameters.

    `norm(channels)` and `pool(pixels)` create layers: a normalisation, and a pooling of `pixels` x `pixels`.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=5, padding=2),
        norm(16),
        activation(),
        pool(2),
        nn.Conv2d(16, 32, kernel_size=5, padding=2),
        norm(32),
        activation(),
        pool(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, CLASSES),
    )


def seeded_network(schedule: Schedule, device: torch.device) -> nn.Module:
    """The network, with first weights drawn from the schedule's seed, which are the same on every rank."""
    torch.manual_seed(schedule.seed)
    # Channels last is a third faster on CPUs, and suits tensor cores.
    return network().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def create_optimizer(
    model: nn.Module, schedule: Schedule
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Create Adam, and the scheduler that follows `schedule.learning_rate_share`."""
    optimizer = torch.optim.Adam(model.parameters(), lr=schedule.learning_rate)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.learning_rate_share)


def batches(images: int, schedule: Schedule, rank: int, world_size: int) -> Iterator[list[int]]:
    """Yield the indices of `rank`'s images in each step, without end.

    If an epoch ends within a batch, the batch continues with the next epoch, whose order is new (`set_epoch`). So a
    small set of images is enough for any number of ranks.
    """
    indices = cast("Dataset[int]", range(images))  # the sampler reads nothing but its length
    sampler = DistributedSampler[int](indices, num_replicas=world_size, rank=rank, seed=schedule.seed)

    def endless() -> Iterator[int]:
        for epoch in count():
            sampler.set_epoch(epoch)
            yield from sampler

    stream = endless()
    while True:
        yield list(islice(stream, schedule.rank_batch(world_size)))


def prepare(images: Tensor, labels: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Copy uint8 images [n, 28, 28] and labels [n] to `device`, as scaled float32 [n, 1, 28, 28] and int64 [n]."""
    scaled = (images.to(device).float() / 255 - PIXEL_MEAN) / PIXEL_DEVIATION
    return scaled.unsqueeze(1), labels.to(device).long()


def register_gradient_sum(model: nn.Module, device: torch.device) -> Tensor:
    """Register hooks that add all elements of this rank's gradients, before the all-reduce, to the returned sum.

    The sum becomes and stays NaN or infinite when a gradient does. After the all-reduce every rank would have the NaN,
    so its origin would be unknown. Adding takes a quarter of the time of `isfinite` for each gradient.
    """
    total = torch.zeros((), device=device)

    def add(gradient: Tensor) -> None:
        total.add_(gradient.sum())

    for parameter in model.parameters():
        parameter.register_hook(add)
    return total


def is_true_on_all_ranks(condition: bool, device: torch.device) -> bool:
    """Whether `condition` is true on every rank. Runs a collective, so all ranks must call it."""
    return bool(minima_over_ranks([int(condition)], device)[0])


def train(ctx: Context, digits: Digits, schedule: Schedule, device: torch.device) -> tuple[tuple[float, ...], Training]:
    """Train and evaluate over the default process group. All ranks call it. torch's errors are not caught.

    Returns the loss of each step (the mean over all ranks), and the results.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ctx.step("build DistributedDataParallel")
    device_ids = [device] if device.type == "cuda" else None
    model = DistributedDataParallel(seeded_network(schedule, device), device_ids=device_ids)
    indices = batches(len(digits.train_images), schedule, rank, world_size)
    losses, first_bad_step, seconds = run_training_loop(ctx, model, digits, schedule, indices)

    ctx.step("send rank 0's BatchNorm statistics to all")
    # The statistics rightly differ between ranks, because each rank has trained with other images; DDP also sends rank
    # 0's, before each forward pass. The ranks evaluate the network without DDP: a forward pass of DDP is a collective,
    # and ranks with shards of unequal size run unequal numbers of forward passes.
    for buffer in model.module.buffers():
        dist.broadcast(buffer, src=0)
    ctx.step("evaluate")
    scores = evaluate(model.module, digits, rank, world_size, device)
    ctx.step("all-reduce the metrics")
    metrics = torch.cat([losses / world_size, scores])
    dist.all_reduce(metrics)
    *mean_losses, correct, test_loss, tests = metrics.tolist()
    last = mean_losses[-LAST_STEPS:]
    return tuple(mean_losses), Training(
        first_loss=mean_losses[0],
        last_loss=sum(last) / len(last),
        accuracy=correct / tests,
        test_loss=test_loss / tests,
        steps=schedule.steps,
        samples=(schedule.steps - 1) * schedule.rank_batch(world_size),
        training_seconds=seconds,
        first_bad_step=first_bad_step,
        checksum=checksum(model.module),
    )


def run_training_loop(
    ctx: Context, model: DistributedDataParallel, digits: Digits, schedule: Schedule, indices: Iterator[list[int]]
) -> tuple[Tensor, int | None, float]:
    """Train, and return this rank's loss in each step, the first bad step (or None), and the seconds of training.

    In a bad step the loss or a gradient is not finite. The seconds do not include the first step, which also loads
    kernels, builds buckets and opens connections.
    """
    device = next(model.parameters()).device
    optimizer, scheduler = create_optimizer(model, schedule)
    gradients = register_gradient_sum(model, device)
    losses = torch.zeros(schedule.steps, device=device)
    first_bad_step: int | None = None
    begin = time.perf_counter()
    model.train()
    for step, batch in zip(range(schedule.steps), indices, strict=False):
        ctx.step(f"training step {step + 1} of {schedule.steps}")
        images, labels = prepare(digits.train_images[batch], digits.train_labels[batch], device)
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # at the same time DDP averages the gradients over the ranks
        optimizer.step()
        scheduler.step()
        losses[step] = loss.detach()
        if first_bad_step is None and not (gradients + loss.detach()).isfinite():
            first_bad_step = step
        if step == 0:
            synchronize(device)
            begin = time.perf_counter()
    synchronize(device)
    return losses, first_bad_step, time.perf_counter() - begin


@torch.no_grad()
def evaluate(model: nn.Module, digits: Digits, rank: int, world_size: int, device: torch.device) -> Tensor:
    """Evaluate this rank's share of the test images: [images recognised, sum of the losses, images], as floats."""
    model.eval()
    scores = torch.zeros(3, device=device)
    shard = range(rank, len(digits.test_images), world_size)
    for start in range(0, len(shard), EVALUATION_BATCH):
        batch = list(shard[start : start + EVALUATION_BATCH])
        images, labels = prepare(digits.test_images[batch], digits.test_labels[batch], device)
        logits = model(images)
        correct = (logits.argmax(dim=1) == labels).sum()
        scores += torch.stack([correct, cross_entropy(logits, labels, reduction="sum"), correct.new_tensor(len(batch))])
    return scores


def checksum(model: nn.Module) -> str:
    """SHA-256 of the parameters' bytes, in the order of their definition.

    Buffers are not included, because those of BatchNorm differ between ranks by design.
    """
    digest = hashlib.sha256()
    for parameter in model.parameters():
        flat = parameter.detach().cpu().reshape(-1).contiguous()
        digest.update(bytes(flat.view(torch.uint8).tolist()))
    return digest.hexdigest()
