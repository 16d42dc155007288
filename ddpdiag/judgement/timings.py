"""Where a run's seconds went.

Rank 0's clock gives the frame: when all were here, when each trial was handed out, when the run ended. What lies
between one trial's last outcome and the next order is our own. So the parts add up to the whole, and nothing is counted
twice.

Of one trial the rank in the middle tells what it did: its own record adds up to what it took. What the run waited for
beyond that (a rank that reached the barrier later, or ended later) is waiting, and is put down to who was last; where
that one did not end well, it is a part of the failure, and put down to nobody here. Of two ranks the earlier one counts
as the middle, so that waiting for the other is seen in full.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median_low
from typing import Any, NamedTuple

from msgspec import structs

from ddpdiag.checks.api import Check, Stage
from ddpdiag.model import IMPORT_STEP, Arrival, EventKind, Outcome, Recording, Status, Trial
from ddpdiag.model.report import JUDGEMENT, KINDS, OTHER, START, Spent, Timings, Wait

_MOST_WAITS = 10
# Who came within this share of the wait before the last one was as late as it.
_LATE_TOO = 0.1
# So many late ones are listed; more say nothing of any one of them.
_MOST_LATE = 16
# What makes a rank late; it may begin a measurement at once, and take long over it.
_OWN_DOING = ("start", "import", "context", "group", "measure")


class Late(NamedTuple):
    """Who was waited for, in which check (empty: at the start), for how long, and in what it spent more than others."""

    ranks: tuple[int, ...]
    seconds: float
    code: str
    why: str = ""


class Told(NamedTuple):
    """What a trial took, by kind, and for whom it waited."""

    kinds: dict[str, float]
    late: tuple[Late, ...]

    @property
    def seconds(self) -> float:
        """What it took in all."""
        return sum(self.kinds.values())

    def within(self, room: float) -> "Told":
        """The same shares in no more than `room`: clocks of several hosts may say more than there was."""
        if self.seconds <= room:
            return self
        share = room / self.seconds
        kinds = {kind: seconds * share for kind, seconds in self.kinds.items()}
        return Told(kinds, tuple(late._replace(seconds=late.seconds * share) for late in self.late if share > 0))


class _Part(NamedTuple):
    """Seconds of one kind in one stage."""

    stage: str
    kind: str
    seconds: float


class _Joining(NamedTuple):
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
    joining, each = _joining(recording), tuple(_each(recording))
    end = _end(recording, joining, each)
    placed = tuple(_placed(each, joining.over, end))
    inside = _inside(placed, {check.code: check.stage.value for check in checks}, joining, end)
    parts = (_Part(START, "start", before), *inside, _Part(JUDGEMENT, "own", judged))
    late = (*joining.late, *(late for one in placed for late in one.told.late))
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


def _joining(recording: Recording) -> _Joining:
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
    return _Joining(most, over, tuple(late))


def _end(recording: Recording, joining: _Joining, each: Sequence[tuple[Trial, Told]]) -> float:
    """When the run ended; of one that was cut off, the last that is known of it."""
    last = max((joining.over, *(known(event.seconds) for event in recording.events)))
    if recording.end is not None:
        # Who reports in rank 0's place counts from its own arrival: what is known of the run may end later.
        return max((known(recording.end.seconds), last, *(known(trial.begin_seconds) for trial, _ in each)))
    now = joining.over
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


def _inside(placed: Sequence[_Placed], stage_of: Mapping[str, str], joining: _Joining, end: float) -> Iterator[_Part]:
    """From the first hello to the end of the run, without gap or overlap."""
    yield _Part(START, "start", joining.most)
    yield _Part(START, "wait", joining.over - joining.most)
    now, rest = joining.over, (START, "own")
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


# One trial ------------------------------------------------------------------------------------------------------------


def known(seconds: float | None) -> float:
    """A time as it can be: what no clock gives (not known, negative, no number) is nothing."""
    return seconds if seconds is not None and 0 < seconds < math.inf else 0.0


def told(trial: Trial, outcomes: Sequence[Outcome]) -> Told:
    """What the rank in the middle did, and what was waited for beyond that."""
    if not outcomes:
        return Told({}, ())
    group_of = {rank: number for number, group in enumerate(trial.groups) for rank in group}
    waited = _waited(outcomes, group_of)
    busy = sorted(outcomes, key=lambda outcome: known(outcome.seconds) - waited[outcome.rank])
    middle = busy[(len(busy) - 1) // 2]
    kinds = _kinds(middle, waited[middle.rank])
    came = _arrivals(outcomes, group_of, middle)
    late = list(latest(came, _last(came), kinds["wait"], trial.code, of=len(outcomes)))
    slowest = max(outcomes, key=lambda outcome: known(outcome.seconds))
    beyond = known(slowest.seconds) - known(middle.seconds)
    # Who ends last where something failed is often a bystander: whose fault it is, the findings say.
    kind = "wait" if slowest.status is Status.DONE else "failed"
    if kind == "wait":
        late += _ended_last(outcomes, group_of, slowest, beyond)
    spent = {own.rank: own for own in outcomes if any(own.rank in one.ranks[:1] for one in late)}
    more = {rank: _more(_kinds(own, waited[rank]), kinds) for rank, own in spent.items()}
    explained = tuple(one._replace(why=more[one.ranks[0]]) if one.ranks else one for one in late)
    return Told({**kinds, kind: kinds.get(kind, 0.0) + beyond}, explained)


def _waited(outcomes: Sequence[Outcome], group_of: Mapping[int, int]) -> dict[int, float]:
    """Seconds of each rank at the barrier, beyond those of who came there last in its group."""
    gates = {own.rank: known(own.timings.get("gate")) for own in outcomes}
    least: dict[int | None, float] = {}
    for own in outcomes:
        if "gate" in own.timings:
            group = group_of.get(own.rank)
            least[group] = min(least.get(group, gates[own.rank]), gates[own.rank])
    return {rank: max(0.0, gate - least.get(group_of.get(rank), 0.0)) for rank, gate in gates.items()}


def _kinds(outcome: Outcome, waited: float) -> dict[str, float]:
    """What one rank did in a trial; it adds up to what the trial took there."""
    timings, left = outcome.timings, known(outcome.seconds)
    well = outcome.status is Status.DONE
    importing = left if outcome.at == IMPORT_STEP and not well else timings.get("import")
    total = timings.get("total")
    before = 0.0 if total is None else left - known(total) - known(importing)
    wanted = (
        ("import", importing),
        ("start", before),
        ("context", timings.get("context")),
        ("group", timings.get("group")),
        ("wait", waited),
        ("own", known(timings.get("gate")) - waited),
    )
    kinds: dict[str, float] = {}
    for kind, seconds in wanted:
        kinds[kind] = min(left, known(seconds))
        left -= kinds[kind]
    rest = "failed" if not well else "measure" if total is not None else "unknown"
    return kinds | {rest: left}


def _more(late: Mapping[str, float], usual: Mapping[str, float]) -> str:
    """The kind in which a late rank spent most more than usual; empty if none."""
    more = {kind: late.get(kind, 0.0) - usual.get(kind, 0.0) for kind in _OWN_DOING}
    most = max(_OWN_DOING, key=lambda kind: more[kind])
    return most if more[most] > 0 else ""


def _arrivals(outcomes: Iterable[Outcome], group_of: Mapping[int, int], one: Outcome) -> dict[int, float]:
    """When the ranks of one's group reached the barrier, if they did, in seconds of its trial."""
    group = group_of.get(one.rank)
    peers = (own for own in outcomes if group_of.get(own.rank) == group)
    return {own.rank: known(own.timings["arrive"]) for own in peers if "arrive" in own.timings}


