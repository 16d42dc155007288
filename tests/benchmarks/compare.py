"""How often `ddpdiag compare` calls equal runs different.

    python tests/benchmarks/compare.py [--pairs 20] [--keep DIR]

Each pair is two short checks of two ranks with nothing wrong. The bar: no regression in 20 of 20 pairs. The load of the
machine is shown beside each pair: where others used the cores, the comparison says that it does not judge.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CHECK = ("-m", "ddpdiag", "check", "--nproc-per-node", "2", "--select", "LCH,COL001,TRN001,TRN003")


def run(record: Path) -> None:
    """One check, recorded."""
    own = {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *CHECK, "--record", str(record)]
    subprocess.run(command, env={**os.environ, **own}, capture_output=True, check=False, timeout=180)


def compared(old: Path, new: Path) -> dict:
    """What `ddpdiag compare` says."""
    command = [sys.executable, "-m", "ddpdiag", "compare", str(old), str(new), "--json", "-"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    return json.loads(done.stdout)


def regressions(comparison: dict) -> list[dict]:
    return [change for change in comparison["changes"] if change["direction"] == "regression"]


def refused(comparison: dict) -> bool:
    """Did it say that no times were judged, since the cores were busy?"""
    return any(
        change["name"] == "busy" and "no times were judged" in change["text"] for change in comparison["changes"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the recordings there")
    asked = parser.parse_args()
    counts = dict.fromkeys(("clean", "not judged", "false"), 0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(asked.pairs):
            load = os.getloadavg()[0]
            first, second = (folder / f"{number}-{kind}.jsonl" for kind in ("first", "second"))
            run(first)
            run(second)
            comparison = compared(first, second)
            found = regressions(comparison)
            counts["false" if found else "not judged" if refused(comparison) else "clean"] += 1
            said = "; ".join(change["text"] for change in found) or "nothing"
            print(f"{number:>3}  load {load:.1f}  {said}", flush=True)
    print(", ".join(f"{name} {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
