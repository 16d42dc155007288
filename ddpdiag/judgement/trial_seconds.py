"""What one trial took, by kind, and for whom the others waited in it.

The rank in the middle tells what it did: its own record adds up to what it took. What the run waited for beyond that
(a rank that reached the gate later, or ended later) is waiting, and is put down to who was last; where that one did not
end well, it is a part of the failure, and put down to nobody here. Of two ranks the earlier one counts as the middle,
so that waiting for the other is seen in full.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ddpdiag.model import IMPORT_STEP, Outcome, Status, Trial

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


def known(seconds: float | None) -> float:
    """A time as it can be: what no clock gives (not known, negative, no number) is nothing."""
    return seconds if seconds is not None and math.isfinite(seconds) and seconds > 0 else 0.0


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
    """Seconds of each rank at the gate, beyond those of who came there last in its group."""
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
    """When the ranks of one's group reached the gate, if they did, in seconds of its trial."""
    peers = (own for own in outcomes if group_of.get(own.rank) == group_of.get(one.rank))
    return {own.rank: known(own.timings["arrive"]) for own in peers if "arrive" in own.timings}


def _last(times: Mapping[int, float]) -> float:
    return max(times.values(), default=0.0)


def _ended_last(
    outcomes: Sequence[Outcome], group_of: Mapping[int, int], slowest: Outcome, beyond: float
) -> Iterator[Late]:
    """Who ended so much later than the middle; if its group only began late, who was last at that group's gate."""
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
