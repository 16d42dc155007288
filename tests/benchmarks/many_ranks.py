"""How many ranks can one small machine check at once, and does the check say the truth then?

    python tests/benchmarks/many_ranks.py [--ranks 8 16 32 64 128] [--fault sleep segv] [--torchrun] [--opens]

`ddpdiag check --nproc-per-node N` over gloo, healthy and, with `--fault`, with a fault of tests/inject in the last
rank's first all-reduce (sleep, segv, raise, ...). Shown are the verdict, the ranks that error findings blame, the
seconds of the whole and of each stage, and the most memory that all processes of the run had together (PSS, in which
shared pages count once). With `--torchrun` torchrun starts the ranks. With `--opens` each run is repeated under strace,
which counts the files that were opened, and is not timed.

The ranks of a host share one import of torch, so 64 ranks are to need at most 6 GiB. A size for which the machine has
too little memory left is passed over and says so. With `--before CHECKOUT` the code of another checkout runs.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

INJECT = Path(__file__).parents[1] / "inject"
RANKS = (8, 16, 32, 64, 128)
MIB_PER_RANK = 90  # with one import for all
MARK = "DDPDIAG_BENCHMARK"
HEAD = (
    "| ranks | fault | verdict | blamed | total | memory (PSS) | files opened | stages |\n"
    "|--:|---|---|---|--:|--:|--:|---|"
)
OPENS = ("strace", "-f", "--seccomp-bpf", "-qq", "-c", "-e", "trace=open,openat,openat2")


@dataclass(frozen=True)
class Way:
    """How ranks are started, and by which code."""

    by_torchrun: bool
    checkout: Path | None

    def command(self, ranks: int, report: Path) -> list[str]:
        torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "29471")
        check = ("-m", "ddpdiag", "check", "--json", str(report))
        if self.by_torchrun:
            return [sys.executable, *torchrun, *check]
        return [sys.executable, *check, "--nproc-per-node", str(ranks)]

    def variables(self, fault: str | None) -> dict[str, str]:
        paths = [str(path) for path in (self.checkout, INJECT if fault is not None else None) if path is not None]
        own = {} if fault is None else {"DDPDIAG_TEST_FAULT": fault}
        return {**own, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}


def available_mib() -> int:
    """What the machine has left."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) // 1024


class Watch(threading.Thread):
    """The most memory that the processes with a mark in their environment had while a command ran."""

    def __init__(self, mark: str) -> None:
        super().__init__(daemon=True)
        self.most_mib = 0
        self.over = threading.Event()
        self._mark = f"{MARK}={mark}".encode()
        self._others: set[str] = set()

    def run(self) -> None:
        while not self.over.wait(1.0):
            pids = [name for name in os.listdir("/proc") if name.isdigit() and name not in self._others]
            self.most_mib = max(self.most_mib, sum(map(self._kib, pids)) // 1024)

    def _kib(self, pid: str) -> int:
        folder = Path("/proc", pid)
        try:
            if self._mark not in (folder / "environ").read_bytes():
                self._others.add(pid)
                return 0
            return int((folder / "smaps_rollup").read_text().partition("\nPss:")[2].split()[0])
        except (OSError, IndexError):
            return 0


def check(way: Way, ranks: int, fault: str | None, folder: Path, mark: str, prefix: tuple[str, ...] = ()) -> Mapping:  # type: ignore[type-arg]
    """The JSON report of one check."""
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    own = way.variables(f"{fault} {ranks - 1}" if fault is not None else None)
    env = {**os.environ, **own, MARK: mark, "DDPDIAG_TEST_REACHED": str(folder / f"reached-{mark}")}
    command = [*prefix, *way.command(ranks, report)]
    done = subprocess.run(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if not report.exists():
        sys.exit(f"{ranks} ranks: left with {done.returncode} and no report:\n{done.stderr[-2000:]}")
    found: Mapping = json.loads(report.read_text())  # type: ignore[type-arg]
    return found


def opened(way: Way, ranks: int, fault: str | None, folder: Path) -> int:
    """How many files all processes of a run opened, or tried to."""
    counts = folder / "strace"
    check(way, ranks, fault, folder, uuid.uuid4().hex, (*OPENS, "-o", str(counts)))
    calls = re.findall(r"^ *[\d.]+ +[\d.]+ +\d+ +(\d+) .*open", counts.read_text(), re.MULTILINE)
    return sum(map(int, calls))


def row(way: Way, ranks: int, fault: str | None, folder: Path, *, opens: bool) -> str:
    """One line of the table."""
    if (left := available_mib()) < MIB_PER_RANK * ranks:
        return f"| {ranks} | {fault or 'none'} | not run: {left} MiB left | | | | | |"
    watch = Watch(mark := uuid.uuid4().hex)
    watch.start()
    begin = time.monotonic()
    report = check(way, ranks, fault, folder, mark)
    seconds = time.monotonic() - begin
    watch.over.set()
    errors = [finding for finding in report["findings"] if finding["severity"] == "error"]
    blamed = sorted({rank for finding in errors for rank in finding["ranks"]})
    codes = ", ".join(dict.fromkeys(finding["code"] for finding in errors))
    stages = ", ".join(f"{s['name']} {s['seconds']:.1f} s" for s in report["stages"] if s["seconds"])
    who = f"{blamed} ({codes})" if errors else "none"
    files = f"{opened(way, ranks, fault, folder):,}" if opens else ""
    return (
        f"| {ranks} | {fault or 'none'} | {report['verdict']} | {who} | {seconds:.0f} s | {watch.most_mib:,} MiB "
        f"| {files} | {stages} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="sizes (default: 8 16 32 64 128)")
    parser.add_argument("--fault", nargs="+", default=[], help="faults, each after a healthy run of the size")
    parser.add_argument("--torchrun", action="store_true", help="torchrun starts the ranks")
    parser.add_argument("--opens", action="store_true", help="count the files that are opened, with strace")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="run the code of another checkout")
    asked = parser.parse_args()
    if min(asked.ranks) < 2:
        parser.error("at least two ranks")
    way = Way(asked.torchrun, asked.before and asked.before.resolve())
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as name:
        for ranks in asked.ranks:
            for fault in (None, *asked.fault):
                print(row(way, ranks, fault, Path(name), opens=asked.opens), flush=True)


if __name__ == "__main__":
    main()
