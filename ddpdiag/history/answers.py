"""The answers to the questions of `ddpdiag history`, made from the rows of many runs by pure functions."""

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from msgspec import Struct

from ddpdiag.errors import ExitCode
from ddpdiag.history.counters import Rise, rises
from ddpdiag.history.drift import Drift, drift
from ddpdiag.history.recurrence import MIN_RUNS, Recurrence, Recurring, gpu_trials, host_trials, recurrence
from ddpdiag.history.rows import ARROW, DAY_SECONDS, Reading, Run, State
from ddpdiag.history.since import Appearance, appearances
from ddpdiag.text import count, fold_hosts, label, share_text

SCHEMA = "ddpdiag.history/1"
_NAMES_SHOWN = 6
# Programs read the list of failing hosts; another name could mean several hosts to them ("n[1-9]").
_HOST_NAME = re.compile(r"\w[\w.:-]*")


class HostDays(Struct, frozen=True, kw_only=True):
    """A host by day: for each day of the window its failing runs and its runs with a known state."""

    host: str
    failing: tuple[int, ...]
    runs: tuple[int, ...]


class History(Struct, frozen=True, kw_only=True):
    """The answers. `since` and `until` are the window (UTC, ISO 8601).

    `failing_hosts` are the recurring hosts, and the hosts to which recurring GPUs were moved. `exit_code` is 1 if a
    host, GPU or pair recurs, a host or link gets slower or its errors rise, 3 if no host could be judged, else 0.
    `problems` are sentences about files and runs that do not count. `host_runs` counts hosts over all runs. `days` has
    the hosts that are named anywhere, and `day_names` its days.
    """

    schema: str = SCHEMA
    sentence: str
    exit_code: int
    since: str
    until: str
    runs: int
    hosts: int
    host_runs: int
    failing_hosts: tuple[str, ...]
    recurring_hosts: Recurrence
    recurring_gpus: Recurrence
    drifts: tuple[Drift, ...]
    rises: tuple[Rise, ...]
    series_judged: int
    series_unjudged: int
    appearances: tuple[Appearance, ...]
    day_names: tuple[str, ...]
    days: tuple[HostDays, ...]
    problems: tuple[str, ...] = ()


