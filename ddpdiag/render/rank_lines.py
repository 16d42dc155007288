"""Who stands in the table of ranks: those blamed, and of a large world those that are worth a look."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.render.hosts import fold_ranks
from ddpdiag.render.page import one_line
from ddpdiag.stats import quantile

Row = Mapping[str, Scalar]

IDENTITY = ("rank", "local_rank", "node", "gpu_uuid")
_ORDER = (Severity.ERROR, Severity.WARNING, None)


class Line(NamedTuple):
    """A line of the table: one rank, or `ranks` of one host of which all figures are the same ("3440-3447")."""

    name: str
    row: Row
    mark: Severity | None
    ranks: int = 1


def blamed(findings: Sequence[Finding], rows: Iterable[Row]) -> dict[int, Severity]:
    """The worst that each rank is blamed for; a host that is blamed as a whole means each rank of it."""
    marks: dict[int, Severity] = {}
    for severity in (Severity.WARNING, Severity.ERROR):
        own = [finding for finding in findings if finding.severity is severity]
        hosts = {node for finding in own if not finding.ranks for node in finding.nodes}
        theirs = (row.get("rank") for row in rows if row.get("node") in hosts) if hosts else ()
        named = (rank for finding in own for rank in finding.ranks)
        marks.update(dict.fromkeys((*named, *(rank for rank in theirs if isinstance(rank, int))), severity))
    return marks


def line_of(row: Row, marks: Mapping[int, Severity]) -> Line:
    """The line of a rank alone; it has no name where the row has no rank."""
    rank = row.get("rank")
    return Line("" if rank is None else one_line(str(rank)), row, marks.get(rank) if isinstance(rank, int) else None)


def by_host(lines: Iterable[Line], names: Sequence[str]) -> list[Line]:
    """Ranks of one host of which all figures are the same as one line."""
    groups: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.row.get("node"), line.mark, *map(line.row.get, names)), []).append(line)
    return [_together(group) for group in groups.values()]


def _together(lines: Sequence[Line]) -> Line:
    ranks = [rank for line in lines if isinstance(rank := line.row.get("rank"), int)]
    first = lines[0]
    if len(ranks) < 2 or len(ranks) < len(lines) or first.row.get("node") is None:
        return first
    row = {**first.row, "local_rank": None, "gpu_uuid": None}
    return Line(fold_ranks(ranks), row, first.mark, len(ranks))


def worst_first(lines: Iterable[Line], names: Sequence[str], numbers: Mapping[str, Sequence[float]]) -> list[Line]:
    """Blamed, silent and slowest lines first.

    The lines are compared by their figures `names`, of which `numbers` has the finite values in rising order.
    """
    medians = {name: quantile(values, 0.5) for name, values in numbers.items() if values}

    def worth(line: Line) -> tuple[int, int, float]:
        silent = sum(line.row.get(name) is None for name in names)
        slowness = max((_slowness(name, line.row.get(name), median) for name, median in medians.items()), default=0.0)
        return _ORDER.index(line.mark), -silent, -slowness

    return sorted(lines, key=worth)


def in_turns(lines: Iterable[Line]) -> list[Line]:
    """Of those blamed, one of each host before the next of any, or one host alone would fill the table."""
    seen: Counter[tuple[object, ...]] = Counter()
    turns: list[tuple[int, int, Line]] = []
    for line in lines:
        own = (line.mark, line.row.get("node"))
        turns.append((_ORDER.index(line.mark), seen[own] if line.mark else 0, line))
        seen[own] += 1
    return [line for *_, line in sorted(turns, key=lambda turn: turn[:2])]


def _slowness(name: str, value: Scalar, median: float) -> float:
    """How many times slower than the median; 0 for what has no better and worse."""
    if isinstance(value, bool) or not isinstance(value, int | float) or median <= 0:
        return 0.0
    if not math.isfinite(value):
        return math.inf
    if name.endswith(("_per_s", "_per_second")):
        return median / value if value > 0 else math.inf
    # Who is fast waits in backward for who is slow, so a long backward says nothing against a rank.
    return value / median if name.endswith("_seconds") and name != "backward_seconds" else 0.0
