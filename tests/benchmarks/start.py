"""How long `ddpdiag check` takes, training included, beside what people run instead; two ranks, CPU only.

    python -m pip install -c constraints.txt '.[benchmark]'
    python tests/benchmarks/start.py --rounds 10

Every round runs each pair once, one command right after the other, and the next round in the other order, so that
whatever else the machine does at the time falls on both:

    check / torchrun         `ddpdiag check` and `torchrun --nproc-per-node 2` on a script that only meets (a gloo
                             group, one barrier, and out): what a check costs over the least that a job costs.
                             At most 1.5. With `--ranks 2 8` the same for 8 ranks, without training as well: below 1.
    check / accelerate test  `ddpdiag check` and `accelerate test` on two processes, which answers a like question.
                             Below 1. Left out where accelerate is not installed.
    with a secret / without  two ranks started by hand that meet at this host's own address: with DDPDIAG_TOKEN, so that
                             the control channel is encrypted (CURVE), and without. At most 1.1. Left out on a host
                             that has no other address than loopback.
    preflight / its check    two ranks of torchrun that call `ddpdiag.preflight()`, and `torchrun -m ddpdiag check`:
                             what a call from a script adds. At most 1.1. `--only preflight` runs this pair alone.
    now / before             `ddpdiag check` of this checkout and of the one given with --before. At most 1.05.

Then `ddpdiag --help` and `ddpdiag explain COL001`, each within 0.3 s and without torch.

The medians of the ratios count. A bar that is missed is said, and changes nothing in the exit code, which is 1 only
when a command itself failed: a time depends on the machine, and nothing that depends on the machine is a test. The two
processes of `accelerate test` abort now and then when they leave: that is said, too, and the pair runs again.
"""

import argparse
import os
import platform
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SCRIPTS = Path(sysconfig.get_path("scripts"))
CHECKOUT = Path(__file__).resolve().parents[2]
FIT = ("FIT: 2 ranks",)

MEET = """\
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""

# "MULTI_CPU" would start one process only (accelerate 1.15 starts several through mpirun alone). "MULTI_GPU" starts
# two, as torchrun does, and ACCELERATE_USE_CPU has them meet over gloo.
TWO_PROCESSES = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 1
machine_rank: 0
num_processes: 2
mixed_precision: 'no'
use_cpu: false
"""
OVER_GLOO = ("Num processes: 2", "DistributedType.MULTI_CPU  Backend: gloo")

PREFLIGHT = (
    "import os, ddpdiag; print(ddpdiag.preflight() if os.environ['RANK'] == '0' else ddpdiag.preflight().verdict)\n"
)

