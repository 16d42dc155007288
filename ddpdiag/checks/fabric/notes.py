"""A search among units: its rounds and their results, what is known so far, and the diagnosis."""

from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Mapping, Sequence
from enum import Enum
from random import Random
from statistics import NormalDist
from typing import NamedTuple

from ddpdiag.stats import quantile

Pair = tuple[int, ...]
Domain = Hashable
# How many of those that are free are looked at; in a shuffled list a good one is soon found.
_LOOKED_AT = 32


def pair_up(units: Sequence[int], domains: Mapping[int, Domain], random: Random) -> tuple[Pair, ...]:
    """Every unit with another one, by chance, of another domain as far as that is possible; of an odd number one is
    left out.

    With each domain's units in a row, the first half meets the second half in order: partners share a domain only where
    that has more than half of all.
    """
    mixed = list(units)
    random.shuffle(mixed)
    if domains:
        order: dict[Domain, list[int]] = {}
        for unit in mixed:
            order.setdefault(domains.get(unit, unit), []).append(unit)
        mixed = [unit for own in sorted(order.values(), key=len, reverse=True) for unit in own]
    half = len(mixed) // 2
    return tuple(ordered(one, other) for one, other in zip(mixed[:half], mixed[half : 2 * half], strict=True))


def ordered(one: int, other: int) -> Pair:
    """A pair is written with its smaller number first."""
    return (one, other) if one < other else (other, one)


def partners(
    suspects: Sequence[int],
    cleared: Collection[int],
    domains: Mapping[int, Domain],
    met: Callable[[int], Collection[int]],
    random: Random,
) -> tuple[Pair, ...]:
    """A cleared partner for each suspect, each for one: of another domain, and one that it has not met, if possible.

    Suspects beyond the number of the cleared get none this time.
    """
    # Of many that are cleared no more than the suspects may look at: to shuffle all takes most of a large search.
    free = random.sample(list(cleared), min(len(cleared), len(suspects) + _LOOKED_AT))
    pairs = []
    for suspect in suspects:
        if not free:
            break
        at = _choose(suspect, free, domains, met(suspect))
        free[at], free[-1] = free[-1], free[at]
        pairs.append(ordered(suspect, free.pop()))
    return tuple(pairs)


def _choose(suspect: int, free: Sequence[int], domains: Mapping[int, Domain], met: Collection[int]) -> int:
    """The place of the best partner in `free`."""
    home = domains.get(suspect)
    best, score = len(free) - 1, -1
    for at in range(len(free) - 1, max(-1, len(free) - 1 - _LOOKED_AT), -1):
        other = free[at]
        own = 2 * (other not in met) + (home is None or domains.get(other) != home)
        if own == 3:
            return at
        if own > score:
            best, score = at, own
    return best


def apart(pairs: Iterable[Pair], busy: Iterable[int] = ()) -> tuple[Pair, ...]:
    """The pairs that can be tried at the same time, beside units that are busy."""
    taken = set(busy)
    chosen = []
    for pair in pairs:
        if taken.isdisjoint(pair):
            taken.update(pair)
            chosen.append(pair)
    return tuple(chosen)


