"""Units that are slow together: the quiet rounds that show it, and what they share.

Of units that are slow together it is not known who is at fault; what they share explains all of them at once. A unit
that is slow while its neighbours are not is at fault itself. Without known domains, what is shared shows in three ways:

- Neighbours. Schedulers number hosts along their cables, so that hosts next to each other mostly share a switch. A row
  of slow ones counts as one if chance would make such a row in fewer than 0.05 runs (Chernoff bound of a scan).
- Time: units that were slow as long as others communicated, and are not in quiet rounds.
- A cut: two groups that are fast inside and slow across. What joins the groups is slow, and no unit.

With two units alone, or of two that are all of a domain, this cannot be told.
"""

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, zip_longest
from random import Random
from statistics import fmean, median, pvariance

from ddpdiag.checks.fabric.matching import Domain, Pair, apart, partners
from ddpdiag.checks.fabric.notes import (
    FINAL_ROUNDS,
    PATH_FAILURES,
    Congested,
    Notes,
    Phase,
    Reached,
    Results,
    Round,
)
from ddpdiag.checks.fabric.rules import MOST_ROUNDS, SOME_UNITS, by_chance

# Two that are slow together may be two that are slow.
_LEAST = 3
# Rows of so many slow ones are looked for, with no more others between them.
_ROWS = (3, 4, 5, 6, 8, 12, 16, 24, 32)
# Uplinks of a leaf that carry less than a quarter of what its hosts can send are not built.
_PARTS = 4
# On each side of a suspect: even at the end of a row of hosts, four that are slow are no chance among 16,384.
_WITNESSES = 3
# A quiet round has witnesses as long as a quarter of the units communicates at most.
_QUIET_SHARE = 1 / 8
# So many pairs are tried with nothing beside them: each costs a round.
_ALONE_ROUNDS = 2
_STEPS = 100  # of the power iteration; two sides that differ at all part in fewer
_MEANS = 20
# What tests saw of noise in themselves may be the congestion that is looked for.
_MOST_NOISE = 0.3

Sides = tuple[tuple[int, ...], ...]


# Quiet rounds: is a unit slow alone, or only while others communicate? -----------------------------------------------


def retest(notes: Notes) -> Generator[Round, Results, None]:
    """The quiet rounds of suspects that are slow, and of pairs that fail between good ends.

    A unit that failed with partner after partner was tried together with many others each time. What it shares with
    some of these (an uplink, a switch) may be too narrow for all of them, or busy with other jobs for a while.

    1. Parts: in each of four rounds a quarter of the suspects communicates; neighbours, and units of one domain, in
       different rounds. An uplink that carries a quarter of what its units can send is then no hindrance. A suspect
       that passes is cleared.
    2. Last: the suspects that never passed, in two rounds, with witnesses. These are units that are next to a suspect
       (in its domain, else in the order of ranks) and passed. Witnesses that fail both times show that the slowness is
       shared.
    3. Pairs one at a time: a few of those across a cut, or paths.

    Only suspects, witnesses and their cleared partners communicate. It costs at most six rounds, and none without
    suspects: congestion that others cause and that half of the time is over by the next round is over by the last with
    98 %.
    """
    # Slow and no more: congestion does not keep a test from ending time after time.
    notes.retested = [
        unit
        for unit in notes.suspects
        if notes.is_bad(unit) and any(tested.rate is not None for tested in notes.loaded_tests(unit))
    ]
    dealt = sorted(notes.retested, key=lambda unit: (str(notes.domains.get(unit, "")), unit))
    count = min(_PARTS, len(dealt), max(1, MOST_ROUNDS - FINAL_ROUNDS - notes.rounds))
    for part in range(count if len(dealt) > 1 else 0):  # one suspect is alone in the last rounds
        yield from _try(notes, dealt[part::count])
    yield from _last(notes)
    for pair in _open_pairs(notes)[:_ALONE_ROUNDS]:
        if notes.rounds < MOST_ROUNDS or len(notes.units) <= SOME_UNITS:
            results = yield Round(Phase.QUIET, (pair,))
            notes.rounds += 1
            notes.alone |= results


