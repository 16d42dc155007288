"""`ddpdiag history`: which hosts recur, which get slower, what is new; which files count."""

import json
import math
import os
import re
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from random import Random

import pytest
from msgspec import structs
from typer.testing import CliRunner

from ddpdiag.cli.app import app
from ddpdiag.cli.edge import guarded
from ddpdiag.codec import indented_json
from ddpdiag.history import parquet
from ddpdiag.history.answers import History, answer, host_answer, time_text
from ddpdiag.history.blocks import host_sections, samples, sparkline
from ddpdiag.history.counters import rises
from ddpdiag.history.distributions import (
    beta_binomial_tail,
    beta_cdf,
    binomial_tail,
    false_discovery_limit,
    rate_interval,
    spearman,
    theil_sen,
)
from ddpdiag.history.drift import drift
from ddpdiag.history.recurrence import gpu_trials, host_trials, recurrence, subject_of
from ddpdiag.history.rows import Blame, Figure, HostRow, Reading, Run, State, row_of
from ddpdiag.history.since import appearances
from ddpdiag.history.store import Store, find_sources
from ddpdiag.model import TCP_PART, Counters, Matrix
from ddpdiag.simulate.fleet import host_name
from ddpdiag.simulate.months import BEGIN, FleetMonths, Plan

ROOT = Path(__file__).parents[2]
DAY = 86_400.0
NOW = BEGIN.timestamp()
CODES = frozenset({"FAB001", "GPU003", "COL001"})
MANUAL = (ROOT / "docs" / "history.md").read_text()
# The documented view and query, from the first day of the tests on.
VIEW = re.search(r"`(CREATE VIEW hosts AS [^`]*)`", MANUAL)[1].replace("DIR/", "")
QUERY = re.search(r"(SELECT host, [^;]* WHERE day[^;]*;)", MANUAL)[1].replace("2026-08-30", "2026-01-01")


def run(day: float, hosts: Sequence[str], *blames: Blame, unknown: Sequence[str] = (), **fields: object) -> Run:
    """A run of healthy hosts, but for those that `blames` name and those whose state is unknown."""
    blamed = {host for blame in blames for host in blame.hosts}
    states = {
        host: State.FAILING if host in blamed else State.UNKNOWN if host in unknown else State.HEALTHY for host in hosts
    }
    facts, gpus = fields.pop("facts", {}), fields.pop("gpus", {})
    rows = tuple(HostRow(host, state, gpus.get(host, ()), facts.get(host, ())) for host, state in states.items())
    named = {"verdict": "unfit" if blames else "fit", "sentence": "", "ranks": len(rows), "codes": CODES, **fields}
    return Run(run_id=f"{day}", begin_seconds=NOW + day * DAY, hosts=rows, blames=blames, **named)


def blame(*hosts: str, code: str = "FAB001.host", **fields: object) -> Blame:
    return Blame(code, "a title", hosts, **fields)


def fleet_runs(bad: dict[int, Blame], days: int = 20, hosts: int = 12) -> list[Run]:
    """A run of all hosts each day; on the days in `bad` with that finding."""
    names = [f"n{number}" for number in range(hosts)]
    return [run(day, names, *([bad[day]] if day in bad else [])) for day in range(days)]


def of(runs: Sequence[Run], readings: Sequence[Reading] = ()) -> History:
    return answer(runs, readings, since_seconds=NOW, until_seconds=NOW + 30 * DAY)


# Distributions: figures of R 4.3 (pbeta, pbinom, binom.test, cor.test) and of closed forms.


def test_the_beta_distribution():
    assert beta_cdf(0.3, 2, 5) == pytest.approx(1 - sum(math.comb(6, k) * 0.3**k * 0.7 ** (6 - k) for k in (0, 1)))
    assert beta_cdf(0.9, 30, 3) == pytest.approx(binomial_tail(30, 32, 0.9))


@pytest.mark.parametrize(("k", "n", "rate"), [(3, 20, 0.05), (1, 5, 0.5), (9, 60, 0.003)])
def test_the_tail_of_a_binomial(k, n, rate):
    exact = math.fsum(math.comb(n, i) * rate**i * (1 - rate) ** (n - i) for i in range(k, n + 1))
    assert binomial_tail(k, n, rate) == pytest.approx(exact, rel=1e-9)
    assert beta_binomial_tail(k, n, rate * 1e6, (1 - rate) * 1e6) == pytest.approx(exact, rel=2e-3)


def test_hosts_that_differ_make_many_failures_likelier():
    assert beta_binomial_tail(5, 60, 0.3, 99.7) > 20 * binomial_tail(5, 60, 0.003)


def test_the_interval_of_a_rate():
    assert rate_interval(4, 40) == pytest.approx((0.0279, 0.2366), abs=1e-4)
    assert rate_interval(0, 10) == pytest.approx((0, 0.3085), abs=1e-4)
    assert rate_interval(0, 0) == (0, 1)


def test_the_false_discovery_rate():
    # Benjamini and Hochberg (1995), table of section 4.1: four of 15 are accepted.
    p = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459]
    assert false_discovery_limit(p, 15, 0.05) == pytest.approx(0.05 * 4 / 15)
    assert false_discovery_limit([], 15, 0.05) == 0


