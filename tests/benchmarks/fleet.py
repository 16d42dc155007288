"""What a run of a large fleet costs rank 0: simulated runs of 1,024, 2,048, ... 131,072 ranks, 8 on each host.

    python tests/benchmarks/fleet.py [--ranks 1024 2048 ...]

1 % of the hosts are 25 % slower. Each size has a process of its own, since memory that was once taken stays taken.
Shown are the seconds of CPU, since nothing waits: to plan (all rounds together, each from all answers so far, as in a
run), to judge the whole recording, and to write the report of 80 columns; the most memory of the process, with the
recording in it; both per rank; and the lines of the report.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

RANKS_PER_HOST = 8
RANKS = tuple(1024 << power for power in range(8))
HEAD = "| ranks | plan | judge | report | peak memory | us per rank | KiB per rank | lines |\n|" + "--:|" * 8


def measure(ranks: int) -> dict[str, float]:
    """One size, in this process."""
    from ddpdiag.checks.api import Seen
    from ddpdiag.checks.fabric import hosts as fab001
    from ddpdiag.checks.registry import all_checks
    from ddpdiag.checks.world import World
    from ddpdiag.judgement import judge
    from ddpdiag.model import Recording
    from ddpdiag.render.terminal import render
    from ddpdiag.simulate.fleet import Fault, Faults, Fleet, simulate

    hosts = ranks // RANKS_PER_HOST
    slow = Faults(((Fault.SLOW_HOST, max(1, hosts // 100)),))
    recording = simulate(Fleet(hosts, slow), ranks_per_host=RANKS_PER_HOST)
    header, arrivals = recording.header, recording.arrivals
    begin = time.process_time()
    world = World(size=ranks, launcher=header.launcher, options=header.options, arrivals=arrivals)
    of_round = [0]
    for trial in recording.trials:
        of_round.append(of_round[-1] + sum(map(len, trial.groups)))
    for number, known in enumerate(of_round):
        trials, outcomes = recording.trials[:number], recording.outcomes[:known]
        part = Recording(header=header, arrivals=arrivals, trials=trials, outcomes=outcomes)
        fab001.CHECK.plan(Seen(world, fab001.CHECK, part))
    planned = time.process_time()
    report = judge(recording, all_checks())
    judged = time.process_time()
    text = render(report, color=False, width=80)
    return {
        "plan": planned - begin,
        "judge": judged - planned,
        "report": time.process_time() - judged,
        "kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "lines": text.count("\n"),
    }


def row(ranks: int, cost: dict[str, float]) -> str:
    """One line of the table."""
    seconds = (cost["plan"], cost["judge"], cost["report"])
    return (
        f"| {ranks:,} | "
        + " | ".join(f"{one:.2f} s" for one in seconds)
        + f" | {cost['kib'] / 1024:,.0f} MiB | {1e6 * sum(seconds) / ranks:.0f} | {cost['kib'] / ranks:.1f} "
        f"| {cost['lines']:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="sizes (default: 1024 to 131072)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if min(asked.ranks) < 3 * RANKS_PER_HOST or any(ranks % RANKS_PER_HOST for ranks in asked.ranks):
        parser.error(f"multiples of {RANKS_PER_HOST}, of at least three hosts")
    if asked.here:
        print(json.dumps(measure(asked.ranks[0])))
        return
    print(HEAD, flush=True)
    for ranks in asked.ranks:
        command = [sys.executable, __file__, "--here", "--ranks", str(ranks)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr or f"{ranks} ranks: ended with {done.returncode}")
        print(row(ranks, json.loads(done.stdout)), flush=True)


if __name__ == "__main__":
    main()
