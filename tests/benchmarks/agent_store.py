"""Several runs under one agent of torchrun: what one leaves in the agent's store must not reach the next.

    python tests/benchmarks/agent_store.py [--runs 20]

Two ways of starting: a command that runs the check twice and then a training, and an attempt that is killed at one of
twelve moments of its check, after which the next attempt runs the check and a training. A line for each run says
whether every check was FIT and the training ended well; beside it plain torch, started twice in one command.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAIN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(4)
dist.all_reduce(value)
assert value[0] == dist.get_world_size()
dist.barrier()
dist.destroy_process_group()
"""
CHECK = f"{sys.executable} -m ddpdiag check --select RDZ,COL001 --budget 60 -q >> $FOLDER/said 2>&1"
TWICE = f"{CHECK} && {CHECK} && {sys.executable} $FOLDER/train.py"
KILLED = f"""
if [ "$TORCHELASTIC_RESTART_COUNT" = 0 ]; then
    timeout -s KILL $AFTER {CHECK}
    exit 1
fi
{CHECK} && {sys.executable} $FOLDER/train.py
"""
PLAIN = f"{sys.executable} $FOLDER/train.py && {sys.executable} $FOLDER/train.py"
# A training whose ranks do not find each other waits for half an hour.
SECONDS = 150.0
MOMENTS = [0.5 * number for number in range(1, 13)]


def succeeds(command: str, *options: str, **variables: str) -> tuple[bool, float]:
    """Whether two ranks that run `command` under torchrun end well, and the seconds that it took."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(TRAIN)
        script = Path(folder) / "run.sh"
        script.write_text(command)
        begin = time.monotonic()
        try:
            ended = subprocess.run(
                (*torchrun(), "--nproc-per-node", "2", *options, "--no-python", "bash", str(script)),
                env={**os.environ, "FOLDER": folder, **variables},
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return False, SECONDS
        said = Path(folder) / "said"
        if ended.returncode and said.exists():
            print(said.read_text()[-3000:], file=sys.stderr)
        return ended.returncode == 0, time.monotonic() - begin


def torchrun() -> tuple[str, ...]:
    """The launcher of this interpreter's torch."""
    return sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"


def main() -> int:
    """Run all, and print how many were right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    print(f"{'command':<36} {'moment':>7}  result  seconds")
    right = 0
    for _ in range(runs):
        well, spent = succeeds(TWICE)
        right += well
        print(f"{'check, check, train':<36} {'-':>7}  {'right' if well else 'WRONG':<6} {spent:8.1f}", flush=True)
    killed = 0
    for moment in MOMENTS:
        well, spent = succeeds(KILLED, "--max-restarts", "1", AFTER=str(moment))
        killed += well
        print(
            f"{'killed check; check, train':<36} {moment:>5.1f} s  {'right' if well else 'WRONG':<6} {spent:8.1f}",
            flush=True,
        )
    plain, spent = succeeds(PLAIN)
    print(f"{'plain torch: train, train':<36} {'-':>7}  {'works' if plain else 'fails':<6} {spent:8.1f}")
    print(f"check, check, train: {right} of {runs}; after a killed attempt: {killed} of {len(MOMENTS)}")
    return 0 if (right, killed) == (runs, len(MOMENTS)) else 1


if __name__ == "__main__":
    sys.exit(main())
