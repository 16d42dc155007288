"""Where a run's seconds went.

Rank 0's clock gives the frame: when all were here, when each trial was handed out, when the run ended. What a trial
took is `trial_seconds`; what lies between one trial's last outcome and the next order is our own. So the parts add up
to the whole, and nothing is counted twice.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median_low
from typing import Any, NamedTuple

from msgspec import structs

from ddpdiag.checks.api import Check, Stage
from ddpdiag.judgement.trial_seconds import Late, Told, known, latest, told
from ddpdiag.model import Arrival, EventKind, Outcome, Recording, Trial
from ddpdiag.model.report import JUDGEMENT, KINDS, OTHER, START, Spent, Timings, Wait

_MOST_WAITS = 10


class _Part(NamedTuple):
    """Seconds of one kind in one stage."""

    stage: str
    kind: str
    seconds: float


class _Gathering(NamedTuple):
    """When most were here, when the wait for the others was over, in seconds of the run, and for whom it was."""

    most: float
    over: float
    late: tuple[Late, ...] = ()


class _Placed(NamedTuple):
    """A trial in its place: when it began (known, or after the one before), and what it took there."""

    trial: Trial
    begin: float
    told: Told


def timings_of(recording: Recording, checks: Sequence[Check[Any]]) -> Timings:
    """The timings of a run; trials of checks that this version does not know belong to no stage."""
    own = recording.arrivals.get(0)
    before = known(own.up_seconds) if own else 0.0
    judged = known(recording.end.judge_seconds) if recording.end else 0.0
    gathering, each = _gathering(recording), tuple(_each(recording))
    end = _end(recording, gathering, each)
    placed = tuple(_placed(each, gathering.over, end))
    inside = _inside(placed, {check.code: check.stage.value for check in checks}, gathering, end)
    parts = (_Part(START, "start", before), *inside, _Part(JUDGEMENT, "own", judged))
    late = (*gathering.late, *(late for one in placed for late in one.told.late))
    waits = tuple(_waits(recording.arrivals, late))
    return Timings(seconds=before + end + judged, stages=tuple(_rows(parts)), waits=waits)


def with_judge_seconds(recording: Recording, seconds: float) -> Recording:
    """The same run, whose judgement took so long."""
    end = recording.end
    return recording if end is None else structs.replace(recording, end=structs.replace(end, judge_seconds=seconds))


def _each(recording: Recording) -> Iterator[tuple[Trial, Told]]:
    """Every trial, and what it took."""
    outcomes: dict[int, list[Outcome]] = {}
    for outcome in recording.outcomes:
        outcomes.setdefault(outcome.trial, []).append(outcome)
    for trial in recording.trials:
        yield trial, told(trial, outcomes.get(trial.number, []))


def _gathering(recording: Recording) -> _Gathering:
    """The start; who came last, or never, if that was waited for."""
    came = {rank: known(arrival.seconds) for rank, arrival in recording.arrivals.items()}
    missing = {
        event.rank: known(event.seconds)
        for event in recording.events
        if event.kind is EventKind.ABSENT and event.rank is not None
    }
    most = median_low(came.values()) if came else 0.0
    over = max((most, *came.values(), *missing.values()))
    late = latest(missing or came, over, over - most, "", of=len(came) + len(missing))
    return _Gathering(most, over, tuple(late))


def _end(recording: Recording, gathering: _Gathering, each: Sequence[tuple[Trial, Told]]) -> float:
    """When the run ended; of one that was cut off, the last that is known of it."""
    last = max((gathering.over, *(known(event.seconds) for event in recording.events)))
    if recording.end is not None:
        # Who reports in rank 0's place counts from its own arrival: what is known of the run may end later.
        return max((known(recording.end.seconds), last, *(known(trial.begin_seconds) for trial, _ in each)))
    now = gathering.over
    for trial, own in each:
        now = max(now, known(trial.begin_seconds)) + own.seconds
    return max(last, now)


def _placed(each: Sequence[tuple[Trial, Told]], begin: float, end: float) -> Iterator[_Placed]:
    """The trials one after the other, each within the time until the next one was handed out."""
    now = begin
    for (trial, own), after in zip(each, (*each[1:], None), strict=False):
        now = min(max(now, known(trial.begin_seconds)), end)
        timed = after is not None and after[0].begin_seconds is not None
        until = min(known(after[0].begin_seconds), end) if timed and after is not None else end
        one = _Placed(trial, now, own.within(max(0.0, until - now)))
        yield one
        now += one.told.seconds


def _inside(
    placed: Sequence[_Placed], stage_of: Mapping[str, str], gathering: _Gathering, end: float
) -> Iterator[_Part]:
    """From the first hello to the end of the run, without gap or overlap."""
    yield _Part(START, "start", gathering.most)
    yield _Part(START, "wait", gathering.over - gathering.most)
    now, rest = gathering.over, (START, "own")
    for one in placed:
        stage = stage_of.get(one.trial.code, OTHER)
        yield _Part(*rest, one.begin - now)
        for kind, seconds in one.told.kinds.items():
            yield _Part(stage, kind, seconds)
        now = one.begin + one.told.seconds
        # An old recording does not say when a trial was handed out: what is left may belong to any of them.
        rest = (stage, "own") if one.trial.begin_seconds is not None else (OTHER, "unknown")
    yield _Part(*rest, end - now)


def _rows(parts: Iterable[_Part]) -> Iterator[Spent]:
    """The parts by stage and kind; stages in which nothing was spent are left out."""
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    for part in parts:
        sums[part.stage, part.kind] += max(0.0, part.seconds)
    for stage in (START, *(stage.value for stage in Stage), OTHER, JUDGEMENT):
        kinds = {kind: sums[stage, kind] for kind in KINDS if sums[stage, kind] > 0}
        if kinds:
            yield Spent(stage=stage, seconds=sum(kinds.values()), kinds=kinds)


def _waits(arrivals: Mapping[int, Arrival], late: Iterable[Late]) -> Iterator[Wait]:
    """The longest waits, those for the same ranks together."""
    groups: dict[tuple[int, ...], list[Late]] = {}
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
            why=most.why,
            up_seconds=(known(first.up_seconds) or None) if first else None,
        )
