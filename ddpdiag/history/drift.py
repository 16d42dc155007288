"""Hosts and links whose figures get worse over weeks, compared with the others.

A figure of a host is divided by the median of its peers: all hosts of the same run if there are `MIN_PEERS` others,
because they had the same load, else those of runs of the same day with as many ranks. Links between hosts are compared
with links in the same way; those of a host that gets slower itself are not listed. So a change of the whole fleet,
such as a new release of NCCL, is no host's drift. The median of each day makes a series. Spearman's rank correlation
with time tests it, with fewer effective days where neighbouring days are alike; Benjamini and Hochberg's procedure
limits the share of false ones. The slope is Theil and Sen's, which a third of wrong days does not change.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from ddpdiag.history.distributions import (
    autocorrelation,
    beta_cdf,
    false_discovery_limit,
    median,
    spearman,
    theil_sen,
)
from ddpdiag.history.rows import ARROW, DAY_SECONDS, Run, is_rate

MAX_FALSE_SHARE = 0.05
# With fewer peers their median is not robust: one slow host among three moves it.
MIN_PEERS = 4
# Spearman's correlation is close to normal from about 10 values on.
MIN_DAYS = 10
# A smaller loss over the whole series is not reported: clocks and temperatures differ by as much between healthy hosts.
MIN_LOSS_SHARE = 0.02
_WEEK_DAYS = 7.0


class Drift(Struct, frozen=True, kw_only=True):
    """A figure of a host, or of a link ("n1 -> n2"), that got worse, beyond that of its peers.

    `loss_share_per_week` is the loss of each week (0.01: 1 % slower than its peers), with the limits of its interval
    (95 %), and `loss_share` the loss over the `days` with values. `since_seconds` and `until_seconds` are the times of
    the first and the last day. `series` has the median of each day, as a share of the peers' (above 1: better).
    """

    subject: str
    name: str
    loss_share_per_week: float
    low_share_per_week: float
    high_share_per_week: float
    loss_share: float
    days: int
    p_value: float
    since_seconds: float
    until_seconds: float
    series: tuple[float, ...]


class DriftAnswer(Struct, frozen=True, kw_only=True):
    """All drifts, the largest loss first. `judged` series had enough days and peers; `unjudged` had not."""

    drifts: tuple[Drift, ...]
    judged: int
    unjudged: int


def drift(runs: Iterable[Run]) -> DriftAnswer:
    """Find the figures that get worse. `runs` are in order of time."""
    days_by_series = _relative_days(runs)
    candidates: list[tuple[float, tuple[str, str], list[float], list[float]]] = []
    judged = 0
    for key, values_by_day in days_by_series.items():
        if len(values_by_day) < MIN_DAYS:
            continue
        judged += 1
        days = sorted(values_by_day)
        logs = [median(values_by_day[day]) for day in days]
        times = [float(day) for day in days]
        if (p_value := p_value_of_fall(times, logs, _effective_days(times, logs))) < MAX_FALSE_SHARE:
            candidates.append((p_value, key, times, logs))
    limit = false_discovery_limit([each[0] for each in candidates], max(1, judged), MAX_FALSE_SHARE)
    drifts = [_drift(*key, times, logs, p) for p, key, times, logs in candidates if p <= limit]
    shown = [each for each in drifts if each.low_share_per_week > 0 and each.loss_share >= MIN_LOSS_SHARE]
    # A link of a host that gets slower itself shows nothing new.
    slower = {each.subject for each in shown}
    shown = [each for each in shown if ARROW not in each.subject or slower.isdisjoint(each.subject.split(ARROW))]
    shown.sort(key=lambda each: (-each.loss_share, each.subject, each.name))
    return DriftAnswer(drifts=tuple(shown), judged=judged, unjudged=len(days_by_series) - judged)


def _relative_days(runs: Iterable[Run]) -> dict[tuple[str, str], dict[int, list[float]]]:
    """For each host and figure: by day, the logarithms of the figure over its peers' median (above 0: better)."""
    series: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    # The figures of runs with too few hosts, by day, figure and number of ranks, on which figures depend.
    lonely: dict[tuple[int, str, int], list[tuple[str, float]]] = defaultdict(list)
    known: set[tuple[str, str]] = set()
    for run in runs:
        day = int(run.begin_seconds // DAY_SECONDS)
        by_name: dict[str, list[tuple[str, float]]] = defaultdict(list)
        for figure in run.figures:
            by_name[figure.name].append((figure.subject, math.log(figure.value)))
            known.add((figure.subject, figure.name))
        for name, values in by_name.items():
            if len(values) > MIN_PEERS:
                _append(series, name, day, values)
            else:
                lonely[day, name, run.ranks] += values
    for (day, name, _ranks), values in lonely.items():
        if len({host for host, _ in values}) > MIN_PEERS:
            # The load differs from run to run, so these values count only where the day has no better ones.
            _append(series, name, day, values, better={host for host, _ in values if day in series[host, name]})
    for key in known:
        series.setdefault(key, {})  # a series without peers is known, and not judged
    return series


def _append(
    series: Mapping[tuple[str, str], dict[int, list[float]]],
    name: str,
    day: int,
    values: Sequence[tuple[str, float]],
    better: Collection[str] = (),
) -> None:
    """Append the values of a run or day to the series, but for hosts in `better`."""
    middle, sign = median([value for _, value in values]), 1 if is_rate(name) else -1
    for host, value in values:
        if host not in better:
            series[host, name][day].append(sign * (value - middle))


def _effective_days(times: Sequence[float], logs: Sequence[float]) -> float:
    """The number of independent days with as much information.

    Neighbouring days are alike where a host is under the same load for days; they count as fewer, unless chance
    explains it (95 %).
    """
    slope, middle = _slope(times, logs), sum(times) / len(times)
    alike = autocorrelation([log - slope * (time - middle) for time, log in zip(times, logs, strict=True)])
    alike = min(0.9, alike) if alike > 1.645 / math.sqrt(len(times)) else 0.0
    return max(4.0, len(times) * (1 - alike) / (1 + alike))


def p_value_of_fall(times: Sequence[float], values: Sequence[float], effective_days: float) -> float:
    """The probability of a fall like this one in `values` that do not depend on time, by Spearman's correlation."""
    correlation = spearman(times, values)
    # Student's t distribution, by the beta distribution (DLMF 8.17.11).
    tail = beta_cdf(1 - correlation**2, (effective_days - 2) / 2, 0.5) / 2
    return tail if correlation < 0 else 1 - tail


def _slope(times: Sequence[float], values: Sequence[float]) -> float:
    """The slope by least squares, which is fast and only serves to take the trend out."""
    middle, mean = sum(times) / len(times), sum(values) / len(values)
    square = sum((time - middle) ** 2 for time in times)
    return sum((t - middle) * (value - mean) for t, value in zip(times, values, strict=True)) / square


def _drift(subject: str, name: str, times: Sequence[float], logs: Sequence[float], p_value: float) -> Drift:
    slope, low, high = theil_sen(times, logs)
    losses = [1 - math.exp(_WEEK_DAYS * each) for each in (slope, high, low)]
    return Drift(
        subject=subject,
        name=name,
        loss_share_per_week=losses[0],
        low_share_per_week=losses[1],
        high_share_per_week=losses[2],
        loss_share=1 - math.exp(slope * (times[-1] - times[0])),
        days=len(times),
        p_value=p_value,
        since_seconds=times[0] * DAY_SECONDS,
        until_seconds=times[-1] * DAY_SECONDS,
        series=tuple(math.exp(log) for log in logs),
    )