def _last(notes: Notes) -> Generator[Round, Results, None]:
    witnesses: list[int] = []
    for number in range(FINAL_ROUNDS):
        left = [unit for unit in notes.retested if unit not in notes.cleared]
        if not left:
            return
        if number == 0:
            room = max(0, int(len(notes.units) * _QUIET_SHARE) - len(left))
            witnesses = list(islice(_next_to(notes, left), room))
        yield from _try(notes, [*left, *witnesses], () if number or notes.cut else _open_pairs(notes))


def _try(notes: Notes, subjects: Sequence[int], pairs: Sequence[Pair] = ()) -> Generator[Round, Results, None]:
    """One round of these with cleared partners that were no suspects, and of `pairs` that fail between good ends."""
    beside = apart(pairs, subjects)
    taken = {*subjects, *notes.retested, *chain.from_iterable(beside)}
    # A suspect may be on either side of a cut: it is tried with both.
    side = notes.cut[notes.rounds % 2] if notes.cut else notes.units
    free = [unit for unit in side if unit in notes.cleared and unit not in taken]
    if found := partners(subjects, free, notes.domains, notes.partners_of, notes.random):
        results = yield Round(Phase.QUIET, (*found, *beside))
        notes.book_quiet({pair: results[pair] for pair in found}, {*subjects})
        notes.alone |= {pair: results[pair] for pair in beside}


def _next_to(notes: Notes, suspects: Sequence[int]) -> Iterator[int]:
    """Units next to the suspects that were none themselves, each once; first the nearest of every suspect."""
    members: dict[object, list[int]] = {}
    for unit in notes.units:
        members.setdefault(notes.domains.get(unit), []).append(unit)
    place = {unit: at for own in members.values() for at, unit in enumerate(own)}
    near = []
    for unit in suspects:
        own, at = members[notes.domains.get(unit)], place[unit]
        near.append(own[at + 1 : at + 1 + _WITNESSES] + own[max(0, at - _WITNESSES) : at][::-1])
    known = {None, *notes.retested}
    for witness in chain.from_iterable(zip_longest(*near)):
        if witness not in known and witness in notes.cleared:
            known.add(witness)
            yield witness


def _open_pairs(notes: Notes) -> list[Pair]:
    """Pairs across a cut, the slowest first; else those that failed each time, often enough to be blamed."""
    if notes.cut:
        across = [pair for pair in notes.tests if _is_across(pair, notes.cut[0]) and notes.cleared.issuperset(pair)]
        return sorted(across, key=lambda pair: notes.tests[pair][0].rate or 0.0)
    pairs = [pair for pair in notes.between_good() if not notes.passed(pair) and pair not in notes.alone]
    return [pair for pair in pairs if len(notes.tests[pair]) >= PATH_FAILURES]


# What they share -----------------------------------------------------------------------------------------------------


def congested_parts(notes: Notes) -> tuple[Congested, ...]:
    """The parts of the fabric that slow down several units: always, or only while others communicate."""
    slow = [unit for unit in notes.retested if unit not in notes.cleared and unit in notes.quiet]
    suspects = set(notes.retested)
    witnesses = [unit for unit, own in notes.quiet.items() if unit not in suspects and len(own) >= FINAL_ROUNDS]
    failing = {unit for unit in witnesses if not any(map(notes.passes, notes.quiet[unit]))}
    parts: list[tuple[Domain | None, list[int]]] = []
    # Domains of which half of the witnesses are slow, as the suspects are.
    for domain, members in notes.by_domain(witnesses).items():
        bad = failing.intersection(members)
        if len(members) >= 2 and 2 * len(bad) >= len(members):
            parts.append((domain, sorted([*bad, *(unit for unit in slow if notes.domains.get(unit) == domain)])))
    unknown = sorted(unit for unit in (*slow, *failing) if unit not in notes.domains)
    parts += [(None, row) for row in rows(unknown, notes.units, notes.rules.alpha) if not failing.issuperset(row)]
    cut = tuple(_across_cut(notes))
    if not cut:
        parts += _eased(notes)
    found = []
    for shared, units in parts:
        loaded = tuple(tested for unit in units for tested in notes.loaded_tests(unit))
        quiet = tuple(notes.quiet[unit][-1] for unit in units if unit in notes.quiet)
        found.append(Congested(tuple(units), loaded, quiet, shared))
    return (*found, *cut)


