"""Where a run's seconds went. Pure.

Rank 0's clock gives the frame: when all were here, when each trial was handed out, when the run ended. Within a trial
the rank in the middle tells what it did: its own record adds up to what it took. What the run waited for beyond that
(a rank that reached the gate later, or ended later) is waiting, and is put down to who was last. What lies between one
trial's last outcome and the next order is our own. So the parts add up to the whole, and nothing is counted twice.

Of two ranks the earlier one counts as the middle, so that waiting for the other is seen in full.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median_low
from typing import Any, NamedTuple

from msgspec import structs

from ddpdiag.check import Check, Stage
from ddpdiag.model import IMPORT_STEP, Arrival, EventKind, Outcome, Recording, Status, Trial
from ddpdiag.model.timings import JUDGEMENT, KINDS, OTHER, START, Spent, Timings, Wait

# Who came within this share of the wait before the last one was as late as it.
_LATE_TOO = 0.1
# So many late ones are listed; more say nothing of any one of them.
_MOST_LATE = 16
_MOST_WAITS = 10


class _Part(NamedTuple):
    """Seconds of one kind in one stage."""

    stage: str
    kind: str
    seconds: float


class _Late(NamedTuple):
    """Who was waited for, in which check, and for how long."""

    ranks: tuple[int, ...]
    seconds: float
    code: str


class _Told(NamedTuple):
    """What a trial took, by kind, and for whom it waited."""

    kinds: dict[str, float]
    late: tuple[_Late, ...]


def timings_of(recording: Recording, checks: Sequence[Check[Any]]) -> Timings:
    """The timings of a run; trials of checks that this version does not know belong to no stage."""
    own = recording.arrivals.get(0)
    stage_of = {check.code: check.stage.value for check in checks}
    before = _known(own.up_seconds) if own else 0.0
    judged = _known(recording.end.judge_seconds) if recording.end else 0.0
    told = {trial.number: _told(trial, outcomes) for trial, outcomes in _by_trial(recording)}
    gathering, absent = _gathering(recording)
    end = _end(recording, gathering, told)
    inside = tuple(_inside(recording, stage_of, told, gathering, end))
    late = [*absent, *(late for own in told.values() for late in own.late)]
    parts = [_Part(START, "start", before), *inside, _Part(JUDGEMENT, "own", judged)]
    waits = tuple(_waits(recording.arrivals, late))
    return Timings(seconds=before + end + judged, stages=tuple(_rows(parts)), waits=waits)


def with_judge_seconds(recording: Recording, seconds: float) -> Recording:
    """The same run, whose judgement took so long."""
    end = recording.end
    return recording if end is None else structs.replace(recording, end=structs.replace(end, judge_seconds=seconds))


def _known(seconds: float | None) -> float:
    """A time as it can be: what no clock gives (not known, negative, no number) is nothing."""
    return seconds if seconds is not None and math.isfinite(seconds) and seconds > 0 else 0.0


def _by_trial(recording: Recording) -> Iterator[tuple[Trial, list[Outcome]]]:
    outcomes: dict[int, list[Outcome]] = {}
    for outcome in recording.outcomes:
        outcomes.setdefault(outcome.trial, []).append(outcome)
    for trial in recording.trials:
        yield trial, outcomes.get(trial.number, [])


# The frame -----------------------------------------------------------------------------------------------------------


class _Gathering(NamedTuple):
    """When most were here, and when the wait for the others was over, in seconds of the run."""

    most: float
    over: float


def _gathering(recording: Recording) -> tuple[_Gathering, tuple[_Late, ...]]:
    """The start; who came last, or never, if that was waited for."""
    came = {rank: _known(arrival.seconds) for rank, arrival in recording.arrivals.items()}
    missing = {
        event.rank: _known(event.seconds)
        for event in recording.events
        if event.kind is EventKind.ABSENT and event.rank is not None
    }
    if not came:
        return _Gathering(0.0, max(missing.values(), default=0.0)), ()
    most = median_low(came.values())
    over = max(most, *came.values(), *missing.values())
    return _Gathering(most, over), tuple(_latest(missing or came, over, over - most, "", of=len(came) + len(missing)))


def _end(recording: Recording, gathering: _Gathering, told: Mapping[int, _Told]) -> float:
    """When the run ended; of one that was cut off, the last that is known of it."""
    begins = [_known(trial.begin_seconds) + sum(told[trial.number].kinds.values()) for trial in recording.trials]
    events = [_known(event.seconds) for event in recording.events]
    known = max((gathering.over, *events), default=0.0)
    if recording.end is None:
        timed = any(trial.begin_seconds is not None for trial in recording.trials)
        return max(known, *begins) if timed else max(known, gathering.over + sum(begins))
    # Who reports in rank 0's place counts from its own arrival.
    return max(_known(recording.end.seconds), known)


def _inside(
    recording: Recording, stage_of: Mapping[str, str], told: Mapping[int, _Told], gathering: _Gathering, end: float
) -> Iterator[_Part]:
    """From the first hello to the end of the run, without gap or overlap."""
    yield _Part(START, "start", gathering.most)
    yield _Part(START, "wait", gathering.over - gathering.most)
    now, stage, kind = gathering.over, START, "own"
    for trial, after in zip(recording.trials, (*recording.trials[1:], None), strict=True):
        begin = now if trial.begin_seconds is None else min(max(now, _known(trial.begin_seconds)), end)
        yield _Part(stage, kind, begin - now)
        told_next = end if after is None or after.begin_seconds is None else _known(after.begin_seconds)
        room = max(0.0, min(told_next, end) - begin)
        stage, now = stage_of.get(trial.code, OTHER), begin
        for own, seconds in _fitted(told[trial.number].kinds, room).items():
            yield _Part(stage, own, seconds)
            now += seconds
        # An old recording does not say when a trial was handed out: what is left may belong to any of them.
        if trial.begin_seconds is None:
            stage, kind = OTHER, "unknown"
        else:
            kind = "own"
    yield _Part(stage, kind, end - now)


def _fitted(kinds: Mapping[str, float], room: float) -> dict[str, float]:
    """The same shares in no more than `room`: clocks of several hosts may say more than there was."""
    spent = sum(kinds.values())
    return dict(kinds) if spent <= room else {kind: seconds * (room / spent) for kind, seconds in kinds.items()}


def _rows(parts: Iterable[_Part]) -> Iterator[Spent]:
    """The parts by stage and kind; stages in which nothing was spent are left out."""
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    for part in parts:
        sums[part.stage, part.kind] += max(0.0, part.seconds)
    for stage in (START, *(stage.value for stage in Stage), OTHER, JUDGEMENT):
        kinds = {kind: sums[stage, kind] for kind in KINDS if sums[stage, kind] > 0}
        if kinds:
            yield Spent(stage=stage, seconds=sum(kinds.values()), kinds=kinds)


# One trial -----------------------------------------------------------------------------------------------------------


def _told(trial: Trial, outcomes: Sequence[Outcome]) -> _Told:
    """What the rank in the middle did, and what was waited for beyond that."""
    if not outcomes:
        return _Told({}, ())
    group_of = {rank: number for number, group in enumerate(trial.groups) for rank in group}
    least: dict[int, float] = {}
    for outcome in outcomes:
        if "gate" in outcome.timings:
            number, gate = group_of.get(outcome.rank, -1), _known(outcome.timings["gate"])
            least[number] = min(least.get(number, gate), gate)

    def waited(outcome: Outcome) -> float:
        """Seconds at the gate, beyond those of who came there last."""
        gate = _known(outcome.timings.get("gate"))
        return min(_known(outcome.seconds), max(0.0, gate - least.get(group_of.get(outcome.rank, -1), 0.0)))

    busy = sorted(outcomes, key=lambda outcome: _known(outcome.seconds) - waited(outcome))
    middle = busy[(len(busy) - 1) // 2]
    kinds, at_gate = _kinds(middle, waited(middle)), waited(middle)
    beyond = max(_known(outcome.seconds) for outcome in outcomes) - _known(middle.seconds)
    kinds["wait"] = kinds.get("wait", 0.0) + beyond
    peers = [own for own in outcomes if group_of.get(own.rank, -1) == group_of.get(middle.rank, -1)]
    late = (
        *_latest(_arrivals(peers), _last(_arrivals(peers)), at_gate, trial.code, of=len(outcomes)),
        *_ended_last(trial.code, outcomes, beyond, lambda outcome: group_of.get(outcome.rank, -1)),
    )
    return _Told(kinds, late)


def _kinds(outcome: Outcome, waited: float) -> dict[str, float]:
    """What one rank did in a trial; it adds up to what the trial took there."""
    timings, left = outcome.timings, _known(outcome.seconds)
    well = outcome.status is Status.DONE
    importing = left if outcome.at == IMPORT_STEP and not well else timings.get("import")
    total = timings.get("total")
    before = 0.0 if total is None else left - _known(total) - _known(importing)
    wanted = (
        ("import", importing),
        ("start", before),
        ("context", timings.get("context")),
        ("group", timings.get("group")),
        ("wait", waited),
        ("own", _known(timings.get("gate")) - waited),
    )
    kinds: dict[str, float] = {}
    for kind, seconds in wanted:
        kinds[kind] = min(left, _known(seconds))
        left -= kinds[kind]
    rest = "failed" if not well else "measure" if total is not None else "unknown"
    return kinds | {rest: left}


def _arrivals(outcomes: Iterable[Outcome]) -> dict[int, float]:
    """When each rank reached the gate, if it did, in seconds of its trial."""
    return {own.rank: _known(own.timings["arrive"]) for own in outcomes if "arrive" in own.timings}


def _last(times: Mapping[int, float]) -> float:
    return max(times.values(), default=0.0)


def _ended_last(
    code: str, outcomes: Sequence[Outcome], beyond: float, group: Callable[[Outcome], int]
) -> Iterator[_Late]:
    """Who ended so much later than the middle; if its group only began late, who was last at that group's gate."""
    ended = {own.rank: _known(own.seconds) for own in outcomes}
    slowest = max(outcomes, key=lambda own: _known(own.seconds))
    came = _arrivals(own for own in outcomes if group(own) == group(slowest))
    usual = median_low(_arrivals(outcomes).values()) if came else 0.0
    if came and _last(came) - usual > beyond / 2:
        yield from _latest(came, _last(came), beyond, code, of=len(outcomes))
    else:
        yield from _latest(ended, _last(ended), beyond, code, of=len(outcomes))


