"""The data of a search among units (hosts, or ranks of a host): pairs, the bar, rounds, results and diagnosis."""

from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Mapping, Sequence
from enum import Enum
from random import Random
from statistics import NormalDist
from typing import NamedTuple

from ddpdiag.stats import quantile

Pair = tuple[int, ...]
Domain = Hashable
# So many free units are considered as partners. In a shuffled list a good one is soon found.
_LOOKED_AT = 32


def pair_up(units: Sequence[int], domains: Mapping[int, Domain], random: Random) -> tuple[Pair, ...]:
    """Random pairs of all units, of two different domains as far as possible; an odd unit is left out.

    The units of each domain are in a row, and the first half is paired with the second half in order. Partners share a
    domain only if it has more than half of all units.
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
    """The pair with its smaller number first."""
    return (one, other) if one < other else (other, one)


def partners(
    suspects: Sequence[int],
    cleared: Collection[int],
    domains: Mapping[int, Domain],
    met: Callable[[int], Collection[int]],
    random: Random,
) -> tuple[Pair, ...]:
    """Pair each suspect with a different cleared unit: if possible one that it has not `met`, and of another domain.

    If there are more suspects than cleared units, the last suspects get no partner in this round.
    """
    # No more cleared units than the suspects may consider: to shuffle all takes most of the time of a large search.
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
    """The index of the best partner in `free`."""
    domain = domains.get(suspect)
    best, score = len(free) - 1, -1
    for at in range(len(free) - 1, max(-1, len(free) - 1 - _LOOKED_AT), -1):
        other = free[at]
        value = 2 * (other not in met) + (domain is None or domains.get(other) != domain)
        if value == 3:
            return at
        if value > score:
            best, score = at, value
    return best


def apart(pairs: Iterable[Pair], busy: Iterable[int] = ()) -> tuple[Pair, ...]:
    """The pairs that can be tried at the same time: no unit is in two of them, or in `busy`."""
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
# Up to FEW_UNITS all pairs are tried. Up to SOME_UNITS so many matchings come before any unit is judged: of few pairs,
# a quarter of the units may spoil most by chance.
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
# The bar is at most so many standard deviations below the usual rate: noisier fleets would need more rounds.
_MOST_Z = 6.0


class Rules(NamedTuple):
    """The settings of a search. Shares are of the rate that most of the pairs reach.

    `alpha`: healthy units blamed per run. `floor`: a smaller slowdown is never a fault, however quiet the fleet.
    `transients`: the share of tests that fail once. `rounds`: the failures that make a unit bad (None: see
    `rounds_for`). `least`: no lower rate passes. `quiet`: suspects are tried again while few other units communicate.
    """

    alpha: float = 0.05
    floor: float = 0.05
    transients: float = 0.01
    rounds: int | None = None
    least: float = 0.0
    quiet: bool = True

    def rounds_for(self, units: int) -> int:
        """The failures that make a unit bad: `rounds`, else three, or four if units or transients are many."""
        if self.rounds is not None:
            return self.rounds
        return 4 if units > MANY_UNITS or self.transients > MANY_TRANSIENTS else 3


class Bar(NamedTuple):
    """The bar of a test: the least rate that passes, with the fleet's usual rate and its noise as a share of that."""

    usual: float
    sigma: float
    least: float

    @property
    def share(self) -> float:
        """The share by which the bar lies below the usual rate."""
        return 1 - self.least / self.usual if self.usual else 0.0


def bar_of(rates: Sequence[float], units: int, rules: Rules, spread: float = 0.0) -> Bar:
    """The bar, from the rates of pairs. `spread` is the noise within single tests, as a share.

    Faults only slow down. If a quarter of the units is bad, nearly half of the pairs are: the shortest half of all
    rates still is among the good ones, but the median and its deviations are between good and bad ones.
    """
    known = sorted(rates)
    if not known or known[-1] <= 0:
        return Bar(0.0, 0.0, 0.0)
    usual, width = _shortest_half(known)
    sigma = width / _HALF_WIDTH * (1 + _SMALL_SAMPLE / len(known)) / usual if usual >= 1 else 0.0
    return _bar(usual, max(sigma, spread), units, rules)


def bar_of_best(best: Sequence[float], tests: int, rules: Rules, spread: float = 0.0) -> Bar:
    """The bar, from the best of each unit's `tests` rates: if a quarter of the units is bad, a quarter of these is."""
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
    # Transients use a part of this share; noise may use the rest.
    left = max(each - rules.transients, each / 10)
    return min(_MOST_Z, max(0.0, _NORMAL.inv_cdf(1 - min(left, 0.5))))


def smallest_slowdown(bar: Bar, rounds: int, *, found: float = 0.99) -> float:
    """The smallest slowdown, as a share, that fails in all `rounds` rounds with the total probability `found`."""
    if not bar.usual:
        return 1.0
    z = _NORMAL.inv_cdf(found ** (1 / rounds))
    # A unit that is slower by d has noise of (1 - d) sigma: 1 - d + z (1 - d) sigma must stay below the bar.
    return min(1.0, max(0.0, 1 - (1 - bar.share) / (1 + z * bar.sigma)))


