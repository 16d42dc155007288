"""The whole search: each unit alone, then pairs, then all that are good together.

Pairs are searched by PCC: pair, confirm, cover. In a few parallel rounds for any number of units, almost without false
blame.

1. Pair: a random perfect matching (a few of them where units are few). A pair that is far below the others makes both
   its ends suspects, until one of them passes with somebody else.
2. Confirm: each suspect is tried with other partners that were cleared. Who passes once is cleared. A pair that failed
   while both its ends are cleared is tried again: it goes on failing (the path between the two is bad) or it does not
   (a transient).
3. Cover, if asked for: more matchings look for paths.
4. Quiet: what failed every time is tried again while hardly any other unit communicates (see `retest`). A unit that
   fails there as well is bad, unless its neighbours are as slow: then what they share is (see `congestion`).

The procedure is written down as a generator: it yields rounds and is sent what each pair reached. Two units, or units
of which most are bad, cannot be told apart, and that is said.
"""

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ddpdiag.checks.fabric.congestion import congested_parts, is_slow_between, retest
from ddpdiag.checks.fabric.matching import Domain, Pair, apart, pair_up, partners, round_robin
from ddpdiag.checks.fabric.notes import (
    LOST,
    PATH_FAILURES,
    UNHEARD,
    Bad,
    Diagnosis,
    Notes,
    Path,
    Phase,
    Reached,
    Results,
    Round,
    Search,
    Systemic,
)
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
from ddpdiag.text import share_text

T = TypeVar("T")
# Of fewer units it is not known which of them is the usual one.
_LEAST_TO_COMPARE = 3
# Where the best pairs are so far above the median, they show what is possible, and most units are slow.
_ABOVE = 2.0
_ABOVE_SIGMAS = 6.0  # and no noise


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
    proof = None
    # All good ones together. Where one is lost in the middle of it the others are tried once more.
    for _ in range(2 if len(good) > 1 and not diagnosis.systemic else 0):
        proof = (yield Round(Phase.VERIFY, (good,))).get(good)
        if proof is None or proof.why != UNHEARD:
            break
    return Located(alone, diagnosis, proof)


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
    failing = [group for group in units if group in results and not results[group].passes(bar.least)]
    # Where most fail, it is no matter of single units: pairs will show it as well.
    if 2 * len(failing) >= len(units) and len(units) > 1:
        return ()
    for _ in range(ground.inside_rules.rounds_for(len(units)) - 1):
        if not failing:
            break
        again = yield Round(Phase.LOCAL, tuple(failing))
        for group, tested in again.items():
            tests[group].append(tested)
        failing = [group for group in failing if group in again and not again[group].passes(bar.least)]
    return tuple(Alone(group[0], tuple(tests[group]), bar.usual) for group in failing)


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


# Pair, confirm, cover ------------------------------------------------------------------------------------------------


def localise(
    units: Sequence[int], domains: Mapping[int, Domain] | None = None, rules: Rules | None = None, seed: int = 0
) -> Search:
    """Find the bad ones among `units`; `domains` (leaf, rack) may name some of them or none."""
    notes = Notes(units, domains or {}, rules or Rules(), seed)
    if len(units) < 2:
        return Diagnosis(notes.bar, 0, cleared=frozenset(units))
    first: list[Results] = []
    for pairs in _opening(notes):
        first.append((yield Round(Phase.PAIR, pairs)))
    tests = [tested for results in first for tested in results.values()]
    notes.bar = _bar(notes, first)
    for results in first:
        notes.book(results)
    if reason := _systemic(notes, tests):
        return _diagnose(notes, systemic=reason)
    yield from _confirm(notes)
    notes.slow_between = notes.has_quiet_rounds and is_slow_between(notes)
    if not notes.slow_between:
        yield from _repeat(notes)
    yield from _cover(notes)
    if notes.has_quiet_rounds:
        yield from retest(notes)
    return _diagnose(notes)


def _bar(notes: Notes, first: Sequence[Results]) -> Bar:
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


def _opening(notes: Notes) -> list[tuple[Pair, ...]]:
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


def _systemic(notes: Notes, tests: Sequence[Reached]) -> Systemic | None:
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
        what = f"{share_text(share)} of what is expected" if is_expected else f"{least / 1e6:g} MB/s"
        return Systemic(f"{below} of {len(tests)} pairs are below {what}", too_slow=is_expected)
    best = max(_ABOVE, 1 + _ABOVE_SIGMAS * notes.bar.sigma)
    above = sum(rate > best * notes.bar.usual for rate in ended)
    if above and 2 * above <= len(tests):
        return Systemic(
            f"most pairs are far slower than the best: {above} of {len(tests)} reach {best:.1f} times the usual rate"
        )
    return None