def test_ranks_and_slopes():
    assert spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)
    assert spearman([1, 2, 3], [7, 7, 7]) == 0
    slope, low, high = theil_sen(range(10), [2 * x + (100 if x in (3, 7) else 0) for x in range(10)])
    assert slope == 2
    assert low <= 2 <= high


# Recurring hosts ------------------------------------------------------------------------------------------------------


def test_a_host_that_fails_again_and_again_is_named():
    history = of(fleet_runs({day: blame("n3") for day in (2, 5, 9, 13, 18)}))
    (only,) = history.recurring_hosts.recurring
    assert (only.name, only.check, only.incidents, only.runs, only.alone) == ("n3", "", 5, 20, 5)
    assert only.codes == {"FAB001.host": 5}
    assert only.low_share < 0.25 < only.high_share
    assert history.failing_hosts == ("n3",)
    assert history.exit_code == 1
    assert "1 host (n3) fails again and again" in history.sentence


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({5: blame("n3")}, "once is chance"),
        ({day: blame(f"n{day}") for day in range(10)}, "each host once"),
        ({5.0: blame("n3"), 5.1: blame("n3"), 5.2: blame("n3"), 5.3: blame("n3")}, "retries of one job"),
        ({day: blame(*(f"n{host}" for host in range(8))) for day in (2, 5, 9)}, "one finding for many hosts"),
    ],
)
def test_what_is_no_lemon(bad, why):
    names = [f"n{number}" for number in range(12)]
    healthy = [run(day + 0.5, names) for day in range(20) if day != 5]
    runs = sorted(
        [*healthy, *(run(day, names, each) for day, each in bad.items())], key=lambda each: each.begin_seconds
    )
    assert of(runs).failing_hosts == (), why


def test_two_hosts_that_fail_only_together_are_a_pair():
    history = of(fleet_runs({day: blame("n3", "n4") for day in (1, 3, 6, 9, 11, 14, 17, 19)}))
    assert history.failing_hosts == ()
    (pair,) = history.recurring_hosts.pairs
    assert (pair.hosts, pair.days) == (("n3", "n4"), 8)
    assert history.exit_code == 1


def test_who_is_blamed_only_with_a_lemon_is_none():
    alone = {day: blame("n3") for day in (1, 3, 5, 7, 9)}
    history = of(fleet_runs(alone | {day: blame("n3", "n4") for day in (11, 14, 17)}))
    assert history.failing_hosts == ("n3",)
    assert history.recurring_hosts.pairs == ()


def test_a_repaired_host_is_not_left_out():
    runs = fleet_runs({day: blame("n3") for day in (0, 1, 2, 4, 5)}, days=29)
    recovered = of(runs).recurring_hosts.recovered
    assert [(each.name, each.healthy_since) for each in recovered] == [("n3", 23)]
    assert of(runs).failing_hosts == ()


def test_runs_without_the_failing_check_neither_repair_a_host_nor_part_its_retries():
    names = [f"n{number}" for number in range(12)]
    other = [run(day / 24, names, codes=frozenset({"HST001"})) for day in range(24 * 29)]
    broken = fleet_runs({day: blame("n3") for day in (0, 2, 4, 6, 8)}, days=10)
    history = of(sorted([*broken, *other], key=lambda each: each.begin_seconds))
    assert history.failing_hosts == ("n3",)
    retries = [run(day / 24 + 0.01, names, blame("n3")) for day in (1, 2, 3)]
    trials = host_trials(sorted([*retries, *other], key=lambda each: each.begin_seconds))
    assert len(subject_of(trials["n3"]).incidents) == 1


def test_too_few_runs_are_unknown_and_not_healthy():
    history = of(fleet_runs({}, days=4))
    assert history.exit_code == 3
    assert history.recurring_hosts.unjudged == tuple(sorted(f"n{number}" for number in range(12)))
    assert "Too few runs" in history.sentence
    assert of([]).exit_code == 3


def test_a_run_that_says_nothing_about_a_host_is_no_healthy_run():
    names = ["n0", "n1"]
    history = of([run(day, names, unknown=["n1"]) for day in range(20)])
    assert history.recurring_hosts.unjudged == ("n1",)
    assert history.recurring_hosts.judged == 1


def test_a_gpu_keeps_its_failures_when_it_moves():
    names = [f"n{number}" for number in range(8)]

    def day_of(day: int) -> Run:
        where = "n1" if day < 10 else "n5"
        gpus = {name: (f"GPU-{name}",) for name in names} | {where: (f"GPU-{where}", "GPU-x")}
        bad = [blame(where, code="GPU003.ecc", gpus=("GPU-x",))] if day in (1, 4, 7, 12, 15, 18) else []
        return run(day, names, *bad, gpus=gpus)

    history = of([day_of(day) for day in range(20)])
    (gpu,) = history.recurring_gpus.recurring
    assert (gpu.name, gpu.incidents, gpu.runs, gpu.hosts) == ("GPU-x", 6, 20, ("n1", "n5"))
    assert history.recurring_hosts.recurring == ()
    assert history.failing_hosts == ("n5",)  # where the GPU is now
    assert [host_answer(history, name)[1] for name in ("n1", "n5")] == [0, 1]