def answer(
    runs: Sequence[Run],
    readings: Sequence[Reading] = (),
    *,
    since_seconds: float,
    until_seconds: float,
    problems: Sequence[str] = (),
) -> History:
    """Answer all questions about the runs of a window, and the readings of counters; both are in order of time."""
    hosts_of_gpu = _hosts_of_blamed_gpus(runs)
    gpus = recurrence(gpu_trials(runs), hosts_of_gpu)
    moved = {gpu.name: gpu.hosts[-1] for gpu in gpus.recurring if len(gpu.hosts) > 1}
    hosts = recurrence(host_trials(runs, frozenset(moved)))
    failing = dict.fromkeys([*(each.name for each in hosts.recurring), *moved.values()])
    slower, rising = drift(runs), rises(readings)
    all_hosts = {row.host for run in runs for row in run.hosts}
    named = [*(each.name for each in (*hosts.recurring, *hosts.recovered)), *(each.subject for each in slower.drifts)]
    names = dict.fromkeys(name for name in (*named, *(each.host for each in rising.rises)) if name in all_hosts)
    is_found = bool(hosts.recurring or gpus.recurring or hosts.pairs or slower.drifts or rising.rises)
    exit_code = ExitCode.UNFIT if is_found else ExitCode.FIT if hosts.judged else ExitCode.UNKNOWN
    first_day = int(since_seconds // DAY_SECONDS)
    day_count = int((until_seconds - 1) // DAY_SECONDS) - first_day + 1
    return History(
        sentence=_sentence(hosts, gpus, slower.drifts, rising.rises, len(runs), len(all_hosts)),
        exit_code=exit_code,
        since=time_text(since_seconds),
        until=time_text(until_seconds),
        runs=len(runs),
        hosts=len(all_hosts),
        host_runs=sum(len(run.hosts) for run in runs),
        failing_hosts=tuple(filter(_HOST_NAME.fullmatch, failing)),
        recurring_hosts=hosts,
        recurring_gpus=gpus,
        drifts=slower.drifts,
        rises=rising.rises,
        series_judged=slower.judged + rising.judged,
        series_unjudged=slower.unjudged + rising.unjudged,
        appearances=appearances(runs),
        day_names=tuple(time_text((first_day + number) * DAY_SECONDS)[:10] for number in range(day_count)),
        days=_host_days(runs, list(names), first_day, day_count),
        problems=tuple(problems),
    )


def time_text(seconds: float) -> str:
    """A time in seconds since 1970 as "2026-05-31T12:00Z"."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%MZ")


def _hosts_of_blamed_gpus(runs: Sequence[Run]) -> dict[str, tuple[str, ...]]:
    """For each blamed GPU, the hosts on which it was blamed, the last one at the end."""
    hosts: dict[str, dict[str, None]] = {}
    for run in runs:
        blamed = {gpu for blame in run.blames for gpu in blame.gpus}
        for row in run.hosts if blamed else ():
            for gpu in blamed.intersection(row.gpus):
                names = hosts.setdefault(gpu, {})
                names.pop(row.host, None)
                names[row.host] = None
    return {gpu: tuple(names) for gpu, names in hosts.items()}


def _host_days(runs: Sequence[Run], names: Sequence[str], first_day: int, day_count: int) -> tuple[HostDays, ...]:
    failing: dict[str, list[int]] = {name: [0] * day_count for name in names}
    known: dict[str, list[int]] = {name: [0] * day_count for name in names}
    for run in runs:
        day = int(run.begin_seconds // DAY_SECONDS) - first_day
        for row in run.hosts:
            if row.host in known and row.state is not State.UNKNOWN:
                known[row.host][day] += 1
                failing[row.host][day] += row.state is not State.HEALTHY
    return tuple(HostDays(host=name, failing=tuple(failing[name]), runs=tuple(known[name])) for name in names)


def _sentence(
    hosts: Recurrence, gpus: Recurrence, drifts: Sequence[Drift], rising: Sequence[Rise], runs: int, host_count: int
) -> str:
    if not runs:
        return "No run in this time, so no host is known to be healthy."
    parts = []
    if hosts.recurring:
        parts.append(f"{_named(hosts.recurring, 'host')} {_verb(hosts.recurring, 'fail')} again and again")
    if gpus.recurring:
        parts.append(f"{_named(gpus.recurring, 'GPU')} {_verb(gpus.recurring, 'fail')} again and again")
    if number := len(hosts.pairs):
        parts.append(f"{count(number, 'pair')} of hosts {'fails' if number == 1 else 'fail'} together")
    slower = list(dict.fromkeys(each.subject for each in drifts))
    for noun in ("host", "link"):
        if own := [name for name in slower if (ARROW in name) == (noun == "link")]:
            names = fold_hosts(own, limit=_NAMES_SHOWN)
            parts.append(f"{count(len(own), noun)} ({names}) {_verb(own, 'get')} slower")
    if own := list(dict.fromkeys(each.host for each in rising)):
        names = fold_hosts(own, limit=_NAMES_SHOWN)
        parts.append(f"errors on {count(len(own), 'host')} ({names}) rise faster and faster")
    judged = f"{hosts.judged:,} of {count(host_count, 'host')} had {MIN_RUNS} or more runs"
    if parts:
        return f"{'; '.join(parts)}. {judged}."
    if not hosts.judged:
        return f"Too few runs to judge any of {count(host_count, 'host')}: expected {MIN_RUNS} or more of a host."
    limit = hosts.detectable_share
    found = f" A host that fails in {share_text(limit)} of its runs would be found." if limit is not None else ""
    return f"No host fails more often than the others. {judged}.{found}"


def host_answer(history: History, name: str) -> tuple[str, ExitCode]:
    """The sentence and the exit code for one host of the history."""
    hosts = history.recurring_hosts
    own = {each.name: each for each in (*hosts.recurring, *hosts.recovered)}.get(name)
    if parts := (*_failure_clauses(history, name), *_trend_clauses(history, name)):
        return f"{'; '.join(parts)}.", ExitCode.UNFIT
    if name in hosts.unjudged:
        return f"{name} had fewer than {MIN_RUNS} runs with a result, too few to judge it.", ExitCode.UNKNOWN
    if own is not None:
        return f"{name} failed again and again; {count(own.healthy_since, 'healthy run')} since.", ExitCode.FIT
    return f"{name} fails no more often than the other hosts.", ExitCode.FIT


def _failure_clauses(history: History, name: str) -> Iterator[str]:
    hosts = history.recurring_hosts
    for own in hosts.recurring:
        if own.name == name:
            rate = f"{own.incidents} of {own.runs} runs; the other hosts in {share_text(own.fleet_share)} of theirs"
            yield f"{name} fails again and again ({own.check or 'all checks'}: {rate})"
    for pair in hosts.pairs:
        if name in pair.hosts:
            yield f"{name} fails together with {fold_hosts({*pair.hosts} - {name})}"
    for gpu in history.recurring_gpus.recurring:
        if gpu.hosts and gpu.hosts[-1] == name:
            yield f"GPU {gpu.name}, last blamed on {name}, fails again and again"


def _trend_clauses(history: History, name: str) -> Iterator[str]:
    for slower in history.drifts:
        if name in slower.subject.split(ARROW):
            week = share_text(slower.loss_share_per_week)
            yield f"{label(slower.name)} of {slower.subject} gets {week} worse a week"
    for rise in history.rises:
        if rise.host == name:
            yield f"errors of {rise.part} ({label(rise.counter)}) rise faster and faster"


def _named(each: Sequence[Recurring], noun: str) -> str:
    return f"{count(len(each), noun)} ({fold_hosts((one.name for one in each), limit=_NAMES_SHOWN)})"


def _verb(subjects: Sequence[object], verb: str) -> str:
    return f"{verb}s" if len(subjects) == 1 else verb