def _eased(notes: Notes) -> list[tuple[Domain | None, list[int]]]:
    """Those that are slow only while others communicate: by domain, in rows, and the rest together.

    In a quiet round they are as fast as others, and not just above the bar by chance.
    """
    least = (notes.bar.usual + notes.bar.least) / 2
    eased = [
        unit
        for unit in notes.retested
        if unit in notes.cleared and any((tested.rate or 0.0) >= least for tested in notes.quiet.get(unit, ()))
    ]
    groups: list[tuple[Domain | None, list[int]]] = [
        (domain, units) for domain, units in notes.by_domain(eased).items() if len(units) >= _LEAST
    ]
    in_domains = {unit for _, units in groups for unit in units}
    groups += [(None, row) for row in rows(sorted({*eased} - in_domains), notes.units, notes.rules.alpha)]
    grouped = {unit for _, units in groups for unit in units}
    rest = [unit for unit in eased if unit not in grouped]
    return [*groups, (None, rest)] if len(rest) >= _LEAST else groups


def rows(members: Sequence[int], units: Sequence[int], alpha: float) -> list[list[int]]:
    """Groups of members that lie so close together in `units` that chance makes such a group in less than `alpha` of
    the runs."""
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
    """At most the probability that so many of `length` units are members, of whom `share` are (Chernoff)."""
    dense = size / length
    if dense <= share:
        return 1.0
    distance = dense * math.log(dense / share)
    if dense < 1:
        distance += (1 - dense) * math.log((1 - dense) / (1 - share))
    return math.exp(-length * distance)


def usual_of(tests: Iterable[Reached]) -> float | None:
    """The median of those that ended."""
    rates = [tested.rate for tested in tests if tested.rate is not None]
    return median(rates) if rates else None


# Two groups of units that are fast inside and slow across ------------------------------------------------------------


def cut_of(notes: Notes) -> Sides:
    """The two sides among good units, the smaller one first; or nothing.

    The rates of pairs (their logarithms, since some are many times faster than others) are explained by two sides: one
    rate inside, another one across. The sides are those of the leading eigenvector of the pairs' weights (how far each
    is above or below the middle of fast and slow pairs), as in spectral clustering. They count if in fewer than `alpha`
    runs chance would explain the rates as well, over all ways to choose sides of these sizes: by the likelihood ratio
    of normal rates with one mean and with two, and by the number of slow pairs. And pairs across must be slower than
    the noise, and by the least slowdown that matters. All tests together decide, whichever of them fail: noise of
    single ones hides nothing.

    Of more than SOME_UNITS each is tried in too few pairs for that.
    """
    if len(notes.units) > SOME_UNITS:
        return ()
    # What each pair reached in its first test, if that ended.
    reached = {pair: own[0].rate for pair, own in notes.tests.items() if notes.cleared.issuperset(pair)}
    rates = {pair: math.log(rate) for pair, rate in reached.items() if rate}
    if not rates:
        return ()
    first, second = _sides(rates)
    across = [rate for pair, rate in rates.items() if _is_across(pair, first)]
    inside = [rate for pair, rate in rates.items() if not _is_across(pair, first)]
    # Two units that are slow with all others may be two slow ones.
    if min(len(first), len(second)) < _LEAST or not inside or not across:
        return ()
    ways = _log_choices(len(first) + len(second), len(first))
    least = math.log(notes.rules.alpha) - ways
    least_slower = max(notes.rules.floor, min(notes.bar.sigma, _MOST_NOISE))
    is_slow = median(across) <= median(inside) + math.log(1 - least_slower)
    if not is_slow or max(_log_ratio(inside, across), _log_failing(notes, inside, across)) > least:
        return ()
    return tuple(sorted((first, second), key=lambda side: (len(side), side)))


