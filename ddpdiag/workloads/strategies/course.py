"""The steps of a training, and what is measured around them: losses, time, memory, communication."""

import resource
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpdiag.model.context import Context
from ddpdiag.workloads.devices import describe
from ddpdiag.workloads.mnist import Digits
from ddpdiag.workloads.strategies.lesson import Lesson
from ddpdiag.workloads.strategies.traffic import Traffic

# Not timed: the first steps load kernels, open connections and allocate memory.
WARMUP_STEPS = 3
# After the others, with torch's profiler, which makes them slower.
WATCHED_STEPS = 5


class Trained(Struct, frozen=True, kw_only=True):
    """One rank's training. `losses` are the mean over the `images` that it saw, step by step; a rank that saw none (a
    stage of a pipeline that is not the last one) has none. `parts` are the same for each of several parts of the
    images. `seconds` are those of `timed_steps`. `end` is the checksum of the last parameters, where a rank has all of
    them. Bytes and share are explained in `model.train.StrategyRow`.
    """

    device: str
    losses: tuple[float, ...]
    parts: tuple[tuple[float, ...], ...]
    images: int
    timed_steps: int
    seconds: float
    peak_bytes: int
    state_bytes: int
    communication_share: float | None
    end: str


class Course:
    """Iterate over it for the images and labels of each step; `note` the loss; `trained` is what was measured.

    `part` of `parts` says which images of a step are this rank's; every rank has all of them where parts is 1.
    The first of `devices` gets the images.
    """

    def __init__(
        self, ctx: Context, lesson: Lesson, digits: Digits, devices: Sequence[torch.device], part: int, parts: int
    ) -> None:
        self._ctx, self._lesson, self._devices = ctx, lesson, devices
        self._batches = lesson.batches(digits, part, parts, devices[0])
        self._images = len(range(part, lesson.batch, parts))
        self._losses: list[Tensor] = []
        self._parts: list[Tensor] = []
        self._warmup = min(WARMUP_STEPS, lesson.steps - 1)
        self._seconds = 0.0
        self._peak_bytes = 0
        self._share: float | None = None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The steps of the lesson, and some more in which communication is watched."""
        begin = 0.0
        for step in range(self._lesson.steps):
            self._ctx.step(f"training step {step + 1} of {self._lesson.steps}")
            if step == self._warmup:
                self._finish()
                begin = time.perf_counter()
            yield next(self._batches)
        self._finish()
        self._seconds = time.perf_counter() - begin
        self._peak_bytes = self._measured_peak()
        if dist.is_initialized():
            yield from self._watched()

    def _watched(self) -> Iterator[tuple[Tensor, Tensor]]:
        traffic = Traffic(self._devices[0])
        traffic.begin()
        for step in range(WATCHED_STEPS):
            self._ctx.step(f"watch communication in step {step + 1} of {WATCHED_STEPS}")
            yield next(self._batches)
        self._finish()
        self._share = traffic.end()

    def note(self, loss: Tensor, parts: Sequence[Tensor] = ()) -> None:
        """The mean loss of this step's images, as this rank saw them; `parts` are those of parts of them.

        Nothing is read from the device here: that would wait for it in every step.
        """
        if len(self._losses) < self._lesson.steps:
            self._losses.append(loss.detach())
            if parts:
                self._parts.append(torch.stack(list(parts)).detach())

    def trained(self, parameters: Sequence[nn.Parameter], optimizer: Optimizer, end: str = "") -> Trained:
        """What was measured; the parameters are those that this rank holds, `end` their checksum if that is all."""
        losses = torch.stack(self._losses).tolist() if self._losses else []
        return Trained(
            device=describe(self._devices[0]).name,
            losses=tuple(losses),
            parts=tuple(tuple(part.tolist()) for part in self._parts),
            images=self._images if losses else 0,
            timed_steps=self._lesson.steps - self._warmup,
            seconds=self._seconds,
            peak_bytes=self._peak_bytes,
            state_bytes=held_bytes(parameters, optimizer),
            communication_share=self._share,
            end=end,
        )

    def _finish(self) -> None:
        """Wait until the devices have done what they were told."""
        for device in self._devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)

    def _measured_peak(self) -> int:
        if self._devices[0].type == "cuda":
            return sum(torch.cuda.max_memory_allocated(device) for device in dict.fromkeys(self._devices))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # Linux counts KiB


def held_bytes(parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> int:
    """Bytes of the parameters, their gradients and the optimizer's state that lie on this rank."""
    tensors: list[Tensor] = []
    for parameter in parameters:
        state = (value for value in optimizer.state[parameter].values() if isinstance(value, Tensor))
        tensors += [parameter, *([] if parameter.grad is None else [parameter.grad]), *state]
    return sum(local.numel() * local.element_size() for local in map(_local, tensors))


def _local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor: a part of it, where it is a DTensor."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
