"""The data of a search for bad units (hosts, or ranks of a host): pairs, the bar, rounds, results and the diagnosis.

The "bar" is the lowest rate with which a test passes. A unit is "cleared" by a test that passes, and is a "suspect"
until then. A "domain" is a part of the network that units share, such as a leaf switch.
"""

from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Mapping, Sequence
from enum import Enum
from random import Random
from statistics import NormalDist
from typing import NamedTuple

from ddpdiag.stats import quantile

Pair = tuple[int, ...]
Domain = Hashable
# The most free units that are considered as a partner. In a shuffled list a good one is soon found.
_MAX_CANDIDATES = 32


def pair_up(units: Sequence[int], domains: Mapping[int, Domain], random: Random) -> tuple[Pair, ...]:
    """Pair all units at random, with partners of different domains if possible. An odd unit is left out.

    The units are listed domain by domain, and the first half of the list is paired with the second half, in order. So
    partners share a domain only if the domain has more than half of all units.
    """
    mixed = list(units)
    random.shuffle(mixed)
    if domains:
        order: dict[Domain, list[int]] = {}
        for unit in mixed:
            order.setdefault(domains.get(unit, unit), []).append(unit)
        mixed = [unit for own in sorted(order.values(), key=len, reverse=True) for unit in own]
    half = len(mixed) // 2
    return tuple(ordered_pair(one, other) for one, other in zip(mixed[:half], mixed[half : 2 * half], strict=True))


def ordered_pair(one: int, other: int) -> Pair:
    """Return the pair with its smaller number first."""
    return (one, other) if one < other else (other, one)


def pair_with_cleared(
    suspects: Sequence[int],
    cleared: Collection[int],
    domains: Mapping[int, Domain],
    past_partners: Callable[[int], Collection[int]],
    random: Random,
) -> tuple[Pair, ...]:
    """Pair each suspect with a cleared unit, if possible not one of its `past_partners`, and of another domain.

    If there are more suspects than cleared units, the last suspects get no partner in this round.
    """
    # Only as many cleared units as are considered: shuffling all would take most of the time of a large search.
    free = random.sample(list(cleared), min(len(cleared), len(suspects) + _MAX_CANDIDATES))
    pairs = []
    for suspect in suspects:
        if not free:
            break
        at = _best_partner(suspect, free, domains, past_partners(suspect))
        free[at], free[-1] = free[-1], free[at]
        pairs.append(ordered_pair(suspect, free.pop()))
    return tuple(pairs)


def _best_partner(
    suspect: int, free: Sequence[int], domains: Mapping[int, Domain], past_partners: Collection[int]
) -> int:
    """Return the index in `free` of the best partner for the suspect."""
    domain = domains.get(suspect)
    best, score = len(free) - 1, -1
    for at in range(len(free) - 1, max(-1, len(free) - 1 - _MAX_CANDIDATES), -1):
        other = free[at]
        value = 2 * (other not in past_partners) + (domain is None or domains.get(other) != domain)
        if value == 3:
            return at
        if value > score:
            best, score = at, value
    return best


def disjoint(pairs: Iterable[Pair], busy: Iterable[int] = ()) -> tuple[Pair, ...]:
    """Choose pairs that can be tested at the same time: no unit is in two of them, or in `busy`."""
    taken = set(busy)
    chosen = []
    for pair in pairs:
        if taken.isdisjoint(pair):
            taken.update(pair)
            chosen.append(pair)
    return tuple(chosen)