def _across_cut(notes: Notes) -> Iterator[Congested]:
    sides = cut_of(notes)
    if not sides:
        return
    across = [pair for pair in notes.tests if _is_across(pair, sides[0]) and notes.cleared.issuperset(pair)]
    tests = [tested for pair in across for tested in notes.tests[pair]]
    loaded = tuple(tested for tested in tests if not notes.passes(tested)) or tuple(tests)
    eased = (notes.quiet[unit][-1] for unit in notes.retested if unit in notes.quiet and unit in notes.cleared)
    # Few beside many: the few share what is slow.
    units = sides[0] if 2 * len(sides[0]) <= len(sides[1]) else tuple(sorted(chain(*sides)))
    yield Congested(units, loaded, tuple(notes.alone.values()) or tuple(eased), sides=sides)


def _is_across(pair: Pair, side: Sequence[int]) -> bool:
    """Is one of its ends on that side, and the other not?"""
    return (pair[0] in side) != (pair[1] in side)


def _sides(rates: Mapping[Pair, float]) -> Sides:
    """Units by the sign of the leading eigenvector."""
    middle = _middle([*rates.values()])
    units = sorted({unit for pair in rates for unit in pair})
    random = Random(0)
    vector = {unit: random.uniform(-1, 1) for unit in units}
    degree = dict.fromkeys(units, 0.0)
    for pair, rate in rates.items():
        for unit in pair:
            degree[unit] += abs(rate - middle)
    shift = max(degree.values())  # no eigenvalue is below -shift: with it the leading one is the largest in size
    for _ in range(_STEPS if shift else 0):
        following = {unit: shift * own for unit, own in vector.items()}
        for (one, other), rate in rates.items():
            following[one] += (rate - middle) * vector[other]
            following[other] += (rate - middle) * vector[one]
        length = math.hypot(*following.values())
        vector = {unit: own / length for unit, own in following.items()}
    return tuple(unit for unit in units if vector[unit] < 0), tuple(unit for unit in units if vector[unit] >= 0)


def _middle(rates: Sequence[float]) -> float:
    """Between the mean of the slow ones and that of the fast ones (two means)."""
    middle = (min(rates) + max(rates)) / 2
    for _ in range(_MEANS):
        slow, fast = [rate for rate in rates if rate < middle], [rate for rate in rates if rate >= middle]
        if not slow or not fast:
            break
        middle = (fmean(slow) + fmean(fast)) / 2
    return middle


def _log_failing(notes: Notes, inside: Sequence[float], across: Sequence[float]) -> float:
    """The logarithm of the chance that so many of the pairs across are slow, if each is as seldom as a test may fail.

    Pairs that are slow for no reason are further away than noise would have them.
    """
    middle = (median(inside) + median(across)) / 2
    slow = sum(rate < middle for rate in across)
    return _log_choices(len(across), slow) + slow * math.log(by_chance(len(notes.units), notes.rules))


def _log_ratio(inside: Sequence[float], across: Sequence[float]) -> float:
    """The logarithm of the likelihood ratio of one mean for all rates, and of one for each group."""
    whole = pvariance([*inside, *across])
    left = (len(inside) * pvariance(inside) + len(across) * pvariance(across)) / (len(inside) + len(across))
    if whole <= 0:
        return 0.0
    return (len(inside) + len(across)) / 2 * math.log(max(left / whole, 1e-9))


def _log_choices(count: int, chosen: int) -> float:
    """The logarithm of the binomial coefficient."""
    return math.lgamma(count + 1) - math.lgamma(chosen + 1) - math.lgamma(count - chosen + 1)
