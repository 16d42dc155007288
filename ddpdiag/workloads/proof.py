"""Does DistributedDataParallel do what it promises? Shown on one step, from the first weights to the metrics.

DDP promises that every rank's gradient is the mean over all images of the step, as if one process had seen them all. So
each rank computes that gradient alone as well, and compares. The network has GroupNorm: BatchNorm sees other images on
each rank, and its gradients rightly differ from those of one process.

To tell who spoilt a gradient, what each rank hands to DDP is kept by a communication hook, and two other ranks compute
it again from the same images. Gradients are compared by sketches, a few numbers each: whole they would fit no report.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler

from ddpdiag.model.measurements import Proof
from ddpdiag.model.trial import Context
from ddpdiag.workloads.mnist import Digits
from ddpdiag.workloads.training import checksum, network, prepared

SEED = 0
IMAGES_PER_RANK = 4
# All images at once would not fit a GPU of a large world.
_CHUNK = 1024
# How many sums a sketch has.
_SUMS = 4
# Of so many images the sampler's shards are looked at, and so many test images are predicted.
_SAMPLED, _PREDICTED = 1000, 500


def seeded(device: torch.device) -> nn.Sequential:
    """The network of the training, without BatchNorm, and with the same first weights on every rank."""
    torch.manual_seed(SEED)
    return network(partial(nn.GroupNorm, 4)).to(device)


def prove(ctx: Context, digits: Digits, device: torch.device) -> Proof:
    """One step of DDP over the default process group; every rank of it calls this. Errors are torch's own."""
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
    covered, drawn, shards = sampled(ctx, rank, world_size, device)
    reduced, gathered = predictions(ctx, model, digits, device)
    return Proof(
        first_weights=first_weights,
        dtype=str(whole.dtype).removeprefix("torch."),
        error=float((averaged - whole).abs().max() / whole.abs().max()),
        norm=float(whole.norm()),
        handed=sketch(signs, handed),
        averaged=sketch(signs, averaged),
        witnessed={ctx.group[other]: told for other, told in witnessed.items()},
        images=_SAMPLED,
        shards=shards,
        covered=covered,
        drawn=drawn,
        predicted=min(_PREDICTED, len(digits.test_images)),
        reduced=reduced,
        gathered=gathered,
    )


@contextmanager
def without_tf32() -> Iterator[None]:
    """TensorFloat-32 has 10 bits: what it rounds is no fault. cuDNN stays on, as in the job."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def shard(rank: int) -> range:
    """The images that a rank has in this step."""
    return range(rank * IMAGES_PER_RANK, (rank + 1) * IMAGES_PER_RANK)


def others(rank: int, world_size: int) -> list[int]:
    """Whose gradients a rank computes again: two, so that there is a majority, and far away, since a bad host's ranks
    are neighbours."""
    steps = {max(1, world_size // 3), max(2, 2 * world_size // 3)}
    return [(rank + step) % world_size for step in sorted(steps) if step < world_size]


def gradient(model: nn.Module, digits: Digits, images: range, device: torch.device) -> Tensor:
    """The gradient of the mean loss over these images, flat [parameters], computed here alone."""
    model.zero_grad()
    for start in range(0, len(images), _CHUNK):
        inputs, labels = batch(digits, images[start : start + _CHUNK], device)
        (cross_entropy(model(inputs), labels, reduction="sum") / len(images)).backward()
    return flat([parameter.grad for parameter in model.parameters()])


def batch(digits: Digits, images: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """These training images, over again where there are too few, with their labels."""
    numbers = [image % len(digits.train_images) for image in images]
    return prepared(digits.train_images[numbers], digits.train_labels[numbers], device)


def step_of_ddp(model: nn.Module, digits: Digits, images: range, device: torch.device) -> tuple[Tensor, Tensor]:
    """What this rank handed to the all-reduce, its own gradient over the world size, and what DDP made of all."""
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
    """The same signs on every rank: float64 [sums, count] of +1 and -1."""
    generator = torch.Generator().manual_seed(SEED)
    signs = torch.randint(0, 2, (_SUMS, count), generator=generator)
    return signs.mul_(2).sub_(1).to(torch.float64)


def sketch(signs: Tensor, vector: Tensor) -> tuple[float, ...]:
    """A few sums of all elements under random signs: linear, and another one where one element is another."""
    return tuple((signs @ vector.cpu().to(torch.float64)).tolist())  # not every device has float64


def sampled(ctx: Context, rank: int, world_size: int, device: torch.device) -> tuple[int, int, tuple[str, str]]:
    """How many images all shards cover, how many they have in all, and digests of this rank's in two epochs."""
    ctx.step("the shards of the sampler")
    numbers = cast("Dataset[int]", range(_SAMPLED))
    sampler: DistributedSampler[int] = DistributedSampler(numbers, num_replicas=world_size, rank=rank, seed=SEED)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    counts = torch.bincount(torch.tensor(epochs[0]), minlength=_SAMPLED).to(device)
    dist.all_reduce(counts)
    first, second = (hashlib.sha256(repr(own).encode()).hexdigest() for own in epochs)
    return int((counts > 0).sum()), int(counts.sum()), (first, second)


@torch.no_grad()
def predictions(ctx: Context, model: nn.Module, digits: Digits, device: torch.device) -> tuple[int, int]:
    """Right predictions of all ranks, summed by an all-reduce; and counted among all predictions, gathered."""
    ctx.step("predictions, reduced and gathered")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    count = min(_PREDICTED, len(digits.test_images))
    share = -(-count // world_size)
    own = list(islice(range(rank * share, count), share))
    padded = torch.full((share,), -1, dtype=torch.int64, device=device)
    correct = torch.zeros((), dtype=torch.int64, device=device)
    if own:
        inputs, labels = prepared(digits.test_images[own], digits.test_labels[own], device)
        padded[: len(own)] = found = model(inputs).argmax(dim=1)
        correct += (found == labels).sum()
    dist.all_reduce(correct)
    gathered = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(gathered, padded)
    labels = digits.test_labels[:count].long().to(device)
    return int(correct), int((torch.cat(gathered)[:count] == labels).sum())