def _last(times: Mapping[int, float]) -> float:
    return max(times.values(), default=0.0)


def _ended_last(
    outcomes: Sequence[Outcome], group_of: Mapping[int, int], slowest: Outcome, beyond: float
) -> Iterator[Late]:
    """Who ended so much later than the middle; if its group only began late, who was last at that group's barrier."""
    came = _arrivals(outcomes, group_of, slowest)
    usual = sorted(known(own.timings["arrive"]) for own in outcomes if "arrive" in own.timings)
    if came and _last(came) - usual[(len(usual) - 1) // 2] > beyond / 2:
        return latest(came, _last(came), beyond, slowest.code, of=len(outcomes))
    ended = {own.rank: known(own.seconds) for own in outcomes}
    return latest(ended, _last(ended), beyond, slowest.code, of=len(outcomes))


def latest(times: Mapping[int, float], last: float, seconds: float, code: str, *, of: int) -> Iterator[Late]:
    """Who came last, of so many that took part; nobody where that is most of them, or too many to list."""
    if seconds <= 0:
        return
    ranks = tuple(sorted(rank for rank, time in times.items() if time >= last - _LATE_TOO * seconds))
    few = len(ranks) <= _MOST_LATE and 2 * len(ranks) <= of
    yield Late(ranks if few else (), seconds, code)
