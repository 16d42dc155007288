"""Numbers for people: SI inside, pretty only here.

Times and bandwidths step by 1000 (GB/s is 1e9 bytes per second), sizes by 1024 (MiB). Three digits are shown, since no
measurement here is better than that. The unit of a figure is the end of its name: `busbw_bytes_per_s`, or one of its
words between dots: `training.seconds`, `seconds.import`.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ddpdiag.model import Scalar

ABSENT = "–"


class Unit(NamedTuple):
    """What a value is divided by before it is shown, and what is written behind it."""

    size: float
    symbol: str


# The symbols are ASCII ("us"), as nccl-tests writes them: the text also ends in log files.
_SECONDS = (Unit(1.0, "s"), Unit(1e-3, "ms"), Unit(1e-6, "us"), Unit(1e-9, "ns"))
_BYTES_PER_S = (Unit(1e12, "TB/s"), Unit(1e9, "GB/s"), Unit(1e6, "MB/s"), Unit(1e3, "kB/s"), Unit(1.0, "B/s"))
_BYTES = tuple(Unit(1024.0**power, f"{letter}iB") for power, letter in ((4, "T"), (3, "G"), (2, "M"), (1, "K")))
_PER_SECOND = (Unit(1.0, "/s"),)
_SHARE = (Unit(0.01, "%"),)

# Longest first: "_bytes_per_s" also ends in "_per_s".
_SUFFIXES: tuple[tuple[str, tuple[Unit, ...]], ...] = (
    ("_bytes_per_s", _BYTES_PER_S),
    ("_per_second", _PER_SECOND),
    ("_seconds", _SECONDS),
    ("_bytes", (*_BYTES, Unit(1.0, "B"))),
    ("_share", _SHARE),
    ("_accuracy", _SHARE),
)
# Where the whole name is a unit.
_BARE = {"bytes_per_s": "rate", "per_second": "rate", "seconds": "time", "bytes": "size", "share": "share"}
_PLAIN = Unit(1.0, "")


def _family(name: str) -> tuple[str, tuple[Unit, ...]]:
    """The suffix of `name` and its units; an empty suffix and no units if it has none."""
    plain = f"_{name.replace('.', '_')}"
    found = next(((suffix, units) for suffix, units in _SUFFIXES if plain.endswith(suffix)), None)
    if found is not None:
        return found
    # `seconds.import`: what is counted is each of those that follow.
    head = f"_{name.partition('.')[0]}" if "." in name else ""
    return "", next((units for suffix, units in _SUFFIXES if suffix == head), ())


def label(name: str) -> str:
    """The name of a figure without its unit: `busbw_bytes_per_s` is "busbw", `training.seconds` "training.time"."""
    if name in _BARE:
        return _BARE[name]
    head, dot, last = name.rpartition(".")
    if dot and last in _BARE:
        return f"{_spaced(head)}.{_BARE[last]}"
    first, dot, rest = name.partition(".")
    if dot and first in _BARE:
        return f"{_BARE[first]}.{_spaced(rest)}"
    suffix, _ = _family(name)
    return _spaced(name.removesuffix(suffix if suffix != "_accuracy" else "")) or name


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def figure(value: float) -> str:
    """Three digits, "nan" or "inf"; no unit."""
    size = abs(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if size < 1e-3 or size >= 1e7:
        return f"{value:.3g}"
    if size >= 99.95:
        return f"{value:,.0f}"
    decimals = 2 - math.floor(math.log10(float(f"{size:.3g}")))
    return f"{value:.{decimals}f}"


def _short(value: float) -> str:
    """`figure` without zeros at the end: "3.2", not "3.20"."""
    text = figure(value)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def _fitting(value: float, units: Sequence[Unit]) -> Unit:
    """The largest unit of which `value` is at least one; for 0 the base unit, for less than the smallest that one."""
    if value == 0 or not math.isfinite(value):
        return next(unit for unit in units if unit.size == 1.0 or len(units) == 1)
    # Rounded as it will be shown, else 999.9 us would read "1,000 us".
    return next((unit for unit in units if float(f"{abs(value) / unit.size:.3g}") >= 1), units[-1])


def _pretty(value: float | None, units: Sequence[Unit]) -> str:
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return figure(value)
    unit = _fitting(value, units)
    return f"{_short(value / unit.size)} {unit.symbol}"


def seconds(value: float | None) -> str:
    """A time: "3.2 ms"."""
    return _pretty(value, _SECONDS)


def bytes_per_s(value: float | None) -> str:
    """A bandwidth, in powers of 1000: "1.07 GB/s"."""
    return _pretty(value, _BYTES_PER_S)


def byte_count(value: float | None) -> str:
    """A size, in powers of 1024: "64 MiB"."""
    return _pretty(value, _family("_bytes")[1])


def per_second(value: float | None) -> str:
    """A rate of whole things: "312 /s"."""
    return _pretty(value, _PER_SECOND)


def percent(share: float | None) -> str:
    """A share of one: 0.42 is "42 %"."""
    return _pretty(share, _SHARE)


def count(number: int, noun: str) -> str:
    """A number of things: "1 rank", "4 ranks"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf if value > 0 else -math.inf


def quantity(name: str, value: Scalar | list[Scalar]) -> str:
    """The value of the figure `name`, with the unit that its name ends in; text stays as it is."""
    match value:
        case None:
            return ABSENT
        case bool():
            return "yes" if value else "no"
        case str():
            return value
        case list():
            return ", ".join(quantity(name, item) for item in value) or "none"
    _, units = _family(name)
    if units:
        return _pretty(_float(value), units)
    # Counts, ports and ranks without a unit are exact.
    return str(value) if isinstance(value, int) and abs(value) < 10**18 else _short(_float(value))


def column_unit(name: str, values: Iterable[Scalar]) -> Unit:
    """One unit for a whole column, so that its numbers can be compared: the one that fits the median of them."""
    numbers = sorted(v for v in values if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v))
    _, units = _family(name)
    if not units or not numbers:
        return _fitting(0, units) if units else _PLAIN
    return _fitting(numbers[len(numbers) // 2], units)


def cell(value: Scalar, unit: Unit) -> str:
    """A value in a column of `unit`, without the symbol."""
    if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and unit is not _PLAIN):
        return figure(_float(value) / unit.size)
    return quantity("", value)
