"""Comparison of the collectives that ranks posted: which ranks posted a different one than most, or fewer."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ddpdiag.model import Collective
from ddpdiag.stats import find_odd_ranks
from ddpdiag.text import count, size_text

Traces = Mapping[int, Sequence[Collective]]

# All ranks must pass equally many elements to these. In a gather, a scatter or an all-to-all they may differ.
_EQUAL_SIZES = frozenset({"all_reduce", "allreduce", "broadcast", "reduce", "barrier"})


# By the type's name in torch's flight recorder (c10/core/ScalarType.h): its name in Python, and bytes per element.
DTYPES = {
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "Half": ("float16", 2),
    "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8),
    "Int": ("int32", 4),
    "Short": ("int16", 2),
    "Char": ("int8", 1),
    "Byte": ("uint8", 1),
    "Bool": ("bool", 1),
}


class Split(NamedTuple):
    """The different collectives that ranks posted under the same number; this is the first such number.

    `sides`: an example of each with its ranks, the most common last. `odd`: ranks outside a strict majority, if any.
    """

    odd: tuple[int, ...]
    sides: tuple[tuple[Collective, tuple[int, ...]], ...]


class Lag(NamedTuple):
    """The ranks that posted fewer collectives than most, and the first one that they lack; empty if there are none."""

    ranks: tuple[int, ...] = ()
    lacking: Collective | None = None


def in_words(collective: Collective) -> str:
    """A collective in words, such as "all_reduce #7 (1,024 float32, 4 KiB)"."""
    name, each = DTYPES.get(collective.dtype, (collective.dtype, 0))
    size = f"{collective.elements:,} {name}" if name else count(collective.elements, "element")
    size += f", {size_text(each * collective.elements)}" if each else ""
    return f"{_operation(collective)} #{collective.seq}" + (f" ({size})" if collective.elements or name else "")


def split(traces: Traces) -> Split | None:
    """Find the first number of a group under which ranks posted different collectives; None if there is none."""
    posted: dict[tuple[str, int], dict[int, Collective]] = defaultdict(dict)
    for rank, trace in traces.items():
        for collective in trace:
            if not collective.p2p:
                posted[collective.group, collective.seq][rank] = collective
    for _, by_rank in sorted(posted.items(), key=lambda item: (item[0][1], item[0][0])):
        odd = find_odd_ranks({rank: _call(collective) for rank, collective in by_rank.items()})
        if odd is not None:
            groups = sorted(odd.by_value.values(), key=lambda ranks: (len(ranks), ranks))
            return Split(odd.ranks, tuple((by_rank[ranks[0]], ranks) for ranks in groups))
    return None


def last(trace: Sequence[Collective] | None) -> Collective | None:
    """The last collective that a rank posted, or None. Point-to-point operations do not count."""
    return next((collective for collective in reversed(trace or ()) if not collective.p2p), None)


def lag(traces: Traces) -> Lag:
    """Find the ranks that posted fewer collectives than most, in the group of most ranks' last collective."""
    ends = {rank: collective for rank, trace in traces.items() if (collective := last(trace)) is not None}
    if not ends:
        return Lag()
    counts = Counter(collective.group for collective in ends.values())
    group = max(counts, key=lambda name: (counts[name], name))
    known = {rank: trace for rank, trace in traces.items() if not trace or any(c.group == group for c in trace)}
    numbers = {rank: max((c.seq for c in trace if _is_of(c, group)), default=0) for rank, trace in known.items()}
    times = Counter(numbers.values())
    front = max(times, key=lambda number: (times[number], number))
    behind = tuple(sorted(rank for rank, number in numbers.items() if number < front))
    if not behind:
        return Lag()
    least = min(numbers[rank] for rank in behind)
    later = [c for trace in known.values() for c in trace if _is_of(c, group) and c.seq > least]
    return Lag(behind, min(later, key=lambda c: (c.seq, c.name, c.elements)))


def _is_of(collective: Collective, group: str) -> bool:
    return collective.group == group and not collective.p2p


def _operation(collective: Collective) -> str:
    return collective.name.rpartition(":")[2]


def _call(collective: Collective) -> tuple[str, int, str]:
    name = _operation(collective)
    return (name, collective.elements, collective.dtype) if name in _EQUAL_SIZES else (name, 0, "")
