"""Comparison of the collectives that ranks posted, to find ranks that posted other or fewer collectives than most."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ddpdiag.model import Collective
from ddpdiag.stats import find_odd_ranks
from ddpdiag.text import count, size_text

Traces = Mapping[int, Sequence[Collective]]
# The collective that each rank posted, by group name and collective number.
ByNumber = Mapping[tuple[str, int], Mapping[int, Collective]]

# By a type's name in torch's flight recorder (c10/core/ScalarType.h): its name in Python, and the bytes per element.
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
# All ranks must pass equally many elements to these collectives. In a gather, scatter or all-to-all they may differ.
_EQUAL_SIZES = frozenset({"all_reduce", "allreduce", "broadcast", "reduce", "barrier"})


class Mismatch(NamedTuple):
    """The different collectives that ranks posted under one number, which should be equal.

    `variants` holds one example of each with the ranks that posted it, the most common last. `minority` are the ranks
    that posted another collective than more than half of the ranks; empty if there is no such majority.
    """

    minority: tuple[int, ...]
    variants: tuple[tuple[Collective, tuple[int, ...]], ...]


class Lag(NamedTuple):
    """The ranks that posted fewer collectives than most, and the first collective that one of them did not post."""

    ranks: tuple[int, ...] = ()
    first_missing: Collective | None = None


def collective_text(collective: Collective) -> str:
    """Describe an operation, such as "all_reduce #7 (1,024 float32, 4 KiB)" or "send to rank 3"."""
    if collective.peer is not None:
        return f"{collective.operation} {'to' if collective.operation == 'send' else 'from'} rank {collective.peer}"
    name, element_bytes = DTYPES.get(collective.dtype, (collective.dtype, 0))
    size = f"{collective.elements:,} {name}" if name else count(collective.elements, "element")
    size += f", {size_text(element_bytes * collective.elements)}" if element_bytes else ""
    return f"{collective.operation} #{collective.seq}" + (f" ({size})" if collective.elements or name else "")


def by_number(traces: Traces) -> ByNumber:
    """The collective that each rank posted, by group name and collective number, in the order of the numbers."""
    posted: dict[tuple[str, int], dict[int, Collective]] = defaultdict(dict)
    for rank, trace in traces.items():
        for collective in trace:
            if not collective.p2p:
                posted[collective.group, collective.seq][rank] = collective
    return dict(sorted(posted.items(), key=lambda item: (item[0][1], item[0][0])))


def mismatches(posted: ByNumber) -> Iterator[Mismatch]:
    """Yield, for each process group whose ranks posted different collectives under one number, the first of these."""
    groups: set[str] = set()
    for (group, _), by_rank in posted.items():
        odd = find_odd_ranks({rank: compared_part(collective) for rank, collective in by_rank.items()})
        if odd is not None and group not in groups:
            groups.add(group)
            sides = sorted(odd.by_value.values(), key=lambda ranks: (len(ranks), ranks))
            yield Mismatch(odd.ranks, tuple((by_rank[ranks[0]], ranks) for ranks in sides))


def first_mismatch(traces: Traces) -> Mismatch | None:
    """Find the first number in a process group under which ranks posted different collectives; else None."""
    return next(mismatches(by_number(traces)), None)


def last_collective(trace: Sequence[Collective] | None) -> Collective | None:
    """Return the last collective that a rank posted, or None. Point-to-point operations do not count."""
    return next((collective for collective in reversed(trace or ()) if not collective.p2p), None)


def find_lag(traces: Traces) -> Lag:
    """Find the ranks that posted fewer collectives than most, in the process group that most ranks used last."""
    ends = [end for trace in traces.values() if (end := last_collective(trace)) is not None]
    if not ends:
        return Lag()
    counts = Counter(collective.group for collective in ends)
    group = max(counts, key=lambda name: (counts[name], name))
    known = {rank: trace for rank, trace in traces.items() if not trace or any(c.group == group for c in trace)}
    numbers = {rank: max((c.seq for c in trace if _is_in(c, group)), default=0) for rank, trace in known.items()}
    ranks_at = Counter(numbers.values())
    usual_number = max(ranks_at, key=lambda number: (ranks_at[number], number))
    behind = tuple(sorted(rank for rank, number in numbers.items() if number < usual_number))
    if not behind:
        return Lag()
    least = min(numbers[rank] for rank in behind)
    later = [c for trace in known.values() for c in trace if _is_in(c, group) and c.seq > least]
    return Lag(behind, min(later, key=lambda c: (c.seq, c.name, c.elements)))


def compared_part(collective: Collective) -> tuple[str, int, str]:
    """The properties that must be equal on all ranks: the operation, and if all ranks pass as much, size and dtype."""
    name = collective.operation
    return (name, collective.elements, collective.dtype) if name in _EQUAL_SIZES else (name, 0, "")


def _is_in(collective: Collective, group: str) -> bool:
    return collective.group == group and not collective.p2p
