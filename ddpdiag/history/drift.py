"""Hosts and links whose figures get worse over weeks, compared with the others.

A figure of a host is divided by the median of its peers, which have the same model of GPU: all hosts of the same run if
there are `MIN_PEERS` others, because they had the same load, else those of runs of the same day with as many ranks.
Links between hosts are compared with links in the same way; those of a host that gets slower itself are not listed. So
a change of the whole fleet, such as a new release of NCCL, is no host's drift. The median of each day makes a series.
It is tested by Spearman's rank correlation with time, and by Student's test if it falls at once, with fewer effective
days where days next to each other are alike. Benjamini and Hochberg's procedure limits the share of false ones. The
slope is Theil and Sen's, which a third of wrong days does not change.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

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
# A step explains a series if it leaves a quarter of the square of a line's residuals; noise alone does not in
# simulated series without a step. A few days of another load are no step.
_STEP_SQUARE_SHARE, _MIN_STEP_DAYS = 0.25, 5
_WEEK_DAYS = 7.0


class Drift(Struct, frozen=True, kw_only=True):
    """A figure of a host, or of a link ("n1 -> n2"), that got worse, beyond that of its peers.

    `loss_share_per_week` is the loss of each week (0.01: 1 % slower than its peers), with the limits of its interval
    (95 %), and `loss_share` the loss over the `days` with values. `step_seconds` is the day of a loss that came at once
    (None: over time). `since_seconds` and `until_seconds` are the times of the first and the last day. `series` has the
    median of each day, as a share of the peers' (above 1: better).
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
    step_seconds: float | None = None


class DriftAnswer(Struct, frozen=True, kw_only=True):
    """All drifts, the largest loss first. `judged` series had enough days and peers; `unjudged` had not."""

    drifts: tuple[Drift, ...]
    judged: int
    unjudged: int


class _Peers(NamedTuple):
    """Subjects that are compared: hosts, or links, with the same models of GPU."""

    name: str
    models: tuple[str, ...]


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
        p_value = min(p_value_of_trend(times, logs), _p_value_of_step(times, logs))
        if p_value < MAX_FALSE_SHARE:
            candidates.append((p_value, key, times, logs))
    limit = false_discovery_limit([each[0] for each in candidates], max(1, judged), MAX_FALSE_SHARE)
    drifts = [_drift(*key, times, logs, p) for p, key, times, logs in candidates if p <= limit]
    shown = [
        each
        for each in drifts
        if each.loss_share >= MIN_LOSS_SHARE and (each.low_share_per_week > 0 or each.step_seconds is not None)
    ]
    # A link of a host that gets slower itself shows nothing new.
    slower = {each.subject for each in shown}
    shown = [each for each in shown if ARROW not in each.subject or slower.isdisjoint(each.subject.split(ARROW))]
    shown.sort(key=lambda each: (-each.loss_share, each.subject, each.name))
    return DriftAnswer(drifts=tuple(shown), judged=judged, unjudged=len(days_by_series) - judged)


