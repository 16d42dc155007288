"""The timeline of a run, rank by rank."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from heapq import nlargest, nsmallest
from statistics import median_low
from typing import Any

from ddpdiag.checks.api import Check
from ddpdiag.judgement.timings import known
from ddpdiag.model import EventKind, Outcome, Recording, Status
from ddpdiag.model.report import OTHER, Bar, Lane, Timeline, Unfinished

# A page shows so many without getting lost, and a report stays short.
MOST_RANKS, MOST_TRIALS = 16, 64
# Came so much later than the rank in the middle: worth a look.
_LATE_SECONDS = 1.0
_GONE = (EventKind.LOST, EventKind.LEAVING)


def timeline_of(recording: Recording, checks: Sequence[Check[Any]], blamed: Collection[int]) -> Timeline:
    """The timeline; of many ranks those worth a look (`blamed` first), of many trials the longest."""
    outcomes: dict[int, list[Outcome]] = {trial.number: [] for trial in recording.trials}
    for outcome in recording.outcomes:
        if outcome.trial in outcomes:
            outcomes[outcome.trial].append(outcome)
    stages = {check.code: check.stage.value for check in checks}
    bars = _bars(recording, outcomes, stages)
    longest = {bar.number for bar in nlargest(MOST_TRIALS, bars, key=lambda bar: bar.seconds)}
    shown = tuple(bar for bar in bars if bar.number in longest)
    experiments = {trial.number for trial in recording.trials if trial.may_fail}
    ranks = _chosen(recording, blamed, experiments)
    ends = (
        known(recording.end.seconds) if recording.end else 0.0,
        *(bar.begin_seconds + bar.seconds for bar in bars),
        *(known(event.seconds) for event in recording.events),
        *(known(arrival.seconds) for arrival in recording.arrivals.values()),
    )
    return Timeline(
        seconds=max(ends),
        trials=shown,
        lanes=_lanes(recording, ranks, shown, outcomes),
        trials_in_all=len(bars),
        ranks_in_all=recording.header.world_size,
    )


def _bars(recording: Recording, outcomes: Mapping[int, Sequence[Outcome]], stages: Mapping[str, str]) -> list[Bar]:
    """The trials one after the other; an old recording does not say when they began: then each after the last one."""
    now = max((known(arrival.seconds) for arrival in recording.arrivals.values()), default=0.0)
    bars: list[Bar] = []
    for trial in recording.trials:
        own = outcomes[trial.number]
        begin = known(trial.begin_seconds) if trial.begin_seconds is not None else now
        seconds = max((known(outcome.seconds) for outcome in own), default=0.0)
        now = max(now, begin + seconds)
        bar = Bar(
            number=trial.number,
            code=trial.code,
            stage=stages.get(trial.code, OTHER),
            begin_seconds=begin,
            seconds=seconds,
            deadline_seconds=known(trial.limit_seconds),
            statuses={status.value: count for status, count in Counter(o.status for o in own).items()},
        )
        bars.append(bar)
    return bars


def _chosen(recording: Recording, blamed: Collection[int], experiments: Collection[int]) -> list[int]:
    """The ranks worth a look, in rising order. What may fail, and what others brought about, speaks against nobody."""
    came = {rank: known(arrival.seconds) for rank, arrival in recording.arrivals.items()}
    size = recording.header.world_size
    # A header may claim more ranks than there is memory for; who is neither here nor missed has nothing to show.
    missed = {event.rank for event in recording.events if event.rank is not None and 0 <= event.rank < size}
    everybody = {*came, *missed, *range(min(size, MOST_RANKS))}
    usual = median_low(came.values()) if came else 0.0
    bad: Counter[int] = Counter(missed)
    bad.update(rank for rank, seconds in came.items() if seconds > usual + _LATE_SECONDS)
    bad.update(
        outcome.rank
        for outcome in recording.outcomes
        if outcome.status is not Status.DONE
        and outcome.status is not Status.SKIPPED
        and not outcome.told
        and outcome.trial not in experiments
    )
    return sorted(nsmallest(MOST_RANKS, everybody, key=lambda rank: (rank not in blamed, -bad[rank], rank)))


def _lanes(
    recording: Recording, ranks: Sequence[int], bars: Sequence[Bar], outcomes: Mapping[int, Sequence[Outcome]]
) -> tuple[Lane, ...]:
    wanted = frozenset(ranks)
    own: dict[int, dict[int, Outcome]] = {rank: {} for rank in ranks}
    for bar in bars:
        for outcome in outcomes[bar.number]:
            if outcome.rank in wanted:
                own[outcome.rank][bar.number] = outcome
    gone: dict[int, float] = {}
    for event in recording.events:
        if event.kind in _GONE and event.rank in wanted and event.rank is not None:
            gone[event.rank] = min(gone.get(event.rank, math.inf), known(event.seconds))
    return tuple(_lane(recording, rank, bars, own[rank], gone.get(rank)) for rank in ranks)


def _lane(recording: Recording, rank: int, bars: Sequence[Bar], own: Mapping[int, Outcome], gone: float | None) -> Lane:
    arrival = recording.arrivals.get(rank)
    layout = recording.header.layout
    told = layout[rank] if 0 <= rank < len(layout) else "?"
    return Lane(
        rank=rank,
        node=arrival.place.node if arrival else told,
        arrived_seconds=known(arrival.seconds) if arrival else None,
        gone_seconds=gone,
        seconds=tuple(known(own[bar.number].seconds) if bar.number in own else None for bar in bars),
        unfinished=tuple(
            Unfinished(number=number, status=outcome.status.value, at=outcome.at)
            for number, outcome in own.items()
            if outcome.status is not Status.DONE
        ),
    )
