"""Tensor parallelism: every rank computes all images, but has only a part of each of the two large matrices.

The first matrix is cut by columns, so each rank computes some of the hidden values. The second matrix is cut by rows,
so each rank computes what its hidden values contribute to the output. One all-reduce adds these contributions.
"""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

from ddpdiag.model.trial import Context
from ddpdiag.strategies.trainings import Data
from ddpdiag.strategies.workloads.trainer import Task, Trainer
from ddpdiag.workloads.group import process_group
from ddpdiag.workloads.mnist import Digits


def train(ctx: Context, task: Task, digits: Digits, backend: str) -> Data:
    """Train on all images with a part of the last two layers. `task.hidden` must be a multiple of the world size."""
    with process_group(ctx, backend) as device:
        ctx.step("cut the matrices")
        model = task.network().to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        parallelize_module(model, mesh, {"hidden.1": ColwiseParallel(), "output": RowwiseParallel()})
        optimizer = task.optimizer(model.parameters())
        trainer = Trainer(ctx, task, digits, [device], part=0, parts=1)
        for images, labels in trainer:
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trainer.keep_loss(loss)
        return trainer.measurements(list(model.parameters()), optimizer)
