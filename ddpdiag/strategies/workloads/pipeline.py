"""Pipeline parallelism: each rank has some of the blocks, and the batch goes through the ranks in small pieces (GPipe).

While the last rank computes the first piece, the ranks before it compute the next pieces. At the beginning and the end
of each step ranks wait: this bubble takes (stages - 1) / (pieces + stages - 1) of the time (Huang, 2019).
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
from ddpdiag.strategies.workloads.trainer import Task, Trainer, shared_reason
from ddpdiag.workloads.devices import describe
from ddpdiag.workloads.group import process_group
from ddpdiag.workloads.mnist import SIDE, Digits

# More pieces make the bubble smaller, but each piece then has less computation in relation to its messages.
MAX_PIECES = 8


def train(ctx: Context, task: Task, digits: Digits, backend: str) -> Data:
    """Train this rank's blocks of the network. There must be at least as many blocks as ranks."""
    with process_group(ctx, backend) as device:
        stage, stages = dist.get_rank(), dist.get_world_size()
        ctx.step("build the stage")
        blocks = list(task.network())
        first, end = len(blocks) * stage // stages, len(blocks) * (stage + 1) // stages
        images = torch.zeros(task.batch_size // piece_count(task.batch_size), 1, SIDE, SIDE)
        stage_input = nn.Sequential(*blocks[:first])(images)
        stage_output = nn.Sequential(*blocks[first:end])(stage_input)
        model = nn.Sequential(*blocks[first:end]).to(device)
        optimizer = task.optimizer(model.parameters())

        def share_of_loss(logits: Tensor, labels: Tensor) -> Tensor:
            """The summed loss of one piece, divided by the batch size: all pieces add up to the batch's mean loss."""
            return cross_entropy(logits, labels, reduction="sum") / task.batch_size

        # From torch 2.7 on, GPipe divides gradients by the number of pieces unless scale_grads is False.
        can_scale = "scale_grads" in signature(ScheduleGPipe).parameters
        gpipe = partial(ScheduleGPipe, scale_grads=False) if can_scale else ScheduleGPipe
        # Without these examples PipelineStage sends shapes as Python objects, which needs NumPy.
        examples = {"input_args": stage_input.to(device), "output_args": stage_output.to(device)}
        pipeline_stage = PipelineStage(model, stage, stages, device, **examples)
        if reason := shared_reason(ctx, why_impossible(pipeline_stage)):
            return Data(device=describe(device).name, not_possible=reason)
        schedule = gpipe(pipeline_stage, piece_count(task.batch_size), share_of_loss)
        trainer = Trainer(ctx, task, digits, [device], part=0, parts=1)
        for images, labels in trainer:
            losses: list[Tensor] = []
            optimizer.zero_grad()
            # Run forward and backward of all pieces. Only the first stage passes images, only the last uses labels.
            schedule.step(*([images] if stage == 0 else []), target=labels, losses=losses)
            optimizer.step()
            if stage == stages - 1:
                trainer.keep_loss(torch.stack(losses).sum())
        return trainer.measurements(list(model.parameters()), optimizer)


def piece_count(batch_size: int) -> int:
    """The largest number of equal pieces into which a batch can be cut, up to MAX_PIECES."""
    return max(number for number in range(1, MAX_PIECES + 1) if batch_size % number == 0)


def why_impossible(stage: PipelineStage) -> str:
    """The reason why this torch cannot run a pipeline stage over gloo, or "" if it can.

    Stages connect by messages. torch 2.9 sends an int64 but receives a float32 (stage.py, _get_init_p2p_neighbors_ops),
    at which gloo ends the process with SIGABRT: "Received data size doesn't match expected size".
    """
    messages: list[dist.P2POp] = getattr(stage, "_get_init_p2p_neighbors_ops", list)()
    sizes = sorted({message.tensor.element_size() for message in messages}, reverse=True)
    if dist.get_backend() == "gloo" and len(sizes) > 1:
        return f"PipelineStage sends {sizes[0]} bytes where {sizes[1]} are received, at which gloo aborts"
    return ""
