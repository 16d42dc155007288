"""Two groups of units that are fast inside and slow across: what joins the groups is slow, and no unit.

The rates of pairs (their logarithms, since some are many times faster than others) are explained by two sides: one rate
inside, another one across. The sides are those of the leading eigenvector of the pairs' weights (how far each is above
or below the middle of fast and slow pairs), as in spectral clustering. They count if in fewer than `alpha` runs chance
would explain the rates as well, over all ways to choose sides of these sizes: by the likelihood ratio of normal rates
with one mean and with two, and by the number of slow pairs. And pairs across must be slower than the noise, and by the
least slowdown that matters. All tests together decide, whichever of them fail: noise of single ones hides nothing.
"""

import math
from collections.abc import Mapping, Sequence
from random import Random
from statistics import fmean, median, pvariance

from ddpdiag.checks.fabric.matching import Pair
from ddpdiag.checks.fabric.notes import Notes
from ddpdiag.checks.fabric.rules import SOME_UNITS, by_chance

# Two units that are slow with all others may be two slow ones.
_LEAST_SIDE = 3
_STEPS = 100  # of the power iteration; two sides that differ at all part in fewer
_MEANS = 20
# What tests saw of noise in themselves may be the congestion that is looked for.
_MOST_NOISE = 0.3

Sides = tuple[tuple[int, ...], ...]


def cut_of(notes: Notes) -> Sides:
    """The two sides among good units, the smaller one first; or nothing.

    Of more than SOME_UNITS each is tried in too few pairs for that.
    """
    if len(notes.units) > SOME_UNITS:
        return ()
    rates = {pair: math.log(rate) for pair, rate in _rates(notes).items() if notes.cleared.issuperset(pair)}
    if not rates:
        return ()
    first, second = _sides(rates)
    across = [rate for pair, rate in rates.items() if is_across(pair, first)]
    inside = [rate for pair, rate in rates.items() if not is_across(pair, first)]
    if min(len(first), len(second)) < _LEAST_SIDE or not inside or not across:
        return ()
    ways = _log_choices(len(first) + len(second), len(first))
    least = math.log(notes.rules.alpha) - ways
    least_slower = max(notes.rules.floor, min(notes.bar.sigma, _MOST_NOISE))
    is_slow = median(across) <= median(inside) + math.log(1 - least_slower)
    if not is_slow or max(_log_ratio(inside, across), _log_failing(notes, inside, across)) > least:
        return ()
    return tuple(sorted((first, second), key=lambda side: (len(side), side)))


def is_across(pair: Pair, side: Sequence[int]) -> bool:
    """Is one of its ends on that side, and the other not?"""
    return (pair[0] in side) != (pair[1] in side)


def _rates(notes: Notes) -> Mapping[Pair, float]:
    """What each pair reached in its first test, if that ended."""
    return {pair: own[0].rate for pair, own in notes.tests.items() if own[0].rate}


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


def _log_failing(notes: Notes, inside: Sequence[float], across: Sequence[float]) -> float:
    """The logarithm of the chance that so many of the pairs across are slow, if each is as seldom as a test may fail.

    Pairs that are slow for no reason are further away than noise would have them.
    """
    middle = (median(inside) + median(across)) / 2
    slow = sum(rate < middle for rate in across)
    return _log_choices(len(across), slow) + slow * math.log(by_chance(len(notes.units), notes.rules))


def _log_ratio(inside: Sequence[float], across: Sequence[float]) -> float:
    """The logarithm of the likelihood ratio of one mean for all rates, and of one for each group."""
    whole = pvariance([*inside, *across])
    left = (len(inside) * pvariance(inside) + len(across) * pvariance(across)) / (len(inside) + len(across))
    if whole <= 0:
        return 0.0
    return (len(inside) + len(across)) / 2 * math.log(max(left / whole, 1e-9))


def _log_choices(count: int, chosen: int) -> float:
    """The logarithm of the binomial coefficient."""
    return math.lgamma(count + 1) - math.lgamma(chosen + 1) - math.lgamma(count - chosen + 1)
