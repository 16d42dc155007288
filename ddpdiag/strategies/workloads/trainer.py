"""The training that all strategies share: one network, the same first weights, the same images in the same order.

Losses, time and memory are measured around its steps.
"""

import resource
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpdiag.model.trial import Context
from ddpdiag.strategies.trainings import Data
from ddpdiag.workloads.collectives import is_true_on_any_rank
from ddpdiag.workloads.devices import describe, synchronize
from ddpdiag.workloads.mnist import CLASSES, Digits
from ddpdiag.workloads.training import checksum, prepare

# The width of the last layers: large enough that cutting a matrix is useful, and quick on a CPU.
HIDDEN = 128
# Found by trial: 30 steps are enough to see the loss fall to a tenth.
LEARNING_RATE, MOMENTUM = 0.05, 0.9


class Task(Struct, frozen=True, kw_only=True):
    """The network and its batches. `batch` counts images of a step over all ranks; `hidden` is the last layers' width.

    The network has GroupNorm and not BatchNorm, because GroupNorm normalises each image separately, so the division of
    the images over the ranks does not matter. Nothing is random after the first weights.
    """

    steps: int
    batch: int
    hidden: int = HIDDEN
    seed: int = 0

    def network(self) -> nn.Sequential:
        """Create the network: images [n, 1, 28, 28] to logits [n, 10], in four blocks. All calls give equal weights."""
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
        """Yield the images and labels of one part of each step, prepared for the network, without end.

        The images of a step do not depend on the number of parts: part r takes images r, r + parts, ...
        """
        count = len(digits.train_images)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed))
        step = 0
        while True:
            chosen = order[torch.arange(step * self.batch, (step + 1) * self.batch) % count][part::parts]
            yield prepare(digits.train_images[chosen], digits.train_labels[chosen], device)
            step += 1


def exact() -> None:
    """Compute float32 as float32, for the rest of this process.

    GPUs round the inputs of convolutions to TF32's 10 bits. That is right for a job, but would hide differences.
    """
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")


def agreed_lack(ctx: Context, lack: str) -> str:
    """Compare what each rank's torch lacks: the reason why the ranks cannot train by a strategy, or "" if all can.

    Without this, a rank that can train would wait for the others until the deadline, and be reported as hung.
    """
    elsewhere = is_true_on_any_rank(ctx, bool(lack))
    return f"torch {torch.__version__}: {lack}" if lack else "another rank's torch cannot" if elsewhere else ""


# Not timed: the first steps load kernels, open connections and allocate memory.
WARMUP_STEPS = 3


class Trainer:
    """The steps of a training, with measurements. Iterate over a trainer for the images and labels of each step, call
    `note` with the loss in each step, and `trained` after the last one.

    `part` of `parts` selects this rank's images of a step; if `parts` is 1, these are all images. They are on the first
    of `devices`.
    """

    def __init__(
        self, ctx: Context, task: Task, digits: Digits, devices: Sequence[torch.device], part: int, parts: int
    ) -> None:
        self._ctx, self._task, self._devices = ctx, task, devices
        self._batches = task.batches(digits, part, parts, devices[0])
        self._images = len(range(part, task.batch, parts))
        self._losses: list[Tensor] = []
        self._warmup = min(WARMUP_STEPS, task.steps - 1)
        self._seconds = 0.0
        self._peak_bytes = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        begin = 0.0
        for step in range(self._task.steps):
            self._ctx.step(f"training step {step + 1} of {self._task.steps}")
            if step == self._warmup:
                self._finish()
                begin = time.perf_counter()
            yield next(self._batches)
        self._finish()
        self._seconds = time.perf_counter() - begin
        if self._devices[0].type == "cuda":
            self._peak_bytes = sum(torch.cuda.max_memory_allocated(device) for device in dict.fromkeys(self._devices))
        else:
            self._peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # Linux counts KiB

    def note(self, loss: Tensor) -> None:
        """Keep the mean loss over this rank's images of this step.

        The loss is not read from the device, because reading would wait for the device in every step.
        """
        if len(self._losses) < self._task.steps:
            self._losses.append(loss.detach())

    def trained(self, parameters: Sequence[nn.Parameter], optimizer: Optimizer, end: str = "") -> Data:
        """The measurements. `parameters` are those that this rank holds; `end` is their checksum if it holds all."""
        losses = torch.stack(self._losses).tolist() if self._losses else []
        return Data(
            start=checksum(self._task.network()),
            device=describe(self._devices[0]).name,
            losses=tuple(losses),
            images=self._images if losses else 0,
            timed_steps=self._task.steps - self._warmup,
            seconds=self._seconds,
            peak_bytes=self._peak_bytes,
            state_bytes=held_bytes(parameters, optimizer),
            end=end,
        )

    def _finish(self) -> None:
        """Wait until the devices have finished their work."""
        for device in self._devices:
            synchronize(device)


def held_bytes(parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> int:
    """Bytes on this rank of the parameters, their gradients and the optimizer's state."""
    tensors: list[Tensor] = []
    for parameter in parameters:
        state = (value for value in optimizer.state[parameter].values() if isinstance(value, Tensor))
        tensors += [parameter, *([] if parameter.grad is None else [parameter.grad]), *state]
    return sum(local.numel() * local.element_size() for local in map(local_part, tensors))


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank: the shard of a DTensor, or the whole of a plain tensor."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
