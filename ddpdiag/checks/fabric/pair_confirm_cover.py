"""PCC: pair, confirm, cover. In a few parallel rounds for any number of units, almost without false blame.

1. Pair: a random perfect matching (a few of them where units are few). A pair that is far below the others makes both
   its ends suspects, until one of them passes with another unit.
2. Confirm: each suspect is tried with other partners that were cleared. Who passes once is cleared; who fails every
   time is bad. A pair that failed while both its ends are cleared is tried again: it goes on failing (the path between
   the two is bad) or it does not (a transient).
3. Cover, if asked for: more matchings look for paths.

The procedure is written down as a generator: it yields rounds and is sent what each pair reached. Two units, or units
of which most are bad, cannot be told apart, and that is said.
"""

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from enum import Enum
from random import Random
from typing import NamedTuple

from ddpdiag.checks.fabric.matching import Domain, Pair, pair_up, partners, round_robin
from ddpdiag.checks.fabric.rules import (
    FEW_UNITS,
    OPENING_ROUNDS,
    SOME_UNITS,
    Bar,
    Rules,
    bar_of,
    bar_of_best,
    smallest_slowdown,
)
from ddpdiag.stats import quantile

# Where the best pairs are so far above the median, they show what is possible, and most units are slow.
_ABOVE = 2.0
_ABOVE_SIGMAS = 6.0  # and no noise
# A path is blamed once it has failed so often and never passed: of noise that fails once in 60 tests, two failures
# would be found twice in a run of 16,384.
PATH_FAILURES = 3
# The results of a group of which a member was lost before, or during the test: the path between them is not at fault.
LOST, UNHEARD = "lost", "unheard"


class Phase(Enum):
    """What a round is for: each unit alone, pairs, suspects again, paths, and all good ones together as the proof."""

    LOCAL = "local"
    PAIR = "pair"
    CONFIRM = "confirm"
    COVER = "cover"
    VERIFY = "verify"


class Reached(NamedTuple):
    """What a group reached, in bytes per second; None where it did not end, with the reason (hung, died, wrong).

    `spread` is its own noise, as a share of its rate.
    """

    rate: float | None
    why: str = ""
    spread: float = 0.0


class Round(NamedTuple):
    """Groups of units that are tried at the same time: pairs, in all rounds but the first and the last."""

    phase: Phase
    groups: tuple[tuple[int, ...], ...]


class Bad(NamedTuple):
    """A unit that failed with every partner: with whom, and what it reached there."""

    unit: int
    partners: tuple[int, ...]
    tests: tuple[Reached, ...]


class Path(NamedTuple):
    """A pair that failed while both its ends are good: what it reached each time."""

    pair: Pair
    tests: tuple[Reached, ...]


class Systemic(NamedTuple):
    """Why no single unit is at fault; `too_slow` where most pairs do not end, or miss what this hardware reaches."""

    reason: str
    too_slow: bool = False


