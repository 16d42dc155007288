"""Units that are slow together: the quiet rounds that show it, and what they share.

Of units that are slow together it is not known who is at fault; what they share explains all of them at once. A unit
that is slow while its neighbours are not is at fault itself. Without known domains, what is shared shows in three ways:

- Neighbours. Schedulers number hosts along their cables, so that hosts next to each other mostly share a switch. A row
  of slow ones counts as one if chance would make such a row in fewer than 0.05 runs (Chernoff bound of a scan).
- Time: units that were slow as long as others communicated, and are not in quiet rounds.
- Pairs: units that pass with some partners fail with many others. What lies between them is slow, and no unit.

With two units alone, or of two that are all of a domain, this cannot be told.
"""

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import chain, islice, zip_longest
from statistics import median

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
from ddpdiag.checks.fabric.rules import MOST_ROUNDS, SOME_UNITS
from ddpdiag.checks.matrix import explain

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
# More than this share of the pairs of good units must fail for the network between them to be at fault. Between two
# halves half of the pairs are slow; of transients, a twentieth would be much.
_FAILING_SHARE = 0.2


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
    3. Pairs one at a time: a few of those that fail between good ends.

    Where the network between good units is slow, no suspect is blamed, and only pairs are tried.

    Only suspects, witnesses and their cleared partners communicate. It costs at most six rounds, and none without
    suspects: congestion that others cause and that half of the time is over by the next round is over by the last with
    98 %.
    """
    if not notes.slow_between:
        yield from _retest_units(notes)
    for pair in _open_pairs(notes)[:_ALONE_ROUNDS]:
        if notes.rounds < MOST_ROUNDS or len(notes.units) <= SOME_UNITS:
            results = yield Round(Phase.QUIET, (pair,))
            notes.rounds += 1
            notes.alone |= results


def _retest_units(notes: Notes) -> Generator[Round, Results, None]:
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


def _last(notes: Notes) -> Generator[Round, Results, None]:
    witnesses: list[int] = []
    for number in range(FINAL_ROUNDS):
        left = [unit for unit in notes.retested if unit not in notes.cleared]
        if not left:
            return
        if number == 0:
            room = max(0, int(len(notes.units) * _QUIET_SHARE) - len(left))
            witnesses = list(islice(_next_to(notes, left), room))
        yield from _try(notes, [*left, *witnesses], () if number else _open_pairs(notes))


def _try(notes: Notes, subjects: Sequence[int], pairs: Sequence[Pair] = ()) -> Generator[Round, Results, None]:
    """One round of these with cleared partners that were no suspects, and of `pairs` that fail between good ends."""
    beside = apart(pairs, subjects)
    taken = {*subjects, *notes.retested, *chain.from_iterable(beside)}
    free = [unit for unit in notes.units if unit in notes.cleared and unit not in taken]
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
    """Pairs of good units that failed each time, the slowest first: often enough to be blamed, or very many."""
    failing = [pair for pair in notes.between_good() if not notes.passed(pair) and pair not in notes.alone]
    if notes.slow_between:
        return sorted(failing, key=lambda pair: notes.tests[pair][0].rate or 0.0)
    return [pair for pair in failing if len(notes.tests[pair]) >= PATH_FAILURES]


# What they share -----------------------------------------------------------------------------------------------------


def congested_parts(notes: Notes) -> tuple[Congested, ...]:
    """The parts of the fabric that slow down several units: always, or only while others communicate."""
    if notes.slow_between:
        return (_slow_between(notes),)
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
    parts += _eased(notes)
    found = []
    for shared, units in parts:
        loaded = tuple(tested for unit in units for tested in notes.loaded_tests(unit))
        quiet = tuple(notes.quiet[unit][-1] for unit in units if unit in notes.quiet)
        found.append(Congested(tuple(units), loaded, quiet, shared))
    return tuple(found)


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


# A network that is slow between hosts --------------------------------------------------------------------------------


def is_slow_between(notes: Notes) -> bool:
    """Whether pairs of good units fail so often that the network between them is at fault.

    A unit is cleared by one partner. Where a link that many share is slow, such as the one between two switches, units
    pass with some partners and fail with others; a unit that met only the latter must not be blamed. Of more than
    SOME_UNITS each is tried in too few pairs for that.
    """
    pairs = _between_cleared(notes)
    failing = sum(not notes.passed(pair) for pair in pairs)
    return len(notes.units) <= SOME_UNITS and failing > max(_LEAST, _FAILING_SHARE * len(pairs))


def _between_cleared(notes: Notes) -> list[Pair]:
    return [pair for pair in notes.tests if notes.cleared.issuperset(pair)]


def _slow_between(notes: Notes) -> Congested:
    """The pairs that fail, and if all pairs were tried, the two groups between which they do."""
    failing = [pair for pair in _between_cleared(notes) if not any(map(notes.passes, notes.tests[pair]))]
    passing = notes.tests.keys() - failing
    pattern = explain({(one, other) for one, other in failing}, {(one, other) for one, other in passing})
    islands = pattern.islands if pattern is not None else ()
    units = tuple(sorted({*chain(*failing), *notes.suspects}))
    loaded = tuple(tested for pair in failing for tested in notes.tests[pair])
    sides = islands if len(islands) == 2 and min(map(len, islands)) >= _LEAST else (units,)
    return Congested(units, loaded, tuple(notes.alone.values()), sides=sides)
