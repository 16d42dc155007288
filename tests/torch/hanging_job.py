"""A training on CPU with tensor, pipeline and data parallel groups over gloo, which a fault of one rank stops.

    python hanging_job.py FOLDER WORLD_SIZE FAULT RANK

All ranks are forked from one process, which has imported torch. Once no rank goes on, each rank writes its flight
recorder into FOLDER/trace_RANK, as a watchdog does for NCCL. A rank that raised its own error writes none.
"""

import mmap
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json

STEPS, FAULT_STEP = 4, 2
STILL_SECONDS, LIMIT_SECONDS = 1.5, 60.0
FOREVER_SECONDS = 3600.0


def main(folder: str, world_size: int, fault: str, faulty_rank: int) -> None:
    """Fork the ranks, wait until none goes on, let them write their recorders, and kill them."""
    progress = mmap.mmap(-1, world_size + 1)  # the steps of each rank, and whether to write the recorders
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            run_rank(folder, rank, progress, fault if rank == faulty_rank else "")
        children.append(child)
    wait_until_still(progress, world_size)
    progress[world_size] = 1
    expected = world_size - (fault == "raises")
    end = time.monotonic() + LIMIT_SECONDS
    while len(list(Path(folder).glob("trace_*"))) < expected and time.monotonic() < end:
        time.sleep(0.05)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def wait_until_still(progress: mmap.mmap, world_size: int) -> None:
    """Return when all ranks have trained, and no rank has gone on for STILL_SECONDS."""
    seen, since = b"", time.monotonic()
    while time.monotonic() - since < STILL_SECONDS or min(seen[:world_size]) == 0:
        time.sleep(0.05)
        if progress[:] != seen:
            seen, since = progress[:], time.monotonic()


def run_rank(folder: str, rank: int, progress: mmap.mmap, fault: str) -> None:
    """Train in this process until it is killed."""
    torch.set_num_threads(1)
    world_size = len(progress) - 1
    if fault != "raises":
        threading.Thread(target=dump_later, args=(folder, rank, progress), daemon=True).start()
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        train(rank, progress, fault)
    except (RuntimeError, ValueError) as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
    time.sleep(FOREVER_SECONDS)  # as in destroy_process_group(), or in a validation


def train(rank: int, progress: mmap.mmap, fault: str) -> None:
    """Train some steps of a model whose layers and batches are divided. The loss is reduced over all ranks."""
    tensor_group, pipeline_group, data_group = make_groups(rank, len(progress) - 1)
    for step in range(STEPS):
        now = fault if step == FAULT_STEP else ""
        for layer in range(2):
            progress[rank] += 1
            if layer and now == "sleeps":
                time.sleep(FOREVER_SECONDS)
            if layer and now == "raises":
                raise ValueError("loss is NaN")
            if layer and now == "leaves":
                return
            activations = torch.ones(64)
            if layer and now == "other collective":
                dist.broadcast(activations, group=tensor_group, group_src=0)
            else:
                dist.all_reduce(activations, group=tensor_group)
        dist.broadcast(torch.ones(32), group=pipeline_group, group_src=0)
        if now == "other order":
            dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(128), group=data_group)
        if now != "other order":
            dist.all_reduce(torch.ones(1))


def make_groups(rank: int, world_size: int) -> list[dist.ProcessGroup]:
    """The rank's groups in a grid of pipeline stages, replicas of the model, and parts of a layer."""
    grid = torch.arange(world_size).reshape(-1, 2, 2)
    own = []
    for axis, name in ((2, "TENSOR"), (0, "PIPELINE"), (1, "DATA")):
        for ranks in grid.movedim(axis, -1).reshape(-1, grid.shape[axis]).tolist():
            group = dist.new_group(ranks, group_desc=f"{name}_PARALLEL_GROUP")
            if rank in ranks:
                own.append(group)
    return own


def dump_later(folder: str, rank: int, progress: mmap.mmap) -> None:
    while not progress[len(progress) - 1]:
        time.sleep(0.05)
    temporary = Path(folder, f".{rank}")
    temporary.write_bytes(_dump_fr_trace_json())
    temporary.rename(Path(folder, f"trace_{rank}"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