def round_robin(units: Sequence[int], number: int) -> tuple[Pair, ...]:
    """Return the pairs of round `number`. In n - 1 rounds (n if odd) n units all meet once (circle method)."""
    circle: list[int | None] = [*units, *([None] if len(units) % 2 else [])]
    turned = circle[:1] + circle[1:][number:] + circle[1:][:number]
    couples = zip(turned, reversed(turned[len(turned) // 2 :]), strict=False)
    return tuple(ordered_pair(one, other) for one, other in couples if one is not None and other is not None)


# The width of the middle half of a normal distribution, in standard deviations.
_HALF_WIDTH = 1.349
# A correction for small samples, in which the shortest half is too narrow (simulated, 8 to 64 values).
_SMALL_SAMPLE = 8.0
# By n: mean and standard deviation of the largest of n values of a standard normal distribution (order statistics).
_LARGEST_OF = {1: (0.0, 1.0), 2: (0.56, 0.83), 3: (0.85, 0.75), 4: (1.03, 0.70), 5: (1.16, 0.67), 6: (1.27, 0.64)}
_LARGEST_OF_MORE = (1.35, 0.62)
# The standard deviation of a normal distribution, in units of its median absolute deviation.
_MAD_TO_SIGMA = 1.4826
# With more units, or a larger share of transient failures, a bad unit must fail four times, not three (simulated).
MANY_UNITS = 1_000
MANY_TRANSIENTS = 0.01
_NORMAL = NormalDist()
# The bar is at most so many standard deviations below the usual rate. Noisier fleets would need more rounds.
_MAX_Z = 6.0


class Rules(NamedTuple):
    """The settings of a search.

    `alpha`: the accepted number of healthy units blamed per run. `floor`: a smaller slowdown is never a fault, as a
    share of the usual rate. `transients`: the share of tests that fail by chance. `failures`: the failures that make a
    unit bad (None: `failures_for` decides). `least`: no lower rate passes, in bytes per second. `has_quiet_rounds`:
    suspects are tested again while few other units communicate.
    """

    alpha: float = 0.05
    floor: float = 0.05
    transients: float = 0.01
    failures: int | None = None
    least: float = 0.0
    has_quiet_rounds: bool = True

    def failures_for(self, unit_count: int) -> int:
        """Return how many failures make a unit bad: `failures`, else three, or four with many units or transients."""
        if self.failures is not None:
            return self.failures
        return 4 if unit_count > MANY_UNITS or self.transients > MANY_TRANSIENTS else 3


class RateLimits(NamedTuple):
    """The bar of a test: `least` is the lowest rate that passes, in bytes per second.

    `usual` is the rate of most healthy pairs (0: not known), and `sigma` its standard deviation as a share of `usual`.
    """

    usual: float
    sigma: float
    least: float

    @property
    def share(self) -> float:
        """The share by which the bar is below the usual rate."""
        return 1 - self.least / self.usual if self.usual else 0.0


def bar_of(rates: Sequence[float], unit_count: int, rules: Rules, spread: float = 0.0) -> RateLimits:
    """Derive the bar from the rates of pairs. `spread` is the noise within single tests, as a share of their rates.

    The usual rate is the median of the shortest half of all rates. If a quarter of the units is bad, nearly half of the
    pairs are slow. The shortest half then still has good pairs only, while the median of all pairs may be a slow one.
    """
    known = sorted(rates)
    if not known or known[-1] <= 0:
        return RateLimits(0.0, 0.0, 0.0)
    usual, width = _shortest_half(known)
    sigma = width / _HALF_WIDTH * (1 + _SMALL_SAMPLE / len(known)) / usual if usual >= 1 else 0.0
    return _bar(usual, max(sigma, spread), unit_count, rules)


def bar_of_best(best: Sequence[float], test_count: int, rules: Rules, spread: float = 0.0) -> RateLimits:
    """Derive the bar from each unit's best rate of `test_count` tests. Of these only rates of bad units are slow."""
    known = sorted(best)
    if not known or known[-1] <= 0:
        return RateLimits(0.0, 0.0, 0.0)
    mean, deviation = _LARGEST_OF.get(test_count, _LARGEST_OF_MORE)
    middle = quantile(known, 0.5)
    if middle < 1:  # less than a byte in a second is no rate
        return RateLimits(0.0, 0.0, rules.least)
    away = quantile(sorted(abs(rate - middle) for rate in known), 0.5)
    sigma = max(_MAD_TO_SIGMA * away / deviation / middle, spread)
    return _bar(middle / (1 + mean * sigma), sigma, len(best), rules)


def _bar(usual: float, sigma: float, unit_count: int, rules: Rules) -> RateLimits:
    share = max(rules.floor, z_of(unit_count, rules) * sigma)
    return RateLimits(usual, sigma, max(rules.least, usual * (1 - share)))


def _shortest_half(known: Sequence[float]) -> tuple[float, float]:
    """Return the median and width of the shortest interval that has more than half of the values (the shorth)."""
    count = len(known) // 2 + 1
    at = min(range(len(known) - count, -1, -1), key=lambda begin: known[begin + count - 1] - known[begin])
    return quantile(known[at : at + count], 0.5), known[at + count - 1] - known[at]


def z_of(unit_count: int, rules: Rules) -> float:
    """Return the number of standard deviations by which the bar is below the usual rate."""
    # The share of healthy tests that may fail in each round.
    each = float((rules.alpha / max(1, unit_count)) ** (1 / rules.failures_for(unit_count)))
    # Transients use a part of this share; noise may use the rest.
    left = max(each - rules.transients, each / 10)
    return min(_MAX_Z, max(0.0, _NORMAL.inv_cdf(1 - min(left, 0.5))))


def smallest_slowdown(bar: RateLimits, rounds: int, *, probability: float = 0.99) -> float:
    """Return the smallest slowdown, as a share, that fails in all of `rounds` rounds with this `probability`."""
    if not bar.usual:
        return 1.0
    z = _NORMAL.inv_cdf(probability ** (1 / rounds))
    # A unit that is slower by d has noise of (1 - d) sigma: 1 - d + z (1 - d) sigma must stay below the bar.
    return min(1.0, max(0.0, 1 - (1 - bar.share) / (1 + z * bar.sigma)))


# A pair is blamed if it fails so often and never passes. Two failures are not enough: if noise makes one test in 60
# fail, they occur twice in a run of 16,384 units.
PATH_FAILURES = 3
# `Result.failure` of a group that lost a member before the test (LOST) or during it (UNHEARD).
LOST, UNHEARD = "lost", "unheard"


class Phase(Enum):
    """The purpose of a round of tests."""

    LOCAL = "local"  # test each unit alone
    PAIR = "pair"  # test random pairs
    CONFIRM = "confirm"  # test suspects, and failing pairs of cleared units, again
    QUIET = "quiet"  # test suspects again while few other units communicate
    VERIFY = "verify"  # test all cleared units together


class Result(NamedTuple):
    """The result of a group's test: its rate in bytes per second, or None and the `failure` ("hung", "died", "wrong").

    `spread` is the noise within the test, as a share of the rate.
    """

    rate: float | None
    failure: str = ""
    spread: float = 0.0

    def passes(self, least: float) -> bool:
        """Whether the test ended and reached `least` bytes per second."""
        return self.rate is not None and self.rate >= least


class Round(NamedTuple):
    """Groups of units that are tested at the same time: single units (LOCAL), all units (VERIFY), or else pairs."""

    phase: Phase
    groups: tuple[tuple[int, ...], ...]


class BadUnit(NamedTuple):
    """A unit that failed with each of its partners, the results of these tests, and the results in quiet rounds."""

    unit: int
    partners: tuple[int, ...]
    tests: tuple[Result, ...]
    quiet_tests: tuple[Result, ...] = ()


class BadPath(NamedTuple):
    """A pair that failed although both units pass with other partners, and the pair's results."""

    pair: Pair
    tests: tuple[Result, ...]


class CongestedPart(NamedTuple):
    """Units that share a slow part of the network, and their results: while others communicate, and in quiet rounds.

    `domain` is the units' domain if it is known and the same for all. `is_between`: only pairs of these units are slow.
    """

    units: tuple[int, ...]
    loaded_tests: tuple[Result, ...]
    quiet_tests: tuple[Result, ...]
    domain: Domain | None = None
    is_between: bool = False


class SystemicFault(NamedTuple):
    """The reason why no single unit is at fault. `most_failed`: most pairs gave no rate (hung, or failed)."""

    reason: str
    most_failed: bool = False


class Diagnosis(NamedTuple):
    """The result of a search among pairs.

    Of `undecided` units it is not known whether they or a shared part is at fault. Units of `congested` parts of the
    network are not blamed. `systemic` is the reason why no unit is blamed. `detectable_share` is the smallest slowdown,
    as a share, that would have been found.
    """

    bar: RateLimits
    rounds: int
    bad: tuple[BadUnit, ...] = ()
    cleared: frozenset[int] = frozenset()
    undecided: tuple[int, ...] = ()
    paths: tuple[BadPath, ...] = ()
    congested: tuple[CongestedPart, ...] = ()
    systemic: SystemicFault | None = None
    detectable_share: float = 1.0


Results = Mapping[tuple[int, ...], Result]
Search = Generator[Round, Results, Diagnosis]


class SearchState:
    """The state of a search: all results, and what follows from them."""

    def __init__(self, units: Sequence[int], domains: Mapping[int, Domain], rules: Rules, seed: int) -> None:
        self.units = units
        self.domains = domains
        self.rules = rules
        # With up to four units at most one other pair communicates in any round, so all rounds are quiet.
        self.has_quiet_rounds = rules.has_quiet_rounds and len(units) > 4
        self.random = Random(seed)
        self.tests: dict[Pair, list[Result]] = {}
        self.failed_pairs_of: dict[int, list[Pair]] = {}
        self.failed_pairs: dict[Pair, None] = {}
        self.failures_needed = rules.failures_for(len(units))
        self.cleared: set[int] = set()
        self.retested_units: list[int] = []  # the suspects that are tested again in quiet rounds
        self.quiet_tests: dict[int, list[Result]] = {}  # results of suspects and witnesses in quiet rounds
        self.lone_tests: dict[Pair, Result] = {}  # results of pairs while no other pair communicated
        self.slow_between = False  # whether the network between cleared units is at fault
        self.rounds = 0
        self.bar = RateLimits(0.0, 0.0, 0.0)

    def record(self, results: Results) -> None:
        """Record the results of a round of pairs, and clear the units of those pairs that passed."""
        self.rounds += 1
        for pair, tested in results.items():
            self.tests.setdefault(pair, []).append(tested)
            if self.passes(tested):
                self.cleared.update(pair)
                continue
            self.failed_pairs[pair] = None
            for unit in pair:
                self.failed_pairs_of.setdefault(unit, []).append(pair)

    def record_quiet(self, results: Results, subjects: Collection[int]) -> None:
        """Record the results of `subjects` in a quiet round, and clear those that pass. Lost groups are ignored."""
        self.rounds += 1
        for pair, tested in results.items():
            (subject,) = (unit for unit in pair if unit in subjects)
            if tested.failure == LOST:
                continue
            self.quiet_tests.setdefault(subject, []).append(tested)
            if self.passes(tested):
                self.cleared.add(subject)

    def passes(self, tested: Result) -> bool:
        return tested.passes(self.bar.least)

    def passed(self, pair: Pair) -> bool:
        alone = self.lone_tests.get(pair)
        return any(map(self.passes, self.tests[pair])) or (alone is not None and self.passes(alone))

    def partners_of(self, unit: int) -> tuple[int, ...]:
        """Return the partners with which a unit failed, in order of the tests."""
        return tuple(one if other == unit else other for one, other in self.failed_pairs_of.get(unit, ()))

    @property
    def units_in_order(self) -> list[int]:
        """All units by domain, then by number. Neighbours in this order are mostly close in the network as well."""
        return sorted(self.units, key=lambda unit: (str(self.domains.get(unit, "")), unit))

    @property
    def suspects(self) -> list[int]:
        return [unit for unit in self.units if unit not in self.cleared]

    def is_bad(self, unit: int) -> bool:
        """Whether the unit failed `failures_needed` times, and with cleared partners in all these tests but one."""
        failed = self.partners_of(unit)
        return (
            len(failed) >= self.failures_needed
            and sum(other in self.cleared for other in failed) >= self.failures_needed - 1
        )

    def loaded_tests(self, unit: int) -> list[Result]:
        """Return the last results of the unit's failed pairs in rounds that are not quiet."""
        return [self.tests[pair][-1] for pair in self.failed_pairs_of.get(unit, ())]

    def failed_between_cleared(self) -> list[Pair]:
        """Return the pairs that failed although both units are cleared and none was lost."""
        cleared = filter(self.cleared.issuperset, self.failed_pairs)
        return [pair for pair in cleared if not any(tested.failure == LOST for tested in self.tests[pair])]

    def pairs_to_repeat(self) -> list[Pair]:
        """Return pairs of cleared units that never passed, but failed too seldom to be blamed; the slowest first."""
        known = {pair: self.tests[pair] for pair in self.failed_between_cleared()}
        open_ones = [p for p, own in known.items() if len(own) < PATH_FAILURES and not any(map(self.passes, own))]
        return sorted(open_ones, key=lambda pair: known[pair][0].rate or 0.0)


def slower_share(tests: Sequence[Result], usual: float) -> float | None:
    """Return the share by which the best test is below `usual`; None if a test failed, or `usual` is 0 (not known)."""
    known = [tested.rate for tested in tests if tested.rate is not None]
    return 1 - max(known) / usual if known and len(known) == len(tests) and usual else None
