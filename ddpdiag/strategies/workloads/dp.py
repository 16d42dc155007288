"""nn.DataParallel: one process divides each batch among its GPUs, and copies the network to them in every step.

torch's manual recommends DistributedDataParallel instead, even on one host. This strategy shows the difference.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ddpdiag.model.trial import Context
from ddpdiag.strategies.trainings import Data
from ddpdiag.strategies.workloads.trainer import Task, Trainer
from ddpdiag.workloads.mnist import Digits


def train(ctx: Context, task: Task, digits: Digits, _backend: str) -> Data:
    """Train on all GPUs that this process sees."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    ctx.step("build DataParallel")
    model = nn.DataParallel(task.network().to(devices[0]), device_ids=devices)
    optimizer = task.optimizer(model.parameters())
    trainer = Trainer(ctx, task, digits, devices, part=0, parts=1)
    for images, labels in trainer:
        loss = cross_entropy(model(images), labels)  # the model gathers its output on the first GPU
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trainer.keep_loss(loss)
    return trainer.measurements(list(model.parameters()), optimizer)
