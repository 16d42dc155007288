"""What `ddpdiag host` adds to the start of every job, beside what a Prolog would run instead.

    python tests/benchmarks/prolog.py --rounds 10

Every round runs all commands, one right after the other, the next round in the reverse order, with an empty environment
and in the root directory, as slurmd runs a Prolog:

    python -c pass           the least that anything written in Python costs
    nvidia-smi -L            what sites put into a Prolog; left out where there is none
    ddpdiag host             at most 1 s
    ddpdiag host --torch     at most 5 s
    python -c import torch   the least of what needs torch

The medians count, and the ratio to `python -c pass` (or, with torch, to `import torch`). A bar that is missed is said,
and changes nothing in the exit code: a time depends on the machine, and nothing that depends on the machine is a test.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Command(NamedTuple):
    """What is timed, the name of what it is held against, and its bar in seconds."""

    name: str
    arguments: Sequence[str]
    against: str = ""
    bar_seconds: float | None = None


def commands() -> list[Command]:
    ddpdiag = str(Path(sysconfig.get_path("scripts")) / "ddpdiag")
    smi = shutil.which("nvidia-smi")
    python, torch = "python -c pass", "python -c import torch"
    return [
        Command(python, [sys.executable, "-c", "pass"]),
        *([Command("nvidia-smi -L", [smi, "-L"], python)] if smi else []),
        Command("ddpdiag host", [ddpdiag, "host"], python, 1.0),
        Command(torch, [sys.executable, "-c", "import torch"]),
        Command("ddpdiag host --torch", [ddpdiag, "host", "--torch", "--budget", "60"], torch, 5.0),
    ]


def seconds(command: Command) -> float:
    """One run, from start to exit, as slurmd would start it."""
    begin = time.perf_counter()
    done = subprocess.run(
        command.arguments, env={}, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    taken = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"{command.name} left with {done.returncode}:\n{done.stdout}{done.stderr}")
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="how often each runs, at least 2 (default: 10)")
    rounds = max(2, parser.parse_args().rounds)
    chosen = commands()
    if not any(command.name.startswith("nvidia-smi") for command in chosen):
        print("there is no nvidia-smi here: nothing is compared with it")
    print(f"{len(os.sched_getaffinity(0))} cores, load at start {Path('/proc/loadavg').read_text().split()[0]}")
    for command in chosen:
        seconds(command)  # unmeasured: fills the page cache, compiles modules
    taken: dict[str, list[float]] = {command.name: [] for command in chosen}
    for number in range(rounds):
        for command in chosen if number % 2 else reversed(chosen):
            taken[command.name].append(seconds(command))
    print(f"{'':<24}{'median':>9}{'quartiles':>17}{'ratio':>8}  to")
    for command in chosen:
        print(row(command, taken))


def row(command: Command, taken: dict[str, list[float]]) -> str:
    low, middle, high = statistics.quantiles(taken[command.name], n=4, method="inclusive")
    text = f"{command.name:<24}{middle:>7.3f} s{low:>9.3f}-{high:.3f} s"
    if not command.against:
        return text
    pairs = zip(taken[command.name], taken[command.against], strict=True)
    text += f"{statistics.median(ours / theirs for ours, theirs in pairs):>8.1f}  {command.against}"
    if command.bar_seconds is None:
        return text
    passes = "passes" if middle <= command.bar_seconds else "falls short"
    return f"{text}; bar {command.bar_seconds:g} s: {passes}"


if __name__ == "__main__":
    main()
