"""The search for bad units (hosts, or ranks of a host): each unit alone, then pairs, then all good units together.

The search among pairs takes a few parallel rounds for any number of units, and almost never blames a good one.

1. Pair: random perfect matchings. Both ends of a pair that is far slower than the others are suspects until they pass
   with another partner.
2. Confirm: each suspect is tried with cleared partners. A unit that passes once is cleared. A pair that failed although
   both its ends are cleared is tried again: if it goes on failing, the path between the two is bad, else it was a
   transient.
3. Quiet: what failed every time is tried again while few other units communicate (see `retest`). A unit that fails
   there as well is bad, unless its neighbours are as slow: then the part that they share is (see `congested_parts`).

The search is a generator: it yields rounds, and is sent the results of each. If there are two units, or most units are
bad, single bad units cannot be found, and the diagnosis says so.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import NamedTuple, TypeVar

from ddpdiag.checks.fabric.notes import (
    FEW_UNITS,
    FINAL_ROUNDS,
    LOST,
    MOST_ROUNDS,
    OPENING_ROUNDS,
    PATH_FAILURES,
    SOME_UNITS,
    UNHEARD,
    Bad,
    Bar,
    Congested,
    Diagnosis,
    Domain,
    Notes,
    Pair,
    Path,
    Phase,
    Reached,
    Results,
    Round,
    Rules,
    Search,
    Systemic,
    apart,
    bar_of,
    bar_of_best,
    pair_up,
    partners,
    round_robin,
    smallest_slowdown,
)
from ddpdiag.stats import quantile

# Fewer slow units need not have a common cause.
_LEAST = 3
# Sizes of the rows of slow units that are searched for; no more other units may be between them.
_ROWS = (3, 4, 5, 6, 8, 12, 16, 24, 32)
# A round has a quarter of the suspects: no leaf has uplinks for less than a quarter of what its hosts can send.
_PARTS = 4
# Offsets of a suspect's witnesses: even at the end of the line, four slow hosts are no chance among 16,384.
_NEIGHBOURS = (1, -1, 2, -2, 3, -3)
# Suspects and witnesses are at most this share of the units. With their partners, a quarter communicates.
_QUIET_SHARE = 1 / 8
# The most pairs that are tried while no other pair communicates: each costs a round.
_ALONE_ROUNDS = 2
# More than this share of the pairs of good units must fail for the network between them to be at fault. If the network
# between two halves is slow, half of the pairs are; transients rarely are a twentieth.
_FAILING_SHARE = 0.2


def retest(notes: Notes) -> Generator[Round, Results, None]:
    """Test suspects that are slow, and pairs that fail between good ends, again in quiet rounds.

    A suspect failed while many other units communicated. An uplink or a switch that it shares with some of these may be
    too narrow for all of them, or busy with other jobs for a while.

    1. Parts: each of four rounds has a quarter of the suspects; neighbours, and units of one domain, are in different
       rounds. An uplink that carries a quarter of what its units can send is then no hindrance. A suspect that passes
       is cleared.
    2. Last: two rounds have the suspects that never passed, with witnesses: neighbours that passed before. Witnesses
       that fail both times show that the slowness is shared.
    3. Pairs: a few of those that fail between good ends, one pair at a time.

    If the network between good units is slow, no suspect is blamed, and only step 3 is done.

    Only suspects, witnesses and their cleared partners communicate. Suspects cost at most six rounds. Congestion by
    others that ends before the next round half of the time ends before the last one with 98 %.
    """
    if not notes.slow_between:
        yield from _retest_units(notes)
    for pair in _open_pairs(notes)[:_ALONE_ROUNDS]:
        if notes.rounds < MOST_ROUNDS or len(notes.units) <= SOME_UNITS:
            results = yield Round(Phase.QUIET, (pair,))
            notes.rounds += 1
            notes.alone |= results


def _retest_units(notes: Notes) -> Generator[Round, Results, None]:
    # Only slow units: congestion does not keep a test from ending time after time.
    notes.retested = [
        unit
        for unit in notes.suspects
        if notes.is_bad(unit) and any(tested.rate is not None for tested in notes.loaded_tests(unit))
    ]
    suspects = set(notes.retested)
    in_order = [unit for unit in notes.in_line if unit in suspects]
    count = min(_PARTS, len(in_order), max(1, MOST_ROUNDS - FINAL_ROUNDS - notes.rounds))
    for part in range(count if len(in_order) > 1 else 0):  # a single suspect is tried in the last rounds only
        yield from _retry(notes, in_order[part::count])
    witnesses = _witnesses(notes)
    for number in range(FINAL_ROUNDS):
        if unresolved := [unit for unit in notes.retested if unit not in notes.cleared]:
            yield from _retry(notes, [*unresolved, *witnesses], () if number else _open_pairs(notes))


def _witnesses(notes: Notes) -> list[int]:
    """The nearest neighbours of the remaining suspects, if they passed before."""
    line, left = notes.in_line, [unit for unit in notes.retested if unit not in notes.cleared]
    place = {unit: at for at, unit in enumerate(line)}
    near = (place[unit] + away for away in _NEIGHBOURS for unit in left)
    found = dict.fromkeys(line[at] for at in near if 0 <= at < len(line))
    suspects = set(notes.retested)
    free = [unit for unit in found if unit in notes.cleared and unit not in suspects]
    return free[: max(0, int(len(line) * _QUIET_SHARE) - len(left))]


def _retry(notes: Notes, subjects: Sequence[int], pairs: Sequence[Pair] = ()) -> Generator[Round, Results, None]:
    """Run a round of `subjects` with cleared partners that were no suspects, and of `pairs`; record the results."""
    beside = apart(pairs, subjects)
    taken = {*subjects, *notes.retested, *chain.from_iterable(beside)}
    free = [unit for unit in notes.units if unit in notes.cleared and unit not in taken]
    if found := partners(subjects, free, notes.domains, notes.partners_of, notes.random):
        results = yield Round(Phase.QUIET, (*found, *beside))
        notes.book_quiet({pair: results[pair] for pair in found}, {*subjects})
        notes.alone |= {pair: results[pair] for pair in beside}


def _open_pairs(notes: Notes) -> list[Pair]:
    """Pairs of good units that failed each time and often enough; all of them, slowest first, if most are slow."""
    failing = [pair for pair in notes.between_good() if not notes.passed(pair) and pair not in notes.alone]
    if notes.slow_between:
        return sorted(failing, key=lambda pair: notes.tests[pair][0].rate or 0.0)
    return [pair for pair in failing if len(notes.tests[pair]) >= PATH_FAILURES]


def congested_parts(notes: Notes) -> tuple[Congested, ...]:
    """The parts of the fabric that slow down several units: always, or only while others communicate."""
    if notes.slow_between:
        return (_slow_between(notes),)
    line, alpha, suspects = notes.in_line, notes.rules.alpha, set(notes.retested)
    slow = {unit for unit in notes.retested if unit not in notes.cleared and unit in notes.quiet}
    slow |= {unit for unit, own in notes.quiet.items() if len(own) > 1 and not any(map(notes.passes, own))}
    # `eased` are as fast as others in a quiet round, and not just above the bar by chance.
    least = (notes.bar.usual + notes.bar.least) / 2
    eased = {
        unit
        for unit in notes.retested
        if unit in notes.cleared and any((tested.rate or 0.0) >= least for tested in notes.quiet.get(unit, ()))
    }
    near = rows([unit for unit in line if unit in slow], line, alpha)
    parts = [units for units in near if not suspects.isdisjoint(units)]
    freed = rows([unit for unit in line if unit in eased], line, alpha)
    rest = [unit for unit in line if unit in eased.difference(*freed)]
    return tuple(_part(notes, units) for units in (*parts, *freed, *([rest] if len(rest) >= _LEAST else ())))


def _part(notes: Notes, units: Sequence[int]) -> Congested:
    domains = {notes.domains.get(unit) for unit in units}
    return Congested(
        units=tuple(sorted(units)),
        loaded=tuple(tested for unit in units for tested in notes.loaded_tests(unit)),
        quiet=tuple(notes.quiet[unit][-1] for unit in units if unit in notes.quiet),
        domain=domains.pop() if len(domains) == 1 else None,
    )


def rows(members: Sequence[int], units: Sequence[int], alpha: float) -> list[list[int]]:
    """Groups of members so close together in `units` that chance makes one in less than `alpha` of the runs."""
    place = {unit: at for at, unit in enumerate(units)}
    at = [place[unit] for unit in members]
    share = len(at) / len(units) if units else 0.0
    together: set[int] = set()  # places between members of the same group: (n - 1, n) by n
    for size in _ROWS:
        for first in range(len(at) - size + 1):
            length = at[first + size - 1] - at[first] + 1
            if 2 * size >= length and len(units) * len(_ROWS) * _chance(size, length, share) <= alpha:
                together.update(range(first + 1, first + size))
    groups: list[list[int]] = []
    for number, unit in enumerate(members):
        if number in together:
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return [group for group in groups if len(group) >= _LEAST]


def _chance(size: int, length: int, share: float) -> float:
    """An upper bound (Chernoff) of the probability that `size` of `length` units are members, of whom `share` are."""
    dense = size / length
    if dense <= share:
        return 1.0
    distance = dense * math.log(dense / share)
    if dense < 1:
        distance += (1 - dense) * math.log((1 - dense) / (1 - share))
    return math.exp(-length * distance)


def usual_of(tests: Iterable[Reached]) -> float | None:
    """The median rate of the tests that ended, in bytes per second; None if none ended."""
    rates = [tested.rate for tested in tests if tested.rate is not None]
    return median(rates) if rates else None


def is_slow_between(notes: Notes) -> bool:
    """Whether pairs of good units fail so often that the network between them is at fault.

    One partner is enough to clear a unit. If a shared link is slow, such as the one between two switches, units pass
    with some partners and fail with others. A unit that was paired with the latter only must not be blamed. With more
    than SOME_UNITS, each is tried in too few pairs for this test.
    """
    pairs = _between_cleared(notes)
    failing = sum(not notes.passed(pair) for pair in pairs)
    return len(notes.units) <= SOME_UNITS and failing > max(_LEAST, _FAILING_SHARE * len(pairs))


def _between_cleared(notes: Notes) -> list[Pair]:
    return [pair for pair in notes.tests if notes.cleared.issuperset(pair)]


def _slow_between(notes: Notes) -> Congested:
    """The slow network between good units: the units of the pairs that fail, and the suspects."""
    failing = [pair for pair in _between_cleared(notes) if not any(map(notes.passes, notes.tests[pair]))]
    units = tuple(sorted({*chain(*failing), *notes.suspects}))
    loaded = tuple(tested for pair in failing for tested in notes.tests[pair])
    return Congested(units, loaded, tuple(notes.alone.values()), between=True)


T = TypeVar("T")
# With fewer units it is not known which rate is the usual one.
_LEAST_TO_COMPARE = 3
# If the best pairs are this many times above the usual rate, they show what is possible, and most units are slow.
_ABOVE = 2.0
_ABOVE_SIGMAS = 6.0  # more than noise explains


class Ground(NamedTuple):
    """The input of a search: the units, those that can be tested alone (`with_inside`), and the domains."""

    units: tuple[int, ...]
    with_inside: tuple[int, ...] = ()
    domains: Mapping[int, Domain] = {}
    rules: Rules = Rules()
    seed: int = 0


class Alone(NamedTuple):
    """A unit that fails when tested alone: its results, and the usual rate in bytes per second (0: not known)."""

    unit: int
    tests: tuple[Reached, ...]
    usual: float


class Located(NamedTuple):
    """The result of a search. `proof` is the test of all good units together, None if they were not tested."""

    alone: tuple[Alone, ...]
    diagnosis: Diagnosis
    proof: Reached | None


def locate(ground: Ground) -> Generator[Round, Results, Located]:
    """Find the bad units; those that are bad alone take no part in the pairs."""
    alone = yield from _inside(ground)
    out = {each.unit for each in alone}
    rest = tuple(unit for unit in ground.units if unit not in out)
    diagnosis = yield from localise(rest, ground.domains, ground.rules, ground.seed)
    good = tuple(unit for unit in rest if unit in diagnosis.cleared)
    proof = None
    # All good units together. If one is lost during this test, the others are tested once more.
    for _ in range(2 if len(good) > 1 and not diagnosis.systemic else 0):
        proof = (yield Round(Phase.VERIFY, (good,))).get(good)
        if proof is None or proof.why != UNHEARD:
            break
    return Located(alone, diagnosis, proof)


def _inside(ground: Ground) -> Generator[Round, Results, tuple[Alone, ...]]:
    """Test each unit alone, and those that fail as often as a pair would be. Returns those that failed each time."""
    units = [(unit,) for unit in ground.with_inside]
    if not units:
        return ()
    results = yield Round(Phase.LOCAL, tuple(units))
    rates = [tested.rate for tested in results.values() if tested.rate is not None]
    rules, bar = ground.rules._replace(least=0.0), Bar(0.0, 0.0, 0.0)
    if len(rates) >= _LEAST_TO_COMPARE:
        spread = max(tested.spread for tested in results.values())
        bar = bar_of(rates, len(rates), rules, spread)
    tests = {group: [tested] for group, tested in results.items()}
    failing = [group for group in units if group in results and not results[group].passes(bar.least)]
    # If half of them fail, the cause is not a single unit, and the pairs will show it as well.
    if 2 * len(failing) >= len(units) and len(units) > 1:
        return ()
    for _ in range(rules.rounds_for(len(units)) - 1):
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
    """The next round of a search, or its end, after known results. These are played back, so that a plan is pure.

    A group that is missing in the results of its round had lost a unit, and counts as lost. If no group of a round is
    `possible`, or none is in the next results, all its groups count as lost. The proof ran with the good units that
    were left.
    """
    unused = deque(answers)
    try:
        step = next(search)
        while True:
            known: Results = {}
            if unused and step.phase is Phase.VERIFY:
                known = dict(zip(step.groups, unused.popleft().values(), strict=True))
            elif unused and any(group in unused[0] for group in step.groups):
                known = unused.popleft()
            elif not unused and possible(step):
                return step
            step = search.send({group: known.get(group, Reached(None, LOST)) for group in step.groups})
    except StopIteration as end:
        found: T = end.value
        return found


def localise(
    units: Sequence[int], domains: Mapping[int, Domain] | None = None, rules: Rules | None = None, seed: int = 0
) -> Search:
    """Find the bad units. `domains` (leaf, rack) may name some of them or none."""
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
    if notes.has_quiet_rounds:
        yield from retest(notes)
    return _diagnose(notes)


def _bar(notes: Notes, first: Sequence[Results]) -> Bar:
    """The bar, from the best rate of each unit if there were several rounds, else from the rates of all pairs."""
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
    """The rounds before any unit is judged: all pairs of few units, three matchings of some, or one of many."""
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
    """The reason why no single unit can be at fault (most fail), or None."""
    ended = [tested.rate for tested in tests if tested.rate is not None]
    if len(notes.units) == 2 and not all(map(notes.passes, tests)):
        return Systemic("with two alone it cannot be decided which of them is at fault, or the path between them")
    if not ended or (2 * (len(tests) - len(ended)) > len(tests) and not _most_pass(notes, 0.0)):
        return Systemic(f"{len(tests) - len(ended)} of {len(tests)} pairs did not end", too_slow=True)
    least = notes.rules.least
    below = len(tests) - len(ended) + sum(rate < least for rate in ended)
    if 2 * below >= len(tests) and not _most_pass(notes, least):
        return Systemic(f"{below} of {len(tests)} pairs are below {least / 1e6:g} MB/s")
    best = max(_ABOVE, 1 + _ABOVE_SIGMAS * notes.bar.sigma)
    above = sum(rate > best * notes.bar.usual for rate in ended)
    if above and 2 * above <= len(tests):
        return Systemic(
            f"most pairs are far slower than the best: {above} of {len(tests)} reach {best:.1f} times the usual rate"
        )
    return None


def _most_pass(notes: Notes, least: float) -> bool:
    """Whether most of few units reached `least` with some partner; False for more units, whose pairs are not all tried.

    Among few units a single bad one spoils half of the pairs or more: three of six, two of three.
    """
    if len(notes.units) > FEW_UNITS:
        return False
    passed = {
        unit for pair, tests in notes.tests.items() for unit in pair if any(tested.passes(least) for tested in tests)
    }
    return 2 * len(passed) > len(notes.units)


def _confirm(notes: Notes) -> Generator[Round, Results, None]:
    """Test each suspect with cleared partners until it passes or has failed often enough."""
    while open_ones := [unit for unit in notes.suspects if not notes.is_bad(unit)]:
        again = apart(notes.questionable())
        busy = {unit for pair in again for unit in pair}
        free = [unit for unit in notes.units if unit in notes.cleared and unit not in busy]
        pairs = partners(open_ones, free, notes.domains, notes.partners_of, notes.random)
        if not pairs and not again:
            return
        notes.book((yield Round(Phase.CONFIRM, (*pairs, *again))))


def _repeat(notes: Notes) -> Generator[Round, Results, None]:
    """Repeat pairs that failed between good ends until they pass or have failed often enough."""
    # Among many units, repeated pairs must not take more rounds than the failures that make a unit bad.
    most = notes.needed if len(notes.units) > SOME_UNITS else notes.rounds + 2 * (PATH_FAILURES - 1)
    while notes.rounds < most and (again := apart(notes.questionable())):
        results = yield Round(Phase.CONFIRM, again)
        notes.book(results)
        if len(again) == 1:  # no other pair communicated
            notes.alone |= results


def _diagnose(notes: Notes, systemic: Systemic | None = None) -> Diagnosis:
    failing = [] if systemic else [unit for unit in notes.suspects if notes.is_bad(unit)]
    congested = () if systemic else congested_parts(notes)
    shared = {unit for part in congested for unit in part.units}
    # Two slow units that are all of their domain: no third one shows whether they or what they share is at fault.
    slow = {unit for unit in failing if unit in notes.quiet}
    members: dict[Domain, list[int]] = {}
    for unit in notes.domains.keys() & set(notes.units):
        members.setdefault(notes.domains[unit], []).append(unit)
    twos = [own for own in members.values() if len(own) == 2 and slow.issuperset(own)]
    undecided = {unit for own in twos for unit in own} - shared
    named = [unit for unit in failing if unit not in shared and unit not in undecided]
    between_good = [pair for pair in notes.between_good() if shared.isdisjoint(pair)]
    failed = [pair for pair in between_good if not notes.passed(pair) and len(notes.tests[pair]) >= PATH_FAILURES]
    failures = notes.needed + (1 + FINAL_ROUNDS if notes.has_quiet_rounds else 0)
    return Diagnosis(
        bar=notes.bar,
        rounds=notes.rounds,
        bad=tuple(
            Bad(unit, notes.partners_of(unit), tuple(notes.loaded_tests(unit)), tuple(notes.quiet.get(unit, ())))
            for unit in named
        ),
        cleared=frozenset(notes.cleared) if not systemic else frozenset(),
        open=tuple(unit for unit in notes.suspects if unit not in named and unit not in shared),
        paths=tuple(Path(pair, tuple(notes.tests[pair])) for pair in failed),
        congested=congested,
        systemic=systemic,
        # Two units have no third one to be compared with.
        found_from=smallest_slowdown(notes.bar, failures) if len(notes.units) > 2 else 1.0,
    )
