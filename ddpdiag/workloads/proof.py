"""One step of DistributedDataParallel (DDP), compared with the same step in one process that has all images.

DDP promises that every rank's gradient is the mean over all images of the step. So each rank also computes this mean
gradient without other ranks, and compares. The network has GroupNorm, because BatchNorm normalises over the images of
one rank, so that its gradients rightly differ from those of one process. It has GELU and mean pooling, because cuDNN
may round differently for another batch size or GPU: with ReLU and max pooling, rounding can switch an activation, which
changes the gradient by up to 1 % of its largest element (tests/benchmarks/rounding.py).

A communication hook keeps the gradient that each rank passes to DDP. Two other ranks compute the same gradient from the
same images, so that a rank with a wrong gradient can be named. The ranks report sketches of the gradients, a few
numbers each, because gradients are too large for a report.
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
from ddpdiag.workloads.training import checksum, network, prepare

SEED = 0
IMAGES_PER_RANK = 4
# The most images in one forward pass: those of a large world do not fit into a GPU's memory together.
_CHUNK_IMAGES = 1024
# The number of sums in a sketch.
_SUMS_PER_SKETCH = 4


def proof_network(device: torch.device) -> nn.Sequential:
    """The network of `training`, but with GroupNorm, GELU and mean pooling. Every rank draws the same first weights."""
    torch.manual_seed(SEED)
    return network(partial(nn.GroupNorm, 4), nn.GELU, nn.AvgPool2d).to(device)


def prove(ctx: Context, digits: Digits, device: torch.device) -> Proof:
    """Run and verify a step of DDP over the default process group. All ranks call it. torch's errors are not caught."""
    with without_tf32():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        local_model = proof_network(device)
        ctx.step("the gradient of all images, in one process")
        expected = compute_gradient(local_model, digits, range(IMAGES_PER_RANK * world_size), device)
        ctx.step("the same with DistributedDataParallel")
        model = proof_network(device)
        first_weights = checksum(model)
        own_gradient, averaged = run_ddp_step(model, digits, shard(rank), device)
        ctx.step("the gradients of other ranks, in one process")
        signs = random_signs(len(expected))
        sketches_by_rank = {
            other: sketch(signs, compute_gradient(local_model, digits, shard(other), device) / world_size)
            for other in ranks_to_verify(rank, world_size)
        }
    return Proof(
        first_weights=first_weights,
        dtype=str(expected.dtype).removeprefix("torch."),
        gradient_error=float((averaged - expected).abs().max() / expected.abs().max()),
        gradient_norm=float(expected.norm()),
        input_sketch=sketch(signs, own_gradient),
        expected_sketches={ctx.group[other]: sums for other, sums in sketches_by_rank.items()},
    )


@contextmanager
def without_tf32() -> Iterator[None]:
    """Disable TensorFloat-32, which rounds to 10 bits, and let cuDNN use deterministic algorithms only."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def shard(rank: int) -> range:
    """The indices of the images that `rank` has in the compared step."""
    return range(rank * IMAGES_PER_RANK, (rank + 1) * IMAGES_PER_RANK)


def ranks_to_verify(rank: int, world_size: int) -> list[int]:
    """The ranks (two, or fewer in a small world) whose gradients `rank` computes again, likely on other hosts."""
    distances = {max(1, world_size // 3), max(2, 2 * world_size // 3)}
    return [(rank + distance) % world_size for distance in sorted(distances) if distance < world_size]


def compute_gradient(model: nn.Module, digits: Digits, images: range, device: torch.device) -> Tensor:
    """Compute the gradient of the mean loss over `images`, without other ranks, as one flat vector."""
    model.zero_grad()
    for start in range(0, len(images), _CHUNK_IMAGES):
        inputs, labels = batch(digits, images[start : start + _CHUNK_IMAGES], device)
        (cross_entropy(model(inputs), labels, reduction="sum") / len(images)).backward()
    return flatten([parameter.grad for parameter in model.parameters()])


def batch(digits: Digits, images: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the training images with these indices, and their labels. Indices beyond the last image wrap around."""
    numbers = [image % len(digits.train_images) for image in images]
    return prepare(digits.train_images[numbers], digits.train_labels[numbers], device)


def run_ddp_step(model: nn.Module, digits: Digits, images: range, device: torch.device) -> tuple[Tensor, Tensor]:
    """Run a step of DDP. Returns this rank's own gradient divided by the world size, and DDP's mean gradient."""
    ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    own_gradients: dict[nn.Parameter, Tensor] = {}

    def keep(_state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        world_size = dist.get_world_size()
        scaled = (part.detach().clone().div_(world_size) for part in bucket.gradients())
        own_gradients.update(zip(cast("list[nn.Parameter]", bucket.parameters()), scaled, strict=True))
        return allreduce_hook(cast("dist.ProcessGroup", None), bucket)

    ddp.register_comm_hook(None, keep)
    inputs, labels = batch(digits, images, device)
    cross_entropy(ddp(inputs), labels).backward()
    averaged = flatten([parameter.grad for parameter in model.parameters()])
    return flatten([own_gradients.get(parameter) for parameter in model.parameters()]), averaged


def flatten(parts: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([part.detach().reshape(-1) for part in parts if part is not None])


def random_signs(count: int) -> Tensor:
    """Return random signs, the same on every rank: float64 [_SUMS_PER_SKETCH, count] of +1 and -1."""
    generator = torch.Generator().manual_seed(SEED)
    signs = torch.randint(0, 2, (_SUMS_PER_SKETCH, count), generator=generator)
    return signs.mul_(2).sub_(1).to(torch.float64)


def sketch(signs: Tensor, vector: Tensor) -> tuple[float, ...]:
    """Sum all elements several times, each time with other random signs. The sums differ if one element differs."""
    return tuple((signs @ vector.cpu().to(torch.float64)).tolist())  # not every device has float64