def test_checks_that_did_not_run_are_no_exposure():
    names = [f"n{number}" for number in range(4)]
    few = [run(day, names, blame("n2", code="GPU003.ecc"), codes=frozenset({"GPU003"})) for day in (1, 7, 13)]
    many = [run(day + 0.5, names, codes=frozenset({"COL001"})) for day in range(20)]
    trials = host_trials(sorted([*few, *many], key=lambda each: each.begin_seconds))
    assert [each.name for each in recurrence(trials).recurring] == ["n2"]


def test_many_sick_hosts_do_not_hide_each_other():
    random, names = Random(1), [f"n{number}" for number in range(40)]
    rates = {name: 0.4 if number < 8 else 0.003 for number, name in enumerate(names)}
    runs = [run(day / 2, names, *(blame(name) for name in names if random.random() < rates[name])) for day in range(60)]
    assert set(of(runs).failing_hosts) == set(names[:8])


@pytest.mark.parametrize(
    ("hosts", "share", "code", "words"),
    [
        (1, 0.0, 3, "There is no other host"),
        (1, 0.5, 1, "All hosts together fail in 50 %"),
        (1, 1.0, 1, "1 host (n0) fails again and again"),
        (8, 1.0, 1, "All hosts together fail in 100 %"),
        (8, 0.5, 1, "All hosts together fail in"),
        (3, 0.0, 0, "Slow changes were not judged"),
    ],
)
def test_what_no_comparison_with_others_shows(hosts, share, code, words):
    random, names = Random(1), [f"n{number}" for number in range(hosts)]
    bad = [[name for number, name in enumerate(names) if (day + number) % 2 < 2 * share] for day in range(40)]
    history = of(
        [
            run(day / 2, names, *map(blame, own), figures=figures(day, 1.0, random, hosts=hosts))
            for day, own in enumerate(bad)
        ]
    )
    assert history.exit_code == code
    assert words in history.sentence
    assert host_answer(history, "n0")[1] == code


def test_warnings_alone_do_not_leave_a_host_out():
    history = of(fleet_runs({day: blame("n3", is_error=False) for day in (2, 5, 9, 13, 18)}))
    assert [each.name for each in history.recurring_hosts.recurring] == ["n3"]
    assert history.failing_hosts == ()


@pytest.mark.parametrize("is_error", [True, False])
def test_a_gpu_is_where_it_was_seen_last(is_error):
    """It failed on n1, and is on n5 now, where it has not failed yet. Warnings leave no host out."""
    names = [f"n{number}" for number in range(8)]

    def day_of(day: int) -> Run:
        gpus = {name: (f"GPU-{name}",) for name in names}
        where = "n1" if day < 14 else "n5"
        gpus[where] = (*gpus[where], "GPU-x")
        own = blame("n1", code="GPU003.ecc", gpus=("GPU-x",), is_error=is_error)
        bad = [own] if day in (1, 4, 7, 10, 12) else []
        return run(day, names, *bad, gpus=gpus)

    history = of([day_of(day) for day in range(18)])
    assert history.recurring_gpus.recurring[0].hosts == ("n1", "n5")
    assert history.failing_hosts == (("n5",) if is_error else ())
    assert [host_answer(history, name)[1] for name in ("n1", "n5")] == [0, 1]


def test_gpus_that_all_fail_always():
    names = [f"n{number}" for number in range(3)]
    gpus = {name: (f"GPU-{name}",) for name in names}
    bad = [blame(name, code="GPU003.ecc", gpus=gpus[name], is_error=False) for name in names]
    assert of([run(day, names, *bad, gpus=gpus) for day in range(20)]).exit_code == 1


def test_a_run_each_day_that_fails_is_a_failure_each_day():
    runs = [run(day - day / 200, [f"n{n}" for n in range(12)], *[blame("n3")] * (day % 4 > 0)) for day in range(24)]
    assert of(runs).recurring_hosts.recurring[0].incidents == 18


def test_an_empty_history_of_gpus():
    assert recurrence(gpu_trials(fleet_runs({}))).recurring == ()


@pytest.mark.parametrize(("lemons", "pairs", "seed"), [(4, 2, 1), (20, 8, 4)])
def test_a_simulated_fleet(lemons, pairs, seed):
    """Also where so many hosts fail that they could be taken for usual ones, and hide each other."""
    plan = Plan(hosts=200, days=30, jobs_per_day=30, lemons=lemons, repaired=0, drifting=0, pairs=pairs)
    fleet = FleetMonths(plan, seed)
    found = recurrence(host_trials([row_of(report) for report in fleet.reports()]))
    named, planted = {each.name for each in found.recurring}, {host_name(host) for host in fleet.lemons}
    assert len(named & planted) >= 0.75 * lemons
    assert len(named - planted) <= 1
    assert len({pair.hosts for pair in found.pairs} - {tuple(map(host_name, pair)) for pair in fleet.pairs}) <= 1