SHORT_SECONDS = 0.3
LEAN = """\
import contextlib, sys
sys.argv = ["ddpdiag", *sys.argv[1:]]
from ddpdiag.cli import main
with contextlib.suppress(SystemExit):
    main()
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""


class Failed(Exception):
    """A command left with an error, or did not say what it should."""


@dataclass(frozen=True)
class Command:
    """Something to time. Its output must hold `words`, so that nothing else than what was meant is timed."""

    name: str
    arguments: Sequence[str]
    words: Sequence[str] = ()
    patience: int = 1

    def seconds(self, folder: Path) -> float:
        """One run, from start to exit."""
        begin = time.perf_counter()
        done = subprocess.run(
            self.arguments,
            cwd=folder,
            env=variables(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - begin
        missing = [word for word in self.words if word not in done.stdout]
        if done.returncode or missing:
            without = f" and without {missing}" if missing else ""
            raise Failed(f"{self.name} left with {done.returncode}{without}:\n{done.stdout[-3000:]}")
        return seconds


@dataclass(frozen=True)
class Pair:
    """`ours` against `theirs`; `bar` is what the ratio of their seconds may be, or must stay below."""

    ours: Command
    theirs: Command
    bar: float
    below: bool

    def passes(self, ratio: float) -> bool:
        return ratio < self.bar if self.below else ratio <= self.bar

    def seconds(self, order: Sequence[Command], folder: Path) -> tuple[float, float]:
        """Ours and theirs, run one right after the other; both again while theirs fails and may."""
        for _ in range(self.theirs.patience - 1):
            try:
                return self._seconds(order, folder)
            except Failed as failure:
                if not str(failure).startswith(self.theirs.name):
                    raise
                print(f"       {str(failure).partition(':')[0]}; again", flush=True)
        return self._seconds(order, folder)

    def _seconds(self, order: Sequence[Command], folder: Path) -> tuple[float, float]:
        taken = {command.name: command.seconds(folder) for command in order}
        return taken[self.ours.name], taken[self.theirs.name]


def variables() -> dict[str, str]:
    """A user's environment: both tools with their compiled modules, no launcher, no GPU, scripts on PATH."""
    left_out = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    environ = {name: value for name, value in os.environ.items() if name not in left_out}
    ours = {"PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    return environ | ours | {"ACCELERATE_USE_CPU": "true"}


def against_torchrun(ranks: int, folder: Path) -> list[Pair]:
    """A check and torchrun with so many ranks, which share one import of torch in a check only."""
    number = ("--nproc-per-node", str(ranks))
    check = Command(f"check of {ranks}", [str(SCRIPTS / "ddpdiag"), "check", *number], (f"FIT: {ranks} ranks",))
    untrained = Command(f"untrained {ranks}", [*check.arguments, "--skip-stage", "training"], check.words)
    torchrun = Command(f"torchrun of {ranks}", [str(SCRIPTS / "torchrun"), *number, str(folder / "meet.py")])
    if ranks == 2:
        return [Pair(check, torchrun, 1.5, below=False)]
    return [Pair(check, torchrun, 1.0, below=True), Pair(untrained, torchrun, 1.0, below=True)]


def against_its_check(folder: Path) -> Pair:
    """Two ranks that call preflight(), and the same check started by torchrun itself."""
    (folder / "preflight.py").write_text(PREFLIGHT)
    start = [str(SCRIPTS / "torchrun"), "--nproc-per-node", "2"]
    by_script = Command("preflight", [*start, str(folder / "preflight.py")], ("2 ranks on 1 host",))
    return Pair(
        by_script, Command("its check", [*start, "-m", "ddpdiag", "check"], ("2 ranks on 1 host",)), 1.1, below=False
    )


def pairs(folder: Path, ranks: Sequence[int], before: Path | None) -> list[Pair]:
    """What is compared here; the scripts that it takes are written to `folder`."""
    (folder / "meet.py").write_text(MEET)
    (folder / "two.yaml").write_text(TWO_PROCESSES)
    found = [pair for count in ranks for pair in against_torchrun(count, folder)]
    check = Command("ddpdiag check", [str(SCRIPTS / "ddpdiag"), "check", "--nproc-per-node", "2"], FIT)
    if installed("accelerate") is not None:
        test = [str(SCRIPTS / "accelerate"), "test", "--config_file", str(folder / "two.yaml")]
        found.append(Pair(check, Command("accelerate test", test, OVER_GLOO, patience=6), 1.0, below=True))
    else:
        print("accelerate is not installed: nothing is compared with `accelerate test`\n")
    found.append(against_its_check(folder))
    address = own_address()
    if address is not None:
        with_secret = Command("with a secret", by_hand(address, "DDPDIAG_TOKEN=secret"), FIT)
        without = Command("without", by_hand(address, "DDPDIAG_TOKEN="), [*FIT, "LCH001.unauthenticated"])
        found.append(Pair(with_secret, without, 1.1, below=False))
    if before is not None:
        now, then = Command("now", of_checkout(CHECKOUT), FIT), Command("before", of_checkout(before.resolve()), FIT)
        found.append(Pair(now, then, 1.05, below=False))
    return found


def of_checkout(root: Path) -> list[str]:
    """A check by the code of this checkout, with this interpreter and what is installed for it."""
    return ["env", f"PYTHONPATH={root}", sys.executable, "-m", "ddpdiag", "check", "--nproc-per-node", "2"]


def own_address() -> str | None:
    """An address of this host that others could reach, if it has one; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737)
        except OSError:
            return None
        return str(probe.getsockname()[0])


def by_hand(address: str, variable: str) -> list[str]:
    """Two ranks in two shells, as on two hosts: no process starts both, and they do not meet over loopback."""
    check = f"{variable} OMP_NUM_THREADS=1 ddpdiag check --world-size 2 --master-addr {address} --master-port 29411"
    return ["sh", "-c", f"{check} --rank 1 & {check} --rank 0 --details; code=$?; wait; exit $code"]


def compare(pair: Pair, rounds: int, folder: Path) -> None:
    """Run a pair `rounds` times and print what each run took, and how the ratios lie to the bar."""
    print(f"{pair.ours.name} / {pair.theirs.name}")
    print(f"{'round':>5}  {'first':<16}{pair.ours.name:>16}{pair.theirs.name:>18}{'ratio':>8}")
    ratios = []
    for number in range(1, rounds + 1):
        order = (pair.ours, pair.theirs) if number % 2 else (pair.theirs, pair.ours)
        ours, theirs = pair.seconds(order, folder)
        ratios.append(ours / theirs)
        print(f"{number:>5}  {order[0].name:<16}{ours:>14.2f} s{theirs:>16.2f} s{ratios[-1]:>8.2f}", flush=True)
    low, middle, high = quartiles(ratios)
    verdict = "passes" if pair.passes(middle) else "falls short"
    bar = f"{'below' if pair.below else 'at most'} {pair.bar:g}"
    print(f"ratio: median {middle:.2f}, quartiles {low:.2f} and {high:.2f}; bar: {bar}; {verdict}\n")


def check_short(arguments: Sequence[str], rounds: int, folder: Path) -> None:
    """Time a command that should be there at once, and see that it leaves torch alone."""
    name = " ".join(["ddpdiag", *arguments])
    Command(f"{name} without torch", [sys.executable, "-c", LEAN, *arguments]).seconds(folder)
    command = Command(name, [str(SCRIPTS / "ddpdiag"), *arguments])
    low, middle, high = quartiles([command.seconds(folder) for _ in range(rounds)])
    verdict = "passes" if middle <= SHORT_SECONDS else "falls short"
    print(
        f"{name}: median {middle:.3f} s, quartiles {low:.3f} and {high:.3f} s, torch not imported; "
        f"bar: at most {SHORT_SECONDS:g} s; {verdict}"
    )


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def installed(name: str) -> str | None:
    """A package's version; `None` when it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def describe() -> str:
    """The machine and the versions, without which the numbers say nothing."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = models[0].partition(":")[2].strip() if models else platform.machine()
    packages = [f"{name} {found}" for name in ("torch", "ddpdiag", "accelerate") if (found := installed(name))]
    load = Path("/proc/loadavg").read_text().split()[0]
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores ({model}), Python {platform.python_version()}, {', '.join(packages)}; load at start {load}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="how often each pair runs, at least 2 (default: 10)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="sizes to compare with torchrun (default: 2)")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="compare with the code of another checkout")
    parser.add_argument("--only", metavar="NAME", help="run only the pair whose first command has this name")
    arguments = parser.parse_args()
    rounds = max(2, arguments.rounds)
    print(describe())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = pairs(folder, arguments.ranks, arguments.before)
        found = [pair for pair in found if arguments.only in (None, pair.ours.name)]
        try:
            for pair in found:
                pair.seconds((pair.ours, pair.theirs), folder)  # unmeasured: fills the page cache, compiles modules
                compare(pair, rounds, folder)
            for words in (["--help"], ["explain", "COL001"]):
                check_short(words, rounds, folder)
        except Failed as failure:
            sys.exit(str(failure))


if __name__ == "__main__":
    main()
