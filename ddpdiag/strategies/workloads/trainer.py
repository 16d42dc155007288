"""The parts that all strategies share: `Task`, one network with the same first weights, and the same images in the same
order; and `Trainer`, which measures losses, time and memory."""

import resource
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpdiag.model.trial import Context
from ddpdiag.strategies.trainings import HIDDEN_WIDTH, Data
from ddpdiag.workloads.collectives import is_true_on_any_rank
from ddpdiag.workloads.devices import describe, synchronize
from ddpdiag.workloads.mnist import CLASSES, Digits
from ddpdiag.workloads.training import checksum, prepare

# Found by trial: 30 steps are enough to see the loss fall to a tenth.
LEARNING_RATE, MOMENTUM = 0.05, 0.9


class Task(Struct, frozen=True, kw_only=True):
    """The network and its batches. `batch_size` is over all ranks; `hidden` is the width of the last layers.

    The network has GroupNorm and not BatchNorm, because GroupNorm normalises each image separately, so the division of
    the images over the ranks does not matter. The first weights and the order of the images are random, by `seed`.
    """

    steps: int
    batch_size: int
    hidden: int = HIDDEN_WIDTH
    seed: int = 0

    def network(self) -> nn.Sequential:
        """Seed torch, and create the network of four blocks: images [n, 1, 28, 28] to logits [n, 10]."""
        torch.manual_seed(self.seed)
        blocks = OrderedDict[str, nn.Module](
            near=nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.GroupNorm(4, 16), nn.GELU(), nn.AvgPool2d(2)),
            far=nn.Sequential(nn.Conv2d(16, 32, 5, padding=2), nn.GroupNorm(4, 32), nn.GELU(), nn.AvgPool2d(2)),
            hidden=nn.Sequential(nn.Flatten(), nn.Linear(32 * 7 * 7, self.hidden), nn.GELU()),
            output=nn.Linear(self.hidden, CLASSES),
        )
        return nn.Sequential(blocks)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
        # foreach=False: torch's foreach kernels do not take plain tensors and DTensors together.
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM, foreach=False)

    def batches(self, digits: Digits, part: int, parts: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the images and labels of one part of each step on `device`, prepared for the network, without end.

        The images of a step do not depend on the number of parts: part r has images r, r + parts, ...
        """
        count = len(digits.train_images)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed))
        step = 0
        while True:
            chosen = order[torch.arange(step * self.batch_size, (step + 1) * self.batch_size) % count][part::parts]
            yield prepare(digits.train_images[chosen], digits.train_labels[chosen], device)
            step += 1


def use_exact_float32() -> None:
    """Switch TF32 off for the rest of this process.

    With TF32, GPUs round the inputs of convolutions to 10 bits. A job may accept that, but here it would hide faults.
    """
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")


def shared_reason(ctx: Context, reason: str) -> str:
    """The reason why some rank cannot train by a strategy, or "". `reason` is this rank's; all ranks must call this.

    If a rank that can train did not know, it would wait for the others until the deadline, and be reported as hung.
    """
    is_impossible = is_true_on_any_rank(ctx, bool(reason))
    return f"torch {torch.__version__}: {reason}" if reason else "another rank's torch cannot" if is_impossible else ""


# The first steps are not timed, because they load kernels, open connections and allocate memory.
WARMUP_STEPS = 3


class Trainer:
    """Gives the images and labels of each step to a training loop, and measures the steps.

    Iterate over a trainer, call `keep_loss` in each step, and `measurements` after the last step. This rank trains on
    `part` (from 0) of the `parts` parts of each step's images, which are put on the first of `devices`.
    """

    def __init__(
        self, ctx: Context, task: Task, digits: Digits, devices: Sequence[torch.device], part: int, parts: int
    ) -> None:
        self._ctx, self._task, self._devices = ctx, task, devices
        self._batches = task.batches(digits, part, parts, devices[0])
        self._images = len(range(part, task.batch_size, parts))
        self._losses: list[Tensor] = []
        self._warmup = min(WARMUP_STEPS, task.steps - 1)
        self._seconds = 0.0
        self._peak_bytes = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        begin = 0.0
        for step in range(self._task.steps):
            self._ctx.step(f"training step {step + 1} of {self._task.steps}")
            if step == self._warmup:
                self._synchronize()
                begin = time.perf_counter()
            yield next(self._batches)
        self._synchronize()
        self._seconds = time.perf_counter() - begin
        if self._devices[0].type == "cuda":
            self._peak_bytes = sum(torch.cuda.max_memory_allocated(device) for device in dict.fromkeys(self._devices))
        else:
            self._peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # Linux counts KiB

    def keep_loss(self, loss: Tensor) -> None:
        """Keep the mean loss of this rank's images in this step, on the device, because a copy would take time."""
        if len(self._losses) < self._task.steps:
            self._losses.append(loss.detach())

    def measurements(self, parameters: Sequence[nn.Parameter], optimizer: Optimizer, end_checksum: str = "") -> Data:
        """This rank's measurements. `end_checksum` is that of the trained network if ranks have copies, else ""."""
        losses = torch.stack(self._losses).tolist() if self._losses else []
        return Data(
            start_checksum=checksum(self._task.network()),
            device=describe(self._devices[0]).name,
            losses=tuple(losses),
            images=self._images if losses else 0,
            timed_steps=self._task.steps - self._warmup,
            seconds=self._seconds,
            peak_bytes=self._peak_bytes,
            state_bytes=state_size(parameters, optimizer),
            end_checksum=end_checksum,
        )

    def _synchronize(self) -> None:
        for device in self._devices:
            synchronize(device)


def state_size(parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> int:
    """The size in bytes of the parameters, gradients and optimizer state that are on this rank."""
    tensors: list[Tensor] = []
    for parameter in parameters:
        state = (value for value in optimizer.state[parameter].values() if isinstance(value, Tensor))
        tensors += [parameter, *([] if parameter.grad is None else [parameter.grad]), *state]
    return sum(local.numel() * local.element_size() for local in map(local_part, tensors))


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that is on this rank: the local shard of a DTensor, or a plain tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
