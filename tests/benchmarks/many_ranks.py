"""How many ranks can one small machine check at once, and does the check say the truth then?

    python tests/benchmarks/many_ranks.py [--ranks 16 32] [--fault sleep]

`ddpdiag check --nproc-per-node N` over gloo, healthy and, with `--fault`, with a fault of tests/inject in the last
rank's first all-reduce (sleep, segv, raise, ...). Shown are the verdict, the ranks that error findings blame, the
seconds of the whole and of each stage, and the most memory in use on the machine meanwhile.

Every rank imports torch for itself, as a job's would: 3 s of a core and 310 to 340 MiB each (torch 2.13). A size for
which the machine has too little memory left is passed over and says so.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

INJECT = Path(__file__).parents[1] / "inject"
RANKS = (16, 32)
MIB_PER_RANK = 320
HEAD = "| ranks | fault | verdict | blamed | total | memory | stages |\n|--:|---|---|---|--:|--:|---|"


def available_mib() -> int:
    """What the machine has left."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) // 1024


class Watch(threading.Thread):
    """The least memory that was left while a command ran."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.least = available_mib()
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.5):
            self.least = min(self.least, available_mib())


def check(ranks: int, fault: str | None, folder: Path) -> dict[str, object]:
    """The JSON report of one check."""
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    own = {} if fault is None else {"DDPDIAG_TEST_FAULT": f"{fault} {ranks - 1}", "PYTHONPATH": str(INJECT)}
    env = {**os.environ, **own, "DDPDIAG_TEST_REACHED": str(folder / f"reached-{ranks}"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "ddpdiag", "check", "--nproc-per-node", str(ranks), "--json", str(report)]
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if not report.exists():
        sys.exit(f"{ranks} ranks: left with {done.returncode} and no report:\n{done.stderr[-2000:]}")
    found: dict[str, object] = json.loads(report.read_text())
    return found


def row(ranks: int, fault: str | None, folder: Path) -> str:
    """One line of the table."""
    before = available_mib()
    if before < MIB_PER_RANK * ranks:
        return f"| {ranks} | {fault or 'none'} | not run: {before} MiB left | | | | |"
    watch = Watch()
    watch.start()
    begin = time.monotonic()
    report: dict = check(ranks, fault, folder)  # type: ignore[type-arg]
    seconds = time.monotonic() - begin
    watch.over.set()
    errors = [finding for finding in report["findings"] if finding["severity"] == "error"]
    blamed = sorted({rank for finding in errors for rank in finding["ranks"]})
    codes = ", ".join(dict.fromkeys(finding["code"] for finding in errors))
    stages = ", ".join(f"{s['name']} {s['seconds']:.1f} s" for s in report["stages"] if s["seconds"])
    who = f"{blamed} ({codes})" if errors else "nobody"
    return (
        f"| {ranks} | {fault or 'none'} | {report['verdict']} | {who} | {seconds:.0f} s | {before - watch.least} MiB "
        f"| {stages} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="sizes (default: 16 32)")
    parser.add_argument("--fault", nargs="+", default=[], help="faults, each after a healthy run of the size")
    asked = parser.parse_args()
    if min(asked.ranks) < 2:
        parser.error("at least two ranks")
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as name:
        for ranks in asked.ranks:
            for fault in (None, *asked.fault):
                print(row(ranks, fault, Path(name)), flush=True)


if __name__ == "__main__":
    main()
