"""What `ddpdiag history` finds in simulated months of a fleet: precision, recall, false alarms, days until a drift.

Beside it: the rule "three failing runs within a week", which many sites use.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ddpdiag.history.answers import answer
from ddpdiag.history.drift import drift
from ddpdiag.history.recurrence import host_trials, recurrence
from ddpdiag.history.rows import Run, State, row_of
from ddpdiag.simulate.fleet import host_name
from ddpdiag.simulate.months import BEGIN, FleetMonths, Plan

DAY = 86_400.0
WEEK = 7 * DAY


def naive(runs: Sequence[Run]) -> set[str]:
    """The hosts with three failing runs within a week."""
    times: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for row in run.hosts:
            if row.state is State.FAILING:
                times[row.host].append(run.begin_seconds)
    return {host for host, own in times.items() if any(b - a <= WEEK for a, b in zip(own, own[2:], strict=False))}


def until(runs: Sequence[Run], day: int, days: int = 30) -> list[Run]:
    """The runs of `days` days that end with `day`."""
    begin = BEGIN.timestamp()
    return [run for run in runs if begin + (day - days) * DAY <= run.begin_seconds < begin + day * DAY]


def score(named: set[str], planted: set[str]) -> str:
    hits = len(named & planted)
    precision = hits / len(named) if named else 1.0
    recall = hits / len(planted) if planted else 1.0
    return f"{len(named):4d} named, precision {precision:.2f}, recall {recall:.2f}"


def drift_days(runs: Sequence[Run], planted: set[str], last_day: int) -> Iterator[float]:
    """For each drifting host, the day on which it is named first (infinite: never)."""
    waiting = set(planted)
    for day in range(7, last_day + 1, 3):
        for host in waiting & {each.host for each in drift(until(runs, day, 90)).drifts}:
            waiting.discard(host)
            yield day
    yield from (float("inf") for _ in waiting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2_000)
    parser.add_argument("--days", type=int, default=90)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--no-drift", action="store_true", help="leave out the days until a drift is named")
    words = parser.parse_args()
    jobs = 300 * words.hosts // 2_000
    for seed in range(words.seeds):
        began = time.perf_counter()
        fleet = FleetMonths(Plan(hosts=words.hosts, days=words.days, jobs_per_day=jobs), seed)
        runs = [row_of(report) for report in fleet.reports()]
        print(f"seed {seed}: {len(runs):,} runs, {sum(len(run.hosts) for run in runs):,} host-runs,", end=" ")
        print(f"made in {time.perf_counter() - began:.0f} s")
        for day in sorted({30, 60, words.days}):
            planted = {host_name(host) for host in fleet.lemons if day < 40 or host not in fleet.repaired}
            window = until(runs, day)
            began = time.perf_counter()
            found = recurrence(host_trials(window))
            seconds = time.perf_counter() - began
            names = {each.name for each in found.recurring}
            print(f"  day {day}: history       {score(names, planted)} ({seconds:.1f} s)")
            print(f"  day {day}: 3 in a week   {score(naive(window), planted)}")
            recovered = {each.name for each in found.recovered}
            print(f"  day {day}: recovered {len(recovered)}, of {len(fleet.repaired)} repaired", end=" ")
            print(f"{len(recovered & {host_name(host) for host in fleet.repaired})};", end=" ")
            planted_pairs = {tuple(map(host_name, pair)) for pair in fleet.pairs}
            print(
                f"pairs {len(found.pairs)}, planted {len({pair.hosts for pair in found.pairs} & planted_pairs)}", end=""
            )
            print(f"; a host is found from {100 * (found.detectable_share or 0):.0f} % of {found.median_runs} runs on")
        if not words.no_drift:
            drifting = {host_name(host) for host in fleet.drifting}
            days = sorted(drift_days(runs, drifting, words.days))
            named = {each.host for each in drift(runs).drifts}
            print(f"  drift of 1 % a week: named after {statistics.median(days):.0f} days (median;", end=" ")
            print(f"{days[0]:.0f} to {days[-1]:.0f}); day {words.days}: {score(named, drifting)}")
        quiet = FleetMonths(Plan(hosts=words.hosts, days=30, jobs_per_day=jobs, lemons=0, repaired=0, drifting=0), seed)
        window = [row_of(report) for report in quiet.reports()]
        begin = BEGIN.timestamp()
        calm = answer(window, since_seconds=begin, until_seconds=begin + 30 * DAY)
        print(
            f"  no lemons, day 30: history names {len(calm.failing_hosts)} hosts and {len(calm.drifts)} drifts;",
            end=" ",
        )
        print(f"3 in a week names {len(naive(window))}", flush=True)


if __name__ == "__main__":
    main()
