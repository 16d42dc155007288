"""How long it takes to judge a large benchmark: made-up ranks of 25 sizes each.

    python tests/benchmarks/judge_bench.py [--ranks 1000 10000]

One process judges for all, after the last answer has come: the whole world waits for it. Printed is the time of
`bench_of`, which everything is made of (decoding of all answers included), of the findings after it, and of both once
more, as the report and the figures ask for them.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import structs

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

from benched import benched, data_of, steady

from ddpdiag.bench.check import judge
from ddpdiag.bench.data import Data
from ddpdiag.bench.judge import bench_report
from ddpdiag.checks.api import Seen

SIZES = tuple(8 << power for power in range(25))
# So many ranks are made, and the others are like one of them: making one takes the clocks of all.
MADE = 16
MOMENTS = 11


def world(ranks: int) -> Seen[Data]:
    """A healthy world; no two ranks copy alike."""
    made = [data_of(rank, MADE, steady(), sizes=SIZES) for rank in range(MADE)]
    rows = {
        rank: structs.replace(made[rank % MADE], rank_count=ranks, pid=rank, copy_rates=(10e9 + rank * 1e3,) * MOMENTS)
        for rank in range(ranks)
    }
    return benched(rows)


def both(seen: Seen[Data]) -> None:
    """The report and the findings."""
    bench_report(seen)
    list(judge(seen))


def seconds(work: Callable[[Seen[Data]], object], seen: Seen[Data]) -> float:
    """Of one call."""
    start = time.perf_counter()
    work(seen)
    return time.perf_counter() - start


def main() -> None:
    """A line for each number of ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1000, 10000])
    print("  ranks    bench_of    findings   both again")
    for ranks in parser.parse_args().ranks:
        seen = world(ranks)
        report, findings, again = seconds(bench_report, seen), seconds(both, seen), seconds(both, seen)
        print(f"{ranks:7d}  {report:8.2f} s  {findings:8.2f} s  {again:9.2f} s", flush=True)


if __name__ == "__main__":
    main()