def _relative_days(runs: Iterable[Run]) -> dict[tuple[str, str], dict[int, list[float]]]:
    """For each subject and figure: by day, the logarithms of the figure over its peers' median (above 0: better)."""
    series: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    # The figures of runs with too few peers, by day, peers and number of ranks, on which figures depend.
    lonely: dict[tuple[int, _Peers, int], list[tuple[str, float]]] = defaultdict(list)
    known: set[tuple[str, str]] = set()
    for run in runs:
        day = int(run.begin_seconds // DAY_SECONDS)
        model_of = {row.host: next((fact for fact in row.facts if fact.startswith("GPU ")), "") for row in run.hosts}
        groups: dict[_Peers, list[tuple[str, float]]] = defaultdict(list)
        for figure in run.figures:
            models = tuple(model_of.get(end, "") for end in figure.subject.split(ARROW))
            groups[_Peers(figure.name, models)].append((figure.subject, math.log(figure.value)))
            known.add((figure.subject, figure.name))
        for peers, values in groups.items():
            if len(values) > MIN_PEERS:
                _append(series, peers.name, day, values)
            else:
                lonely[day, peers, run.ranks] += values
    for (day, peers, _ranks), values in lonely.items():
        if len({subject for subject, _ in values}) > MIN_PEERS:
            # The load differs from run to run, so these values count only where the day has no better ones.
            better = {subject for subject, _ in values if day in series[subject, peers.name]}
            _append(series, peers.name, day, values, better)
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


class _Step(NamedTuple):
    """A fall or rise at once. `begin` is the index of the first value after it; the others are the means."""

    begin: int
    before: float
    after: float


def _step_of(times: Sequence[float], values: Sequence[float]) -> _Step | None:
    """The step that explains a series best, if it explains it much better than a line does."""
    total, number = sum(values), len(values)
    best, found, before = 0.0, None, 0.0
    for index, value in enumerate(values):
        if _MIN_STEP_DAYS <= index <= number - _MIN_STEP_DAYS:
            step = _Step(index, before / index, (total - before) / (number - index))
            # The square that the step explains.
            square = (step.before - step.after) ** 2 * index * (number - index) / number
            best, found = max((best, found), (square, step), key=lambda pair: pair[0])
        before += value
    line = _square(_residuals_about_line(times, values))
    mean = total / number
    rest = _square([value - mean for value in values]) - best
    return found if rest < _STEP_SQUARE_SHARE * line else None


def _residuals_about_line(times: Sequence[float], values: Sequence[float]) -> list[float]:
    slope, middle, mean = _slope(times, values), sum(times) / len(times), sum(values) / len(values)
    return [value - mean - slope * (time - middle) for time, value in zip(times, values, strict=True)]


def _residuals_about_step(values: Sequence[float], step: _Step) -> list[float]:
    return [value - (step.before if index < step.begin else step.after) for index, value in enumerate(values)]


def _square(values: Sequence[float]) -> float:
    return sum(value * value for value in values)


def _effective_days(times: Sequence[float], values: Sequence[float], step: _Step | None) -> float:
    """The number of independent days with as much information.

    Days next to each other are alike where a host is under the same load for days, so they count as fewer. What they
    have in common is measured about the trend: a line, or a step if there is one, as after the loss of a lane.
    """
    number = len(values)
    rest = _residuals_about_line(times, values) if step is None else _residuals_about_step(values, step)
    # The estimate is too low by about (2 + 4 r) / n if a line was fitted: by (1 + 3 r) / n for the mean alone (Marriott
    # and Pope, 1954).
    alike = min(0.95, max(0.0, (number * autocorrelation(rest) + 2) / (number - 4)))
    return max(4.0, number * (1 - alike) / (1 + alike))


def p_value_of_trend(times: Sequence[float], values: Sequence[float]) -> float:
    """The probability of a fall like this one in `values` that do not depend on time, by Spearman's correlation.

    `times` are days.
    """
    correlation = spearman(times, values)
    freedom = _effective_days(times, values, _step_of(times, values)) - 2
    return _student_tail(-correlation, 1 - correlation**2, freedom)


def _p_value_of_step(times: Sequence[float], values: Sequence[float]) -> float:
    """The probability of a fall at once like this one, by Student's test of the days before and after; 1 without it."""
    step = _step_of(times, values)
    if step is None:
        return 1.0
    fall, number = step.before - step.after, len(values)
    explained = fall * fall * step.begin * (number - step.begin) / number
    rest = _square(_residuals_about_step(values, step)) + 1e-12
    tail = _student_tail(fall, rest / (rest + explained), _effective_days(times, values, step) - 2)
    # The step was sought at all days.
    return min(1.0, (number - 2 * _MIN_STEP_DAYS + 1) * tail)


def _student_tail(sign: float, unexplained_share: float, freedom: float) -> float:
    """The tail of Student's t distribution, by the beta distribution (DLMF 8.17.11).

    `unexplained_share` is what the line or step leaves of the sum of squares, and the `sign` that of t.
    """
    tail = beta_cdf(unexplained_share, freedom / 2, 0.5) / 2
    return tail if sign > 0 else 1 - tail


def _slope(times: Sequence[float], values: Sequence[float]) -> float:
    """The slope by least squares, which is fast and only serves to take the trend out."""
    middle, mean = sum(times) / len(times), sum(values) / len(values)
    square = sum((time - middle) ** 2 for time in times)
    return sum((t - middle) * (value - mean) for t, value in zip(times, values, strict=True)) / square


def _drift(subject: str, name: str, times: Sequence[float], logs: Sequence[float], p_value: float) -> Drift:
    slope, low, high = theil_sen(times, logs)
    losses = [1 - math.exp(_WEEK_DAYS * each) for each in (slope, high, low)]
    step = _step_of(times, logs)
    rise = slope * (times[-1] - times[0]) if step is None else step.after - step.before
    return Drift(
        subject=subject,
        name=name,
        loss_share_per_week=losses[0],
        low_share_per_week=losses[1],
        high_share_per_week=losses[2],
        loss_share=1 - math.exp(rise),
        days=len(times),
        p_value=p_value,
        since_seconds=times[0] * DAY_SECONDS,
        until_seconds=times[-1] * DAY_SECONDS,
        series=tuple(math.exp(log) for log in logs),
        step_seconds=None if step is None else times[step.begin] * DAY_SECONDS,
    )
