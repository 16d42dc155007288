"""Model parallelism: each process distributes the network over several devices, under DistributedDataParallel.

The first blocks are on the first device, the next blocks on the next one, and images pass through them in this order.
Only one device of a process is busy at a time. The strategy is for networks that do not fit on one device.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ddpdiag.model.trial import Context
from ddpdiag.strategies.trainings import Data
from ddpdiag.strategies.workloads.trainer import Task, Trainer
from ddpdiag.workloads.group import process_group
from ddpdiag.workloads.mnist import Digits
from ddpdiag.workloads.training import checksum


class SplitNetwork(nn.Module):
    """A network whose blocks are distributed over devices in order. The output of each device is copied to the next."""

    def __init__(self, blocks: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        super().__init__()
        count = len(devices)
        self._devices = devices
        self.parts = nn.ModuleList(
            nn.Sequential(*blocks[len(blocks) * i // count : len(blocks) * (i + 1) // count]).to(device)
            for i, device in enumerate(devices)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits of images, which may be on any device. The logits are on the last device."""
        for part, device in zip(self.parts, self._devices, strict=True):
            images = part(images.to(device))
        return images


def devices_of(kind: str, local_rank: int, group_size: int) -> list[torch.device]:
    """The `group_size` devices of a rank: GPUs, of which the first becomes current; or the CPU that many times."""
    if kind == "cpu":
        return [torch.device("cpu")] * group_size
    module = torch.get_device_module(kind)
    group_count = module.device_count() // group_size
    first = group_size * (local_rank % group_count)
    module.set_device(first)  # tensors without an explicit device must not go to another rank's device
    return [torch.device(kind, index) for index in range(first, first + group_size)]


def train(ctx: Context, task: Task, digits: Digits, backend: str, group_size: int) -> Data:
    """Train on this rank's share of the images. The network is on `group_size` GPUs of this rank, or on the CPU."""
    with process_group(ctx, backend) as device:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        devices = devices_of(device.type, ctx.place.local_rank or 0, group_size)
        ctx.step("build DistributedDataParallel over several devices")
        # device_ids is None because the network itself moves its inputs to its devices.
        model = DistributedDataParallel(SplitNetwork(list(task.network()), devices), device_ids=None)
        optimizer = task.optimizer(model.parameters())
        trainer = Trainer(ctx, task, digits, devices, rank, world_size)
        for images, labels in trainer:
            losses = cross_entropy(model(images), labels.to(devices[-1]), reduction="none")
            loss = losses.sum() * world_size / task.batch_size  # as in ddp: gradients are averaged over the ranks
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trainer.keep_loss(losses.mean())
        return trainer.measurements(list(model.parameters()), optimizer, checksum(model))
