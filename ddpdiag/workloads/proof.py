"""One step of DistributedDataParallel, compared with one process that has all images.

DDP promises that every rank's gradient is the mean over all images of the step, as if one process had seen them all. So
each rank also computes this mean gradient alone, and compares. The network has GroupNorm, because BatchNorm normalises
over the images of one rank, so its gradients rightly differ from those of one process. It has GELU and mean pooling:
for another batch size or GPU cuDNN may choose an algorithm that rounds differently, and ReLU and max pooling can then
switch an activation, which changes the gradient by up to 1 % of its largest element (tests/benchmarks/rounding.py).

A communication hook keeps the gradient that each rank passes to DDP. Two other ranks compute the same gradient from the
same images, so that the rank with a wrong gradient can be named. The ranks report sketches of the gradients, a few
numbers each, because whole gradients are too large for a report.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ddpdiag.model.measurements import Proof
from ddpdiag.model.trial import Context
from ddpdiag.workloads.mnist import Digits
from ddpdiag.workloads.training import checksum, network, prepared

SEED = 0
IMAGES_PER_RANK = 4
# The images of a large world do not fit a GPU at once: this many are computed at a time.
_CHUNK = 1024
# The number of sums in a sketch.
_SUMS = 4


def seeded(device: torch.device) -> nn.Sequential:
    """The training's network with GroupNorm, GELU and mean pooling, and the same first weights on every rank."""
    torch.manual_seed(SEED)
    return network(partial(nn.GroupNorm, 4), nn.GELU, nn.AvgPool2d).to(device)


def prove(ctx: Context, digits: Digits, device: torch.device) -> Proof:
    """Run one step of DDP over the default process group. All its ranks call this; torch's errors are not caught."""
    with without_tf32():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        alone = seeded(device)
        ctx.step("the gradient of all images, in one process")
        whole = gradient(alone, digits, range(IMAGES_PER_RANK * world_size), device)
        ctx.step("the same with DistributedDataParallel")
        model = seeded(device)
        first_weights = checksum(model)
        handed, averaged = step_of_ddp(model, digits, shard(rank), device)
        ctx.step("what others should have handed over")
        signs = random_signs(len(whole))
        witnessed = {
            other: sketch(signs, gradient(alone, digits, shard(other), device) / world_size)
            for other in others(rank, world_size)
        }
    return Proof(
        first_weights=first_weights,
        dtype=str(whole.dtype).removeprefix("torch."),
        error=float((averaged - whole).abs().max() / whole.abs().max()),
        norm=float(whole.norm()),
        handed=sketch(signs, handed),
        witnessed={ctx.group[other]: sketches for other, sketches in witnessed.items()},
    )


@contextmanager
def without_tf32() -> Iterator[None]:
    """Disable TensorFloat-32, whose rounding to 10 bits is no fault, and let cuDNN use deterministic algorithms."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def shard(rank: int) -> range:
    """The numbers of the images that a rank has in this step."""
    return range(rank * IMAGES_PER_RANK, (rank + 1) * IMAGES_PER_RANK)


def others(rank: int, world_size: int) -> list[int]:
    """The two ranks (fewer in a small world) whose gradients `rank` computes again, so that a majority decides: ranks
    far away, because the ranks of one bad host are neighbours."""
    steps = {max(1, world_size // 3), max(2, 2 * world_size // 3)}
    return [(rank + step) % world_size for step in sorted(steps) if step < world_size]


def gradient(model: nn.Module, digits: Digits, images: range, device: torch.device) -> Tensor:
    """The gradient of the mean loss over these images, flat [parameters], computed without other ranks."""
    model.zero_grad()
    for start in range(0, len(images), _CHUNK):
        inputs, labels = batch(digits, images[start : start + _CHUNK], device)
        (cross_entropy(model(inputs), labels, reduction="sum") / len(images)).backward()
    return flat([parameter.grad for parameter in model.parameters()])


def batch(digits: Digits, images: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """These training images with their labels; numbers beyond the last image start again at the first."""
    numbers = [image % len(digits.train_images) for image in images]
    return prepared(digits.train_images[numbers], digits.train_labels[numbers], device)


def step_of_ddp(model: nn.Module, digits: Digits, images: range, device: torch.device) -> tuple[Tensor, Tensor]:
    """Run a step of DDP: this rank's gradient before the all-reduce, divided by the world size, and DDP's mean."""
    ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    kept: dict[nn.Parameter, Tensor] = {}

    def keep(_state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        world_size = dist.get_world_size()
        own = (part.detach().clone().div_(world_size) for part in bucket.gradients())
        kept.update(zip(cast("list[nn.Parameter]", bucket.parameters()), own, strict=True))
        return allreduce_hook(cast("dist.ProcessGroup", None), bucket)

    ddp.register_comm_hook(None, keep)
    inputs, labels = batch(digits, images, device)
    cross_entropy(ddp(inputs), labels).backward()
    averaged = flat([parameter.grad for parameter in model.parameters()])
    return flat([kept.get(parameter) for parameter in model.parameters()]), averaged


def flat(parts: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([part.detach().reshape(-1) for part in parts if part is not None])


def random_signs(count: int) -> Tensor:
    """Random signs, the same on every rank: float64 [sums, count] of +1 and -1."""
    generator = torch.Generator().manual_seed(SEED)
    signs = torch.randint(0, 2, (_SUMS, count), generator=generator)
    return signs.mul_(2).sub_(1).to(torch.float64)


def sketch(signs: Tensor, vector: Tensor) -> tuple[float, ...]:
    """A few sums of all elements, each with random signs: linear in `vector`, and different if one element differs."""
    return tuple((signs @ vector.cpu().to(torch.float64)).tolist())  # not every device has float64
