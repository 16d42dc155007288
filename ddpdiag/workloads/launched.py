"""A training that does not care who started it: one script for every way of starting the ranks of a host.

    torchrun --nproc-per-node 2 -m ddpdiag.workloads.launched ...                              (and distributed.run)
    python -m torch.distributed.launch --nproc-per-node 2 [--use-env] -m ddpdiag.workloads.launched ...
    python -m ddpdiag.workloads.launched --spawn 2 ...
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python -m ddpdiag.workloads.launched ...     (once per rank)

All of them must answer three questions for each process: which rank am I, of how many, and where is rank 0? Each rank
writes what it saw as JSON to `rank-<n>.json` in `--out`, or `error-<n>.json` if it gave up.
"""

import time

# Before torch, whose import takes most of a start: what came before this line is the launcher's time.
BEGAN_AT = time.monotonic()

import argparse  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from datetime import timedelta  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import NamedTuple  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from ddpdiag.codec import encode  # noqa: E402
from ddpdiag.model.launching import RankError, RankTimes  # noqa: E402
from ddpdiag.strategies.workloads.trainer import Task  # noqa: E402
from ddpdiag.workloads.devices import choose_device  # noqa: E402
from ddpdiag.workloads.group import close_group  # noqa: E402
from ddpdiag.workloads.mnist import load  # noqa: E402

IMPORTED_AT = time.monotonic()
# The first steps find algorithms and buffers.
UNTIMED_STEPS = 3
# Threads that fight for cores make steps dozens of times slower; that is to be measured, and not to look like a hang.
STEPS_SHARE = 0.3


class Who(NamedTuple):
    """Which rank this process is, and who said so."""

    rank: int
    local_rank: int
    world_size: int
    learnt_from: str


class Asked(argparse.Namespace):
    """The command line."""

    out: Path
    steps: int
    batch_size: int
    backend: str
    data_dir: str | None
    seconds: float
    spawn: int | None
    local_rank: int | None


def read_arguments(words: Sequence[str] | None = None) -> Asked:
    """The command line, with `--local-rank`, which torch.distributed.launch adds without being asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for what each rank saw")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64, help="images of a step, over all ranks")
    parser.add_argument("--backend", default="auto", help="auto: nccl with GPUs, else gloo")
    parser.add_argument("--data-dir", help="MNIST files other than those shipped")
    parser.add_argument("--seconds", type=float, default=120.0, help="time-out of the process group")
    parser.add_argument("--spawn", type=int, metavar="N", help="start N ranks with torch.multiprocessing.spawn")
    # Until torch 2.0 it was spelt with an underscore.
    parser.add_argument("--local-rank", "--local_rank", type=int, help="set by torch.distributed.launch")
    return parser.parse_args(words, namespace=Asked())


def who_am_i(asked: Asked) -> Who:
    """From torchrun's variables, or from the launcher's argument, which the old launcher's users read."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if asked.local_rank is not None:
        return Who(rank, asked.local_rank, world_size, "--local-rank")
    # By hand, nobody may have set LOCAL_RANK; on a single host it is the rank.
    return Who(rank, int(os.environ.get("LOCAL_RANK", rank)), world_size, "environment")


def spawned(index: int, asked: Asked, world_size: int) -> None:
    """A process of torch.multiprocessing.spawn: its rank is the first argument, and nothing is in the environment."""
    os.environ.update(RANK=str(index), LOCAL_RANK=str(index), WORLD_SIZE=str(world_size))
    take_part(asked, Who(index, index, world_size, "spawn's argument"))


def take_part(asked: Asked, who: Who) -> None:
    """Train, write down what was seen, and leave; an error is written down and raised."""
    try:
        seen = train(asked, who)
        (asked.out / f"rank-{who.rank}.json").write_bytes(encode(seen))
    except Exception as error:
        told = RankError(rank=who.rank, error=f"{type(error).__name__}: {error}", at=time.monotonic())
        (asked.out / f"error-{who.rank}.json").write_bytes(encode(told))
        raise
    # At Python's exit torch's threads may abort the process ("terminate called ..."), after all work was done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def train(asked: Asked, who: Who) -> RankTimes:
    """DistributedDataParallel on MNIST's digits, from the process group's opening to its end."""
    backend = ("nccl" if torch.cuda.is_available() else "gloo") if asked.backend == "auto" else asked.backend
    device = choose_device(backend, who.local_rank)
    # Rank 0's address is read from MASTER_ADDR and MASTER_PORT, whoever set them.
    dist.init_process_group(backend, rank=who.rank, world_size=who.world_size, timeout=timedelta(seconds=asked.seconds))
    dist.all_reduce(torch.ones(1, device=device))
    wait_for(device)
    group_at = time.monotonic()

    task = Task(steps=asked.steps, batch=asked.batch_size)
    model = DistributedDataParallel(task.network().to(device), device_ids=[device] if device.type == "cuda" else None)
    optimizer = task.optimizer(model.parameters())
    losses: list[float] = []
    seconds: list[float] = []
    affordable = asked.steps
    batches = task.batches(load(asked.data_dir), who.rank, who.world_size, device)
    while len(seconds) < min(asked.steps, affordable):
        begin = time.perf_counter()
        images, labels = next(batches)
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # meanwhile DDP's reducer averages the gradients over the ranks
        optimizer.step()
        losses.append(loss.item())
        wait_for(device)
        seconds.append(time.perf_counter() - begin)
        if len(seconds) == UNTIMED_STEPS:
            affordable = UNTIMED_STEPS + agreed_steps(seconds[-1], asked.seconds * STEPS_SHARE, device)
    close_group()
    return RankTimes(
        rank=who.rank,
        local_rank=who.local_rank,
        world_size=who.world_size,
        learnt_from=who.learnt_from,
        threads=torch.get_num_threads(),
        backend=backend,
        device="CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device),
        torch_version=str(torch.__version__),  # it is no plain string
        began_at=BEGAN_AT,
        imported_at=IMPORTED_AT,
        group_at=group_at,
        step_seconds=tuple(seconds[UNTIMED_STEPS:]),
        first_loss=losses[0],
        last_loss=losses[-1],
    )


def agreed_steps(step_seconds: float, seconds: float, device: torch.device) -> int:
    """How many steps like the slowest rank's fit into `seconds`, at least three; every rank must take as many."""
    slowest = torch.tensor(step_seconds, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return max(3, int(seconds / slowest.item()))


def wait_for(device: torch.device) -> None:
    """A GPU works on while Python goes on: without this, the clock would stop too early."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def main() -> None:
    """One rank, or with `--spawn` the process that starts them all."""
    asked = read_arguments()
    if asked.spawn is not None:
        mp.spawn(spawned, args=(asked, asked.spawn), nprocs=asked.spawn)
    else:
        take_part(asked, who_am_i(asked))


if __name__ == "__main__":
    main()
