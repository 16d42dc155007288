"""What preflight(groups=..., every=...) costs a training, and the check that names a rank that turns slow.

    python tests/benchmarks/periodic_checks.py [--steps 3000] [--every 1000] [--rounds 3] [--width 512]

Ranks train over gloo under torchrun on this machine, with and without checks in turn. The share is the time that rank
0 spends in the checks of its steps, of all its time; it includes the wait for other ranks. Then rank 1 turns slow in
the middle of an interval:

    compute   4 ranks; rank 1 makes the model's forward pass and the matrix product of the check three times
    burn      2 ranks, each on a core of its own; a process burns the core of rank 1
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

TRAIN = """\
import json, logging, os, subprocess, sys, time
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import ddpdiag

logging.disable()
case, steps, every, width = sys.argv[1], *map(int, sys.argv[2:5])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
if case == "burn":
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp")) if size > 2 else None
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(width, width))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = ddpdiag.preflight(groups=mesh or dist.group.WORLD, every=every) if case != "plain" else None
slow_from, multiply, burner = int(1.5 * every), torch.mm, None
checks, named = [], []
dist.barrier()
begin = time.perf_counter()
for step in range(1, steps + 1):
    images = torch.randn(256, width)
    if torch.mm is not multiply:
        with torch.no_grad():
            [model.module(images) for _ in range(2)]
    loss = (model(images) - images).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 1 and step == slow_from and case == "compute":
        torch.mm = lambda *each: [multiply(*each) for _ in range(3)][0]
    if rank == 1 and step == slow_from and case == "burn":
        burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    before = time.perf_counter()
    if monitor and (report := monitor.step()):
        checks.append(time.perf_counter() - before)
        named.append((step, [finding.title for finding in report.findings]))
seconds = time.perf_counter() - begin
if burner:
    burner.kill()
if rank == 0:
    print("RESULT", json.dumps({"seconds": seconds, "checks": checks, "named": named}), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def train(case: str, ranks: int, options: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(TRAIN)
        run = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-endpoint", "localhost:0"]
        words = [str(script), case, str(options.steps), str(options.every), str(options.width)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *run, "--rdzv-backend", "c10d", *words],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert lines, done.stderr
        return json.loads(lines[0].removeprefix("RESULT "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 3000), ("every", 1000), ("rounds", 3), ("width", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    shares, ratios = [], []
    print("round   ms/step   ms/check, each                 share of the time   with / without")
    for number in range(options.rounds):
        checked = train("checked", 4, options)
        plain = train("plain", 4, options)
        shares.append(sum(checked["checks"]) / checked["seconds"])
        ratios.append(checked["seconds"] / plain["seconds"])
        each = " ".join(f"{1e3 * seconds:.0f}" for seconds in checked["checks"])
        step_ms = 1e3 * plain["seconds"] / options.steps
        print(f"{number + 1:5} {step_ms:9.2f}   {each:28} {shares[-1]:17.2%} {ratios[-1]:16.3f}")
    share = median(shares)
    print(f"share: median {share:.2%}; bar: at most 0.5 %; {'passes' if share <= 0.005 else 'misses'}")
    for case, ranks in (("compute", 4), ("burn", 2)):
        print(f"{case}, {ranks} ranks, rank 1 slow from step {int(1.5 * options.every)}:")
        for step, titles in train(case, ranks, options)["named"]:
            print(f"  step {step}: {'; '.join(titles) or 'no finding'}")


if __name__ == "__main__":
    main()
