"""DistributedDataParallel: every rank has the whole network and its share of the images; gradients are averaged."""

import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ddpdiag.model.trial import Context
from ddpdiag.strategies.trainings import Data
from ddpdiag.strategies.workloads.trainer import Task, Trainer
from ddpdiag.workloads.group import process_group
from ddpdiag.workloads.mnist import Digits
from ddpdiag.workloads.training import checksum


def train(ctx: Context, task: Task, digits: Digits, backend: str) -> Data:
    """Train on this rank's share of the images, together with the other ranks of the group."""
    with process_group(ctx, backend) as device:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        ctx.step("build DistributedDataParallel")
        model = DistributedDataParallel(
            task.network().to(device), device_ids=[device] if device.type == "cuda" else None
        )
        optimizer = task.optimizer(model.parameters())
        trainer = Trainer(ctx, task, digits, [device], rank, world_size)
        for images, labels in trainer:
            losses = cross_entropy(model(images), labels, reduction="none")
            # DDP averages the gradients over the ranks. So each rank divides the sum over its images by the mean number
            # of images of a rank. That is correct even if the ranks have different numbers of images.
            loss = losses.sum() * world_size / task.batch_size
            optimizer.zero_grad()
            loss.backward()  # meanwhile DDP's reducer averages the gradients over the ranks
            optimizer.step()
            trainer.keep_loss(losses.mean())
        return trainer.measurements(list(model.parameters()), optimizer, checksum(model))
