"""Fully sharded data parallel: as ddp, but each rank keeps only a part of each parameter, gradient and optimizer state.
The ranks gather a complete parameter shortly before they use it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from ddpdiag.model.trial import Context
from ddpdiag.strategies.trainings import Data
from ddpdiag.strategies.workloads.trainer import Task, Trainer, local_part, shared_reason
from ddpdiag.workloads.devices import describe
from ddpdiag.workloads.group import process_group
from ddpdiag.workloads.mnist import Digits


def train(ctx: Context, task: Task, digits: Digits, backend: str) -> Data:
    """Train on this rank's share of the images, with this rank's part of the network."""
    with process_group(ctx, backend) as device:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh(device.type, (world_size,))
        ctx.step("try fully_shard on one layer")
        if reason := shared_reason(ctx, why_impossible(mesh)):
            return Data(device=describe(device).name, not_possible=reason)
        ctx.step("shard the network")
        model = task.network().to(device)
        for block in model:
            fully_shard(block, mesh=mesh)  # each block is gathered separately, and freed after use
        fully_shard(model, mesh=mesh)
        optimizer = task.optimizer(model.parameters())  # after sharding, because it must update this rank's parts
        trainer = Trainer(ctx, task, digits, [device], rank, world_size)
        for images, labels in trainer:
            losses = cross_entropy(model(images), labels, reduction="none")
            loss = losses.sum() * world_size / task.batch_size  # as in ddp: gradients are averaged over the ranks
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trainer.keep_loss(losses.mean())
        return trainer.measurements(list(model.parameters()), optimizer)


def why_impossible(mesh: DeviceMesh) -> str:
    """Shard and train one layer, whose gradient is 1 on every rank. Returns why this torch cannot do so, or "".

    torch.cpu.Stream of torch 2.6 lacks methods that fully_shard calls. Over gloo reduce_scatter ignores ReduceOp.AVG in
    torch 2.6 to 2.8 (measured: it gives the sum, and no error).
    """
    layer = nn.Linear(1, mesh.size(), bias=False, device=mesh.device_type)
    try:
        fully_shard(layer, mesh=mesh)
        layer(torch.ones(1, 1, device=mesh.device_type)).sum().backward()
    except (AttributeError, NotImplementedError) as error:
        return f"fully_shard raises {type(error).__name__}: {error}"
    gradient = layer.weight.grad
    if mesh.size() > 1 and gradient is not None and bool((local_part(gradient) == mesh.size()).all().item()):
        return f"over {dist.get_backend()} fully_shard adds the ranks' gradients and does not average them"
    return ""
