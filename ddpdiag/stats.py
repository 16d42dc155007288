"""Statistics over ranks: summaries of measurements, ranks that differ from the majority, and outliers."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

V = TypeVar("V", bound=Hashable)


class Samples(Struct, frozen=True, gc=False, kw_only=True):
    """A summary of repeated measurements, in the unit of the field that holds the summary. For times, `min` estimates
    what the machine can do. The distance from `min` to `p95` shows how much the measurements vary."""

    min: float
    median: float
    p95: float
    count: int


def quantile(ordered: Sequence[float], share: float) -> float:
    """The quantile of a sorted, non-empty sequence (`share` 0.5: median), interpolated (type 7 of Hyndman and Fan)."""
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


class OddRanks(Struct, frozen=True):
    """The `ranks` that do not have the majority's value. Without a majority, the value is None and `ranks` is empty."""

    majority: object
    ranks: tuple[int, ...]
    by_value: dict[object, tuple[int, ...]]


def find_odd_ranks(values: Mapping[int, V]) -> OddRanks | None:
    """Find the ranks that differ from the value of more than half of the ranks. None if all have the same value."""
    counts = Counter(values.values())
    if len(counts) <= 1:
        return None
    by_value: dict[object, tuple[int, ...]] = {
        value: tuple(sorted(rank for rank, actual in values.items() if actual == value)) for value in counts
    }
    majority, count = counts.most_common(1)[0]
    if 2 * count <= len(values):
        return OddRanks(None, (), by_value)
    return OddRanks(majority, tuple(sorted(rank for rank, actual in values.items() if actual != majority)), by_value)


# Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993): the factor of the modified z-score, and its limit.
_MODIFIED_Z = 0.6745
_MAX_Z = 3.5
_MIN_DISTANCE_SHARE = 0.1


def outliers(values: Sequence[float]) -> frozenset[int]:
    """The indices of outliers: values whose modified z-score, a scaled distance from the median, is above 3.5.

    A value that differs from the median by less than a tenth is no outlier. Fewer than three values have no outlier.
    """
    if len(values) < 3:
        return frozenset()
    middle = quantile(sorted(values), 0.5)
    distances = [abs(value - middle) for value in values]
    median_distance = quantile(sorted(distances), 0.5)
    max_distance = max(_MIN_DISTANCE_SHARE * abs(middle), _MAX_Z * median_distance / _MODIFIED_Z)
    return frozenset(index for index, distance in enumerate(distances) if distance > max_distance)