# Slow changes ---------------------------------------------------------------------------------------------------------


def figures(day: int, worse: float, random: Random, *, hosts: int = 8, load: float = 1.0) -> tuple[Figure, ...]:
    rates = [45e9 * load * random.gauss(1, 0.01) * (worse if host == 2 else 1) for host in range(hosts)]
    return tuple(Figure(f"n{host}", "host_busbw_bytes_per_s", rate) for host, rate in enumerate(rates))


@pytest.mark.parametrize(("weekly", "hosts", "named"), [(0.02, 8, ["n2"]), (0.0, 8, []), (0.02, 3, [])])
def test_a_host_that_gets_slower_than_its_peers(weekly, hosts, named):
    random = Random(3)
    names = [f"n{host}" for host in range(hosts)]
    days = [
        run(day, names, figures=figures(day, (1 - weekly) ** (day / 7), random, hosts=hosts, load=1 - day / 100))
        for day in range(30)
    ]
    found = drift(days)
    assert [each.subject for each in found.drifts] == named
    assert found.judged == (8 if hosts == 8 else 0)
    if named:
        (only,) = found.drifts
        assert only.low_share_per_week < weekly < only.high_share_per_week


@pytest.mark.parametrize("day", [6, 15, 22])
def test_a_host_that_lost_a_lane_on_one_day_is_slower(day):
    random, names = Random(4), [f"n{host}" for host in range(50)]
    days = [
        run(each, names, figures=figures(each, 0.8 if each >= day else 1.0, random, hosts=50)) for each in range(30)
    ]
    assert [each.subject for each in drift(days).drifts] == ["n2"]


def test_days_that_are_alike_make_no_trend():
    random, names, named = Random(6), [f"n{host}" for host in range(20)], 0
    for _ in range(10):
        states, days = dict.fromkeys(names, 0.0), []
        for day in range(30):
            states = {name: 0.5 * state + random.gauss(0, 0.03) for name, state in states.items()}
            values = tuple(Figure(name, "busbw_bytes_per_s", 1e9 * math.exp(state)) for name, state in states.items())
            days.append(run(day, names, figures=values))
        named += len(drift(days).drifts)
    assert named <= 2


