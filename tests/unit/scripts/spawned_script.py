"""The shape of the first DDP tutorials: one host, mp.spawn, loopback, a checkpoint in the middle."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 5)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def basic(rank, world_size):
    setup(rank, world_size)
    torch.cuda.set_device(rank)
    model = Toy().to(rank)
    ddp_model = DDP(model, device_ids=[rank])
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)
    optimizer.zero_grad()
    ddp_model(torch.randn(20, 10)).sum().backward()
    optimizer.step()
    cleanup()


def with_checkpoint(rank, world_size):
    setup(rank, world_size)
    ddp_model = DDP(Toy().to(rank), device_ids=[rank])
    path = os.path.join(tempfile.gettempdir(), "model.checkpoint")
    if rank == 0:
        torch.save(ddp_model.state_dict(), path)
    dist.barrier()
    where = {"cuda:0": f"cuda:{rank}"}
    ddp_model.load_state_dict(torch.load(path, map_location=where, weights_only=True))
    ddp_model(torch.randn(20, 10)).sum().backward()
    dist.barrier()
    if rank == 0:
        os.remove(path)
    cleanup()


def run(function, world_size):
    mp.spawn(function, args=(world_size,), nprocs=world_size, join=True)


if __name__ == "__main__":
    count = torch.cuda.device_count()
    run(basic, count)
    run(with_checkpoint, count)
    mp.spawn(basic, args=(count,), nprocs=count)
