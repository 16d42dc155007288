"""Handwritten digits, learned with DistributedDataParallel: the least that a training script needs.

    torchrun --standalone --nproc-per-node 2 recipes/train_ddp.py
    srun -N 2 --ntasks-per-node 1 torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \
        --rdzv-endpoint "$(hostname):29500" recipes/train_ddp.py --epochs 3

Change: the images (here the 10,000 that ship with ddpdiag), the network, and how long it learns. On GPUs each rank
takes the one of its local rank, over NCCL; without GPUs the same script runs over gloo.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from ddpdiag.workloads import mnist


def network():
    """The ConvNet of the MNIST tutorials. On GPUs `nn.SyncBatchNorm.convert_sync_batchnorm` shares its statistics."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=5, padding=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=5, padding=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


def dataset(images, labels):
    """Pixels from 0 to 1, with a channel: [n, 1, 28, 28]."""
    return TensorDataset(images.float().div(255).unsqueeze(1), labels.long())


def train_one_epoch(model, loader, optimizer, device):
    """Every rank sees its share of the images; the backward pass averages the gradients over all ranks."""
    model.train()
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return loss.detach()


@torch.no_grad()
def accuracy(model, loader, device):
    """Over all ranks. The bare network is asked: a forward pass of DDP is a collective."""
    model.eval()
    counts = torch.zeros(2, device=device)
    for images, labels in loader:
        found = model.module(images.to(device)).argmax(dim=1)
        counts += torch.tensor([(found == labels.to(device)).sum(), len(labels)], device=device)
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--global-batch", type=int, default=64, help="images in a step, over all ranks")
    parser.add_argument("--save", metavar="FILE", help="write the weights there at the end")
    arguments = parser.parse_args()

    # torchrun tells each process who it is; the local rank is the number of its GPU.
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")

    digits = mnist.load()
    training = dataset(digits.train_images, digits.train_labels)
    testing = dataset(digits.test_images, digits.test_labels)
    sampler = DistributedSampler(training, seed=0)
    # The same steps on any number of ranks. With a batch of fixed size on each, the learning rate must grow with them.
    batch_size = max(1, arguments.global_batch // dist.get_world_size())
    loader = DataLoader(training, batch_size=batch_size, sampler=sampler)
    test_loader = DataLoader(testing, batch_size=100, sampler=DistributedSampler(testing, shuffle=False))

    torch.manual_seed(0)
    model = DistributedDataParallel(network().to(device), device_ids=[local_rank] if on_gpu else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)  # another order, and other shares, in each epoch
        loss = train_one_epoch(model, loader, optimizer, device)
        share = accuracy(model, test_loader, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.3f}, {share:.1%} of the test images recognised", flush=True)

    if arguments.save and dist.get_rank() == 0:
        torch.save(model.module.state_dict(), arguments.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
