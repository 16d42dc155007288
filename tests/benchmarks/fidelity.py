"""Do our times say what a plain loop says? Both alternate, call by call, in one group.

    python tests/benchmarks/fidelity.py [--ranks 2] [--calls 500] [--min 4] [--max 16M] [--device cpu]

Two runs of one identical loop may differ by half on a machine with two cores, since the processes lie elsewhere, so
only interleaving measures anything: of every three calls, in an order that changes, one is timed as
`ddpdiag allreduce-bench` does, one by an ordinary loop, and one by a copy of that loop, which is the control.
For each size the ratios of the medians are printed with their 95 % bootstrap intervals: ours over the loop's, and the
copy's over the loop's. Ours is faithful where its interval contains 1, or lies within 2 % of it.

On a GPU (`--device cuda`, over nccl) both take CUDA events.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from ddpdiag.bandwidth import rounded_size
from ddpdiag.bench.workloads.operations import prepare
from ddpdiag.bench.workloads.sweep import time_calls, time_one_by_one
from ddpdiag.model.bench import parse_size
from ddpdiag.stats import quantile
from ddpdiag.text import size_text, time_text

RESAMPLES = 2000
CLOSE = 0.02


# A copy of the loop is a function of its own: two that share their code would share the caches, too.
PLAIN_LOOP = """
def plain_loop(tensor, calls):
    seconds = []
    for _ in range(calls):
        if tensor.is_cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            dist.all_reduce(tensor)
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            dist.all_reduce(tensor)
            seconds.append(time.perf_counter() - start)
    return seconds
"""


def plain_loop() -> Callable[[torch.Tensor, int], list[float]]:
    """What anybody would write."""
    names = {"torch": torch, "dist": dist, "time": time}
    exec(PLAIN_LOOP, names)
    return names["plain_loop"]


def alternate(wanted: int, calls: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of `calls` calls each: ours, the plain loop's, and its copy's."""
    sizes = rounded_size("all_reduce", wanted, 4, dist.get_world_size())
    operation = prepare("all_reduce", "float", sizes, device)
    (buffer,) = operation.buffers  # one for all: where memory lies makes a difference, too
    loop, again = plain_loop(), plain_loop()
    # As the benchmark times each call, without switching the collection of garbage for each.
    on_cpu, on_gpu = ((lambda: time_one_by_one(operation.call, 1)), (lambda: time_calls(operation.call, 1, device)))
    ways = {
        "ours": on_gpu if device.type == "cuda" else on_cpu,
        "loop": lambda: loop(buffer, 1),
        "copy": lambda: again(buffer, 1),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    turn = random.Random(wanted)  # the same order on every rank
    for number in range(calls + 10):
        for name in turn.sample(list(ways), len(ways)):
            seconds = ways[name]()
            if number >= 10:
                found[name] += seconds
    return found


def interval(above: Sequence[float], below: Sequence[float], rng: random.Random) -> tuple[float, float, float]:
    """The ratio of the medians, and its 95 % bootstrap interval.

    Calls next to each other share what disturbs them, so whole rounds are drawn.
    """
    rounds = list(zip(above, below, strict=True))
    ratios = sorted(_ratio(rng.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
    return _ratio(rounds), quantile(ratios, 0.025), quantile(ratios, 0.975)


def _ratio(rounds: Sequence[tuple[float, float]]) -> float:
    one, other = (quantile(sorted(side), 0.5) for side in zip(*rounds, strict=True))
    return one / other


def be(rank: int, asked: argparse.Namespace, store: str) -> None:
    """One rank."""
    if asked.device == "cuda":
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if asked.device == "cuda" else torch.device("cpu")
    backend = "nccl" if asked.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=asked.ranks)
    wanted, faithful, control = parse_size(asked.min), 0, 0
    sizes = []
    if rank == 0:
        print("    size  median        ours / loop                loop / loop")
    while wanted <= parse_size(asked.max):
        sizes.append(wanted)
        wanted *= 4
    for each in sizes:
        found = alternate(each, asked.calls, device)
        if rank == 0:
            good, alike = show(each, found)
            faithful, control = faithful + good, control + alike
    if rank == 0:
        print(f"\n{faithful} of {len(sizes)} sizes faithful; the loop against itself: {control} of {len(sizes)}")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort at exit (torch 2.13)


def show(wanted: int, found: dict[str, list[float]]) -> tuple[bool, bool]:
    """One line: are ours, and is the copy of the loop, as the loop?"""
    rng = random.Random(0)
    ours = interval(found["ours"], found["loop"], rng)
    copy = interval(found["copy"], found["loop"], rng)
    good, alike = (low <= 1 <= high or max(abs(low - 1), abs(high - 1)) <= CLOSE for _, low, high in (ours, copy))
    median = time_text(quantile(sorted(found["loop"]), 0.5))
    columns = (f"{one:.3f} [{low:.3f}, {high:.3f}]" for one, low, high in (ours, copy))
    verdicts = ("ok" if fine else "OFF" for fine in (good, alike))
    shown = (f"{column} {verdict:<3}" for column, verdict in zip(columns, verdicts, strict=True))
    print(f"{size_text(wanted):>8}  loop {median:>8}  " + "  ".join(shown), flush=True)
    return good, alike


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=500, help="calls of each kind and size (default: 500)")
    parser.add_argument("--min", default="4", help="smallest size (default: 4)")
    parser.add_argument("--max", default="16M", help="largest size (default: 16M)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ddpdiag-fidelity-") as folder:
        multiprocessing.spawn(be, (asked, str(Path(folder) / "store")), nprocs=asked.ranks)


if __name__ == "__main__":
    sys.exit(main())
