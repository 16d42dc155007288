"""A training of a few steps whose weights every rank compares with those of one process on all data."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 10


def data(rank):
    return torch.arange(32.0).reshape(8, 4) / 32 + rank


def train(model, inputs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and len(sys.argv) > 1:
    dist.barrier()
    Path(sys.argv[1]).touch()
    dist.barrier()
    sys.exit("the first attempt fails")
torch.manual_seed(0)
model, alone = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
alone.load_state_dict(model.state_dict())
train(DistributedDataParallel(model), data(rank))
train(alone, torch.cat([data(each) for each in range(size)]))
torch.testing.assert_close(model.weight, alone.weight)
print(f"rank {rank} of {size} has learned")
dist.barrier()
dist.destroy_process_group()
