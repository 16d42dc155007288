"""Fully sharded data parallel: as ddp, but of every parameter, its gradient and its optimizer state each rank keeps its
part only, and the ranks gather the whole parameter shortly before they need it.
"""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from ddpdiag.model.trial import Context
from ddpdiag.strategies.runs import Data
from ddpdiag.strategies.workloads.trainer import Task, Trainer
from ddpdiag.workloads.group import process_group
from ddpdiag.workloads.mnist import Digits


def train(ctx: Context, task: Task, digits: Digits, backend: str) -> Data:
    """Train on this rank's share of the images, with its share of the network."""
    with process_group(ctx, backend) as device:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        ctx.step("shard the network")
        model = task.network().to(device)
        mesh = init_device_mesh(device.type, (world_size,))
        for block in model:
            fully_shard(block, mesh=mesh)  # each block is gathered by itself, and let go after use
        fully_shard(model, mesh=mesh)
        optimizer = task.optimizer(model.parameters())  # after sharding: it must see the parts
        trainer = Trainer(ctx, task, digits, [device], rank, world_size)
        for images, labels in trainer:
            losses = cross_entropy(model(images), labels, reduction="none")
            loss = losses.sum() * world_size / task.batch  # as in ddp: gradients are averaged over the ranks
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trainer.note(losses.mean())
        return trainer.trained(list(model.parameters()), optimizer)
