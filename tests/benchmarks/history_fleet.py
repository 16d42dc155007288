"""What `ddpdiag history` finds in simulated months of a fleet: precision, recall, false alarms, days until a trend.

Beside it: the rule "three failing runs within a week", which many sites use.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ddpdiag.history.answers import answer
from ddpdiag.history.counters import rises
from ddpdiag.history.drift import drift
from ddpdiag.history.recurrence import host_trials, recurrence
from ddpdiag.history.rows import DAY_SECONDS, Reading, Run, State, row_of
from ddpdiag.simulate.fleet import host_name
from ddpdiag.simulate.months import BEGIN, FleetMonths, Plan

WEEK = 7 * DAY_SECONDS


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
    return [run for run in runs if begin + (day - days) * DAY_SECONDS <= run.begin_seconds < begin + day * DAY_SECONDS]


def score(named: set[str], planted: set[str]) -> str:
    hits = len(named & planted)
    precision = hits / len(named) if named else 1.0
    recall = hits / len(planted) if planted else 1.0
    return f"{len(named):4d} named, precision {precision:.2f}, recall {recall:.2f}"


def drift_days(runs: Sequence[Run], planted: set[str], last_day: int) -> Iterator[float]:
    """For each drifting host, the day on which it is named first (infinite: never)."""
    waiting = set(planted)
    for day in range(7, last_day + 1, 3):
        for host in waiting & {each.subject for each in drift(until(runs, day, 90)).drifts}:
            waiting.discard(host)
            yield day
    yield from (float("inf") for _ in waiting)


def last_readings(runs: Sequence[Run]) -> list[Reading]:
    """The last reading of each day, as an index keeps it."""
    last = {(row.seconds // DAY_SECONDS, row.host, row.part): row for run in runs for row in run.readings}
    return sorted(last.values(), key=lambda row: row.seconds)


def rise_days(
    readings: Sequence[Reading], planted: set[str], first_day: int, last_day: int
) -> tuple[list[int], set[str]]:
    """The days after `first_day` on which each host is named first (30 days before each), and others that are named."""
    found: dict[str, int] = {}
    begin = BEGIN.timestamp()
    for day in range(12, last_day + 1, 3):
        window = [
            row for row in readings if begin + (day - 30) * DAY_SECONDS <= row.seconds < begin + day * DAY_SECONDS
        ]
        for host in {each.host for each in rises(window).rises}:
            found.setdefault(host, day)
    return sorted(day - first_day for host, day in found.items() if host in planted), found.keys() - planted


def crowded(seeds: int) -> None:
    """Print the same for fleets of which a tenth fails, where faults could be taken for the usual state."""
    plan = Plan(hosts=200, days=30, jobs_per_day=30, lemons=20, repaired=0, drifting=0, pairs=8)
    hits = others = pair_hits = other_pairs = 0
    for seed in range(seeds):
        fleet = FleetMonths(plan, seed)
        found = recurrence(host_trials([row_of(report) for report in fleet.reports()]))
        named, planted = {each.name for each in found.recurring}, {host_name(host) for host in fleet.lemons}
        pairs, planted_pairs = (
            {each.hosts for each in found.pairs},
            {tuple(map(host_name, pair)) for pair in fleet.pairs},
        )
        hits, others = hits + len(named & planted), others + len(named - planted)
        pair_hits, other_pairs = pair_hits + len(pairs & planted_pairs), other_pairs + len(pairs - planted_pairs)
    print(
        f"a tenth of 200 hosts fails, {seeds} seeds: {hits} of {seeds * plan.lemons} hosts named, {others} others;",
        end=" ",
    )
    print(f"{pair_hits} of {seeds * plan.pairs} pairs, {other_pairs} others")


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
            named = {each.subject for each in drift(runs).drifts}
            print(f"  drift of 1 % a week: named after {statistics.median(days):.0f} days (median;", end=" ")
            print(f"{days[0]:.0f} to {days[-1]:.0f}); day {words.days}: {score(named, drifting)}")
        cables = {host_name(host) for host in fleet.failing_cables}
        after, false = rise_days(last_readings(runs), cables, fleet.plan.cable_day, words.days)
        print(f"  errors that double every week: {len(after)} of {len(cables)} hosts named,", end=" ")
        print(f"after {statistics.median(after):.0f} days (median; {after[0]} to {after[-1]}); others: {len(false)}")
        plan = Plan(hosts=words.hosts, days=30, jobs_per_day=jobs, lemons=0, repaired=0, drifting=0, failing_cables=0)
        window = until([row_of(report) for report in FleetMonths(plan, seed).reports()], 30)
        begin = BEGIN.timestamp()
        calm = answer(window, last_readings(window), since_seconds=begin, until_seconds=begin + 30 * DAY_SECONDS)
        print(
            f"  no lemons, day 30: history names {len(calm.failing_hosts)} hosts, "
            f"{len(calm.drifts)} drifts and {len(calm.rises)} counters;",
            end=" ",
        )
        print(f"3 in a week names {len(naive(window))}", flush=True)
    crowded(8)


if __name__ == "__main__":
    main()
