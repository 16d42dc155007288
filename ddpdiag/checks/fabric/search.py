"""The whole search: each unit alone, then pairs (see `localise`), then all that are good together."""

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ddpdiag.checks.fabric.matching import Domain
from ddpdiag.checks.fabric.notes import LOST, UNHEARD, Diagnosis, Phase, Reached, Results, Round
from ddpdiag.checks.fabric.pair_confirm_cover import localise
from ddpdiag.checks.fabric.rules import Bar, Rules, bar_of

T = TypeVar("T")
# Of fewer units it is not known which of them is the usual one.
_LEAST_TO_COMPARE = 3


class Ground(NamedTuple):
    """What is known before: the units, those of them that have something inside to be tried alone, and the domains."""

    units: tuple[int, ...]
    with_inside: tuple[int, ...] = ()
    domains: Mapping[int, Domain] = {}
    rules: Rules = Rules()
    inside_rules: Rules = Rules()
    seed: int = 0


class Alone(NamedTuple):
    """A unit that is bad by itself: what it reached each time, of which usual rate (0: not known)."""

    unit: int
    tests: tuple[Reached, ...]
    usual: float


class Located(NamedTuple):
    """What came of it. `proof` is what all good ones reached together, None if that was not tried."""

    alone: tuple[Alone, ...]
    diagnosis: Diagnosis
    proof: Reached | None


def locate(ground: Ground) -> Generator[Round, Results, Located]:
    """Find who is bad; what is bad alone takes no part in what follows."""
    alone = yield from _inside(ground)
    out = {own.unit for own in alone}
    rest = tuple(unit for unit in ground.units if unit not in out)
    diagnosis = yield from localise(rest, ground.domains, ground.rules, ground.seed)
    good = tuple(unit for unit in rest if unit in diagnosis.cleared)
    proof = None if diagnosis.systemic else (yield from _prove(good))
    return Located(alone, diagnosis, proof)


def _prove(good: tuple[int, ...]) -> Generator[Round, Results, Reached | None]:
    """All good ones together. Where one is lost in the middle of it the others are tried once more."""
    proof = None
    for _ in range(2 if len(good) > 1 else 0):
        proof = (yield Round(Phase.VERIFY, (good,))).get(good)
        if proof is None or proof.why != UNHEARD:
            break
    return proof


def _inside(ground: Ground) -> Generator[Round, Results, tuple[Alone, ...]]:
    """Each by itself; who fails is tried again as often as a pair would be."""
    units = [(unit,) for unit in ground.with_inside]
    if not units:
        return ()
    results = yield Round(Phase.LOCAL, tuple(units))
    rates = [tested.rate for tested in results.values() if tested.rate is not None]
    bar = Bar(0.0, 0.0, ground.inside_rules.least)
    if len(rates) >= _LEAST_TO_COMPARE:
        spread = max(tested.spread for tested in results.values())
        bar = bar_of(rates, len(rates), ground.inside_rules, spread)
    tests = {group: [tested] for group, tested in results.items()}
    failing = [group for group in units if group in results and not _passes(results[group], bar)]
    # Where most fail, it is no matter of single units: pairs will show it as well.
    if 2 * len(failing) >= len(units) and len(units) > 1:
        return ()
    for _ in range(ground.inside_rules.rounds_for(len(units)) - 1):
        if not failing:
            break
        again = yield Round(Phase.LOCAL, tuple(failing))
        for group, tested in again.items():
            tests[group].append(tested)
        failing = [group for group in failing if group in again and not _passes(again[group], bar)]
    return tuple(Alone(group[0], tuple(tests[group]), bar.usual) for group in failing)


def _passes(tested: Reached, bar: Bar) -> bool:
    return tested.rate is not None and tested.rate >= bar.least


def follow(
    search: Generator[Round, Results, T],
    answers: Sequence[Results],
    possible: Callable[[Round], object] = lambda _: True,
) -> Round | T:
    """The next round, or the end, after these answers: the known ones are played back, so that a plan is pure.

    A group of which an answer says nothing could not be tried, since somebody of it was lost. A round of which nothing
    is `possible` is answered so, and so was one of which the next answer knows no group. The proof is that of those
    good ones that were left.
    """
    left = deque(answers)
    try:
        step = next(search)
        while True:
            known: Results = {}
            if left and step.phase is Phase.VERIFY:
                known = dict(zip(step.groups, left.popleft().values(), strict=True))
            elif left and any(group in left[0] for group in step.groups):
                known = left.popleft()
            elif not left and possible(step):
                return step
            step = search.send({group: known.get(group, Reached(None, LOST)) for group in step.groups})
    except StopIteration as end:
        found: T = end.value
        return found
