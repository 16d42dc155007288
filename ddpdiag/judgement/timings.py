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

from ddpdiag.checks.api import Check, Stage
from ddpdiag.model import IMPORT_STEP, Arrival, EventKind, Outcome, Recording, Status, Trial
from ddpdiag.model.report import (
    JUDGEMENT,
    KINDS,
    OTHER,
    START,
    Spent,
    Timings,
    Wait,
)

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


def timings_of(recording: Recording, checks: Sequence[Check[Any]]) -> Timings:
    """The timings of a run; trials of checks that this version does not know belong to no stage."""
    own = recording.arrivals.get(0)
    before = known(own.up_seconds) if own else 0.0
    judged = known(recording.end.judge_seconds) if recording.end else 0.0
    most, over, late = _joining(recording)
    outcomes = _by_trial(recording)
    each = [(trial, told(trial, outcomes[trial.number])) for trial in recording.trials]
    end = _end(recording, over, each)
    stage_of = {check.code: check.stage.value for check in checks}
    # From the first hello to the end of the run, without gap or overlap.
    sums = defaultdict(float, {(START, "start"): before + most, (START, "wait"): over - most})
    now, rest = over, (START, "own")
    for (trial, whole), after in zip(each, (*each[1:], None), strict=False):
        begin = min(max(now, known(trial.begin_seconds)), end)
        # A trial lies within the time until the next one was handed out.
        timed = after is not None and after[0].begin_seconds is not None
        until = min(known(after[0].begin_seconds), end) if timed and after is not None else end
        part = whole.within(max(0.0, until - begin))
        stage = stage_of.get(trial.code, OTHER)
        sums[rest] += begin - now
        for kind, seconds in part.kinds.items():
            sums[stage, kind] += seconds
        late += part.late
        now = begin + part.seconds
        # An old recording does not say when a trial was handed out: what is left may belong to any of them.
        rest = (stage, "own") if trial.begin_seconds is not None else (OTHER, "unknown")
    sums[rest] += end - now
    sums[JUDGEMENT, "own"] += judged
    # Stages in which nothing was spent are left out.
    names = (START, *(stage.value for stage in Stage), OTHER, JUDGEMENT)
    kinds = {name: {kind: spent for kind in KINDS if (spent := sums[name, kind]) > 0} for name in names}
    return Timings(
        seconds=before + end + judged,
        stages=tuple(Spent(stage=name, seconds=sum(own.values()), kinds=own) for name, own in kinds.items() if own),
        waits=tuple(_waits(recording.arrivals, late)),
    )


def known(seconds: float | None) -> float:
    """A time as it can be: what no clock gives (not known, negative, no number) is nothing."""
    return seconds if seconds is not None and 0 < seconds < math.inf else 0.0


def _by_trial(recording: Recording) -> dict[int, list[Outcome]]:
    outcomes: dict[int, list[Outcome]] = {trial.number: [] for trial in recording.trials}
    for outcome in recording.outcomes:
        if outcome.trial in outcomes:
            outcomes[outcome.trial].append(outcome)
    return outcomes


def _joining(recording: Recording) -> tuple[float, float, list[Late]]:
    """When most were here, when the wait for the others was over, and who came last, or never."""
    came = {rank: known(arrival.seconds) for rank, arrival in recording.arrivals.items()}
    absent = [event for event in recording.events if event.kind is EventKind.ABSENT]
    missing = {event.rank: known(event.seconds) for event in absent if event.rank is not None}
    most = median_low(came.values()) if came else 0.0
    over = max((most, *came.values(), *missing.values()))
    return most, over, latest(missing or came, over - most, "", of=len(came) + len(missing))


def _end(recording: Recording, over: float, each: Sequence[tuple[Trial, Told]]) -> float:
    """When the run ended; of one that was cut off, the last that is known of it."""
    last = max((over, *(known(event.seconds) for event in recording.events)))
    if recording.end is not None:
        # Who reports in rank 0's place counts from its own arrival: what is known of the run may end later.
        return max((known(recording.end.seconds), last, *(known(trial.begin_seconds) for trial, _ in each)))
    now = over
    for trial, own in each:
        now = max(now, known(trial.begin_seconds)) + own.seconds
    return max(last, now)


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
            hosts=tuple(dict.fromkeys(arrivals[rank].place.host for rank in ranks if rank in arrivals)),
            seconds=sum(one.seconds for one in own),
            times=len(own),
            code=most.code,
            why=most.why,
            up_seconds=(known(first.up_seconds) or None) if first else None,
        )


# One trial ------------------------------------------------------------------------------------------------------------


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
    late = latest(came, kinds["wait"], trial.code, of=len(outcomes))
    slowest = max(outcomes, key=lambda outcome: known(outcome.seconds))
    beyond = known(slowest.seconds) - known(middle.seconds)
    # Who ends last where something failed is often a bystander: whose fault it is, the findings say.
    kind = "wait" if slowest.status is Status.DONE else "failed"
    if kind == "wait":
        # Who ended so much later than the middle; if its group only began late, who was last at that group's barrier.
        times = _arrivals(outcomes, group_of, slowest)
        usual = sorted(known(own.timings["arrive"]) for own in outcomes if "arrive" in own.timings)
        if not times or max(times.values()) - usual[(len(usual) - 1) // 2] <= beyond / 2:
            times = {own.rank: known(own.seconds) for own in outcomes}
        late += latest(times, beyond, slowest.code, of=len(outcomes))
    spent = {own.rank: own for own in outcomes if any(own.rank in one.ranks[:1] for one in late)}

    def explained(one: Late) -> Late:
        """With the kind in which the first of the late ranks spent most more than usual."""
        if not one.ranks:
            return one
        own = _kinds(spent[one.ranks[0]], waited[one.ranks[0]])
        more = {kind: own.get(kind, 0.0) - kinds.get(kind, 0.0) for kind in _OWN_DOING}
        most = max(more, key=more.__getitem__)
        return one._replace(why=most) if more[most] > 0 else one

    return Told({**kinds, kind: kinds.get(kind, 0.0) + beyond}, tuple(map(explained, late)))


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


def _arrivals(outcomes: Iterable[Outcome], group_of: Mapping[int, int], one: Outcome) -> dict[int, float]:
    """When the ranks of one's group reached the barrier, if they did, in seconds of its trial."""
    peers = (own for own in outcomes if group_of.get(own.rank) == group_of.get(one.rank))
    return {own.rank: known(own.timings["arrive"]) for own in peers if "arrive" in own.timings}


def latest(times: Mapping[int, float], seconds: float, code: str, *, of: int) -> list[Late]:
    """The ranks that arrived last, of so many that took part; none where these are most, or too many to list."""
    if seconds <= 0:
        return []
    last = max(times.values(), default=0.0)
    ranks = tuple(sorted(rank for rank, time in times.items() if time >= last - _LATE_TOO * seconds))
    return [Late(ranks if len(ranks) <= min(_MOST_LATE, of // 2) else (), seconds, code)]
