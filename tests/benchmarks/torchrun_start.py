"""The time that the checks of torchrun's rendezvous add: seconds from torchrun to the first step of a training.

    python tests/benchmarks/torchrun_start.py [--hosts 3] [--ranks 2] [--runs 5]     (root)

The hosts are network namespaces that share the cores of this machine, so three hosts take longer than three machines.
Each kind of start has its turn in each run. The step is that of the last rank.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS / name) for name in ("hosts", "processes", "tools", "inject")]

from launch import Launched  # noqa: E402
from network import Network  # noqa: E402

STEP = """
import os, sys, time, torch
model = torch.nn.Linear(4, 1)
torch.distributed.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(model)
ddp(torch.ones(2, 4)).sum().backward()
torch.optim.SGD(ddp.parameters(), lr=0.1).step()
print(f"step at {time.monotonic()}", flush=True)
torch.distributed.barrier()
os._exit(0)  # a thread of gloo sometimes aborts the process at its end
"""
KINDS = {
    "plain c10d": ("c10d", "join_timeout=300"),
    "check=none": ("ddpdiag", "check=none"),
    "check=host": ("ddpdiag", "check=host"),
    "check=quick": ("ddpdiag", "check=quick,budget=120"),
}
SECONDS = 300.0


def seconds_to_first_step(hosts: int, ranks: int, backend: str, conf: str) -> float:
    """Start torchrun on all hosts, and wait for its end."""
    with tempfile.TemporaryDirectory() as folder, Network(hosts, Path(folder) / "network") as network:
        script = Path(folder) / "train.py"
        script.write_text(STEP)
        options = ["--nnodes", str(hosts), "--nproc-per-node", str(ranks), "--rdzv-endpoint", "h0:29400"]
        options += ["--rdzv-backend", backend, "--rdzv-conf", conf]
        begin = time.monotonic()
        run = Launched(Path(folder) / "run")
        try:
            for host in network:
                run.start(host.name, host, ["-m", "torch.distributed.run", *options, str(script)], {})
            assert run.is_over(SECONDS), run.told()
            lines = [line for job in run.jobs.values() for line in job.stdout.splitlines()]
            steps = [float(line.split()[-1]) for line in lines if "step at" in line]
            assert len(steps) == hosts * ranks, run.told()
            return max(steps) - begin
        finally:
            run.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    spent: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(given.runs):
        for kind, (backend, conf) in KINDS.items():
            spent[kind].append(seconds_to_first_step(given.hosts, given.ranks, backend, conf))
    print(f"{given.hosts} hosts, {given.ranks} ranks on each, {given.runs} runs; seconds to the first step")
    print(f"{'rendezvous':<12} {'least':>7} {'median':>7} {'most':>7} {'added':>7}")
    plain = statistics.median(spent["plain c10d"])
    for kind, values in spent.items():
        median = statistics.median(values)
        print(f"{kind:<12} {min(values):>7.1f} {median:>7.1f} {max(values):>7.1f} {median - plain:>7.1f}")


if __name__ == "__main__":
    main()
