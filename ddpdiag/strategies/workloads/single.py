"""One process on one device: the reference for all other strategies."""

from torch.nn.functional import cross_entropy

from ddpdiag.model.trial import Context
from ddpdiag.strategies.trainings import Data
from ddpdiag.strategies.workloads.trainer import Task, Trainer
from ddpdiag.workloads.devices import choose_device
from ddpdiag.workloads.mnist import Digits


def train(ctx: Context, task: Task, digits: Digits, backend: str) -> Data:
    device = choose_device(backend, ctx.place.local_rank)
    model = task.network().to(device)
    optimizer = task.optimizer(model.parameters())
    trainer = Trainer(ctx, task, digits, [device], part=0, parts=1)
    for images, labels in trainer:
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trainer.keep_loss(loss)
    return trainer.measurements(list(model.parameters()), optimizer)