class Diagnosis(NamedTuple):
    """Who is bad. `open` are units that could be neither cleared nor confirmed; `systemic` says why nobody is blamed.

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
    systemic: Systemic | None = None
    found_from: float = 1.0


Results = Mapping[tuple[int, ...], Reached]
Search = Generator[Round, Results, Diagnosis]


class _Notes:
    """What is known so far."""

    def __init__(self, units: Sequence[int], domains: Mapping[int, Domain], rules: Rules, seed: int) -> None:
        self.units = units
        self.domains = domains
        self.rules = rules
        self.random = Random(seed)
        self.tests: dict[Pair, list[Reached]] = {}
        self.failures: dict[int, list[Pair]] = {}
        self.failed: dict[Pair, None] = {}
        self.needed = rules.rounds_for(len(units))
        self.cleared: set[int] = set()
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

    def passes(self, tested: Reached) -> bool:
        return tested.rate is not None and tested.rate >= self.bar.least

    def partners_of(self, unit: int) -> tuple[int, ...]:
        """With whom it failed, in order."""
        return tuple(one if other == unit else other for one, other in self.failures.get(unit, ()))

    @property
    def suspects(self) -> list[int]:
        return [unit for unit in self.units if unit not in self.cleared]

    def is_bad(self, unit: int) -> bool:
        """Did it fail often enough, and all but once with partners that are good?"""
        failed = self.partners_of(unit)
        return len(failed) >= self.needed and sum(other in self.cleared for other in failed) >= self.needed - 1

    def between_good(self) -> list[Pair]:
        """Pairs that failed while both ends are cleared and there."""
        good = filter(self.cleared.issuperset, self.failed)
        return [pair for pair in good if not any(own.why == LOST for own in self.tests[pair])]

    def questionable(self) -> list[Pair]:
        """Pairs that failed each time while both ends are cleared, and not often enough to be sure; the worst first."""
        known = {pair: self.tests[pair] for pair in self.between_good()}
        open_ones = [p for p, own in known.items() if len(own) < PATH_FAILURES and not any(map(self.passes, own))]
        return sorted(open_ones, key=lambda pair: known[pair][0].rate or 0.0)


def localise(
    units: Sequence[int], domains: Mapping[int, Domain] | None = None, rules: Rules | None = None, seed: int = 0
) -> Search:
    """Find the bad ones among `units`; `domains` (leaf, rack) may name some of them or none."""
    notes = _Notes(units, domains or {}, rules or Rules(), seed)
    if len(units) < 2:
        return Diagnosis(notes.bar, 0, cleared=frozenset(units))
    first: list[Results] = []
    for pairs in _opening(notes):
        first.append((yield Round(Phase.PAIR, pairs)))
    tests = [tested for results in first for tested in results.values()]
    notes.bar = _bar(notes, first)
    for results in first:
        notes.book(results)
    if (systemic := _systemic(notes, tests)) is not None:
        return _diagnose(notes, systemic)
    yield from _confirm(notes)
    yield from _cover(notes)
    return _diagnose(notes)


def _bar(notes: _Notes, first: Sequence[Results]) -> Bar:
    """From the best of each unit, if it was tried several times; else from all pairs."""
    ended = [(pair, own, own.rate) for results in first for pair, own in results.items() if own.rate is not None]
    spreads = sorted(own.spread for _, own, _ in ended)
    spread = quantile(spreads, 0.5) if spreads else 0.0
    if len(first) == 1:
        return bar_of([rate for *_, rate in ended], len(notes.units), notes.rules, spread)
    best: dict[int, float] = {}
    for pair, _, rate in ended:
        for unit in pair:
            best[unit] = max(best.get(unit, 0.0), rate)
    return bar_of_best([*best.values()], len(first), notes.rules, spread)


def _opening(notes: _Notes) -> list[tuple[Pair, ...]]:
    """The rounds before anybody is judged: all pairs of a few, three matchings of some, one of many."""
    count = len(notes.units)
    if count > SOME_UNITS:
        return [pair_up(notes.units, notes.domains, notes.random)]
    mixed = list(notes.units)
    notes.random.shuffle(mixed)
    rounds = count - 1 + count % 2
    if count > FEW_UNITS:
        rounds = min(rounds, OPENING_ROUNDS)
    return [round_robin(mixed, number) for number in range(rounds)]


def _systemic(notes: _Notes, tests: Sequence[Reached]) -> Systemic | None:
    """Why no single unit can be at fault (most fail), or None."""
    ended = [tested.rate for tested in tests if tested.rate is not None]
    if len(notes.units) == 2 and not all(map(notes.passes, tests)):
        return Systemic("with two alone it cannot be decided which of them is at fault, or the path between them")
    if not ended or (2 * (len(tests) - len(ended)) > len(tests) and not _most_pass(notes, 0.0)):
        return Systemic(f"{len(tests) - len(ended)} of {len(tests)} pairs did not end", too_slow=True)
    share, expected, least = notes.rules.systemic_share, notes.rules.expected or 0.0, notes.rules.least
    below = len(tests) - len(ended) + sum(rate < max(least, share * expected) for rate in ended)
    if 2 * below >= len(tests) and not _most_pass(notes, max(least, share * expected)):
        is_expected = share * expected >= least
        what = f"{share:.0%} of what is expected" if is_expected else f"{least / 1e6:g} MB/s"
        return Systemic(f"{below} of {len(tests)} pairs are below {what}", too_slow=is_expected)
    best = max(_ABOVE, 1 + _ABOVE_SIGMAS * notes.bar.sigma)
    above = sum(rate > best * notes.bar.usual for rate in ended)
    if above and 2 * above <= len(tests):
        return Systemic(
            f"most pairs are far slower than the best: {above} of {len(tests)} reach {best:.1f} times the usual rate"
        )
    return None


def _most_pass(notes: _Notes, least: float) -> bool:
    """Did most units reach so much with somebody? Asked where all pairs of a few units were tried.

    There one bad unit alone spoils half of the pairs or more: three of six, two of three.
    """
    if len(notes.units) > FEW_UNITS:
        return False
    passed = {
        unit
        for pair, tests in notes.tests.items()
        for unit in pair
        if any(tested.rate is not None and tested.rate >= least for tested in tests)
    }
    return 2 * len(passed) > len(notes.units)


def _confirm(notes: _Notes) -> Generator[Round, Results, None]:
    """Each suspect with others that were cleared, until it passes or has failed often enough."""
    while open_ones := [unit for unit in notes.suspects if not notes.is_bad(unit)]:
        again = _apart(notes.questionable())
        busy = {unit for pair in again for unit in pair}
        free = [unit for unit in notes.units if unit in notes.cleared and unit not in busy]
        pairs = partners(open_ones, free, notes.domains, notes.partners_of, notes.random)
        if not pairs and not again:
            return
        notes.book((yield Round(Phase.CONFIRM, (*pairs, *again))))
    # Among many, what is left to repeat must not cost rounds beyond those in which somebody may be blamed.
    most = notes.needed if len(notes.units) > SOME_UNITS else notes.rounds + 2 * (PATH_FAILURES - 1)
    while notes.rounds < most and (again := _apart(notes.questionable())):
        notes.book((yield Round(Phase.CONFIRM, again)))


def _cover(notes: _Notes) -> Generator[Round, Results, None]:
    """More matchings of those that are cleared: they look for paths."""
    good = [unit for unit in notes.units if unit in notes.cleared]
    if len(good) < 3:
        return
    chosen = [pair_up(good, notes.domains, notes.random) for _ in range(notes.rules.cover)]
    rounds = [tuple(pair for pair in own if pair not in notes.tests) for own in chosen]
    for pairs in filter(None, rounds):
        notes.book((yield Round(Phase.COVER, pairs)))
    while rounds and (again := _apart(notes.questionable())):
        notes.book((yield Round(Phase.COVER, again)))


def _apart(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """As many of the pairs as can be tried at the same time."""
    busy: set[int] = set()
    chosen = []
    for pair in pairs:
        if busy.isdisjoint(pair):
            busy.update(pair)
            chosen.append(pair)
    return tuple(chosen)


def _diagnose(notes: _Notes, systemic: Systemic | None = None) -> Diagnosis:
    named = dict.fromkeys([] if systemic else filter(notes.is_bad, notes.suspects))
    between_good = notes.between_good()
    passed = [pair for pair in between_good if any(map(notes.passes, notes.tests[pair]))]
    sure = [pair for pair in between_good if pair not in passed and len(notes.tests[pair]) >= PATH_FAILURES]
    return Diagnosis(
        bar=notes.bar,
        rounds=notes.rounds,
        bad=tuple(
            Bad(unit, notes.partners_of(unit), tuple(notes.tests[pair][-1] for pair in notes.failures[unit]))
            for unit in named
        ),
        cleared=frozenset(notes.cleared) if not systemic else frozenset(),
        open=tuple(unit for unit in notes.suspects if unit not in named),
        paths=_paths(notes, sure),
        transients=_paths(notes, passed),
        unrepeated=_paths(notes, notes.questionable()),
        domains=_domains(notes, named),
        systemic=systemic,
        # Two have no third one to be compared with.
        found_from=smallest_slowdown(notes.bar, notes.needed) if len(notes.units) > 2 else 1.0,
    )


def _paths(notes: _Notes, pairs: Sequence[Pair]) -> tuple[Path, ...]:
    return tuple(Path(pair, tuple(notes.tests[pair])) for pair in pairs)


def _domains(notes: _Notes, named: Iterable[int]) -> tuple[tuple[Domain, tuple[int, ...]], ...]:
    """Domains of which so many units are bad that it is the domain's fault."""
    sizes = Counter(notes.domains[unit] for unit in notes.units if unit in notes.domains)
    members: dict[Domain, list[int]] = {}
    for unit in sorted(named):
        if unit in notes.domains:
            members.setdefault(notes.domains[unit], []).append(unit)
    least, share = notes.rules.domain_least, notes.rules.domain_share
    return tuple(
        (domain, tuple(own))
        for domain, own in members.items()
        if len(own) >= least and len(own) >= share * sizes[domain]
    )
