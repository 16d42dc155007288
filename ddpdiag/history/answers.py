"""The answers to the questions of `ddpdiag history`, made from the rows of many runs by pure functions."""

import math
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from msgspec import Struct

from ddpdiag.errors import ExitCode
from ddpdiag.history.counters import Rise, RiseAnswer, rises
from ddpdiag.history.drift import MIN_PEERS, Drift, DriftAnswer, drift
from ddpdiag.history.recurrence import MIN_RUNS, Recurrence, gpu_trials, host_trials, recurrence
from ddpdiag.history.rows import ARROW, DAY_SECONDS, Reading, Run, State
from ddpdiag.history.since import Appearance, appearances
from ddpdiag.text import count, fold_hosts, label, share_text

SCHEMA = "ddpdiag.history/1"
# At this share of failing runs a job of 7 hosts fails more often than not (0.9**7 = 0.48).
MANY_FAILURES_SHARE = 0.1
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

    `failing_hosts` are the recurring hosts whose failures are not only warnings, and the hosts to which recurring GPUs
    were moved. `exit_code` is 1 if a host, GPU or pair recurs, a host or link gets slower, its errors become more
    frequent, or all hosts fail often (`MANY_FAILURES_SHARE`); 3 if no two hosts could be judged; else 0.
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
    homes = _homes_of_blamed_gpus(runs)
    gpus = recurrence(gpu_trials(runs), homes)
    moved = [gpu for gpu in gpus.recurring if len(gpu.hosts) > 1]
    hosts = recurrence(host_trials(runs, frozenset(gpu.name for gpu in moved), homes))
    failing = dict.fromkeys(each.name for each in hosts.recurring if each.has_errors)
    failing |= dict.fromkeys(gpu.hosts[-1] for gpu in moved if gpu.has_errors)
    slower, rising = drift(runs), rises(readings)
    all_hosts = {row.host for run in runs for row in run.hosts}
    named = [
        *(each.name for each in (*hosts.recurring, *hosts.recovered)),
        *(gpu.hosts[-1] for gpu in moved),
        *(host for pair in hosts.pairs for host in pair.hosts),
        *(each.subject for each in slower.drifts),
        *(each.host for each in rising.rises),
    ]
    names = dict.fromkeys(name for name in named if name in all_hosts)
    is_found = bool(hosts.recurring or gpus.recurring or hosts.pairs or slower.drifts or rising.rises)
    is_found = is_found or (hosts.judged > 0 and hosts.fleet_share >= MANY_FAILURES_SHARE)
    # With one host there is no other to compare with.
    exit_code = ExitCode.UNFIT if is_found else ExitCode.FIT if hosts.judged > 1 else ExitCode.UNKNOWN
    if hidden := [name for name in failing if not _HOST_NAME.fullmatch(name)]:
        who = f"{count(len(hidden), 'recurring host')} ({', '.join(hidden[:3])})"
        problems = (*problems, f"not in the list of failing hosts: {who}, as the name could mean others")
    first_day = int(since_seconds // DAY_SECONDS)
    day_count = math.ceil(until_seconds / DAY_SECONDS) - first_day
    return History(
        sentence=_sentence(hosts, gpus, slower, rising, len(runs), len(all_hosts)),
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


def _homes_of_blamed_gpus(runs: Sequence[Run]) -> dict[str, tuple[str, ...]]:
    """For each GPU that was blamed, the hosts that had it, the present one at the end."""
    blamed = {gpu for run in runs for blame in run.blames for gpu in blame.gpus}
    homes: dict[str, dict[str, None]] = {}
    for row in (row for run in runs for row in run.hosts if blamed):
        for gpu in blamed.intersection(row.gpus):
            names = homes.setdefault(gpu, {})
            names.pop(row.host, None)
            names[row.host] = None
    return {gpu: tuple(names) for gpu, names in homes.items()}


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
    hosts: Recurrence, gpus: Recurrence, slower: DriftAnswer, rising: RiseAnswer, runs: int, host_count: int
) -> str:
    if not runs:
        return "No run in this time, so no host is known to be healthy."
    judged = f"{hosts.judged:,} of {count(host_count, 'host')} had {MIN_RUNS} or more runs."
    if slower.unjudged + rising.unjudged and not slower.judged + rising.judged:
        judged += f" Slow changes were not judged: too few days, or fewer than {MIN_PEERS + 1} hosts to compare."
    clauses = [*_recurrence_clauses(hosts, gpus), *_change_clauses(slower, rising)]
    if hosts.judged and hosts.fleet_share >= MANY_FAILURES_SHARE:
        share, others = share_text(hosts.fleet_share), "other " if hosts.recurring or hosts.pairs else ""
        clauses.append(f"all {others}hosts together fail in {share} of their runs, so what they share may be at fault")
    if clauses:
        text = "; ".join(clauses)
        return f"{text[0].upper()}{text[1:]}. {judged}"
    if not hosts.judged:
        return f"Too few runs to judge any of {count(host_count, 'host')}: expected {MIN_RUNS} or more of a host."
    if hosts.judged == 1:
        return f"There is no other host to compare with. {judged}"
    limit = hosts.detectable_share
    found = f" A host that fails in {share_text(limit)} of its runs would be found." if limit is not None else ""
    return f"No host fails more often than the others. {judged}{found}"


def _recurrence_clauses(hosts: Recurrence, gpus: Recurrence) -> Iterator[str]:
    for answer, noun in ((hosts, "host"), (gpus, "GPU")):
        if answer.recurring:
            names = [each.name for each in answer.recurring]
            yield f"{_named(names, noun)} {_verb(names, 'fail')} again and again"
    if number := len(hosts.pairs):
        yield f"{count(number, 'pair')} of hosts {'fails' if number == 1 else 'fail'} together"


def _change_clauses(slower: DriftAnswer, rising: RiseAnswer) -> Iterator[str]:
    subjects = list(dict.fromkeys(each.subject for each in slower.drifts))
    for noun in ("host", "link"):
        if own := [name for name in subjects if (ARROW in name) == (noun == "link")]:
            yield f"{_named(own, noun)} {_verb(own, 'get')} slower"
    if own := list(dict.fromkeys(each.host for each in rising.rises)):
        yield f"errors on {_named(own, 'host')} become more frequent"


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
    if hosts.fleet_share >= MANY_FAILURES_SHARE:
        share = share_text(hosts.fleet_share)
        return (
            f"{name} fails no more often than others, but all together fail in {share} of their runs.",
            ExitCode.UNFIT,
        )
    if hosts.judged < 2:
        return f"There is no other host to compare {name} with.", ExitCode.UNKNOWN
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
            yield f"{gpu.name}, which {name} has now, fails again and again"


def _trend_clauses(history: History, name: str) -> Iterator[str]:
    for slower in history.drifts:
        if name in slower.subject.split(ARROW):
            pace = f"{share_text(slower.loss_share_per_week)} worse a week"
            if slower.step_seconds is not None:
                pace = f"{share_text(slower.loss_share)} worse on {time_text(slower.step_seconds)[:10]}"
            yield f"{label(slower.name)} of {slower.subject} got {pace}"
    for rise in history.rises:
        if rise.host == name:
            yield f"errors of {rise.part} ({label(rise.counter)}) become more frequent"


def _named(names: Sequence[str], noun: str) -> str:
    return f"{count(len(names), noun)} ({fold_hosts(names, limit=_NAMES_SHOWN)})"


def _verb(subjects: Sequence[object], verb: str) -> str:
    return f"{verb}s" if len(subjects) == 1 else verb
