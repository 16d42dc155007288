"""How far below the others a test must be to count as failed, and how often before a unit is blamed.

A test of a pair is healthy with noise of standard deviation sigma (a share of the rate), and fails for no lasting
reason with the probability `transients`. A unit is blamed after `rounds` failures with different partners, so each
round may fail with f = (alpha / N) ** (1 / rounds) for the whole run to blame alpha healthy units: a low threshold that
holds several times has far more power than a high one that holds once.
"""

from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

from ddpdiag.stats import quantile

# The middle half of a normal distribution is so many standard deviations wide.
_HALF_WIDTH = 1.349
# The shortest half of a small sample is shorter than the middle half of what it was drawn from (simulated, 8 to 64).
_SMALL_SAMPLE = 8.0
# Up to so many units, all pairs are tried; up to the next number, three matchings come before anybody is judged, since
# of few pairs a quarter of the units spoils most by chance.
FEW_UNITS, SOME_UNITS, OPENING_ROUNDS = 8, 128, 3
# With more than SOME_UNITS a search has no more rounds than these.
MOST_ROUNDS = 10
# The largest of so many values of a standard normal distribution: its mean and standard deviation (order statistics).
_LARGEST_OF = {1: (0.0, 1.0), 2: (0.56, 0.83), 3: (0.85, 0.75), 4: (1.03, 0.70), 5: (1.16, 0.67), 6: (1.27, 0.64)}
_LARGEST_OF_MORE = (1.35, 0.62)
# A normal distribution's standard deviation, in units of its median absolute deviation.
_MAD_TO_SIGMA = 1.4826
# Above so many units, or so many transient failures, a fourth round is needed for the same false blame (simulated).
MANY_UNITS = 1_000
MANY_TRANSIENTS = 0.01
_NORMAL = NormalDist()
# The least power that a threshold may be given up for: beyond, a fleet is too noisy for this many rounds.
_MOST_Z = 6.0


class Rules(NamedTuple):
    """What is asked for. Shares are of the rate that most of the pairs reach.

    `alpha`: healthy units blamed per run. `floor`: less than so much slower is never a fault, however quiet the fleet.
    `expected` is what a pair should reach in bytes per second, if that is known, and `systemic_share` the part of it
    that at least half of the pairs must reach; `least` is a rate below which nothing passes. `domain_share` of a
    domain, and `domain_least` units, are the domain's fault. `cover` is how many more rounds look for links. With
    `quiet` suspects are tried again while hardly any other unit communicates.
    """

    alpha: float = 0.05
    floor: float = 0.05
    transients: float = 0.01
    rounds: int | None = None
    expected: float | None = None
    systemic_share: float = 0.5
    least: float = 0.0
    domain_share: float = 0.3
    domain_least: int = 3
    cover: int = 0
    quiet: bool = True

    def rounds_for(self, units: int) -> int:
        """How often a unit must fail: as asked for, else three times, or four where these are many."""
        if self.rounds is not None:
            return self.rounds
        return 4 if units > MANY_UNITS or self.transients > MANY_TRANSIENTS else 3


class Bar(NamedTuple):
    """What a test is held against: the fleet's usual rate, its noise as a share, and the least rate that passes."""

    usual: float
    sigma: float
    least: float

    @property
    def share(self) -> float:
        """How far below the usual rate the bar lies."""
        return 1 - self.least / self.usual if self.usual else 0.0


def bar_of(rates: Sequence[float], units: int, rules: Rules, spread: float = 0.0) -> Bar:
    """From the rates of pairs so far; `spread` is what the tests saw of noise in themselves.

    Faults only slow down, and a quarter of the units spoils nearly half of the pairs: then the shortest half of all
    rates still lies among the good ones, where the median and its deviations lie between good and bad.
    """
    known = sorted(rates)
    if not known or known[-1] <= 0:
        return Bar(0.0, 0.0, 0.0)
    usual, width = _shortest_half(known)
    sigma = width / _HALF_WIDTH * (1 + _SMALL_SAMPLE / len(known)) / usual if usual >= 1 else 0.0
    return _bar(usual, max(sigma, spread), units, rules)


def bar_of_best(best: Sequence[float], tests: int, rules: Rules, spread: float = 0.0) -> Bar:
    """The same from what each unit reached in the best of its `tests`: a quarter of bad units is a quarter of these."""
    known = sorted(best)
    if not known or known[-1] <= 0:
        return Bar(0.0, 0.0, 0.0)
    mean, deviation = _LARGEST_OF.get(tests, _LARGEST_OF_MORE)
    middle = quantile(known, 0.5)
    if middle < 1:  # less than a byte in a second is no rate
        return Bar(0.0, 0.0, rules.least)
    away = quantile(sorted(abs(rate - middle) for rate in known), 0.5)
    sigma = max(_MAD_TO_SIGMA * away / deviation / middle, spread)
    return _bar(middle / (1 + mean * sigma), sigma, len(best), rules)


def _bar(usual: float, sigma: float, units: int, rules: Rules) -> Bar:
    share = max(rules.floor, z_of(units, rules) * sigma)
    return Bar(usual, sigma, max(rules.least, usual * (1 - share)))


def _shortest_half(known: Sequence[float]) -> tuple[float, float]:
    """The median and the width of the shortest interval with more than half of the values (the shorth); of equally
    short ones, the highest."""
    count = len(known) // 2 + 1
    at = min(range(len(known) - count, -1, -1), key=lambda begin: known[begin + count - 1] - known[begin])
    return quantile(known[at : at + count], 0.5), known[at + count - 1] - known[at]


def z_of(units: int, rules: Rules) -> float:
    """How many standard deviations the bar lies below the usual rate (see above)."""
    each = by_chance(units, rules)
    # What transients use up is not there for noise.
    left = max(each - rules.transients, each / 10)
    return min(_MOST_Z, max(0.0, _NORMAL.inv_cdf(1 - min(left, 0.5))))


def by_chance(units: int, rules: Rules) -> float:
    """The share of healthy tests that may fail in a round (see above)."""
    return float((rules.alpha / max(1, units)) ** (1 / rules.rounds_for(units)))


def smallest_slowdown(bar: Bar, rounds: int, *, found: float = 0.99) -> float:
    """The smallest slowdown, as a share, that is found with the probability `found`: it must fail in every round."""
    if not bar.usual:
        return 1.0
    z = _NORMAL.inv_cdf(found ** (1 / rounds))
    # A unit that is slower by d has noise of (1 - d) sigma: 1 - d + z (1 - d) sigma must stay below the bar.
    return min(1.0, max(0.0, 1 - (1 - bar.share) / (1 + z * bar.sigma)))
