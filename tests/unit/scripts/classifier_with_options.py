"""The shape of the large ImageNet script: one main_worker for one GPU, DataParallel and DDP, on any number of hosts."""

import argparse
import os
import random
import shutil

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.parallel
import torch.utils.data
import torch.utils.data.distributed
import torchvision.datasets as datasets
import torchvision.models as models
import torchvision.transforms as transforms

parser = argparse.ArgumentParser(description="classifier")
parser.add_argument("data", default="imagenet")
parser.add_argument("-a", "--arch", default="resnet18")
parser.add_argument("-j", "--workers", default=4, type=int)
parser.add_argument("--epochs", default=90, type=int)
parser.add_argument("-b", "--batch-size", default=256, type=int)
parser.add_argument("--resume", default="")
parser.add_argument("--world-size", default=-1, type=int)
parser.add_argument("--rank", default=-1, type=int, help="node rank")
parser.add_argument("--dist-url", default="tcp://127.0.0.1:23456")
parser.add_argument("--dist-backend", default="nccl")
parser.add_argument("--seed", default=None, type=int)
parser.add_argument("--gpu", default=None, type=int)
parser.add_argument("--multiprocessing-distributed", action="store_true")
best = 0


def main():
    args = parser.parse_args()
    if args.seed is not None:
        random.seed(args.seed)
        torch.manual_seed(args.seed)
    if args.dist_url == "env://" and args.world_size == -1:
        args.world_size = int(os.environ["WORLD_SIZE"])
    args.distributed = args.world_size > 1 or args.multiprocessing_distributed
    per_node = torch.cuda.device_count()
    if args.multiprocessing_distributed:
        args.world_size = per_node * args.world_size
        mp.spawn(main_worker, nprocs=per_node, args=(per_node, args))
    else:
        main_worker(args.gpu, per_node, args)


def main_worker(gpu, per_node, args):
    global best
    args.gpu = gpu
    if args.distributed:
        if args.dist_url == "env://" and args.rank == -1:
            args.rank = int(os.environ["RANK"])
        if args.multiprocessing_distributed:
            args.rank = args.rank * per_node + gpu
        dist.init_process_group(
            backend=args.dist_backend, init_method=args.dist_url, world_size=args.world_size, rank=args.rank
        )
    model = models.__dict__[args.arch]()
    if args.distributed:
        if args.gpu is not None:
            torch.cuda.set_device(args.gpu)
            model.cuda(args.gpu)
            args.batch_size = int(args.batch_size / per_node)
            model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
        else:
            model.cuda()
            model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        model = torch.nn.DataParallel(model).cuda()
    criterion = nn.CrossEntropyLoss().cuda(args.gpu)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if args.resume and os.path.isfile(args.resume):
        where = None if args.gpu is None else f"cuda:{args.gpu}"
        checkpoint = torch.load(args.resume, map_location=where)
        model.load_state_dict(checkpoint["state_dict"])

    train_set = datasets.ImageFolder(
        os.path.join(args.data, "train"), transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
    )
    validation_set = datasets.ImageFolder(os.path.join(args.data, "val"), transforms.ToTensor())
    if args.distributed:
        train_sampler = torch.utils.data.distributed.DistributedSampler(train_set)
        validation_sampler = torch.utils.data.distributed.DistributedSampler(
            validation_set, shuffle=False, drop_last=True
        )
    else:
        train_sampler = None
        validation_sampler = None
    train_loader = torch.utils.data.DataLoader(
        train_set,
        batch_size=args.batch_size,
        shuffle=(train_sampler is None),
        num_workers=args.workers,
        sampler=train_sampler,
    )
    validation_loader = torch.utils.data.DataLoader(
        validation_set, batch_size=args.batch_size, shuffle=False, sampler=validation_sampler
    )
    for epoch in range(args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, args)
        accuracy = validate(validation_loader, model, args)
        is_best = accuracy > best
        best = max(accuracy, best)
        if not args.multiprocessing_distributed or (args.multiprocessing_distributed and args.rank % per_node == 0):
            save_checkpoint({"epoch": epoch, "state_dict": model.state_dict()}, is_best)


def train(loader, model, criterion, optimizer, args):
    model.train()
    for images, target in loader:
        images = images.cuda(args.gpu, non_blocking=True)
        target = target.cuda(args.gpu, non_blocking=True)
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(loader, model, args):
    model.eval()
    right = torch.zeros(1, device="cuda")
    with torch.no_grad():
        for images, target in loader:
            output = model(images.cuda(args.gpu))
            right += (output.argmax(1).cpu() == target).sum()
    if args.distributed:
        dist.all_reduce(right)
    return right.item()


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "best.pth.tar")


if __name__ == "__main__":
    main()
