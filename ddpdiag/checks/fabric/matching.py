"""Who is tried with whom: random perfect matchings, across domains where these are known. Seeded."""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from random import Random

Pair = tuple[int, ...]
Domain = Hashable
# How many of those that are free are looked at; in a shuffled list a good one is soon found.
_LOOKED_AT = 32


def pair_up(units: Sequence[int], domains: Mapping[int, Domain], random: Random) -> tuple[Pair, ...]:
    """Every unit with another one, by chance, of another domain as far as that is possible; of an odd number one is
    left out.

    With each domain's units in a row, the first half meets the second half in order: partners share a domain only where
    that has more than half of all.
    """
    mixed = list(units)
    random.shuffle(mixed)
    if domains:
        order: dict[Domain, list[int]] = {}
        for unit in mixed:
            order.setdefault(domains.get(unit, unit), []).append(unit)
        mixed = [unit for own in sorted(order.values(), key=len, reverse=True) for unit in own]
    half = len(mixed) // 2
    return tuple(ordered(one, other) for one, other in zip(mixed[:half], mixed[half : 2 * half], strict=True))


def ordered(one: int, other: int) -> Pair:
    """A pair is written with its smaller number first."""
    return (one, other) if one < other else (other, one)


def partners(
    suspects: Sequence[int],
    cleared: Collection[int],
    domains: Mapping[int, Domain],
    met: Callable[[int], Collection[int]],
    random: Random,
) -> tuple[Pair, ...]:
    """A cleared partner for each suspect, each for one: of another domain, and one that it has not met, if possible.

    Suspects beyond the number of the cleared get none this time.
    """
    # Of many that are cleared no more than the suspects may look at: to shuffle all takes most of a large search.
    free = random.sample(list(cleared), min(len(cleared), len(suspects) + _LOOKED_AT))
    pairs = []
    for suspect in suspects:
        if not free:
            break
        at = _choose(suspect, free, domains, met(suspect))
        free[at], free[-1] = free[-1], free[at]
        pairs.append(ordered(suspect, free.pop()))
    return tuple(pairs)


def _choose(suspect: int, free: Sequence[int], domains: Mapping[int, Domain], met: Collection[int]) -> int:
    """Where in `free` the best partner stands."""
    home = domains.get(suspect)
    best, score = len(free) - 1, -1
    for at in range(len(free) - 1, max(-1, len(free) - 1 - _LOOKED_AT), -1):
        other = free[at]
        own = 2 * (other not in met) + (home is None or domains.get(other) != home)
        if own == 3:
            return at
        if own > score:
            best, score = at, own
    return best


def apart(pairs: Iterable[Pair], busy: Iterable[int] = ()) -> tuple[Pair, ...]:
    """As many of the pairs as can be tried at the same time, beside units that are busy."""
    taken = set(busy)
    chosen = []
    for pair in pairs:
        if taken.isdisjoint(pair):
            taken.update(pair)
            chosen.append(pair)
    return tuple(chosen)


def round_robin(units: Sequence[int], number: int) -> tuple[Pair, ...]:
    """Round `number` of n - 1 (n if that is odd) in which everybody meets everybody once: the circle method."""
    circle: list[int | None] = [*units, *([None] if len(units) % 2 else [])]
    turned = circle[:1] + circle[1:][number:] + circle[1:][:number]
    couples = zip(turned, reversed(turned[len(turned) // 2 :]), strict=False)
    return tuple(ordered(one, other) for one, other in couples if one is not None and other is not None)
