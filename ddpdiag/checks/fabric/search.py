"""The search for bad units (hosts, or ranks of a host): each unit alone, then pairs, then all cleared units together.

The search among pairs takes a few parallel rounds for any number of units, and almost never blames a healthy unit.

1. Pair: all units are paired at random. If a pair is far slower than most, its two units are suspects until they pass
   with another partner.
2. Confirm: each suspect is tested with cleared partners. A unit that passes once is cleared. A failed pair of cleared
   units is tested again: if it never passes, the path between the two is bad, else the failure was transient.
3. Quiet: suspects that failed every time are tested again while few other units communicate (see `retest_quietly`). A
   unit that still fails is bad. If its neighbours are as slow, the part they share is at fault (`congested_parts`).

The search is a generator that yields rounds, and receives the results of each round. With two units, or if most units
are bad, it cannot find single bad units, and the diagnosis says so.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from statistics import median
from typing import NamedTuple, TypeVar

from ddpdiag.checks.fabric.search_data import (
    LOST,
    PATH_FAILURES,
    UNHEARD,
    BadPath,
    BadUnit,
    CongestedPart,
    Diagnosis,
    Domain,
    Pair,
    Phase,
    RateLimits,
    Result,
    Results,
    Round,
    Rules,
    Search,
    SearchState,
    SystemicFault,
    bar_of,
    bar_of_best,
    disjoint,
    pair_up,
    pair_with_cleared,
    round_robin,
    smallest_slowdown,
)
from ddpdiag.stats import quantile

# Up to FEW_UNITS, all pairs are tested. Up to SOME_UNITS, OPENING_ROUNDS rounds come before any unit is judged, because
# a quarter of the units may by chance spoil most of the few pairs of one round.
FEW_UNITS, SOME_UNITS, OPENING_ROUNDS = 8, 128, 3
# With more than SOME_UNITS a search has no more rounds than these.
MAX_ROUNDS = 10
# The number of last quiet rounds, which have all remaining suspects. A suspect that never passes is blamed.
FINAL_ROUNDS = 2
# Fewer slow units than this may be slow independently of each other.
_MIN_GROUP = 3
# The sizes of the clusters of slow units that are searched for. At most as many other units may be among them.
_ROW_SIZES = (3, 4, 5, 6, 8, 12, 16, 24, 32)
# Each of so many rounds has a quarter of the suspects: the uplinks of a leaf carry a quarter of its hosts' traffic.
_PARTS = 4
# Offsets of a suspect's witnesses in the order of units. At an end there are three. Four slow in a row are no accident.
_NEIGHBOURS = (1, -1, 2, -2, 3, -3)
# Suspects and witnesses are at most this share of the units. With their partners a quarter of the units communicates.
_QUIET_SHARE = 1 / 8
# The most pairs that are tested while no other pair communicates. Each costs a round.
_ALONE_ROUNDS = 2
# The network between cleared units is at fault if more than this share of their pairs fails. If the network between two
# halves of the hosts is slow, half of all pairs fail. Transient failures are rarely a twentieth.
_FAILING_SHARE = 0.2


def retest_quietly(state: SearchState) -> Generator[Round, Results, None]:
    """Test slow suspects, and failing pairs of cleared units, again in quiet rounds.

    A suspect failed while many other units communicated. An uplink or a switch that it shares with some of them may be
    too narrow for their traffic, or busy with other jobs for a while. In quiet rounds only suspects, their witnesses
    and cleared partners communicate.

    1. Parts: each of four rounds has a quarter of the suspects. Neighbours, and units of one domain, are in different
       rounds. An uplink that carries a quarter of its units' traffic does not slow down these tests. A suspect that
       passes is cleared.
    2. Last: two rounds have the suspects that never passed, and witnesses, which are neighbours that passed before.
       If a witness fails both times, it shares the cause of the slowness.
    3. Pairs: a few failing pairs of cleared units, one pair at a time.

    If the network between cleared units is slow, no suspect is blamed, and only step 3 is done. The suspects take at
    most six rounds. If traffic of other jobs ends within a round with a probability of 50 %, it ends before the last of
    these rounds with 98 %.
    """
    if not state.slow_between:
        yield from _retest_units(state)
    for pair in _unresolved_pairs(state)[:_ALONE_ROUNDS]:
        if state.rounds < MAX_ROUNDS or len(state.units) <= SOME_UNITS:
            results = yield Round(Phase.QUIET, (pair,))
            state.rounds += 1
            state.lone_tests |= results


def _retest_units(state: SearchState) -> Generator[Round, Results, None]:
    # Only slow units are tested again. If a unit's tests never end, congestion is not the cause.
    state.retested_units = [
        unit
        for unit in state.suspects
        if state.is_bad(unit) and any(tested.rate is not None for tested in state.loaded_tests(unit))
    ]
    suspects = set(state.retested_units)
    in_order = [unit for unit in state.units_in_order if unit in suspects]
    count = min(_PARTS, len(in_order), max(1, MAX_ROUNDS - FINAL_ROUNDS - state.rounds))
    for part in range(count if len(in_order) > 1 else 0):  # a single suspect is tried in the last rounds only
        yield from _quiet_round(state, in_order[part::count])
    witnesses = _witnesses(state)
    for number in range(FINAL_ROUNDS):
        if unresolved := [unit for unit in state.retested_units if unit not in state.cleared]:
            yield from _quiet_round(state, [*unresolved, *witnesses], () if number else _unresolved_pairs(state))


def _witnesses(state: SearchState) -> list[int]:
    """Return the nearest neighbours of the remaining suspects, as far as these neighbours passed before."""
    line, left = state.units_in_order, [unit for unit in state.retested_units if unit not in state.cleared]
    place = {unit: at for at, unit in enumerate(line)}
    near = (place[unit] + away for away in _NEIGHBOURS for unit in left)
    found = dict.fromkeys(line[at] for at in near if 0 <= at < len(line))
    suspects = set(state.retested_units)
    free = [unit for unit in found if unit in state.cleared and unit not in suspects]
    return free[: max(0, int(len(line) * _QUIET_SHARE) - len(left))]


def _quiet_round(
    state: SearchState, subjects: Sequence[int], pairs: Sequence[Pair] = ()
) -> Generator[Round, Results, None]:
    """Run and record a quiet round: of `pairs`, and of `subjects` with cleared partners that were no suspects."""
    extra_pairs = disjoint(pairs, subjects)
    taken = {*subjects, *state.retested_units, *chain.from_iterable(extra_pairs)}
    free = [unit for unit in state.units if unit in state.cleared and unit not in taken]
    if found := pair_with_cleared(subjects, free, state.domains, state.partners_of, state.random):
        results = yield Round(Phase.QUIET, (*found, *extra_pairs))
        state.record_quiet({pair: results[pair] for pair in found}, {*subjects})
        state.lone_tests |= {pair: results[pair] for pair in extra_pairs}


def _unresolved_pairs(state: SearchState) -> list[Pair]:
    """Return the failing pairs of cleared units: if `slow_between` all, else those with PATH_FAILURES failures."""
    failing = [
        pair for pair in state.failed_between_cleared() if not state.passed(pair) and pair not in state.lone_tests
    ]
    if state.slow_between:
        return sorted(failing, key=lambda pair: state.tests[pair][0].rate or 0.0)
    return [pair for pair in failing if len(state.tests[pair]) >= PATH_FAILURES]


def congested_parts(state: SearchState) -> tuple[CongestedPart, ...]:
    """Return the parts of the network that slow down several units, always or only while other units communicate."""
    if state.slow_between:
        return (_congested_between(state),)
    line, alpha, suspects = state.units_in_order, state.rules.alpha, set(state.retested_units)
    slow = {unit for unit in state.retested_units if unit not in state.cleared and unit in state.quiet_tests}
    slow |= {unit for unit, own in state.quiet_tests.items() if len(own) > 1 and not any(map(state.passes, own))}
    # The units that are slow only under load: in a quiet round they are clearly above the bar.
    least = (state.bar.usual + state.bar.least) / 2
    eased = {
        unit
        for unit in state.retested_units
        if unit in state.cleared and any((tested.rate or 0.0) >= least for tested in state.quiet_tests.get(unit, ()))
    }
    near = clusters([unit for unit in line if unit in slow], line, alpha)
    parts = [units for units in near if not suspects.isdisjoint(units)]
    freed = clusters([unit for unit in line if unit in eased], line, alpha)
    rest = [unit for unit in line if unit in eased.difference(*freed)]
    return tuple(
        _congested_part(state, units) for units in (*parts, *freed, *([rest] if len(rest) >= _MIN_GROUP else ()))
    )


def _congested_part(state: SearchState, units: Sequence[int]) -> CongestedPart:
    domains = {state.domains.get(unit) for unit in units}
    return CongestedPart(
        units=tuple(sorted(units)),
        loaded_tests=tuple(tested for unit in units for tested in state.loaded_tests(unit)),
        quiet_tests=tuple(state.quiet_tests[unit][-1] for unit in units if unit in state.quiet_tests),
        domain=domains.pop() if len(domains) == 1 else None,
    )


def clusters(members: Sequence[int], units: Sequence[int], alpha: float) -> list[list[int]]:
    """Group members so close in `units` that chance forms such a group in less than a share `alpha` of all runs."""
    place = {unit: at for at, unit in enumerate(units)}
    at = [place[unit] for unit in members]
    share = len(at) / len(units) if units else 0.0
    together: set[int] = set()  # places between members of the same group: (n - 1, n) by n
    for size in _ROW_SIZES:
        for first in range(len(at) - size + 1):
            length = at[first + size - 1] - at[first] + 1
            if 2 * size >= length and len(units) * len(_ROW_SIZES) * _chance(size, length, share) <= alpha:
                together.update(range(first + 1, first + size))
    groups: list[list[int]] = []
    for number, unit in enumerate(members):
        if number in together:
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return [group for group in groups if len(group) >= _MIN_GROUP]


def _chance(size: int, length: int, share: float) -> float:
    """Bound (Chernoff) the probability that `size` of `length` units are members. `share` of all units are members."""
    dense = size / length
    if dense <= share:
        return 1.0
    distance = dense * math.log(dense / share)
    if dense < 1:
        distance += (1 - dense) * math.log((1 - dense) / (1 - share))
    return math.exp(-length * distance)


def median_rate(tests: Iterable[Result]) -> float | None:
    """Return the median rate of the tests that ended, in bytes per second; None if no test ended."""
    rates = [tested.rate for tested in tests if tested.rate is not None]
    return median(rates) if rates else None


def is_slow_between(state: SearchState) -> bool:
    """Whether pairs of cleared units fail so often that the network between them is at fault.

    One partner is enough to clear a unit. If a shared link is slow, such as a link between two switches, units pass
    with some partners and fail with others. A unit that only met partners of the second kind must not be blamed. With
    more than SOME_UNITS units the answer is False, because each unit is tested in too few pairs.
    """
    pairs = _between_cleared(state)
    failing = sum(not state.passed(pair) for pair in pairs)
    return len(state.units) <= SOME_UNITS and failing > max(_MIN_GROUP, _FAILING_SHARE * len(pairs))


def _between_cleared(state: SearchState) -> list[Pair]:
    return [pair for pair in state.tests if state.cleared.issuperset(pair)]


def _congested_between(state: SearchState) -> CongestedPart:
    """Return the slow network between cleared units, with the units of all pairs that fail, and the suspects."""
    failing = [pair for pair in _between_cleared(state) if not any(map(state.passes, state.tests[pair]))]
    units = tuple(sorted({*chain(*failing), *state.suspects}))
    loaded = tuple(tested for pair in failing for tested in state.tests[pair])
    return CongestedPart(units, loaded, tuple(state.lone_tests.values()), is_between=True)


def _shared_paths(state: SearchState, failing: Sequence[Pair]) -> tuple[list[CongestedPart], list[Pair]]:
    """The parts of the network that several failing pairs of cleared units share, such as a leaf's uplinks.

    Also returns the pairs that use none of these parts.
    """
    parts: list[CongestedPart] = []
    rest = [*failing]
    while True:
        counts = Counter(domain for pair in rest for domain in _crossed(state, pair))
        domain, count = max(counts.items(), key=itemgetter(1), default=(None, 0))
        if count < _MIN_GROUP:
            return parts, rest
        pairs = [pair for pair in rest if domain in _crossed(state, pair)]
        parts.append(
            CongestedPart(
                units=tuple(sorted({*chain(*pairs)})),
                loaded_tests=tuple(tested for pair in pairs for tested in state.tests[pair]),
                quiet_tests=tuple(state.lone_tests[pair] for pair in pairs if pair in state.lone_tests),
                # Between two domains it is not known whose uplinks are slow.
                domain=domain if len(set().union(*(_crossed(state, pair) for pair in pairs))) > 2 else None,
                is_between=True,
            )
        )
        rest = [pair for pair in rest if pair not in pairs]


def _crossed(state: SearchState, pair: Pair) -> set[Domain]:
    """The domains whose uplinks a pair uses, if both are known."""
    domains = {state.domains[unit] for unit in pair if unit in state.domains}
    return domains if len(domains) > 1 else set()


T = TypeVar("T")
# With fewer units it is not known which rate is the usual one.
_MIN_UNITS_TO_COMPARE = 3
# If the rate of some pairs is so many times the usual rate, it shows what is possible, and most units are slow.
_FAST_FACTOR = 2.0
_FAST_SIGMAS = 6.0  # more than noise explains


class SearchInput(NamedTuple):
    """The input of a search: the units, those of them that can be tested alone, and the domains of the units."""

    units: tuple[int, ...]
    testable_alone: tuple[int, ...] = ()
    domains: Mapping[int, Domain] = {}
    rules: Rules = Rules()
    seed: int = 0


class BadAlone(NamedTuple):
    """A unit that fails when tested alone: its results, and the usual rate in bytes per second (0: not known)."""

    unit: int
    tests: tuple[Result, ...]
    usual: float


class SearchResult(NamedTuple):
    """The result of a search. `proof` is the faster of the tests of all cleared units together, or one that failed."""

    alone: tuple[BadAlone, ...]
    diagnosis: Diagnosis
    proof: Result | None


def search_all(search_input: SearchInput) -> Generator[Round, Results, SearchResult]:
    """Find the bad units: test units alone, then pairs of the units that passed, then all cleared units together."""
    alone = yield from _test_alone(search_input)
    out = {each.unit for each in alone}
    rest = tuple(unit for unit in search_input.units if unit not in out)
    diagnosis = yield from search_pairs(rest, search_input.domains, search_input.rules, search_input.seed)
    good = tuple(unit for unit in rest if unit in diagnosis.cleared)
    proof: Result | None = None
    # If a unit is lost during the test of all cleared units, or they are slow, they are tested once more.
    for _ in range(2 if len(good) > 1 and not diagnosis.systemic else 0):
        tested = (yield Round(Phase.VERIFY, (good,))).get(good)
        if proof is None or tested is None or tested.rate is None or tested.rate > (proof.rate or 0.0):
            proof = tested
        if proof is None or (proof.failure != UNHEARD and (proof.rate is None or proof.passes(diagnosis.bar.least))):
            break
    return SearchResult(alone, diagnosis, proof)


def _test_alone(search_input: SearchInput) -> Generator[Round, Results, tuple[BadAlone, ...]]:
    """Test each unit alone, and failing units again, as often as pairs. Return the units that failed each time."""
    units = [(unit,) for unit in search_input.testable_alone]
    if not units:
        return ()
    results = yield Round(Phase.LOCAL, tuple(units))
    rates = [tested.rate for tested in results.values() if tested.rate is not None]
    rules, bar = search_input.rules._replace(least=0.0), RateLimits(0.0, 0.0, 0.0)
    if len(rates) >= _MIN_UNITS_TO_COMPARE:
        spread = max(tested.spread for tested in results.values())
        bar = bar_of(rates, len(rates), rules, spread)
    tests = {group: [tested] for group, tested in results.items()}
    failing = [group for group in units if group in results and not results[group].passes(bar.least)]
    # If half of them fail, the cause is not a single unit, and the pairs will show it as well.
    if 2 * len(failing) >= len(units) and len(units) > 1:
        return ()
    for _ in range(rules.failures_for(len(units)) - 1):
        if not failing:
            break
        again = yield Round(Phase.LOCAL, tuple(failing))
        for group, tested in again.items():
            tests[group].append(tested)
        failing = [group for group in failing if group in again and not again[group].passes(bar.least)]
    return tuple(BadAlone(group[0], tuple(tests[group]), bar.usual) for group in failing)


def replay(
    search: Generator[Round, Results, T],
    recorded_results: Sequence[Results],
    runnable_groups: Callable[[Round], object] = lambda _: True,
) -> Round | T:
    """Run a search with the results recorded so far, and return its next round, or its result if it ends.

    The search starts anew in each call, so that planning needs no state. A group that is missing in the results of its
    round had lost a unit, and counts as LOST. So do all groups of a round if `runnable_groups` returns none, or if
    none is in the next results. The proof (VERIFY) counts for all cleared units, although lost ones did not run it.
    """
    unused = deque(recorded_results)
    try:
        step = next(search)
        while True:
            known: Results = {}
            if unused and step.phase is Phase.VERIFY:
                known = dict(zip(step.groups, unused.popleft().values(), strict=True))
            elif unused and any(group in unused[0] for group in step.groups):
                known = unused.popleft()
            elif not unused and runnable_groups(step):
                return step
            step = search.send({group: known.get(group, Result(None, LOST)) for group in step.groups})
    except StopIteration as end:
        found: T = end.value
        return found


def search_pairs(
    units: Sequence[int], domains: Mapping[int, Domain] | None = None, rules: Rules | None = None, seed: int = 0
) -> Search:
    """Find the bad units by tests of pairs. `domains` has the leaf switch or rack of units for which it is known."""
    state = SearchState(units, domains or {}, rules or Rules(), seed)
    if len(units) < 2:
        return Diagnosis(state.bar, 0, cleared=frozenset(units))
    opening_results: list[Results] = []
    for pairs in _opening_rounds(state):
        opening_results.append((yield Round(Phase.PAIR, pairs)))
    tests = [tested for results in opening_results for tested in results.values()]
    state.bar = _bar(state, opening_results)
    for results in opening_results:
        state.record(results)
    if reason := _find_systemic(state, tests):
        return _diagnose(state, systemic=reason)
    yield from _confirm_suspects(state)
    state.slow_between = state.has_quiet_rounds and is_slow_between(state)
    if not state.slow_between:
        yield from _repeat_pairs(state)
    if state.has_quiet_rounds:
        yield from retest_quietly(state)
    return _diagnose(state)


def _bar(state: SearchState, opening_results: Sequence[Results]) -> RateLimits:
    """Derive the bar from the best rate of each unit; after only one round, from the rates of all pairs."""
    pairs = (item for results in opening_results for item in results.items())
    ended = [(pair, own, own.rate) for pair, own in pairs if own.rate is not None]
    spreads = sorted(own.spread for _, own, _ in ended)
    spread = quantile(spreads, 0.5) if spreads else 0.0
    if len(opening_results) == 1:
        return bar_of([rate for *_, rate in ended], len(state.units), state.rules, spread)
    best: dict[int, float] = {}
    for pair, _, rate in ended:
        for unit in pair:
            best[unit] = max(best.get(unit, 0.0), rate)
    return bar_of_best([*best.values()], len(opening_results), state.rules, spread)


def _opening_rounds(state: SearchState) -> list[tuple[Pair, ...]]:
    """Return the rounds before any unit is judged: all pairs of few units, three rounds of some, or one of many."""
    count = len(state.units)
    if count > SOME_UNITS:
        return [pair_up(state.units, state.domains, state.random)]
    mixed = list(state.units)
    state.random.shuffle(mixed)
    rounds = count - 1 + count % 2
    if count > FEW_UNITS:
        rounds = min(rounds, OPENING_ROUNDS)
    return [round_robin(mixed, number) for number in range(rounds)]


def _find_systemic(state: SearchState, tests: Sequence[Result]) -> SystemicFault | None:
    """Return the reason why no single unit can be blamed (such as most pairs failing), or None."""
    ended = [tested.rate for tested in tests if tested.rate is not None]
    if len(state.units) == 2 and not all(map(state.passes, tests)):
        return SystemicFault("with two alone it cannot be decided which of them is at fault, or the path between them")
    if not ended or (2 * (len(tests) - len(ended)) > len(tests) and not _most_pass(state, 0.0)):
        return SystemicFault(f"{len(tests) - len(ended)} of {len(tests)} pairs did not end", most_failed=True)
    least = state.rules.least
    below = len(tests) - len(ended) + sum(rate < least for rate in ended)
    if 2 * below >= len(tests) and not _most_pass(state, least):
        return SystemicFault(f"{below} of {len(tests)} pairs are below {least / 1e6:g} MB/s")
    best = max(_FAST_FACTOR, 1 + _FAST_SIGMAS * state.bar.sigma)
    above = sum(rate > best * state.bar.usual for rate in ended)
    if above and 2 * above <= len(tests):
        return SystemicFault(
            f"most pairs are far slower than the best: {above} of {len(tests)} reach {best:.1f} times the usual rate"
        )
    return None


def _most_pass(state: SearchState, least: float) -> bool:
    """Whether most units reached `least` with some partner. False for more than FEW_UNITS, of which not all pairs ran.

    Among few units a single bad unit spoils half of the pairs or more: three of six, or two of three.
    """
    if len(state.units) > FEW_UNITS:
        return False
    passed = {
        unit for pair, tests in state.tests.items() for unit in pair if any(tested.passes(least) for tested in tests)
    }
    return 2 * len(passed) > len(state.units)


def _confirm_suspects(state: SearchState) -> Generator[Round, Results, None]:
    """Test each suspect with cleared partners until it passes or has failed often enough."""
    while open_ones := [unit for unit in state.suspects if not state.is_bad(unit)]:
        again = disjoint(state.pairs_to_repeat())
        busy = {unit for pair in again for unit in pair}
        free = [unit for unit in state.units if unit in state.cleared and unit not in busy]
        pairs = pair_with_cleared(open_ones, free, state.domains, state.partners_of, state.random)
        if not pairs and not again:
            return
        state.record((yield Round(Phase.CONFIRM, (*pairs, *again))))


def _repeat_pairs(state: SearchState) -> Generator[Round, Results, None]:
    """Repeat failing pairs of cleared units until each passes, or has failed often enough to be blamed."""
    # Among many units, repeating pairs must not take more rounds than confirming a bad unit does.
    most = state.failures_needed if len(state.units) > SOME_UNITS else state.rounds + 2 * (PATH_FAILURES - 1)
    while state.rounds < most and (again := disjoint(state.pairs_to_repeat())):
        results = yield Round(Phase.CONFIRM, again)
        state.record(results)
        if len(again) == 1:  # no other pair communicated
            state.lone_tests |= results


def _diagnose(state: SearchState, systemic: SystemicFault | None = None) -> Diagnosis:
    failing = [] if systemic else [unit for unit in state.suspects if state.is_bad(unit)]
    congested = () if systemic else congested_parts(state)
    shared = {unit for part in congested for unit in part.units}
    # If a domain has only two units and both are slow, no third unit shows whether they or their domain is at fault.
    slow = {unit for unit in failing if unit in state.quiet_tests}
    members: dict[Domain, list[int]] = {}
    for unit in state.domains.keys() & set(state.units):
        members.setdefault(state.domains[unit], []).append(unit)
    twos = [own for own in members.values() if len(own) == 2 and slow.issuperset(own)]
    undecided = {unit for own in twos for unit in own} - shared
    named = [unit for unit in failing if unit not in shared and unit not in undecided]
    between_good = [pair for pair in state.failed_between_cleared() if shared.isdisjoint(pair)]
    failed = [pair for pair in between_good if not state.passed(pair) and len(state.tests[pair]) >= PATH_FAILURES]
    common, single = _shared_paths(state, failed)
    failures = state.failures_needed + (1 + FINAL_ROUNDS if state.has_quiet_rounds else 0)
    return Diagnosis(
        bar=state.bar,
        rounds=state.rounds,
        bad=tuple(
            BadUnit(
                unit, state.partners_of(unit), tuple(state.loaded_tests(unit)), tuple(state.quiet_tests.get(unit, ()))
            )
            for unit in named
        ),
        cleared=frozenset(state.cleared) if not systemic else frozenset(),
        undecided=tuple(unit for unit in state.suspects if unit not in named and unit not in shared),
        paths=tuple(BadPath(pair, tuple(state.tests[pair])) for pair in single),
        congested=(*congested, *common),
        systemic=systemic,
        # Two units have no third one to be compared with.
        detectable_share=smallest_slowdown(state.bar, failures) if len(state.units) > 2 else 1.0,
    )
