"""Pipeline parallelism: each rank has some of the blocks, and the batch goes through the ranks in small pieces (GPipe).

While the last rank computes the first piece, the ranks before it compute the next pieces. At the beginning and the end
of each step ranks wait for each other: this bubble is (stages - 1) / (pieces + stages - 1) of the time (Huang, 2019).
"""

from functools import partial
from inspect import signature

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy

from ddpdiag.model.trial import Context
from ddpdiag.strategies.trainings import Data
from ddpdiag.strategies.workloads.trainer import Task, Trainer, agreed_lack
from ddpdiag.workloads.devices import describe
from ddpdiag.workloads.group import process_group
from ddpdiag.workloads.mnist import SIDE, Digits

# More pieces make the bubble smaller, but each piece has less computation for its messages.
MOST_PIECES = 8


def train(ctx: Context, task: Task, digits: Digits, backend: str) -> Data:
    """Train this rank's blocks. There must be at least as many blocks as ranks."""
    with process_group(ctx, backend) as device:
        stage, stages = dist.get_rank(), dist.get_world_size()
        ctx.step("build the stage")
        blocks = list(task.network())
        first, end = len(blocks) * stage // stages, len(blocks) * (stage + 1) // stages
        images = torch.zeros(task.batch // pieces(task.batch), 1, SIDE, SIDE)
        entering = nn.Sequential(*blocks[:first])(images)
        leaving = nn.Sequential(*blocks[first:end])(entering)
        model = nn.Sequential(*blocks[first:end]).to(device)
        optimizer = task.optimizer(model.parameters())

        def share_of_loss(logits: Tensor, labels: Tensor) -> Tensor:
            """The loss of one piece; the sum over all pieces is the mean of the batch."""
            return cross_entropy(logits, labels, reduction="sum") / task.batch

        # From torch 2.7 on, gradients are divided by the number of pieces unless scale_grads is off; before, never.
        scales = "scale_grads" in signature(ScheduleGPipe).parameters
        gpipe = partial(ScheduleGPipe, scale_grads=False) if scales else ScheduleGPipe
        # Without these PipelineStage sends shapes as Python objects, which needs NumPy.
        examples = {"input_args": entering.to(device), "output_args": leaving.to(device)}
        part = PipelineStage(model, stage, stages, device, **examples)
        if lack := agreed_lack(ctx, lack_of(part)):
            return Data(device=describe(device).name, not_possible=lack)
        schedule = gpipe(part, pieces(task.batch), share_of_loss)
        trainer = Trainer(ctx, task, digits, [device], part=0, parts=1)
        for images, labels in trainer:
            losses: list[Tensor] = []
            optimizer.zero_grad()
            # Run forward and backward of all pieces. Only the first stage passes images, only the last uses labels.
            schedule.step(*([images] if stage == 0 else []), target=labels, losses=losses)
            optimizer.step()
            if stage == stages - 1:
                trainer.note(torch.stack(losses).sum())
        return trainer.trained(list(model.parameters()), optimizer)


def pieces(batch: int) -> int:
    """The largest number of equal pieces into which a batch can be cut, up to MOST_PIECES."""
    return max(number for number in range(1, MOST_PIECES + 1) if batch % number == 0)


def lack_of(stage: PipelineStage) -> str:
    """What this torch lacks for a stage over gloo, where neighbours connect with messages of equal sizes; else "".

    torch 2.9 sends an int64 where a float32 is received (stage.py, _get_init_p2p_neighbors_ops), and gloo ends the
    process with SIGABRT: "Received data size doesn't match expected size".
    """
    messages: list[dist.P2POp] = getattr(stage, "_get_init_p2p_neighbors_ops", list)()
    sizes = sorted({message.tensor.element_size() for message in messages}, reverse=True)
    if dist.get_backend() == "gloo" and len(sizes) > 1:
        return f"PipelineStage sends {sizes[0]} bytes where {sizes[1]} are received, at which gloo aborts"
    return ""