# A path is blamed if it has failed so often and never passed. With noise that fails once in 60 tests, two failures of
# one pair occur twice in a run of 16,384.
PATH_FAILURES = 3
# The quiet rounds that have all remaining suspects. A suspect is blamed if it fails in these, and in one before them.
FINAL_ROUNDS = 2
# `Reached.why` of a group that lost a member before the test, or during it: no path is at fault.
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
    """The result of a group's test: its rate in bytes per second, or None with the reason (hung, died, wrong).

    `spread` is the noise within the test, as a share of its rate.
    """

    rate: float | None
    why: str = ""
    spread: float = 0.0

    def passes(self, least: float) -> bool:
        """Whether the test ended and reached `least` bytes per second."""
        return self.rate is not None and self.rate >= least


class Round(NamedTuple):
    """Groups of units that are tried at the same time: pairs, in all rounds but the first and the last."""

    phase: Phase
    groups: tuple[tuple[int, ...], ...]


class Bad(NamedTuple):
    """A unit that failed with every partner: these partners, the results with them, and those in quiet rounds."""

    unit: int
    partners: tuple[int, ...]
    tests: tuple[Reached, ...]
    quiet: tuple[Reached, ...] = ()


class Path(NamedTuple):
    """A pair that failed although both its ends are good, and its results."""

    pair: Pair
    tests: tuple[Reached, ...]


class Congested(NamedTuple):
    """Units that share a slow part of the fabric, and their results: while others communicated, and in quiet rounds.

    `domain` is the leaf, if known and the same for all. `between`: only pairs of these units are slow.
    """

    units: tuple[int, ...]
    loaded: tuple[Reached, ...]
    quiet: tuple[Reached, ...]
    domain: Domain | None = None
    between: bool = False


class Systemic(NamedTuple):
    """The reason why no single unit is at fault. `too_slow`: most pairs do not end."""

    reason: str
    too_slow: bool = False


class Diagnosis(NamedTuple):
    """The result of a search among pairs. Of units in `open` it is not known whether they or a shared part is at fault.

    `systemic` is the reason why no unit is blamed. `congested` are slow parts of the fabric, whose units are not
    blamed. `found_from` is the smallest slowdown, as a share, that would have been found.
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
    """The state of a search: all results, and the facts that follow from them."""

    def __init__(self, units: Sequence[int], domains: Mapping[int, Domain], rules: Rules, seed: int) -> None:
        self.units = units
        self.domains = domains
        self.rules = rules
        # With up to four units at most one other pair communicates in any round: all rounds are quiet.
        self.has_quiet_rounds = rules.quiet and len(units) > 4
        self.random = Random(seed)
        self.tests: dict[Pair, list[Reached]] = {}
        self.failures: dict[int, list[Pair]] = {}
        self.failed: dict[Pair, None] = {}
        self.needed = rules.rounds_for(len(units))
        self.cleared: set[int] = set()
        self.retested: list[int] = []  # the suspects of the quiet rounds
        self.quiet: dict[int, list[Reached]] = {}  # their results in the quiet rounds
        self.alone: dict[Pair, Reached] = {}  # results of pairs while no other pair communicated
        self.slow_between = False  # the network between good units is at fault, as their pairs show
        self.rounds = 0
        self.bar = Bar(0.0, 0.0, 0.0)

    def book(self, results: Results) -> None:
        """Record the results of a round of pairs, and clear the units of pairs that passed."""
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
        """Record the results of `subjects` in a quiet round, and clear those that pass. A lost group is no failure."""
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
        """All units by domain, then by number, so that neighbours follow each other: schedulers mostly number so."""
        return sorted(self.units, key=lambda unit: (str(self.domains.get(unit, "")), unit))

    @property
    def suspects(self) -> list[int]:
        return [unit for unit in self.units if unit not in self.cleared]

    def is_bad(self, unit: int) -> bool:
        """Whether the unit failed `needed` times or more, at least `needed` - 1 of them with cleared partners."""
        failed = self.partners_of(unit)
        return len(failed) >= self.needed and sum(other in self.cleared for other in failed) >= self.needed - 1

    def loaded_tests(self, unit: int) -> list[Reached]:
        """The last results of the unit's failed pairs in rounds in which all suspects, or all units, communicate."""
        return [self.tests[pair][-1] for pair in self.failures.get(unit, ())]

    def between_good(self) -> list[Pair]:
        """Pairs that failed although both ends are cleared, and that lost no unit."""
        good = filter(self.cleared.issuperset, self.failed)
        return [pair for pair in good if not any(own.why == LOST for own in self.tests[pair])]

    def questionable(self) -> list[Pair]:
        """Pairs of good ends that never passed, but failed too seldom to be blamed; the slowest first."""
        known = {pair: self.tests[pair] for pair in self.between_good()}
        open_ones = [p for p, own in known.items() if len(own) < PATH_FAILURES and not any(map(self.passes, own))]
        return sorted(open_ones, key=lambda pair: known[pair][0].rate or 0.0)


def slower_share(tests: Sequence[Reached], usual: float) -> float | None:
    """The share by which the best test is below `usual`; None if a test did not end or `usual` is 0 (not known)."""
    known = [tested.rate for tested in tests if tested.rate is not None]
    return 1 - max(known) / usual if known and len(known) == len(tests) and usual else None
