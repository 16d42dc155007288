"""Error counters that rise more than before: of GPUs, of network ports, and TCP segments that were sent again.

Counters go on counting between the runs, so two readings of a part show the errors of the jobs between them, too. The
rise between two days, for each day or for a million sent segments, makes a series. It is compared with the median of
all parts of its kind on that day, and tested for a trend by Spearman's rank correlation with time; Benjamini and
Hochberg's procedure limits the share of false ones. Days that are alike count as fewer, as in `drift`. A part whose
counter fell was reset (a reboot, a new driver), and that day is left out.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.history.distributions import false_discovery_limit, median
from ddpdiag.history.drift import MAX_FALSE_SHARE, MIN_DAYS, MIN_PEERS, p_value_of_trend
from ddpdiag.history.rows import DAY_SECONDS, Reading
from ddpdiag.model import TCP_PART

# A counter that rises less often is not reported, because single errors are no trend, and neither is one that rises
# less than `MIN_RATIO` times as fast as before and as the others. For segments it is a tenth of RDZ004's limit for a
# lost share, because dead connections of other programs send some again on any host.
MIN_PER_DAY, MIN_PER_MILLION_SEGMENTS, MIN_RATIO = 1.0, 100.0, 3.0
# Errors come in bursts; one of a week is no trend. (This number and the ratio keep most bursts of up to 7 days out
# of the answers in tests/benchmarks/history_fleet.py.)
MIN_ERROR_DAYS = 8
_SENT, _RESENT, _NEEDLESS = "sent_segments", "resent_segments", "needless_segments"
_GPU = "GPU-"


class Rise(Struct, frozen=True, kw_only=True):
    """An error counter of a part of a host that rises more than before, beyond those of the other parts of its kind.

    `before` and `now` are the medians of the first and the last third of the `days` with values, and `others` is the
    median of the other parts in the last third; all are a day, or of a million sent segments for `resent_segments`.
    `series` has the values of the days.
    """

    host: str
    part: str
    counter: str
    before: float
    now: float
    others: float
    days: int
    p_value: float
    since_seconds: float
    until_seconds: float
    series: tuple[float, ...]


class RiseAnswer(Struct, frozen=True, kw_only=True):
    """All rises, the fastest first. `judged` counts the series with enough days and peers, `unjudged` the others."""

    rises: tuple[Rise, ...]
    judged: int
    unjudged: int


class _Part(NamedTuple):
    """A part over time: its host (the last one), its kind, and by day the rise of each counter that rose."""

    host: str
    name: str
    kind: str
    rises: dict[int, dict[str, float]]


def rises(readings: Iterable[Reading]) -> RiseAnswer:
    """Find the counters that rise more than before. `readings` are in order of time."""
    parts = list(_parts(readings))
    counters: dict[str, set[str]] = defaultdict(set)
    on_day: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    for part in parts:
        for day, values in part.rises.items():
            counters[part.kind] |= values.keys()
            on_day[part.kind, day].append(values)
    usual: dict[tuple[str, int, str], float] = {
        (kind, day, counter): median([values.get(counter, 0.0) for values in rows])
        for (kind, day), rows in on_day.items()
        if len(rows) > MIN_PEERS
        for counter in counters[kind]
    }
    judged = unjudged = 0
    candidates: list[Rise] = []
    for part in parts:
        days = sorted(day for day in part.rises if len(on_day[part.kind, day]) > MIN_PEERS)
        if len(days) < MIN_DAYS:
            unjudged += len(counters[part.kind])
            continue
        judged += len(counters[part.kind])
        for counter in counters[part.kind]:
            series = [part.rises[day].get(counter, 0.0) for day in days]
            if any(series):
                others = [usual[part.kind, day, counter] for day in days]
                candidates.append(_rise(part, counter, days, series, others))
    limit = false_discovery_limit([each.p_value for each in candidates], max(1, judged), MAX_FALSE_SHARE)
    found = [each for each in candidates if each.p_value <= limit and _matters(each)]
    found.sort(key=lambda each: (-each.now / _least(each.counter), each.host, each.part, each.counter))
    return RiseAnswer(rises=tuple(found), judged=judged, unjudged=unjudged)


def _parts(readings: Iterable[Reading]) -> Iterator[_Part]:
    own: dict[tuple[str, str], list[Reading]] = defaultdict(list)
    for reading in readings:
        # A GPU keeps its counters when it moves to another host.
        own["" if reading.part.startswith(_GPU) else reading.host, reading.part].append(reading)
    for (_, name), rows in own.items():
        # The counters of an RDMA port ("mlx5_0:1") are not those of an interface.
        is_named = name.startswith(_GPU) or name == TCP_PART
        kind = name[: len(_GPU)] if is_named else "RDMA port" if ":" in name else "interface"
        by_day = {
            int(after.seconds // DAY_SECONDS): _rises(before, after)
            for before, after in pairwise(rows)
            if after.seconds > before.seconds
            and all(after.totals.get(key, 0) >= before.totals[key] for key in before.totals)
        }
        yield _Part(rows[-1].host, name, kind, by_day)


def _rises(before: Reading, after: Reading) -> dict[str, float]:
    """The rise of each counter that rose, for each day or for a million sent segments."""
    risen = {name: total - before.totals.get(name, 0) for name, total in after.totals.items()}
    days = (after.seconds - before.seconds) / DAY_SECONDS
    rates = {name: rise / days for name, rise in risen.items() if rise > 0 and name not in (_SENT, _NEEDLESS)}
    if _RESENT in rates:
        lost = max(0, risen[_RESENT] - risen.get(_NEEDLESS, 0))
        rates[_RESENT] = 1e6 * lost / max(1, risen.get(_SENT, 0), lost)
    return rates


def _rise(part: _Part, counter: str, days: Sequence[int], series: Sequence[float], others: Sequence[float]) -> Rise:
    third = len(days) // 3
    losses = [math.log1p(usual) - math.log1p(own) for own, usual in zip(series, others, strict=True)]
    return Rise(
        host=part.host,
        part=part.name,
        counter=counter,
        before=median(series[:third]),
        now=median(series[-third:]),
        others=median(others[-third:]),
        days=len(days),
        p_value=p_value_of_trend([float(day) for day in days], losses),
        since_seconds=days[0] * DAY_SECONDS,
        until_seconds=days[-1] * DAY_SECONDS,
        series=tuple(series),
    )


def _least(counter: str) -> float:
    return MIN_PER_MILLION_SEGMENTS if counter == _RESENT else MIN_PER_DAY


def _matters(rise: Rise) -> bool:
    least = max(_least(rise.counter), MIN_RATIO * rise.before, MIN_RATIO * rise.others)
    return rise.now >= least and sum(value >= least for value in rise.series) >= MIN_ERROR_DAYS
