"""A training script that any launcher can start. `ddpdiag train --compare-launchers` starts it by each of them:

    torchrun --nproc-per-node 2 -m ddpdiag.strategies.workloads.launched ...             (or torch.distributed.run)
    python -m torch.distributed.launch --nproc-per-node 2 [--use-env] -m ddpdiag.strategies.workloads.launched ...
    python -m ddpdiag.strategies.workloads.launched --spawn ...
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python -m ddpdiag.strategies.workloads.launched ...

Each launcher must give a process its rank, the number of ranks, and the address of rank 0. Each rank writes its
RankTimes as JSON to `rank-<n>.json` in the folder that is the first argument.
"""

import argparse
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ddpdiag.codec import decode, encode
from ddpdiag.strategies.launchers import RankTimes, Training
from ddpdiag.strategies.workloads.trainer import WARMUP_STEPS, Task
from ddpdiag.workloads.devices import choose_device, describe, synchronize
from ddpdiag.workloads.group import close_group
from ddpdiag.workloads.mnist import load

# The share of the time-out in which the timed steps must end. If threads compete for cores, steps are dozens of times
# slower. Then fewer steps run, so that the slow training is measured and does not look like a hang.
STEPS_SHARE = 0.3


class Arguments(argparse.Namespace):
    """The parsed command line. `seconds` is the time-out of the process group, `out` the folder for the times."""

    out: Path
    seconds: float
    training: Training
    spawn: bool
    local_rank: int | None


def read_arguments() -> Arguments:
    """Parse the command line, to which torch.distributed.launch adds `--local-rank`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the times of each rank")
    parser.add_argument("seconds", type=float, help="time-out of the process group")
    parser.add_argument("training", type=lambda text: decode(text.encode(), Training), help="what is trained, as JSON")
    parser.add_argument("--spawn", action="store_true", help="start all ranks with torch.multiprocessing.spawn")
    # Before torch 2.0 torch.distributed.launch passed the option with an underscore.
    parser.add_argument("--local-rank", "--local_rank", type=int, help="set by torch.distributed.launch")
    return parser.parse_args(namespace=Arguments())


def run_rank(arguments: Arguments, rank: int, local_rank: int, world_size: int) -> None:
    """Train as this rank, write its times to a file, and exit this process with 0."""
    times = train(arguments, rank, local_rank, world_size)
    (arguments.out / f"rank-{rank}.json").write_bytes(encode(times))
    # os._exit, because at Python's exit torch's threads may abort the process ("terminate called ...").
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def train(arguments: Arguments, rank: int, local_rank: int, world_size: int) -> RankTimes:
    """Open the process group, train DistributedDataParallel on MNIST, close the group. Returns this rank's times."""
    training = arguments.training
    backend = ("nccl" if torch.cuda.is_available() else "gloo") if training.backend == "auto" else training.backend
    device = choose_device(backend, local_rank)
    # init_process_group reads rank 0's address from MASTER_ADDR and MASTER_PORT, which every launcher sets.
    timeout = timedelta(seconds=arguments.seconds)
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
    dist.all_reduce(torch.ones(1, device=device))
    synchronize(device)
    group_ready_at = time.monotonic()

    task = Task(steps=training.steps, batch_size=training.batch_size)
    model = DistributedDataParallel(task.network().to(device), device_ids=[device] if device.type == "cuda" else None)
    optimizer = task.optimizer(model.parameters())
    seconds: list[float] = []
    step_limit = training.steps
    batches = task.batches(load(), rank, world_size, device)
    while len(seconds) < min(training.steps, step_limit):
        begin = time.perf_counter()
        images, labels = next(batches)
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # meanwhile DDP's reducer averages the gradients over the ranks
        optimizer.step()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
        if len(seconds) == WARMUP_STEPS:
            step_limit = WARMUP_STEPS + agreed_steps(seconds[-1], arguments.seconds * STEPS_SHARE, device)
    close_group()
    return RankTimes(
        rank=rank,
        world_size=world_size,
        threads=torch.get_num_threads(),
        backend=backend,
        device=describe(device).name,
        torch_version=str(torch.__version__),  # torch's own type becomes a plain string
        group_ready_at=group_ready_at,
        step_seconds=statistics.median(seconds[WARMUP_STEPS:]),
    )


def agreed_steps(step_seconds: float, seconds: float, device: torch.device) -> int:
    """The number of steps that the slowest rank can do in `seconds`, at least 3. All ranks must call this."""
    slowest = torch.tensor(step_seconds, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return max(3, int(seconds / slowest.item()))


def run_spawned_rank(index: int, arguments: Arguments) -> None:
    """Run one rank that torch.multiprocessing.spawn started, which passes the rank as `index` and sets no variables."""
    world_size = arguments.training.ranks
    os.environ.update(RANK=str(index), LOCAL_RANK=str(index), WORLD_SIZE=str(world_size))
    run_rank(arguments, index, index, world_size)


def main() -> None:
    """Run one rank, or with `--spawn` start all ranks."""
    arguments = read_arguments()
    if arguments.spawn:
        mp.spawn(run_spawned_rank, args=(arguments,), nprocs=arguments.training.ranks)
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = arguments.local_rank  # torch.distributed.launch passes an argument, torchrun sets LOCAL_RANK
    if local_rank is None:  # started by hand, LOCAL_RANK may be unset; on a single host it equals the rank
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
    run_rank(arguments, rank, local_rank, world_size)


if __name__ == "__main__":
    main()
