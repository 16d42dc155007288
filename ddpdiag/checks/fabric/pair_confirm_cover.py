"""PCC: pair, confirm, cover. In a few parallel rounds for any number of units, almost without false blame.

1. Pair: a random perfect matching (a few of them where units are few). A pair that is far below the others makes both
   its ends suspects, until one of them passes with somebody else.
2. Confirm: each suspect is tried with other partners that were cleared. Who passes once is cleared. A pair that failed
   while both its ends are cleared is tried again: it goes on failing (the path between the two is bad) or it does not
   (a transient).
3. Cover, if asked for: more matchings look for paths.
4. Quiet: what failed every time is tried again while hardly any other unit communicates (see `quiet`). A unit that
   fails there as well is bad, unless its neighbours are as slow: then what they share is (see `congestion`).

The procedure is written down as a generator: it yields rounds and is sent what each pair reached. Two units, or units
of which most are bad, cannot be told apart, and that is said.
"""

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence

from ddpdiag.checks.fabric.congestion import congested_parts
from ddpdiag.checks.fabric.cut import cut_of
from ddpdiag.checks.fabric.matching import Domain, Pair, apart, pair_up, partners, round_robin
from ddpdiag.checks.fabric.notes import (
    PATH_FAILURES,
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
from ddpdiag.checks.fabric.quiet import retest
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
    notes.cut = cut_of(notes) if notes.has_quiet_rounds else ()
    if not notes.cut:
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
        what = f"{share:.0%} of what is expected" if is_expected else f"{least / 1e6:g} MB/s"
        return Systemic(f"{below} of {len(tests)} pairs are below {what}", too_slow=is_expected)
    best = max(_ABOVE, 1 + _ABOVE_SIGMAS * notes.bar.sigma)
    above = sum(rate > best * notes.bar.usual for rate in ended)
    if above and 2 * above <= len(tests):
        return Systemic(
            f"most pairs are far slower than the best: {above} of {len(tests)} reach {best:.1f} times the usual rate"
        )
    return None


def _most_pass(notes: Notes, least: float) -> bool:
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
    undecided = set(_two_of_a_domain(notes, failing)) - shared
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
        domains=_domains(notes, named),
        congested=congested,
        systemic=systemic,
        # Two have no third one to be compared with.
        found_from=smallest_slowdown(notes.bar, notes.most_failures) if len(notes.units) > 2 else 1.0,
    )


def _two_of_a_domain(notes: Notes, failing: Sequence[int]) -> Iterable[int]:
    """Slow units that are both there are of their domain: they are at fault, or what they share; no third one tells."""
    members: dict[Domain, list[int]] = {}
    for unit in notes.units:
        if unit in notes.domains:
            members.setdefault(notes.domains[unit], []).append(unit)
    slow = {unit for unit in failing if unit in notes.quiet}
    return (unit for own in members.values() if len(own) == 2 and slow.issuperset(own) for unit in own)


def _paths(notes: Notes, pairs: Sequence[Pair]) -> tuple[Path, ...]:
    return tuple(Path(pair, tuple(notes.tests[pair])) for pair in pairs)


def _domains(notes: Notes, named: Iterable[int]) -> tuple[tuple[Domain, tuple[int, ...]], ...]:
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
