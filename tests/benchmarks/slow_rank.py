"""Is a slow rank named, and no other one? Benchmarks of 2 ranks, of which one is made slow from outside, or none.

    python tests/benchmarks/slow_rank.py [--runs 10]

Three kinds of runs alternate: nothing is wrong; a process burns one of the cores beside them, which slows either rank
by turns; rank 1 is stopped half of the time (SIGSTOP and SIGCONT, 4 ms each), so that it is twice as slow. Shown is
how often each rank was called slow. The bar: rank 1 in all runs of the last kind, nobody in the others.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

KINDS = ("nothing wrong", "a core is burnt", "rank 1 slowed")
COMMAND = ("-m", "ddpdiag", "allreduce-bench", "-b", "64K", "-e", "16M")


def _burn() -> None:
    while True:
        pass


def _workers_of_rank(pid: int, rank: str) -> list[int]:
    """Workers with torch below a process: forks of a fork server, with the name of this rank."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            command = (entry / "cmdline").read_bytes()
            environ = (entry / "environ").read_bytes().split(b"\0")
            name = (entry / "comm").read_text().strip()
            mine = f"DDPDIAG_BENCHMARK={pid}".encode() in environ
            if mine and b"supervisor.fork_server" in command and name == f"ddpdiag-r{rank}":
                found.append(int(entry.name))
    return found


def _slow_down(over: threading.Event, mark: int) -> None:
    workers: list[int] = []
    while not over.is_set():
        workers = workers or _workers_of_rank(mark, "1")
        for signum in (signal.SIGSTOP, signal.SIGCONT):
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signum)
            time.sleep(0.004)


@contextlib.contextmanager
def disturbed(kind: str, mark: int) -> Iterator[None]:
    """What goes on beside a run."""
    over = threading.Event()
    hog = multiprocessing.Process(target=_burn, daemon=True) if kind == KINDS[1] else None
    if hog:
        hog.start()
    if kind == KINDS[2]:
        threading.Thread(target=_slow_down, args=(over, mark), daemon=True).start()
    try:
        yield
    finally:
        over.set()
        if hog:
            hog.kill()


def run(kind: str, number: int) -> dict[int, str]:
    """The slow ranks of one run, and why."""
    with tempfile.TemporaryDirectory() as folder, disturbed(kind, number):
        file = Path(folder) / "bench.json"
        environ = os.environ | {"DDPDIAG_BENCHMARK": str(number), "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *COMMAND, "--json", str(file)], env=environ, capture_output=True, check=False)
        return {line["rank"]: line["slow"] for line in json.loads(file.read_text())["bench"]["ranks"] if line["slow"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="runs of each kind (default: 10)")
    asked = parser.parse_args()
    named: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for number in range(asked.runs * len(KINDS)):
        kind = KINDS[number % len(KINDS)]
        slow = run(kind, os.getpid() * 1000 + number)
        named[kind][", ".join(f"rank {rank}" for rank in slow) or "nobody"] += 1
        print(f"{kind:<16} {'; '.join(f'rank {rank} {why}' for rank, why in slow.items()) or 'nobody'}", flush=True)
    print()
    for kind, counts in named.items():
        print(f"{kind:<16} " + ", ".join(f"{who} in {times}" for who, times in counts.most_common()))


if __name__ == "__main__":
    main()
