"""How often TRN001 names the processes that take the ranks' cores, and how often it warns on an idle machine.

    python tests/benchmarks/stolen_cores.py [--runs 5] [--idle 20] [--busy 1 2 4]

Each run is a `ddpdiag check --select LCH003,TRN001,TRN003` of two ranks on two cores, beside 1, 2 or 4 busy processes,
or none. Shown are the least, median and largest share of the cores that was busy, that others had, and share of its
runnable time that a rank waited. The bar: all busy processes named in each run beside them, and no warning in any run
beside none. Let the machine be idle otherwise.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from ddpdiag.checks.api import Seen
from ddpdiag.checks.training import mnist
from ddpdiag.checks.training.stolen_cores import cores_by_machine
from ddpdiag.codec import read_recording
from ddpdiag.judgement import world_of

COMMAND = ("-m", "ddpdiag", "check", "--select", "LCH003,TRN001,TRN003", "--nproc-per-node", "2", "--record")
HEAD = (
    "| busy processes | runs | warned | all named | cores busy | others' share | waited share | samples/s |\n"
    "|--:|--:|--:|--:|--:|--:|--:|--:|"
)


@contextlib.contextmanager
def burning(count: int, cores: str) -> Iterator[list[int]]:
    """Processes that use a core all the time."""
    command = ["taskset", "-c", cores, sys.executable, "-c", "while True: pass"]
    hogs = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield [hog.pid for hog in hogs]
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def run(count: int, cores: str) -> dict:
    """The numbers of one run, whether it warned, and whether it named all busy processes."""
    with tempfile.TemporaryDirectory() as folder, burning(count, cores) as pids:
        file = Path(folder) / "recording.jsonl"
        command = ["taskset", "-c", cores, sys.executable, *COMMAND, str(file)]
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environ, capture_output=True, check=False, timeout=150)
        recording = read_recording([file])
    seen = Seen(world_of(recording), mnist.CHECK, recording)
    (others,) = cores_by_machine(seen, {rank: data.core_use for rank, data in seen.by_rank.items() if data.core_use})
    found = [finding for finding in seen.findings if finding.code == "TRN001.stolen-cores"]
    named = {pid for finding in found for pid in finding.evidence["pids"]}
    result = {
        "warned": bool(found),
        "named": bool(found) and named >= set(pids),
        "busy": others.busy_cores / others.core_count,
        "share": others.others_share,
        "waited": max(others.waited_shares.values()),
        "speed": mnist.figures(seen)["training.samples_per_second"],
    }
    print(f"{count} busy: {result}{''.join(f' {finding.message}' for finding in found)}", flush=True)
    return result


def spread(values: list[float]) -> str:
    return f"{min(values):.2f} / {median(values):.2f} / {max(values):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs beside each number of busy processes (default: 5)")
    parser.add_argument("--idle", type=int, default=20, help="runs beside none (default: 20)")
    parser.add_argument("--busy", type=int, nargs="*", default=[1, 2, 4], help="busy processes (default: 1 2 4)")
    parser.add_argument("--cores", default="0,1", help="the cores of the ranks and the busy processes (default: 0,1)")
    asked = parser.parse_args()
    rows = {
        count: [run(count, asked.cores) for _ in range(asked.idle if count == 0 else asked.runs)]
        for count in (0, *asked.busy)
    }
    print(f"\n{HEAD}")
    for count, runs in rows.items():
        if runs:
            warned, named = (sum(own[name] for own in runs) for name in ("warned", "named"))
            shares = (spread([own[name] for own in runs]) for name in ("busy", "share", "waited"))
            speed = f"{median(own['speed'] for own in runs):,.0f}"
            print(f"| {count} | {len(runs)} | {warned} | {named if count else '-'} | {' | '.join(shares)} | {speed} |")


if __name__ == "__main__":
    main()
