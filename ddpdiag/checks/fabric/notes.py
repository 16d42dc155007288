"""A search among units: its rounds and their results, what is known so far, and the diagnosis."""

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from enum import Enum
from random import Random
from typing import NamedTuple

from ddpdiag.checks.fabric.matching import Domain, Pair
from ddpdiag.checks.fabric.rules import Bar, Rules

# A path is blamed once it has failed so often and never passed: of noise that fails once in 60 tests, two failures
# would be found twice in a run of 16,384.
PATH_FAILURES = 3
# A suspect is blamed if it fails in so many quiet rounds as well: one with a part of the suspects, and the last two.
FINAL_ROUNDS = 2
QUIET_TESTS = 1 + FINAL_ROUNDS
# The results of a group of which a member was lost before, or during the test: the path between them is not at fault.
LOST, UNHEARD = "lost", "unheard"


class Phase(Enum):
    """What a round is for: each unit alone, pairs, suspects again, paths, suspects while hardly any other unit
    communicates, and all good ones together as the proof."""

    LOCAL = "local"
    PAIR = "pair"
    CONFIRM = "confirm"
    COVER = "cover"
    QUIET = "quiet"
    VERIFY = "verify"


class Reached(NamedTuple):
    """What a group reached, in bytes per second; None where it did not end, with the reason (hung, died, wrong).

    `spread` is its own noise, as a share of its rate.
    """

    rate: float | None
    why: str = ""
    spread: float = 0.0

    def passes(self, least: float) -> bool:
        """Did it end, and reach so much?"""
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

    `sides` are two groups whose pairs are slow only across, or one group with many slow pairs inside. `domain` is the
    leaf, if known.
    """

    units: tuple[int, ...]
    loaded: tuple[Reached, ...]
    quiet: tuple[Reached, ...]
    domain: Domain | None = None
    sides: tuple[tuple[int, ...], ...] = ()


class Systemic(NamedTuple):
    """Why no single unit is at fault; `too_slow` where most pairs do not end, or miss what this hardware reaches."""

    reason: str
    too_slow: bool = False


class Diagnosis(NamedTuple):
    """Who is bad. For units in `open` the data do not decide whether they or what they share is at fault; `systemic`
    is the reason why no unit is blamed. `congested` are slow parts of the fabric, of which no unit is bad.

    `domains` are those of which so many units are bad that it is the domain; `bad` holds these units as well.
    `unrepeated` failed between good ends too seldom to be sure, when no round was left. `found_from` is the smallest
    slowdown, as a share, that would have been found.
    """

    bar: Bar
    rounds: int
    bad: tuple[Bad, ...] = ()
    cleared: frozenset[int] = frozenset()
    open: tuple[int, ...] = ()
    paths: tuple[Path, ...] = ()
    transients: tuple[Path, ...] = ()
    unrepeated: tuple[Path, ...] = ()
    domains: tuple[tuple[Domain, tuple[int, ...]], ...] = ()
    congested: tuple[Congested, ...] = ()
    systemic: Systemic | None = None
    found_from: float = 1.0


Results = Mapping[tuple[int, ...], Reached]
Search = Generator[Round, Results, Diagnosis]


class Notes:
    """What is known so far."""

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
        self.quiet: dict[int, list[Reached]] = {}  # what these and their witnesses reached there
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

        What could not be tried is no failure: recordings of versions without quiet rounds are judged without them.
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
        """Did this pair pass in any of its tests?"""
        alone = self.alone.get(pair)
        return any(map(self.passes, self.tests[pair])) or (alone is not None and self.passes(alone))

    @property
    def most_failures(self) -> int:
        """How often a unit must fail to be blamed, quiet rounds included."""
        return self.needed + (QUIET_TESTS if self.has_quiet_rounds else 0)

    def partners_of(self, unit: int) -> tuple[int, ...]:
        """With whom it failed, in order."""
        return tuple(one if other == unit else other for one, other in self.failures.get(unit, ()))

    def by_domain(self, units: Iterable[int]) -> dict[Domain, list[int]]:
        """Those units whose domain is known, by domain."""
        members: dict[Domain, list[int]] = {}
        for unit in units:
            if unit in self.domains:
                members.setdefault(self.domains[unit], []).append(unit)
        return members

    @property
    def suspects(self) -> list[int]:
        return [unit for unit in self.units if unit not in self.cleared]

    def is_bad(self, unit: int) -> bool:
        """Did it fail often enough, and all but once with partners that are good?"""
        failed = self.partners_of(unit)
        return len(failed) >= self.needed and sum(other in self.cleared for other in failed) >= self.needed - 1

    def loaded_tests(self, unit: int) -> list[Reached]:
        """What it reached each time that it failed in rounds in which all suspects, or all units, communicate."""
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
    """By which share of the usual rate the best of them is slower; None where one did not end, or nothing is usual."""
    known = [tested.rate for tested in tests if tested.rate is not None]
    return 1 - max(known) / usual if known and len(known) == len(tests) and usual else None
