"""Does the quick check cry wolf? Clean runs, on one host and on three, beside a process that burns a core.

    python -m pip install -c constraints.txt '.[test]'
    sudo python tests/benchmarks/clean.py --runs 50

Every run is the whole check as a user starts it, on hosts made of network namespaces (see tests/hosts), in turn on

    1 host with 2 ranks, 1 host with 4, 3 hosts with 1 rank each, 3 hosts with 4 ranks in all (2, 1 and 1)

The bar: no finding of severity error, and never UNKNOWN. Warnings are counted and shown. A run that misses the bar is
printed with its findings, and the exit code is 1 then, because a false alarm is a fault and no matter of speed.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "hosts"))

from network import Network, reason_against

PORT = 29400
PATIENCE_SECONDS = 150.0


@dataclass(frozen=True)
class Bed:
    """How many ranks each host starts."""

    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        hosts = len(self.ranks)
        return f"{sum(self.ranks)} ranks on {hosts} host{'s' if hosts > 1 else ''}"


# Hosts with different numbers of ranks are a true warning (LCH001.uneven), which one bed shows.
BEDS = (Bed((2,)), Bed((4,)), Bed((1, 1, 1)), Bed((2, 1, 1)))


@dataclass(frozen=True)
class Run:
    """What came of one run."""

    bed: Bed
    exit_code: int | None
    seconds: float
    report: dict
    said: str

    @property
    def findings(self) -> list[dict]:
        return self.report.get("findings", [])

    @property
    def is_clean(self) -> bool:
        errors = any(finding["severity"] == "error" for finding in self.findings)
        return self.exit_code == 0 and self.report.get("verdict") == "fit" and not errors


def run(bed: Bed, folder: Path) -> Run:
    """One check on a bed of its own."""
    with Network(len(bed.ranks), folder / "network") as network:
        begin = time.monotonic()
        processes = [
            _start(network, bed, host, rank, folder)
            for host, count in enumerate(bed.ranks)
            for rank in range(sum(bed.ranks[:host]), sum(bed.ranks[:host]) + count)
        ]
        codes = [_end(process, begin + PATIENCE_SECONDS) for process in processes]
        seconds = time.monotonic() - begin
    path = folder / "report.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    said = "".join(log.read_text(errors="replace") for log in sorted(folder.glob("*.log")))
    return Run(bed, codes[0], seconds, report, said)


def _start(network: Network, bed: Bed, host: int, rank: int, folder: Path) -> subprocess.Popen:
    where = network[host]
    work = folder / f"h{host}"
    (work / "tmp").mkdir(parents=True, exist_ok=True)
    size = sum(bed.ranks)
    check = ["-m", "ddpdiag", "check", "--rank", str(rank), "--world-size", str(size), "--local-rank"]
    check += [str(rank - sum(bed.ranks[:host])), "--master-addr", network[0].address, "--master-port", str(PORT)]
    check += ["--json", str(folder / "report.json")]
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
    environ = {name: value for name, value in os.environ.items() if name not in left_out}
    with (folder / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [*where.enter(work), sys.executable, *check],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # As torchrun sets it for several ranks on a host.
            env=environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(work / "tmp")},
            start_new_session=True,
        )


def _end(process: subprocess.Popen, end: float) -> int | None:
    try:
        return process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


@contextlib.contextmanager
def hog() -> Iterator[None]:
    """A process that burns a core."""
    burner = multiprocessing.Process(target=_burn, daemon=True)
    burner.start()
    try:
        yield
    finally:
        burner.kill()
        burner.join()


def _burn() -> None:
    while True:
        sum(range(10_000))


def show(number: int, done: Run) -> None:
    """One line, and all that a run that is not clean said."""
    warnings = ", ".join(sorted({f["code"] for f in done.findings if f["severity"] == "warning"}))
    verdict = done.report.get("verdict", "no report").upper()
    print(f"{number:>4}  {done.bed.name:<20}{verdict:<10}{done.seconds:>7.1f} s  {warnings}", flush=True)
    if not done.is_clean:
        print(f"      exit code {done.exit_code}\n{done.said}", flush=True)


def summary(runs: Sequence[Run]) -> str:
    """The table of all runs."""
    lines = [f"{'bed':<20}{'runs':>5}{'clean':>7}{'errors':>8}{'UNKNOWN':>9}{'median':>9}{'longest':>9}"]
    for bed in BEDS:
        own = [done for done in runs if done.bed == bed]
        if own:
            errors = sum(f["severity"] == "error" for done in own for f in done.findings)
            unknown = sum(done.report.get("verdict", "unknown") == "unknown" for done in own)
            seconds = sorted(done.seconds for done in own)
            lines.append(
                f"{bed.name:<20}{len(own):>5}{sum(done.is_clean for done in own):>7}{errors:>8}{unknown:>9}"
                f"{seconds[len(own) // 2]:>7.1f} s{seconds[-1]:>7.1f} s"
            )
    warnings = Counter(f["code"] for done in runs for f in done.findings if f["severity"] == "warning")
    lines.append(f"warnings: {', '.join(f'{code} {count}x' for code, count in sorted(warnings.items())) or 'none'}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="how many in all (default: 50)")
    count = max(1, parser.parse_args().runs)
    if reason := reason_against():
        sys.exit(f"no hosts can be made here: {reason}")
    runs: list[Run] = []
    with hog():
        for number in range(1, count + 1):
            folder = Path(tempfile.mkdtemp(prefix="ddpdiag-clean-"))
            try:
                runs.append(run(BEDS[(number - 1) % len(BEDS)], folder))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            show(number, runs[-1])
    clean = sum(done.is_clean for done in runs)
    print(f"\n{summary(runs)}\n{clean} of {len(runs)} runs clean; bar: all; {'passes' if clean == count else 'missed'}")
    sys.exit(clean != count)


if __name__ == "__main__":
    main()
