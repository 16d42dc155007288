"""A trainer as a class, its work split over methods, with snapshots; started by torchrun on any number of hosts."""

import os
from dataclasses import asdict, dataclass

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, random_split
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Snapshot:
    model_state: dict
    optimizer_state: dict
    finished_epoch: int


class Trainer:
    def __init__(self, config, model, optimizer, train_set, test_set=None):
        self.config = config
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.train_set = train_set
        self.train_loader = self._prepare(train_set)
        self.test_loader = self._prepare(test_set) if test_set else None
        self.epochs_run = 0
        self.model = model.to(self.local_rank)
        self.optimizer = optimizer
        self._load_snapshot()
        self.model = DDP(self.model, device_ids=[self.local_rank])

    def _prepare(self, dataset: Dataset):
        return DataLoader(
            dataset,
            batch_size=self.config.batch_size,
            pin_memory=True,
            shuffle=False,
            num_workers=2,
            sampler=DistributedSampler(dataset),
        )

    def _load_snapshot(self):
        try:
            data = torch.load(self.config.snapshot_path, map_location="cpu")
        except FileNotFoundError:
            return
        snapshot = Snapshot(**data)
        self.model.load_state_dict(snapshot.model_state)
        self.optimizer.load_state_dict(snapshot.optimizer_state)
        self.epochs_run = snapshot.finished_epoch

    def _run_batch(self, source, targets, train=True):
        with torch.set_grad_enabled(train):
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch, loader, train=True):
        loader.sampler.set_epoch(epoch)
        for number, (source, targets) in enumerate(loader):
            loss = self._run_batch(source.to(self.local_rank), targets.to(self.local_rank), train)
            if number % 100 == 0:
                print(f"[GPU{self.global_rank}] epoch {epoch} loss {loss:.5f}")

    def _save_snapshot(self, epoch):
        model = self.model
        raw_model = model.module if hasattr(model, "module") else model
        snapshot = Snapshot(raw_model.state_dict(), self.optimizer.state_dict(), epoch)
        torch.save(asdict(snapshot), self.config.snapshot_path)

    def train(self):
        for epoch in range(self.epochs_run, self.config.max_epochs):
            self._run_epoch(epoch, self.train_loader, train=True)
            if self.local_rank == 0 and epoch % self.config.save_every == 0:
                self._save_snapshot(epoch)
            if self.test_loader:
                self._run_epoch(epoch, self.test_loader, train=False)


def objects(config):
    from models import build_model  # of another file

    text = torch.arange(config.length)
    train_set, test_set = random_split(text, [0.9, 0.1], generator=torch.Generator().manual_seed(1))
    model = build_model(config)
    return model, torch.optim.AdamW(model.parameters()), train_set, test_set


def main(config):
    init_process_group(backend="nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    trainer = Trainer(config, *objects(config))
    trainer.train()
    destroy_process_group()


if __name__ == "__main__":
    from configuration import read

    main(read())
