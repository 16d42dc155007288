"""Started by srun, over gloo on CPUs: shards by hand within join, barriers that meet across ifs, groups."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.datasets import FashionMNIST


def read(root):
    if int(os.environ["SLURM_LOCALID"]) != 0:
        dist.barrier()
    data = FashionMNIST(root, download=True)
    if int(os.environ["SLURM_LOCALID"]) == 0:
        dist.barrier()
    return data


def gather_scores(score, rank, world_size):
    if rank == 0:
        scores = [torch.zeros_like(score) for _ in range(world_size)]
        dist.gather(score, gather_list=scores)
        return scores
    dist.gather(score)
    return None


def main():
    rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    first_half = dist.new_group(list(range(world_size // 2)))
    data = read("data")
    indices = list(range(len(data)))[rank::world_size]
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = torch.zeros(1)
    with model.join():
        for index in indices:
            image, label = data[index]
            loss = nn.functional.cross_entropy(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
    if rank < world_size // 2:
        dist.all_reduce(total, group=first_half)
    gather_scores(total, rank, world_size)
    torch.save(model.module.state_dict(), f"model-{rank}.pt")
    if dist.get_rank() != 0:
        dist.destroy_process_group()
        return
    torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