def round_robin(units: Sequence[int], number: int) -> tuple[Pair, ...]:
    """Round `number` of n - 1 (n if that is odd) in which every unit meets every other one once: the circle method."""
    circle: list[int | None] = [*units, *([None] if len(units) % 2 else [])]
    turned = circle[:1] + circle[1:][number:] + circle[1:][:number]
    couples = zip(turned, reversed(turned[len(turned) // 2 :]), strict=False)
    return tuple(ordered(one, other) for one, other in couples if one is not None and other is not None)


# The middle half of a normal distribution is so many standard deviations wide.
_HALF_WIDTH = 1.349
# The shortest half of a small sample is shorter than the middle half of what it was drawn from (simulated, 8 to 64).
_SMALL_SAMPLE = 8.0
# Up to so many units, all pairs are tried; up to the next number, three matchings come before any unit is judged, since
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
    """The rules of a search. Shares are of the rate that most of the pairs reach.

    `alpha`: healthy units blamed per run. `floor`: less than so much slower is never a fault, however quiet the fleet.
    `least` is a rate below which nothing passes. With `quiet` suspects are tried again while hardly any other unit
    communicates.
    """

    alpha: float = 0.05
    floor: float = 0.05
    transients: float = 0.01
    rounds: int | None = None
    least: float = 0.0
    quiet: bool = True

    def rounds_for(self, units: int) -> int:
        """The failures that make a unit bad: as asked for, else three, or four where these are many."""
        if self.rounds is not None:
            return self.rounds
        return 4 if units > MANY_UNITS or self.transients > MANY_TRANSIENTS else 3


class Bar(NamedTuple):
    """The measure of a test: the fleet's usual rate, its noise as a share, and the least rate that passes."""

    usual: float
    sigma: float
    least: float

    @property
    def share(self) -> float:
        """The share by which the bar lies below the usual rate."""
        return 1 - self.least / self.usual if self.usual else 0.0


def bar_of(rates: Sequence[float], units: int, rules: Rules, spread: float = 0.0) -> Bar:
    """The bar from the rates of pairs so far; `spread` is the noise within the tests.

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
    """The number of standard deviations by which the bar lies below the usual rate."""
    # The share of healthy tests that may fail in a round.
    each = float((rules.alpha / max(1, units)) ** (1 / rules.rounds_for(units)))
    # What transients use up is not there for noise.
    left = max(each - rules.transients, each / 10)
    return min(_MOST_Z, max(0.0, _NORMAL.inv_cdf(1 - min(left, 0.5))))


def smallest_slowdown(bar: Bar, rounds: int, *, found: float = 0.99) -> float:
    """The smallest slowdown, as a share, that is found with the probability `found`: it must fail in every round."""
    if not bar.usual:
        return 1.0
    z = _NORMAL.inv_cdf(found ** (1 / rounds))
    # A unit that is slower by d has noise of (1 - d) sigma: 1 - d + z (1 - d) sigma must stay below the bar.
    return min(1.0, max(0.0, 1 - (1 - bar.share) / (1 + z * bar.sigma)))


# A path is blamed once it has failed so often and never passed: of noise that fails once in 60 tests, two failures
# would be found twice in a run of 16,384.
PATH_FAILURES = 3
# A suspect is blamed if it fails in so many quiet rounds as well: one with a part of the suspects, and the last two.
FINAL_ROUNDS = 2
# The results of a group of which a member was lost before, or during the test: the path between them is not at fault.
LOST, UNHEARD = "lost", "unheard"


class Phase(Enum):
    """The purpose of a round: each unit alone, pairs, suspects again, suspects while few others communicate, and all
    good ones together as the proof."""

    LOCAL = "local"
    PAIR = "pair"
    CONFIRM = "confirm"
    QUIET = "quiet"
    VERIFY = "verify"


class Reached(NamedTuple):
    """The rate of a group in bytes per second; None where it did not end, with the reason (hung, died, wrong).

    `spread` is its own noise, as a share of its rate.
    """

    rate: float | None
    why: str = ""
    spread: float = 0.0

    def passes(self, least: float) -> bool:
        """Whether it ended and reached so much."""
        return self.rate is not None and self.rate >= least


class Round(NamedTuple):
    """Groups of units that are tried at the same time: pairs, in all rounds but the first and the last."""

    phase: Phase
    groups: tuple[tuple[int, ...], ...]


class Bad(NamedTuple):
    """A unit that failed with every partner: with whom, what it reached there, and what in quiet rounds."""

    unit: int
    partners: tuple[int, ...]
    tests: tuple[Reached, ...]
    quiet: tuple[Reached, ...] = ()


class Path(NamedTuple):
    """A pair that failed while both its ends are good: what it reached each time."""

    pair: Pair
    tests: tuple[Reached, ...]


class Congested(NamedTuple):
    """Units that share a slow part of the fabric, and what they reached while others communicated and in quiet rounds.

    `domain` is the leaf, if known and the same for all. `between`: only pairs of these units are slow.
    """

    units: tuple[int, ...]
    loaded: tuple[Reached, ...]
    quiet: tuple[Reached, ...]
    domain: Domain | None = None
    between: bool = False


class Systemic(NamedTuple):
    """Why no single unit is at fault; `too_slow` where most pairs do not end."""

    reason: str
    too_slow: bool = False


class Diagnosis(NamedTuple):
    """The units that are bad. For units in `open` the data do not decide whether they or what they share is at fault.

    `systemic` is the reason why no unit is blamed. `congested` are slow parts of the fabric, of which no unit is bad.
    `found_from` is the smallest slowdown, as a share, that would have been found.
    """

    bar: Bar
    rounds: int
    bad: tuple[Bad, ...] = ()
    cleared: frozenset[int] = frozenset()
    open: tuple[int, ...] = ()
    paths: tuple[Path, ...] = ()
    congested: tuple[Congested, ...] = ()
    systemic: Systemic | None = None
    found_from: float = 1.0


Results = Mapping[tuple[int, ...], Reached]
Search = Generator[Round, Results, Diagnosis]


class Notes:
    """The search so far."""

    def __init__(self, units: Sequence[int], domains: Mapping[int, Domain], rules: Rules, seed: int) -> None:
        self.units = units
        self.domains = domains
        self.rules = rules
        # Of up to four units at most one other pair communicates in any round: that is quiet enough.
        self.has_quiet_rounds = rules.quiet and len(units) > 4
        self.random = Random(seed)
        self.tests: dict[Pair, list[Reached]] = {}
        self.failures: dict[int, list[Pair]] = {}
        self.failed: dict[Pair, None] = {}
        self.needed = rules.rounds_for(len(units))
        self.cleared: set[int] = set()
        self.retested: list[int] = []  # the suspects of the quiet rounds
        self.quiet: dict[int, list[Reached]] = {}  # what these reached there
        self.alone: dict[Pair, Reached] = {}  # what a pair reached while no other one communicated
        self.slow_between = False  # the network between good units is at fault, as their pairs show
        self.rounds = 0
        self.bar = Bar(0.0, 0.0, 0.0)

    def book(self, results: Results) -> None:
        """Note what the pairs of a round reached, and clear who passed."""
        self.rounds += 1
        for pair, tested in results.items():
            self.tests.setdefault(pair, []).append(tested)
            if self.passes(tested):
                self.cleared.update(pair)
                continue
            self.failed[pair] = None
            for unit in pair:
                self.failures.setdefault(unit, []).append(pair)

    def book_quiet(self, results: Results, subjects: Collection[int]) -> None:
        """Note what the subjects of a quiet round reached with their partners; a suspect that passes is cleared.

        What could not be tried is no failure.
        """
        self.rounds += 1
        for pair, tested in results.items():
            (subject,) = (unit for unit in pair if unit in subjects)
            if tested.why == LOST:
                continue
            self.quiet.setdefault(subject, []).append(tested)
            if self.passes(tested):
                self.cleared.add(subject)

    def passes(self, tested: Reached) -> bool:
        return tested.passes(self.bar.least)

    def passed(self, pair: Pair) -> bool:
        alone = self.alone.get(pair)
        return any(map(self.passes, self.tests[pair])) or (alone is not None and self.passes(alone))

    def partners_of(self, unit: int) -> tuple[int, ...]:
        """The partners with which a unit failed, in order."""
        return tuple(one if other == unit else other for one, other in self.failures.get(unit, ()))

    @property
    def in_line(self) -> list[int]:
        """All units, neighbours beside each other: by domain, then by number, as most schedulers number hosts."""
        return sorted(self.units, key=lambda unit: (str(self.domains.get(unit, "")), unit))

    @property
    def suspects(self) -> list[int]:
        return [unit for unit in self.units if unit not in self.cleared]

    def is_bad(self, unit: int) -> bool:
        """Whether it failed often enough, and all but once with partners that are good."""
        failed = self.partners_of(unit)
        return len(failed) >= self.needed and sum(other in self.cleared for other in failed) >= self.needed - 1

    def loaded_tests(self, unit: int) -> list[Reached]:
        """The results of its failures in rounds in which all suspects, or all units, communicate."""
        return [self.tests[pair][-1] for pair in self.failures.get(unit, ())]

    def between_good(self) -> list[Pair]:
        """Pairs that failed while both ends are cleared and there."""
        good = filter(self.cleared.issuperset, self.failed)
        return [pair for pair in good if not any(own.why == LOST for own in self.tests[pair])]

    def questionable(self) -> list[Pair]:
        """Pairs that failed each time while both ends are cleared, and not often enough to be sure; the worst first."""
        known = {pair: self.tests[pair] for pair in self.between_good()}
        open_ones = [p for p, own in known.items() if len(own) < PATH_FAILURES and not any(map(self.passes, own))]
        return sorted(open_ones, key=lambda pair: known[pair][0].rate or 0.0)


def slower_share(tests: Sequence[Reached], usual: float) -> float | None:
    """The share by which the best test is slower than usual; None if one did not end or the usual rate is unknown."""
    known = [tested.rate for tested in tests if tested.rate is not None]
    return 1 - max(known) / usual if known and len(known) == len(tests) and usual else None
