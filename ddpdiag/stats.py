"""Statistics over ranks: summaries of measurements, ranks that differ from the majority, and outliers."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

V = TypeVar("V", bound=Hashable)


class Samples(Struct, frozen=True, gc=False, kw_only=True):
    """A summary of repeated measurements, in the unit of the field that holds it. `min` estimates what the machine can
    do, and the distance from `min` to `p95` shows how much its speed varies."""

    min: float
    median: float
    p95: float
    count: int


def quantile(ordered: Sequence[float], share: float) -> float:
    """The `share` quantile of a sorted, non-empty sequence, interpolated (type 7 of Hyndman and Fan)."""
    position = (len(ordered) - 1) * share
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def samples(values: Iterable[float]) -> Samples:
    """Summarise finite values. Raises ValueError if there is none."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values to summarise")
    return Samples(min=ordered[0], median=quantile(ordered, 0.5), p95=quantile(ordered, 0.95), count=len(ordered))


class Odd(Struct, frozen=True):
    """The `ranks` without the value of the majority (`usual`; without a majority None and no ranks), and all groups."""

    usual: object
    ranks: tuple[int, ...]
    groups: dict[object, tuple[int, ...]]


def odd_ones_out(values: Mapping[int, V]) -> Odd | None:
    """The ranks whose value is not the one that more than half of the ranks have. None if all have the same value."""
    counts = Counter(values.values())
    if len(counts) <= 1:
        return None
    groups: dict[object, tuple[int, ...]] = {
        value: tuple(sorted(rank for rank, own in values.items() if own == value)) for value in counts
    }
    usual, count = counts.most_common(1)[0]
    if 2 * count <= len(values):
        return Odd(None, (), groups)
    return Odd(usual, tuple(sorted(rank for rank, own in values.items() if own != usual)), groups)


# Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993): the factor of the modified z-score, and its limit.
_MODIFIED_Z = 0.6745
_MOST_Z = 3.5
_LEAST_SHARE = 0.1


def outliers(values: Sequence[float]) -> frozenset[int]:
    """The indices of outliers: values whose distance from the median is a modified z-score above 3.5.

    A distance below a tenth of the median never counts. Of two values none is an outlier.
    """
    if len(values) < 3:
        return frozenset()
    middle = quantile(sorted(values), 0.5)
    away = [abs(value - middle) for value in values]
    usual = quantile(sorted(away), 0.5)
    least = max(_LEAST_SHARE * abs(middle), _MOST_Z * usual / _MODIFIED_Z)
    return frozenset(place for place, far in enumerate(away) if far > least)