def _latest(times: Mapping[int, float], last: float, seconds: float, code: str, *, of: int) -> Iterator[_Late]:
    """Who came last, of so many that took part; nobody where that is most of them, or too many to list."""
    if seconds <= 0:
        return
    ranks = tuple(sorted(rank for rank, time in times.items() if time >= last - _LATE_TOO * seconds))
    few = len(ranks) <= _MOST_LATE and 2 * len(ranks) <= of
    yield _Late(ranks if few else (), seconds, code)


def _waits(arrivals: Mapping[int, Arrival], late: Iterable[_Late]) -> Iterator[Wait]:
    """The longest waits, those for the same ranks together."""
    groups: dict[tuple[int, ...], list[_Late]] = {}
    for one in late:
        groups.setdefault(one.ranks, []).append(one)
    longest = sorted(groups.items(), key=lambda item: -sum(one.seconds for one in item[1]))
    for ranks, own in longest[:_MOST_WAITS]:
        most = max(own, key=lambda one: one.seconds)
        first = arrivals.get(ranks[0]) if ranks and not most.code else None
        yield Wait(
            ranks=ranks,
            nodes=tuple(dict.fromkeys(arrivals[rank].place.node for rank in ranks if rank in arrivals)),
            seconds=sum(one.seconds for one in own),
            times=len(own),
            code=most.code,
            up_seconds=first.up_seconds if first else None,
        )
