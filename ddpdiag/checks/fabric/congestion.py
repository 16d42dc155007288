"""What units share that are slow together: a known domain, neighbours in the order of ranks, or the two sides of a cut.

Of units that are slow together it is not known who is at fault; what they share explains all of them at once. A unit
that is slow while its neighbours are not is at fault itself. Without known domains, what is shared shows in three ways:

- Neighbours. Schedulers number hosts along their cables, so that hosts next to each other mostly share a switch. A row
  of slow ones counts as one if chance would make such a row in fewer than 0.05 runs (Chernoff bound of a scan).
- Time: units that were slow as long as others communicated, and are not in quiet rounds.
- A cut: two groups that are fast inside and slow across (see `cut`).

With two units alone, or of two that are all of a domain, this cannot be told.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from statistics import median

from ddpdiag.checks.fabric.cut import cut_of, is_across
from ddpdiag.checks.fabric.matching import Domain
from ddpdiag.checks.fabric.notes import FINAL_ROUNDS, Congested, Notes, Reached

# Two that are slow together may be two that are slow.
_LEAST = 3
# Rows of so many slow ones are looked for, with no more others between them.
_ROWS = (3, 4, 5, 6, 8, 12, 16, 24, 32)


def congested_parts(notes: Notes) -> tuple[Congested, ...]:
    """The parts of the fabric that slow down several units: always, or only while others communicate."""
    slow = [unit for unit in notes.retested if unit not in notes.cleared and unit in notes.quiet]
    failing = {unit for unit in _witnesses(notes) if not any(map(notes.passes, notes.quiet[unit]))}
    parts = [*_slow_domains(notes, slow, failing)]
    unknown = sorted(unit for unit in (*slow, *failing) if unit not in notes.domains)
    parts += [(None, row) for row in rows(unknown, notes.units, notes.rules.alpha) if not failing.issuperset(row)]
    cut = tuple(_cut(notes))
    if not cut:
        parts += _eased(notes, [unit for unit in notes.retested if unit in notes.cleared and _is_back(notes, unit)])
    return (*(_part(notes, units, domain) for domain, units in parts), *cut)


def _witnesses(notes: Notes) -> Iterator[int]:
    suspects = set(notes.retested)
    return (unit for unit, tests in notes.quiet.items() if unit not in suspects and len(tests) >= FINAL_ROUNDS)


def _slow_domains(notes: Notes, slow: Sequence[int], failing: set[int]) -> Iterator[tuple[Domain, list[int]]]:
    """Domains of which half of the witnesses are slow, as the suspects are."""
    witnesses = Counter(notes.domains[unit] for unit in _witnesses(notes) if unit in notes.domains)
    for domain, count in witnesses.items():
        own = [unit for unit in failing if notes.domains.get(unit) == domain]
        if count >= 2 and 2 * len(own) >= count:
            yield domain, sorted([*own, *(unit for unit in slow if notes.domains.get(unit) == domain)])


def _is_back(notes: Notes, unit: int) -> bool:
    """Is it as fast as others in a quiet round, and not just above the bar by chance?"""
    best = max((tested.rate or 0.0 for tested in notes.quiet.get(unit, ())), default=0.0)
    return best >= (notes.bar.usual + notes.bar.least) / 2


def _eased(notes: Notes, eased: Sequence[int]) -> Iterator[tuple[Domain | None, list[int]]]:
    """Those that are slow only while others communicate: by domain, in rows, and the rest together."""
    by_domain: dict[Domain, list[int]] = {}
    for unit in eased:
        if unit in notes.domains:
            by_domain.setdefault(notes.domains[unit], []).append(unit)
    groups: list[tuple[Domain | None, list[int]]] = [
        (domain, units) for domain, units in by_domain.items() if len(units) >= _LEAST
    ]
    grouped = {unit for _, units in groups for unit in units}
    groups += [(None, row) for row in rows(sorted({*eased} - grouped), notes.units, notes.rules.alpha)]
    grouped = {unit for _, units in groups for unit in units}
    rest = [unit for unit in eased if unit not in grouped]
    yield from groups
    if len(rest) >= _LEAST:
        yield None, rest


def _part(notes: Notes, units: Sequence[int], domain: Domain | None) -> Congested:
    loaded = tuple(tested for unit in units for tested in notes.loaded_tests(unit))
    quiet = tuple(notes.quiet[unit][-1] for unit in units if unit in notes.quiet)
    return Congested(tuple(units), loaded, quiet, domain)


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


def _cut(notes: Notes) -> Iterator[Congested]:
    sides = cut_of(notes)
    if not sides:
        return
    across = [pair for pair in notes.tests if is_across(pair, sides[0]) and notes.cleared.issuperset(pair)]
    tests = [tested for pair in across for tested in notes.tests[pair]]
    loaded = tuple(tested for tested in tests if not notes.passes(tested)) or tuple(tests)
    eased = (notes.quiet[unit][-1] for unit in notes.retested if unit in notes.quiet and unit in notes.cleared)
    # Few beside many: the few share what is slow.
    units = sides[0] if 2 * len(sides[0]) <= len(sides[1]) else tuple(sorted(chain(*sides)))
    yield Congested(units, loaded, tuple(notes.alone.values()) or tuple(eased), sides=sides)


def usual_of(tests: Iterable[Reached]) -> float | None:
    """The median of those that ended."""
    rates = [tested.rate for tested in tests if tested.rate is not None]
    return median(rates) if rates else None
