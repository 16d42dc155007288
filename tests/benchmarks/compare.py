"""Does `ddpdiag compare` tell equal runs apart, and does it see a rank that became slower by 15 %?

    python tests/benchmarks/compare.py [--pairs 20] [--slower 0.15] [--keep DIR]

Three short checks of two ranks take turns: two with nothing wrong, and one in which forward and backward pass of rank 1
take 15 % more of a core (tests/inject). The second is compared with the first, and the third with the first. The bar:
no regression in 20 of 20 pairs, and rank 1 named in 20 of 20. The load of the machine is shown beside each pair:
where others used the cores, the comparison says that it does not judge.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
CHECK = ("-m", "ddpdiag", "check", "--nproc-per-node", "2", "--select", "LCH,COL001,TRN001,TRN003")
SLOW_RANK = 1


def run(record: Path, **variables: str) -> None:
    """One check, recorded."""
    paths = os.pathsep.join(filter(None, [str(TESTS / "inject"), os.environ.get("PYTHONPATH", "")]))
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "DDPDIAG_TEST_REACHED": f"{record}.reached", **variables}
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


def pair(number: int, slower: float, folder: Path) -> tuple[dict, dict]:
    """Healthy against healthy, and slow against healthy."""
    files = [folder / f"{number}-{kind}.jsonl" for kind in ("first", "second", "slow")]
    run(files[0])
    run(files[1])
    run(files[2], DDPDIAG_TEST_FAULT=f"slower {SLOW_RANK}", DDPDIAG_TEST_SLOWER=str(slower))
    return compared(files[0], files[1]), compared(files[0], files[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--slower", type=float, default=0.15, help="share by which the rank is slower (default: 0.15)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the recordings there")
    asked = parser.parse_args()
    counts = dict.fromkeys(("clean", "clean, not judged", "false", "found", "others", "missed", "not judged"), 0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(asked.pairs):
            load = os.getloadavg()[0]
            healthy, slow = pair(number, asked.slower, folder)
            first, second = regressions(healthy), regressions(slow)
            named = any(change["ranks"] == [SLOW_RANK] for change in second)
            counts["false" if first else "clean, not judged" if refused(healthy) else "clean"] += 1
            counts["found" if named else "others" if second else "not judged" if refused(slow) else "missed"] += 1
            said = "; ".join(change["text"] for change in (*first, *second)) or "nothing"
            print(f"{number:>3}  load {load:.1f}  {said}", flush=True)
    print()
    print(", ".join(f"{name} {counts[name]}" for name in ("clean", "clean, not judged", "false")), "healthy pairs")
    print(", ".join(f"{name} {counts[name]}" for name in ("found", "others", "missed", "not judged")), "slow pairs")


if __name__ == "__main__":
    main()
