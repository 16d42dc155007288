"""Rates between hosts as a matrix that stays small: many hosts share rows and columns."""

from collections.abc import Mapping, Sequence

from ddpdiag.checks.matrix import Way
from ddpdiag.model import Matrix

# A page has room for so many cells in a row.
MOST_ROWS = 48


def pair_matrix(name: str, title: str, hosts: Sequence[str], rates: Mapping[Way, float]) -> Matrix | None:
    """The rates of ways (from, to) between hosts by their numbers; 0 is a way that failed. None if there are none.

    Of more than `MOST_ROWS` hosts, neighbours are put together, and a cell is the lowest rate between two such groups:
    a mean would hide the one that is slow.
    """
    if not rates or len(hosts) < 2:
        return None
    step = -(-len(hosts) // MOST_ROWS)
    labels = tuple(_label(hosts[first : first + step]) for first in range(0, len(hosts), step))
    lowest: dict[Way, float] = {}
    for (a, b), rate in rates.items():
        cell = (a // step, b // step)
        lowest[cell] = min(rate, lowest.get(cell, rate))
    cells = tuple(tuple(lowest.get((a, b)) for b in range(len(labels))) for a in range(len(labels)))
    groups = f", the lowest between groups of {step}" if step > 1 else ""
    return Matrix(name=name, title=f"{title}{groups}", rows=labels, columns=labels, cells=cells, unit="bytes_per_s")


def _label(hosts: Sequence[str]) -> str:
    return hosts[0] if len(hosts) == 1 else f"{hosts[0]}..{hosts[-1]}"
