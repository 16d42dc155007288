"""An ordinary script for torchrun, from the first line to the last; every planted fault is a change to it."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, random_split
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 26 * 26, 10)

    def forward(self, images):
        return self.head(self.norm(self.conv(images)).relu().flatten(1))


class Cached(Dataset):
    def __init__(self, inner):
        self.items = [inner[number] for number in range(len(inner))]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, number):
        image, label = self.items[number]
        return image.clone(), label


def read_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--resume")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load_data(root, local_rank):
    transform = transforms.Compose([transforms.RandomCrop(28, padding=2), transforms.ToTensor()])
    if local_rank == 0:
        datasets.MNIST(root, download=True)
    dist.barrier()
    whole = datasets.MNIST(root, transform=transform)
    return random_split(whole, [50_000, 10_000], generator=torch.Generator().manual_seed(0))


def train_one_epoch(model, loader, optimizer, device):
    model.train()
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def evaluate(network, loader, device):
    network.eval()
    return sum((network(images.to(device)).argmax(1).cpu() == labels).sum().item() for images, labels in loader)


def main():
    args = read_arguments()
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl")
    train_set, validation_set = load_data("data", local_rank)

    sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=64, sampler=sampler, num_workers=4, pin_memory=True)
    validation_loader = DataLoader(validation_set, batch_size=256, num_workers=4)

    model = nn.SyncBatchNorm.convert_sync_batchnorm(Net()).to(device)
    if args.resume:
        state = torch.load(args.resume, map_location="cpu")
        model.load_state_dict(state["model"])
    ddp_model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1 * dist.get_world_size())
    torch.manual_seed(args.seed + rank)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(ddp_model, train_loader, optimizer, device)
        if rank == 0:
            print(epoch, evaluate(ddp_model.module, validation_loader, device))
            torch.save({"model": ddp_model.module.state_dict()}, "last.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
