"""Rates of pairs (hosts, GPUs) in two runs: which ways became slower than the others did.

A cell has no repeats, but a matrix has many cells: how far their changes lie apart is the noise. A way changed where it
did so by half against the usual change of all ways, and by more than three times the distance between the quartiles of
these changes. Of fewer than four ways no noise is known, and nothing is judged. Where others used the cores, a change
is told and not judged.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from ddpdiag.bandwidth.text import rate_text
from ddpdiag.comparison.noise import LEAST_BUSY_ACROSS, LEAST_BUSY_WITHIN
from ddpdiag.model import Matrix
from ddpdiag.model.comparison import Change, Direction
from ddpdiag.stats import quantile

Way = tuple[str, str]
# Chosen, as the slow rank's (bandwidth/slow.py): one connection varies more than the median of many calls.
_RATIO = 1.5
_DISTANCES = 3
_LEAST_WAYS = 4
_SHOWN = 8


def changed_matrices(old: Sequence[Matrix], new: Sequence[Matrix], busy_share: float = 1.0) -> Iterator[Change]:
    """Changes of all matrices of rates that both runs have. `busy_share` as in `least_busy`."""
    known = {matrix.name: matrix for matrix in old if matrix.unit == "bytes_per_s"}
    for matrix in new:
        if matrix.unit == "bytes_per_s" and matrix.name in known:
            yield from _changed(matrix, _rates(known[matrix.name]), _rates(matrix), busy_share)


def _rates(matrix: Matrix) -> dict[Way, float]:
    return {
        (row, column): float(cell)
        for row, cells in zip(matrix.rows, matrix.cells, strict=False)
        for column, cell in zip(matrix.columns, cells, strict=False)
        if row != column and isinstance(cell, int | float) and 0 < cell < math.inf
    }


def _changed(matrix: Matrix, was: Mapping[Way, float], now: Mapping[Way, float], busy_share: float) -> Iterator[Change]:
    # How many times as long a byte takes, above one for worse.
    ratios = {way: was[way] / now[way] for way in now if way in was}
    if len(ratios) < _LEAST_WAYS:
        return
    logs = sorted(map(math.log, ratios.values()))
    usual = median(logs)
    noise = math.exp(quantile(logs, 0.75) - quantile(logs, 0.25)) - 1
    limit = max(math.log(_RATIO), _DISTANCES * math.log1p(noise))
    far = {way: ratio for way, ratio in ratios.items() if abs(math.log(ratio) - usual) >= limit}
    for direction, ways in (
        (Direction.REGRESSION, [way for way in far if math.log(far[way]) > usual]),
        (Direction.IMPROVEMENT, [way for way in far if math.log(far[way]) < usual]),
    ):
        if ways:
            judged = direction if busy_share >= LEAST_BUSY_WITHIN else Direction.NEUTRAL
            yield _of_ways(matrix, judged, ways, was, now, noise)
    if abs(usual) >= max(math.log(_RATIO), math.log1p(noise)):
        direction = Direction.REGRESSION if usual > 0 else Direction.IMPROVEMENT
        judged = direction if busy_share >= LEAST_BUSY_ACROSS else Direction.NEUTRAL
        yield _of_ways(matrix, judged, [way for way in ratios if way not in far], was, now, noise)


def _of_ways(
    matrix: Matrix,
    direction: Direction,
    ways: Sequence[Way],
    was: Mapping[Way, float],
    now: Mapping[Way, float],
    noise: float,
) -> Change:
    old, new = (median(rates[way] for way in ways) for rates in (was, now))
    shown = ", ".join(f"{row} -> {column}" for row, column in ways[:_SHOWN])
    more = f" and {len(ways) - _SHOWN} more" if len(ways) > _SHOWN else ""
    return Change(
        direction=direction,
        name=matrix.name,
        text=f"{matrix.title}: {shown}{more}: {rate_text(old)} -> {rate_text(new)}",
        old=old,
        new=new,
        ratio=old / new,
        noise=noise,
    )
