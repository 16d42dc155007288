"""Two groups of units that are fast inside and slow across: what joins the groups is slow, and no unit.

The rates of pairs are explained by two sides: one rate inside, another one across. The sides are those of the leading
eigenvector of the pairs' weights (how far each is above or below the middle of fast and slow pairs), as in spectral
clustering. They count if chance would explain the rates as well in fewer than `alpha` runs, over all ways to choose
sides of these sizes (likelihood ratio of normal rates with one mean and with two), and if pairs across are slower by
the least slowdown that matters. Single tests may fail or pass: all of them together decide, so that noise of single
tests hides nothing.
"""

import math
from collections.abc import Mapping, Sequence
from random import Random
from statistics import fmean, median, pvariance

from ddpdiag.checks.fabric.matching import Pair
from ddpdiag.checks.fabric.notes import Notes
from ddpdiag.checks.fabric.rules import SOME_UNITS

# Two units that are slow with all others may be two slow ones.
_LEAST_SIDE = 3
_STEPS = 100  # of the power iteration; two sides that differ at all part in fewer
_MEANS = 20

Sides = tuple[tuple[int, ...], ...]


def cut_of(notes: Notes) -> Sides:
    """The two sides among good units, the smaller one first; or nothing.

    Of more than SOME_UNITS each is tried in too few pairs for that.
    """
    if len(notes.units) > SOME_UNITS:
        return ()
    rates = {pair: fmean(own) for pair, own in _rates(notes).items() if notes.cleared.issuperset(pair)}
    if not rates:
        return ()
    first, second = _sides(rates)
    across = [rate for pair, rate in rates.items() if is_across(pair, first)]
    inside = [rate for pair, rate in rates.items() if not is_across(pair, first)]
    if min(len(first), len(second)) < _LEAST_SIDE or not inside or not across:
        return ()
    slow = median(across) <= (1 - notes.rules.floor) * median(inside)
    ways = _log_choices(len(first) + len(second), len(first))
    if not slow or ways + _log_chance(inside, across) > math.log(notes.rules.alpha):
        return ()
    return tuple(sorted((first, second), key=lambda side: (len(side), side)))


def is_across(pair: Pair, side: Sequence[int]) -> bool:
    """Is one of its ends on that side, and the other not?"""
    return (pair[0] in side) != (pair[1] in side)


def _rates(notes: Notes) -> Mapping[Pair, list[float]]:
    """What each pair reached, of pairs that always ended."""
    tests = {pair: [tested.rate for tested in own] for pair, own in notes.tests.items()}
    return {pair: [rate for rate in own if rate is not None] for pair, own in tests.items() if None not in own}


def _sides(rates: Mapping[Pair, float]) -> Sides:
    """Units by the sign of the leading eigenvector."""
    middle = _middle([*rates.values()])
    units = sorted({unit for pair in rates for unit in pair})
    random = Random(0)
    vector = {unit: random.uniform(-1, 1) for unit in units}
    degree = dict.fromkeys(units, 0.0)
    for pair, rate in rates.items():
        for unit in pair:
            degree[unit] += abs(rate - middle)
    shift = max(degree.values())  # no eigenvalue is below -shift: with it the leading one is the largest in size
    for _ in range(_STEPS if shift else 0):
        following = {unit: shift * own for unit, own in vector.items()}
        for (one, other), rate in rates.items():
            following[one] += (rate - middle) * vector[other]
            following[other] += (rate - middle) * vector[one]
        length = math.hypot(*following.values())
        vector = {unit: own / length for unit, own in following.items()}
    return tuple(unit for unit in units if vector[unit] < 0), tuple(unit for unit in units if vector[unit] >= 0)


def _middle(rates: Sequence[float]) -> float:
    """Between the mean of the slow ones and that of the fast ones (two means)."""
    middle = (min(rates) + max(rates)) / 2
    for _ in range(_MEANS):
        slow, fast = [rate for rate in rates if rate < middle], [rate for rate in rates if rate >= middle]
        if not slow or not fast:
            break
        middle = (fmean(slow) + fmean(fast)) / 2
    return middle


def _log_chance(inside: Sequence[float], across: Sequence[float]) -> float:
    """The logarithm of the likelihood ratio of one mean for all rates, and of one for each group."""
    whole = pvariance([*inside, *across])
    left = (len(inside) * pvariance(inside) + len(across) * pvariance(across)) / (len(inside) + len(across))
    if whole <= 0:
        return 0.0
    return (len(inside) + len(across)) / 2 * math.log(max(left / whole, 1e-9))


def _log_choices(count: int, chosen: int) -> float:
    """The logarithm of the binomial coefficient."""
    return math.lgamma(count + 1) - math.lgamma(chosen + 1) - math.lgamma(count - chosen + 1)