def _most_pass(notes: Notes, least: float) -> bool:
    """Did most units reach so much with a partner? Asked where all pairs of a few units were tried.

    There one bad unit alone spoils half of the pairs or more: three of six, two of three.
    """
    if len(notes.units) > FEW_UNITS:
        return False
    passed = {
        unit for pair, tests in notes.tests.items() for unit in pair if any(tested.passes(least) for tested in tests)
    }
    return 2 * len(passed) > len(notes.units)


def _confirm(notes: Notes) -> Generator[Round, Results, None]:
    """Each suspect with others that were cleared, until it passes or has failed often enough."""
    while open_ones := [unit for unit in notes.suspects if not notes.is_bad(unit)]:
        again = apart(notes.questionable())
        busy = {unit for pair in again for unit in pair}
        free = [unit for unit in notes.units if unit in notes.cleared and unit not in busy]
        pairs = partners(open_ones, free, notes.domains, notes.partners_of, notes.random)
        if not pairs and not again:
            return
        notes.book((yield Round(Phase.CONFIRM, (*pairs, *again))))


def _repeat(notes: Notes) -> Generator[Round, Results, None]:
    """Pairs that failed between good ends, until they pass or have failed often enough."""
    # Among many, what is left to repeat must not cost rounds beyond those in which somebody may be blamed.
    most = notes.needed if len(notes.units) > SOME_UNITS else notes.rounds + 2 * (PATH_FAILURES - 1)
    while notes.rounds < most and (again := apart(notes.questionable())):
        results = yield Round(Phase.CONFIRM, again)
        notes.book(results)
        if len(again) == 1:  # nothing communicated beside it
            notes.alone |= results


def _cover(notes: Notes) -> Generator[Round, Results, None]:
    """More matchings of those that are cleared: they look for paths."""
    good = [unit for unit in notes.units if unit in notes.cleared]
    if len(good) < 3:
        return
    chosen = [pair_up(good, notes.domains, notes.random) for _ in range(notes.rules.cover)]
    rounds = [tuple(pair for pair in own if pair not in notes.tests) for own in chosen]
    for pairs in filter(None, rounds):
        notes.book((yield Round(Phase.COVER, pairs)))
    while rounds and (again := apart(notes.questionable())):
        notes.book((yield Round(Phase.COVER, again)))


def _diagnose(notes: Notes, systemic: Systemic | None = None) -> Diagnosis:
    failing = [] if systemic else [unit for unit in notes.suspects if notes.is_bad(unit)]
    congested = () if systemic else congested_parts(notes)
    shared = {unit for part in congested for unit in part.units}
    # Slow units that are both there are of their domain: they are at fault, or what they share; no third one tells.
    slow = {unit for unit in failing if unit in notes.quiet}
    members = notes.by_domain(notes.units)
    twos = [own for own in members.values() if len(own) == 2 and slow.issuperset(own)]
    undecided = {unit for own in twos for unit in own} - shared
    named = [unit for unit in failing if unit not in shared and unit not in undecided]
    between_good = [pair for pair in notes.between_good() if shared.isdisjoint(pair)]
    passed = [pair for pair in between_good if notes.passed(pair)]
    sure = [pair for pair in between_good if pair not in passed and len(notes.tests[pair]) >= PATH_FAILURES]
    return Diagnosis(
        bar=notes.bar,
        rounds=notes.rounds,
        bad=tuple(
            Bad(unit, notes.partners_of(unit), tuple(notes.loaded_tests(unit)), tuple(notes.quiet.get(unit, ())))
            for unit in named
        ),
        cleared=frozenset(notes.cleared) if not systemic else frozenset(),
        open=tuple(unit for unit in notes.suspects if unit not in named and unit not in shared),
        paths=_paths(notes, sure),
        transients=_paths(notes, passed),
        unrepeated=_paths(notes, [pair for pair in notes.questionable() if pair in between_good]),
        # Those of which so many units are bad that it is the domain's fault.
        domains=tuple(
            (domain, tuple(own))
            for domain, own in notes.by_domain(sorted(named)).items()
            if len(own) >= max(notes.rules.domain_least, notes.rules.domain_share * len(members[domain]))
        ),
        congested=congested,
        systemic=systemic,
        # Two have no third one to be compared with.
        found_from=smallest_slowdown(notes.bar, notes.most_failures) if len(notes.units) > 2 else 1.0,
    )


def _paths(notes: Notes, pairs: Sequence[Pair]) -> tuple[Path, ...]:
    return tuple(Path(pair, tuple(notes.tests[pair])) for pair in pairs)
