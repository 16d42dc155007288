"""Set up, samplers and saving are helpers of another file; after the style of detection and self-supervision code."""

import argparse
from pathlib import Path

import torch
import util.misc as utils
from datasets import build_dataset
from engine import evaluate, train_one_epoch
from models import build_model
from torch.utils.data import DataLoader, DistributedSampler


def get_args_parser():
    parser = argparse.ArgumentParser("training", add_help=False)
    parser.add_argument("--output_dir", default="")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--resume", default="")
    parser.add_argument("--local_rank", default=-1, type=int)
    parser.add_argument("--dist_url", default="env://")
    return parser


def main(args):
    utils.init_distributed_mode(args)
    device = torch.device(args.device)
    torch.manual_seed(args.seed + utils.get_rank())
    model, criterion = build_model(args)
    model.to(device)
    model_without_ddp = model
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
        model_without_ddp = model.module
    optimizer = torch.optim.AdamW(model_without_ddp.parameters())
    train_set, validation_set = build_dataset("train", args), build_dataset("val", args)
    if args.distributed:
        train_sampler = DistributedSampler(train_set)
        validation_sampler = DistributedSampler(
            validation_set, num_replicas=utils.get_world_size(), rank=utils.get_rank(), shuffle=False
        )
    else:
        train_sampler = torch.utils.data.RandomSampler(train_set)
        validation_sampler = torch.utils.data.SequentialSampler(validation_set)
    train_loader = DataLoader(train_set, sampler=train_sampler, num_workers=2)
    validation_loader = DataLoader(validation_set, sampler=validation_sampler)
    output_dir = Path(args.output_dir)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu")
        model_without_ddp.load_state_dict(checkpoint["model"])
    for epoch in range(args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, train_loader, optimizer, device, epoch)
        if args.output_dir:
            utils.save_on_master({"model": model_without_ddp.state_dict()}, output_dir / "checkpoint.pth")
        statistics = evaluate(model, criterion, validation_loader, device)
        if args.output_dir and utils.is_main_process():
            torch.save(statistics, output_dir / "eval.pth")
            with (output_dir / "log.txt").open("a") as file:
                file.write(str(epoch))


if __name__ == "__main__":
    main(get_args_parser().parse_args())
