"""Suspects again while the fabric is quiet: is a unit slow alone, or only while others communicate?

A unit that failed with partner after partner was tried together with many others each time. What it shares with some of
these (an uplink, a switch) may be too narrow for all of them, or busy with other jobs for a while.

1. Parts: in each of four rounds a quarter of the suspects communicates; neighbours, and units of one domain, in
   different rounds. An uplink that carries a quarter of what its units can send is then no hindrance. A suspect that
   passes is cleared.
2. Last: the suspects that never passed, in two rounds, with witnesses. These are units that are next to a suspect (in
   its domain, else in the order of ranks) and passed. Witnesses that fail both times show that the slowness is shared.

Only suspects, witnesses and their cleared partners communicate. It costs at most six rounds, and none without suspects:
congestion that others cause and that half of the time is over by the next round is over by the last with 98 %.
"""

from collections.abc import Generator, Iterator, Sequence
from itertools import chain, islice, zip_longest

from ddpdiag.checks.fabric.cut import is_across
from ddpdiag.checks.fabric.matching import Pair, apart, partners
from ddpdiag.checks.fabric.notes import FINAL_ROUNDS, PATH_FAILURES, Notes, Phase, Results, Round
from ddpdiag.checks.fabric.rules import MOST_ROUNDS, SOME_UNITS

# Uplinks of a leaf that carry less than a quarter of what its hosts can send are not built.
_PARTS = 4
# On each side of a suspect: even at the end of a row of hosts, four that are slow are no chance among 16,384.
_WITNESSES = 3
# A quiet round has witnesses as long as a quarter of the units communicates at most.
_QUIET_SHARE = 1 / 8
# So many pairs are tried with nothing beside them: each costs a round.
_ALONE_ROUNDS = 2


def retest(notes: Notes) -> Generator[Round, Results, None]:
    """The quiet rounds of suspects that are slow, and of pairs that fail between good ends."""
    notes.retested = [unit for unit in notes.suspects if notes.is_bad(unit) and _is_slow(notes, unit)]
    yield from _parts(notes)
    yield from _last(notes)
    yield from _alone(notes)


def _is_slow(notes: Notes, unit: int) -> bool:
    """Slow and no more: congestion does not keep a test from ending time after time."""
    return any(tested.rate is not None for tested in notes.loaded_tests(unit))


def _parts(notes: Notes) -> Generator[Round, Results, None]:
    dealt = sorted(notes.retested, key=lambda unit: (str(notes.domains.get(unit, "")), unit))
    count = min(_PARTS, len(dealt), max(1, MOST_ROUNDS - FINAL_ROUNDS - notes.rounds))
    for part in range(count if len(dealt) > 1 else 0):  # one suspect is alone in the last rounds
        yield from _try(notes, dealt[part::count])


def _last(notes: Notes) -> Generator[Round, Results, None]:
    witnesses: list[int] = []
    for number in range(FINAL_ROUNDS):
        left = [unit for unit in notes.retested if unit not in notes.cleared]
        if not left:
            return
        if number == 0:
            room = max(0, int(len(notes.units) * _QUIET_SHARE) - len(left))
            witnesses = list(islice(_witnesses(notes, left), room))
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


def _witnesses(notes: Notes, suspects: Sequence[int]) -> Iterator[int]:
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
        across = [pair for pair in notes.tests if is_across(pair, notes.cut[0]) and notes.cleared.issuperset(pair)]
        return sorted(across, key=lambda pair: notes.tests[pair][0].rate or 0.0)
    pairs = [pair for pair in notes.between_good() if not notes.passed(pair) and pair not in notes.alone]
    return [pair for pair in pairs if len(notes.tests[pair]) >= PATH_FAILURES]


def _alone(notes: Notes) -> Generator[Round, Results, None]:
    """Pairs one at a time: a few of those across a cut, or paths."""
    for pair in _open_pairs(notes)[:_ALONE_ROUNDS]:
        if notes.rounds < MOST_ROUNDS or len(notes.units) <= SOME_UNITS:
            results = yield Round(Phase.QUIET, (pair,))
            notes.rounds += 1
            notes.alone |= results