def test_hosts_are_compared_with_those_of_the_same_gpu():
    """More and more of the hosts of a job have the faster GPU."""
    random, names = Random(2), [f"n{host}" for host in range(24)]
    facts = {name: (f"GPU {'H100' if int(name[1:]) < 12 else 'A100'}",) for name in names}
    days = []
    for day in range(30):
        own = random.sample(names[:12], 5 + day // 8) + random.sample(names[12:], 8 - day // 8)
        rates = {name: (9e9 if "H100" in facts[name][0] else 4e9) * random.gauss(1, 0.01) for name in own}
        values = tuple(Figure(name, "gemm_per_s", rate) for name, rate in rates.items())
        days.append(run(day, own, figures=values, facts=facts))
    assert drift(days).drifts == ()


def test_times_that_rise_are_a_loss():
    random = Random(1)

    def at(day: int) -> tuple[Figure, ...]:
        times = [random.gauss(0.01, 1e-4) * (1 + day / 100 if host == 1 else 1) for host in range(6)]
        return tuple(Figure(f"n{host}", "forward_seconds", seconds) for host, seconds in enumerate(times))

    found = drift([run(day, [f"n{host}" for host in range(6)], figures=at(day)) for day in range(20)])
    assert [each.subject for each in found.drifts] == ["n1"]


def test_a_link_that_gets_slower_is_named_unless_its_host_does():
    random = Random(5)
    hosts = [f"n{host}" for host in range(6)]

    def found(bad_subjects: set[str]) -> list[str]:
        days = []
        for day in range(20):
            subjects = [*hosts, *(f"{a} -> {b}" for a in hosts for b in hosts if a != b)]
            rates = {
                each: 1e9 * random.gauss(1, 0.005) * (0.99**day if each in bad_subjects else 1) for each in subjects
            }
            values = tuple(Figure(each, "rdz.mesh_bytes_per_s", rate) for each, rate in rates.items())
            days.append(run(day, hosts, figures=values))
        return [each.subject for each in drift(days).drifts]

    assert found({"n1 -> n2"}) == ["n1 -> n2"]
    assert found({"n1", "n1 -> n2", "n3 -> n1"}) == ["n1"]


def test_damaged_counters_are_limited():
    (report,) = FleetMonths(Plan(hosts=3, days=1, jobs_per_day=1, lemons=0, repaired=0, pairs=0, drifting=0)).reports()
    counters = (Counters(host="a", part=TCP_PART, totals={"sent_segments": 10**400, "resent_segments": -1}),)
    assert [each.totals for each in row_of(structs.replace(report, counters=counters)).readings] == [
        {"sent_segments": 2**63 - 1}
    ]


def test_links_of_small_runs_are_figures():
    (report,) = FleetMonths(Plan(hosts=3, days=1, jobs_per_day=1, lemons=0, repaired=0, pairs=0, drifting=0)).reports()
    names = tuple(f"h{number}" for number in range(3))
    pairs = Matrix(
        name="rdz.mesh",
        title="",
        rows=names,
        columns=names,
        cells=((None, 9.0, 8.0), (7.0, None, 6.0), (5.0, 0.0, None)),
        unit="bytes_per_s",
    )
    copies = Matrix(
        name="p2p.copy.h1",
        title="",
        rows=("a", "b"),
        columns=("a", "b"),
        cells=((None, 4.0), (3.0, None)),
        unit="bytes_per_s",
        gpus={"a": "GPU-a", "b": "GPU-b"},
    )
    ranks = tuple({"rank": rank, "host": "h1", "gpu_uuid": f"GPU-{name}"} for rank, name in enumerate("ab"))
    world = structs.replace(report.world, hosts=names)
    row = row_of(structs.replace(report, world=world, ranks=ranks, matrices=(pairs, copies)))
    values = {figure.subject: figure.value for figure in row.figures if figure.name == "rdz.mesh_bytes_per_s"}
    links = {"h0 -> h1": 9, "h0 -> h2": 8, "h1 -> h0": 7, "h1 -> h2": 6, "h2 -> h0": 5}
    assert values == links | {"h0": 7.5, "h1": 6.5, "h2": 5.5}
    assert [(f.subject, f.name, f.value) for f in row.figures][-1:] == [("h1", "p2p.copy_bytes_per_s", 3.0)]


def test_sparklines():
    assert sparkline([0, 7]) == "\u2581\u2588"
    assert len(sparkline(range(90))) <= 24
    assert sparkline([]) == ""


# Counters -------------------------------------------------------------------------------------------------------------


def tcp_readings(bad: dict[str, Sequence[float]], *, hosts: int = 8, days: int = 30) -> list[Reading]:
    """Readings of each day. The hosts in `bad` lose so many more of a million segments on each day than the others."""
    random, readings = Random(7), []
    totals = [{"sent_segments": 0, "resent_segments": 0} for _ in range(hosts)]
    for day in range(days):
        for host, own in enumerate(totals):
            sent = random.randrange(10**8, 10**9)
            lost = random.uniform(10, 40) + bad.get(f"n{host}", [0] * days)[day]
            own["sent_segments"] += sent
            own["resent_segments"] += int(sent * lost / 1e6)
            readings.append(Reading(f"n{host}", TCP_PART, NOW + day * DAY, dict(own)))
    return readings


def gpu_readings(errors: Sequence[int | None], *, moves_on: int = 99, others: int = 6) -> list[Reading]:
    """Readings of each day of GPU-x with so many errors (None: the counter was reset), and of GPUs without errors."""
    readings, total = [], 0
    for day, number in enumerate(errors):
        total = 0 if number is None else total + number
        readings += [Reading("n9", f"GPU-{other}", NOW + day * DAY, {}) for other in range(others)]
        host = "n1" if day >= moves_on else "n0"
        readings.append(Reading(host, "GPU-x", NOW + day * DAY, {"pcie_replays": total} if total else {}))
    return readings


RISING = [0] * 12 + [2, 0, 3, 4, 2, 6, 8, 4, 9, 12, 7, 14, 20, 12, 25, 30, 40, 60]


@pytest.mark.parametrize(
    ("readings", "named"),
    [
        (gpu_readings(RISING), ["n0"]),
        (gpu_readings(RISING, moves_on=12), ["n1"]),
        (gpu_readings([*RISING[:15], None, *RISING[15:]]), ["n0"]),
        (gpu_readings([0, 900, 0, 0, 5, 0, 0, 0, 800, 0, 0, 0, 3, 0, 0, 700, 0, 0, 0, 0]), []),  # bursts
        (gpu_readings([50] * 20), []),  # no faster than before
        (gpu_readings([0] * 20 + [500] * 10), ["n0"]),  # a jump
        (gpu_readings(([0] * 12 + [30] * 5) * 2), []),  # bursts of days
        (gpu_readings([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 1, 0]), []),  # single errors
        (gpu_readings(RISING, others=3), []),  # too few to compare with
        (gpu_readings(RISING[-8:]), []),  # too few days
        (tcp_readings({}), []),
        (tcp_readings({"n2": [10 * day for day in range(30)]}), ["n2"]),
        (tcp_readings({f"n{host}": [100 * day for day in range(30)] for host in range(8)}), []),  # all alike
    ],
)
def test_errors_that_rise_faster_and_faster(readings, named):
    found = rises(readings)
    assert [each.host for each in found.rises] == named
    history = of(fleet_runs({}), readings)
    assert history.exit_code == bool(named)
    if named:
        (only,) = history.rises
        assert only.now > 3 * max(only.before, only.others)
        assert f"rrors on 1 host ({named[0]}) become more frequent" in history.sentence
        assert host_answer(history, named[0])[1] == 1
        assert [section.name for section in host_sections(history, [], named[0])] == ["rises"]


def test_the_index_keeps_the_last_counters_of_a_day(folder, tmp_path):
    runs = [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
    last = {
        (each["created"][:10], row["host"], row["part"]): row["totals"] for each in runs for row in each["counters"]
    }
    days = [each["created"][:10] for each in runs]
    assert days == sorted(days)
    read = read_again(folder, tmp_path / "index")["readings"]
    known = {(time_text(each.seconds)[:10], each.host, each.part): each.totals for each in read}
    assert len(read) == len(known)
    assert known == last


# New findings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), [("NCCL", "NCCL 2"), ("kernel", "kernel 6.8.0-79-generic")])
def test_a_finding_that_came_with_a_version(old, new):
    names = [f"n{number}" for number in range(6)]

    def day_of(day: int) -> Run:
        facts = {name: (new if day >= 12 and name in ("n0", "n1") else f"{old} 1",) for name in names}
        bad = [blame("n0"), blame("n1")] if day >= 12 else []
        return run(day, names, *bad, facts=facts)

    (only,) = appearances([day_of(day) for day in range(20)])
    assert (only.code, only.first_host, only.clean_runs, only.runs, only.hosts) == ("FAB001.host", "n0", 12, 8, 2)
    assert (only.version.fact, only.version.found, only.version.host_days) == (new, 16, 16)
    assert (only.version.found_without, only.version.host_days_without) == (0, 104)


@pytest.mark.parametrize("failures_a_day", [1, 5])
def test_one_host_with_a_new_version_does_not_blame_the_version(failures_a_day):
    names = [f"n{number}" for number in range(6)]
    runs = []
    for day in range(20):
        facts = {name: (f"driver {580 if day >= 10 and name == 'n5' else 570}",) for name in names}
        bad = [blame("n5")] if day in (12, 14, 16) else []
        runs += [run(day + retry / 100, names, *bad, facts=facts) for retry in range(failures_a_day if bad else 1)]
    assert [each.version for each in appearances(runs)] == [None]


def test_a_job_and_its_retry_are_no_new_finding():
    names = [f"n{number}" for number in range(6)]
    runs = [run(day, names) for day in range(15)] + [run(15 + hour / 24, names, blame("n1")) for hour in range(3)]
    assert appearances(runs) == ()


def test_a_finding_of_the_first_days_is_not_new():
    assert appearances(fleet_runs({1: blame("n0"), 9: blame("n1")})) == ()


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with the reports of 3 days of a small fleet."""
    (tmp_path / "reports").mkdir()
    for report in FleetMonths(
        Plan(hosts=8, days=3, jobs_per_day=4, lemons=1, repaired=0, pairs=1, drifting=0)
    ).reports():
        (tmp_path / "reports" / f"{report.run_id}.json").write_text(indented_json(report))
    return tmp_path / "reports"


def called(*words: str, code: int | None = None) -> str:
    """What the command prints, on one line."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(out):
        done = guarded(lambda: app(["history", *words]))
    assert code is None or done == code, out.getvalue()
    return " ".join(out.getvalue().split())


def read_again(folder: Path, index: Path) -> dict[str, object]:
    store = Store(str(index))
    summary = store.read(find_sources([str(folder)]))
    runs, readings = list(store.runs(0, 1e11)), store.readings(0, 1e11)
    store.close()
    seen = {"read": summary.read, "duplicates": summary.duplicates, "problems": summary.problems}
    return seen | {"runs": runs, "readings": readings}


def test_a_file_that_cannot_be_read_is_tried_again_in_the_next_call(folder, tmp_path):
    source, *_ = find_sources([str(folder)])
    store, path = Store(str(tmp_path / "index")), Path(source.path)
    path.rename(tmp_path / "away")
    assert [name for name, _ in store.read([source]).problems] == [source.path]
    (tmp_path / "away").rename(path)
    assert store.read([source]).problems == ()
    assert len(list(store.runs(0, 1e11))) == 1
    store.close()


def test_two_calls_may_share_an_index(folder, tmp_path):
    (tmp_path / "one").mkdir()
    first, *_ = sorted(folder.iterdir())
    (tmp_path / "one" / "a.json").write_bytes(first.read_bytes())
    early = Store(str(tmp_path / "index"))
    early.read(find_sources([str(tmp_path / "one")]))
    runs = read_again(folder, tmp_path / "index")["runs"]
    assert list(early.runs(0, 1e11)) == runs
    early.close()


def test_rows_survive_the_index(folder, tmp_path):
    reports = FleetMonths(Plan(hosts=8, days=3, jobs_per_day=4, lemons=1, repaired=0, pairs=1, drifting=0)).reports()
    wanted = sorted(map(row_of, reports), key=lambda each: each.begin_seconds)
    read = read_again(folder, tmp_path / "index")["runs"]
    for old, new in zip(wanted, read, strict=True):
        rows = {"hosts": (), "figures": (), "readings": ()}
        assert new._replace(**rows) == old._replace(**rows)
        assert sorted(new.hosts) == sorted(old.hosts)
        assert sorted(new.figures) == sorted(old.figures)


def test_an_index_that_can_only_be_read_answers_without_the_new_files(folder, tmp_path, monkeypatch):
    index, first = tmp_path / "index", next(folder.iterdir())
    count = len(list(folder.iterdir()))
    first.rename(tmp_path / "later.json")
    read_again(folder, index)
    (tmp_path / "later.json").rename(folder / "later.json")
    index.chmod(0o444)
    if os.access(index, os.W_OK):  # root
        connect = sqlite3.connect
        monkeypatch.setattr(
            sqlite3, "connect", lambda path, **words: connect(f"file:{path}?mode=ro", uri=True, **words)
        )
    text = called(str(folder), "--index", str(index), "--until", "2026-01-05", "--days", "5")
    assert "1 new file not read" in text
    assert f"{count - 1} runs of 8 hosts" in text


def test_only_new_and_changed_files_are_read(folder, tmp_path):
    index, first = tmp_path / "index", next(folder.iterdir())
    count = len(list(folder.iterdir()))
    assert read_again(folder, index)["read"] == count
    assert read_again(folder, index)["read"] == 0
    os.utime(first, ns=(1, 1))
    again = read_again(folder, index)
    assert (again["read"], len(again["runs"])) == (1, count)
    first.unlink()
    assert len(read_again(folder, index)["runs"]) == count


def test_a_run_counts_once_and_damaged_files_are_named(folder, tmp_path):
    whole = next(folder.iterdir()).read_text()
    count = len(list(folder.iterdir()))
    (folder / "copy.json").write_text(whole)
    (folder / "half.json").write_text(whole[:300])
    (folder / "other.json").write_text('{"name": "x"}')
    for _ in range(2):  # named again although it is not read again
        seen = read_again(folder, tmp_path / "index")
        assert seen["duplicates"] == 1
        assert len(seen["runs"]) == count
        assert sorted(Path(path).name for path, _ in seen["problems"]) == ["half.json", "other.json"]


def test_names_that_are_no_unicode_and_numbers_that_are_too_large(folder, tmp_path):
    first = sorted(folder.iterdir())[0]
    report = json.loads(first.read_text())
    report["world"] |= {"hosts": ["", "\n", "h\u2028"], "size": 2**63}
    report["findings"] = [{"code": "X.y", "severity": "error", "title": "", "message": "", "hosts": ["", "h\u2028"]}]
    first.unlink()
    late = sorted(folder.iterdir())[0]
    late.write_text(
        late.read_text().replace('"created": "2026-01-01', '"created": "9999-12-31').replace("+00:00", "-23:00")
    )
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.json")).write_text(json.dumps(report))
    seen = read_again(folder, tmp_path / "index")
    assert [Path(path) for path, _ in seen["problems"]] == [late]
    assert read_again(folder, tmp_path / "index")["read"] == 0
    assert of(seen["runs"]).runs == len(list(folder.iterdir())) - 1


def test_the_query_of_the_manual(folder, tmp_path):
    runs = read_again(folder, tmp_path / "index")["runs"]
    page = (ROOT / "docs" / "history.md").read_text()
    query = re.search(r"```sql\n(.*?)```", page, re.DOTALL)[1].replace("begin_seconds > strftime", "0 < strftime")
    database = sqlite3.connect(tmp_path / "index")
    rows = database.execute(query).fetchall()
    database.close()
    states = [row.state for each in runs for row in each.hosts if row.host == rows[0][0]]
    assert rows[0][1:] == (len(states), states.count(State.FAILING))
    assert len(rows) == 8


def test_the_parts_of_a_recording_are_one_run(tmp_path):
    recording = (Path(__file__).parent.parent / "recordings" / "healthy-2-ranks.jsonl").read_text()
    for name in ("run.jsonl", "rank-1.jsonl"):
        (tmp_path / name).write_text(recording)
    assert len(find_sources([str(tmp_path)])) == 1


def test_another_database_is_left_alone(tmp_path):
    path = tmp_path / "other.db"
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE mine (a)")
    database.close()
    (tmp_path / "text").write_text("no database, but long enough to be read as a header of one " * 3)
    before = path.read_bytes()
    for name in ("other.db", "text"):
        assert "--index" in called(str(tmp_path), "--index", str(tmp_path / name), code=2)
    assert path.read_bytes() == before


# The command ----------------------------------------------------------------------------------------------------------


def test_all_outputs(folder, tmp_path):
    paths = {name: tmp_path / name for name in ("json", "markdown", "prometheus", "write-failing-hosts", "html")}
    options = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    text = CliRunner().invoke(app, ["history", str(folder), "--until", "2026-01-05", "--days", "5", *options]).stdout
    answers = json.loads(paths["json"].read_text())
    assert answers["schema"] == "ddpdiag.history/1"
    assert answers["runs"] == len(list(folder.iterdir()))
    assert answers["sentence"].split(".")[0] in " ".join(text.split())
    assert all(path.exists() for path in paths.values())
    assert max(map(len, text.splitlines())) <= 80
    assert f"ddpdiag_history_runs {answers['runs']}" in paths["prometheus"].read_text()


def test_the_dashboard_shows_metrics_that_exist():
    """Each panel of the dashboard for Grafana asks for a metric that a history with everything in it has."""
    bad = {day: blame("n3") for day in (1, 3, 6, 9, 12)}
    names = [f"n{host}" for host in range(8)]
    random = Random(3)
    days = [
        run(day, names, *([bad[day]] if day in bad else []), figures=figures(day, 0.98 ** (day / 7), random))
        for day in range(30)
    ]
    days_of_n3 = [1.5**day for day in range(30)]
    history = of(days, tcp_readings({"n3": days_of_n3}, hosts=8))
    known = {f"ddpdiag_{sample.name}" for sample in samples(history, NOW)}
    panels = json.loads((ROOT / "recipes" / "grafana-history.json").read_text())["panels"]
    asked = {word for panel in panels for word in re.findall(r"ddpdiag_\w+", panel["targets"][0]["expr"])}
    assert len({panel["id"] for panel in panels}) == len(panels) == 9
    assert asked <= known


def test_a_run_in_the_last_moment_has_a_day():
    history = answer([run(5, ["n0"])], since_seconds=NOW, until_seconds=NOW + 5 * DAY + 0.5)
    assert len(history.day_names) == 6


def test_one_host(folder):
    text = called(str(folder), "--until", "2026-01-05", "--host", "n0003", code=3)
    assert "Runs of n0003" in text
    assert "n0003 had fewer than 10 runs with a result" in text
    assert "did you mean" in called(str(folder), "--until", "2026-01-05", "--host", "n003", code=2)


def test_a_run_of_the_future_is_named_and_does_not_count(folder):
    name = sorted(folder.iterdir())[0]
    name.write_text(name.read_text().replace('"created": "2026-01', '"created": "2126-01'))
    text = called(str(folder), "--until", "2127-01-01", "--days", "3650")
    assert "begins in the future" in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "no such file or folder"),
        (["."], "no report"),
        (["text.json"], "no run in 1 file; the first: "),
        ([".", "--json", "/nowhere/x"], "--json: cannot write /nowhere/x"),
        ([".", "--days", "nan"], "expected a number of days"),
        ([".", "--until", "tomorrow"], "expected a date or time"),
        ([".", "--until", "0001-01-02"], "expected a date or time"),
        ([".", "--json", "-", "--html", "-"], "both name"),
        (["text.json", "--json", "text.json"], "would overwrite a file that is read"),
        (["text.json", "--index", "new", "--json", "new"], "would overwrite a file that is read"),
    ],
)
def test_wrong_usage(tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    if words[0] == "text.json":
        (tmp_path / "text.json").write_text("no report")
    assert sentence in called(*words, code=2)


def test_a_time_without_runs_is_unknown(folder):
    text = called(str(folder), "--until", "2030-01-01", code=3)
    assert "outside of this time, the last at 2026-01-03" in text


def test_parquet_has_every_run_in_a_folder_for_its_day(tmp_path, monkeypatch):
    duckdb = pytest.importorskip("duckdb", reason="--parquet needs DuckDB")
    runs = [run(day, ("a", "b", "it's"), *([blame("b")] if day == 1 else [])) for day in (0, 0.2, 1)]
    for _ in range(2):  # a day that is written again replaces its files
        parquet.write(
            str(tmp_path / "it's" / "lake"), runs, [Reading("a", TCP_PART, NOW, {"sent_segments": 2**63 - 1})]
        )
    folders = {name: len(list((tmp_path / "it's" / "lake" / name).iterdir())) for name in ("runs", "counters")}
    assert folders == {"runs": 2, "counters": 1}
    monkeypatch.chdir(tmp_path / "it's" / "lake")
    database = duckdb.connect()
    database.execute(VIEW)
    assert database.sql(QUERY).fetchall() == [("b", 3, 1), ("a", 3, 0), ("it's", 3, 0)]
    columns = re.search(r"CREATE TABLE hosts \((.*?)\)\nWITH", MANUAL, re.DOTALL)[1].split(",")
    assert [column.split()[0] for column in columns] == [name for name, *_ in database.sql("DESCRIBE hosts").fetchall()]


@pytest.mark.long
def test_spark_reads_the_rows_that_duckdb_reads(tmp_path):
    database = pytest.importorskip("duckdb", reason="--parquet needs DuckDB").connect()
    sql = pytest.importorskip("pyspark.sql", reason="pyspark is not installed", exc_type=ModuleNotFoundError)
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    runs = [row_of(report) for report in FleetMonths(Plan(hosts=60, days=5, jobs_per_day=10)).reports()]
    parquet.write(str(tmp_path), runs, [reading for run in runs for reading in run.readings])
    spark = sql.SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        for name in ("runs", "hosts", "blames", "figures", "counters"):
            frame = spark.read.parquet(str(tmp_path / name))
            rows = database.sql(f"SELECT {', '.join(frame.columns)} FROM '{tmp_path}/{name}/*/*.parquet'").fetchall()
            assert rows
            assert sorted(map(repr, map(tuple, frame.collect()))) == sorted(map(repr, rows))
        spark.read.parquet(str(tmp_path / "hosts")).createOrReplaceTempView("hosts")
        database.execute(VIEW.replace("hosts/", f"{tmp_path}/hosts/"))
        assert [tuple(row) for row in spark.sql(QUERY).collect()] == database.sql(QUERY).fetchall()
    finally:
        spark.stop()
