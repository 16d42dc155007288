"""Format numbers and names for people: numbers with three digits and a fitting unit, many names in few characters.

Units of times and bandwidths are powers of 1000 (GB/s is 1e9 bytes per second), units of sizes powers of 1024 (MiB), as
in nccl-tests. Three digits are shown, since no measurement of ddpdiag is more exact. The name of a figure shows its
unit: at the end (`busbw_bytes_per_s`, `training.seconds`), or before the first dot (`seconds.import`).

Host names come from recordings of other users, and readers paste folded names ("n[0-3]") into commands of Slurm and
ClusterShell. So names with characters that have a meaning there ("@group", brackets, operators) are never folded.
"""

import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple, TypeGuard

from ddpdiag.model import Scalar

ABSENT = "–"


class Unit(NamedTuple):
    """A unit of text: the value is divided by `size`, and `symbol` follows it."""

    size: float
    symbol: str


# The symbols are ASCII ("us"), as nccl-tests writes them, because the text is also written to log files.
_SECONDS = (Unit(1.0, "s"), Unit(1e-3, "ms"), Unit(1e-6, "us"), Unit(1e-9, "ns"))
_BYTES_PER_S = (Unit(1e12, "TB/s"), Unit(1e9, "GB/s"), Unit(1e6, "MB/s"), Unit(1e3, "kB/s"), Unit(1.0, "B/s"))
_FLOP_PER_S = (Unit(1e12, "TFLOP/s"), Unit(1e9, "GFLOP/s"), Unit(1e6, "MFLOP/s"), Unit(1.0, "FLOP/s"))
_BYTES = tuple(Unit(1024.0**power, symbol) for power, symbol in enumerate(("B", "KiB", "MiB", "GiB", "TiB")))[::-1]
_PER_SECOND = (Unit(1.0, "/s"),)
_SHARE = (Unit(0.01, "%"),)
_NO_UNIT = Unit(1.0, "")
_MIN_PERCENT = 0.001
# If a rate is this many times its expectation, the expectation was wrong.
_EXCEEDED_RATIO = 1.2

# Longest first: "_bytes_per_s" also ends in "_per_s".
_SUFFIXES: tuple[tuple[str, tuple[Unit, ...]], ...] = (
    ("_bytes_per_s", _BYTES_PER_S),
    ("_flop_per_s", _FLOP_PER_S),
    ("_per_second", _PER_SECOND),
    ("_seconds", _SECONDS),
    ("_bytes", _BYTES),
    ("_share", _SHARE),
    ("_accuracy", _SHARE),
)
# The labels of figures whose name is only a unit.
_LABEL_OF_UNIT = {"bytes_per_s": "rate", "per_second": "rate", "seconds": "time", "bytes": "size", "share": "share"}


def seconds(value: float | None) -> str:
    """A time as text: "3.2 ms". ABSENT for None."""
    return _with_unit(value, _SECONDS)


def bytes_per_s(value: float | None) -> str:
    """A bandwidth as text, in powers of 1000: "1.07 GB/s". ABSENT for None."""
    return _with_unit(value, _BYTES_PER_S)


def byte_count(value: float | None) -> str:
    """A size as text, in powers of 1024: "64 MiB". ABSENT for None."""
    return _with_unit(value, _BYTES)


def percent(share: float | None) -> str:
    """A fraction as a percentage: 0.42 is "42 %". ABSENT for None."""
    return _with_unit(share, _SHARE)


def begun(sentence: str) -> str:
    """The sentence with a capital first letter."""
    return sentence[:1].upper() + sentence[1:]


def count(number: int, noun: str) -> str:
    """A number as text with its noun in the singular or plural: "1 rank", "4 ranks"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def time_text(seconds: float) -> str:
    """A time as text without separators of thousands, for a sentence: "120 us"."""
    return _in_sentence(seconds, _SECONDS)


def rate_text(bytes_per_s: float) -> str:
    """A bandwidth, for a sentence: "1.31 GB/s"."""
    return _in_sentence(bytes_per_s, _BYTES_PER_S)


def link_rate(bytes_per_s: float | None) -> str:
    """The nominal rate of a network link: "400 Gbit/s", or "speed unknown" for None."""
    return "speed unknown" if bytes_per_s is None else f"{bytes_per_s * 8e-9:g} Gbit/s"


def flops_text(flop_per_s: float) -> str:
    """A number of floating-point operations per second, for a sentence: "712 TFLOP/s"."""
    return _in_sentence(flop_per_s, _FLOP_PER_S)


def size_text(size_bytes: float) -> str:
    """A size, for a sentence: "64 MiB"."""
    return _in_sentence(size_bytes, _BYTES)


def share_text(share: float) -> str:
    """A share, for a sentence: "91 %" or "0.4 %". Only 0 is "0 %"."""
    percents = abs(share) * 100
    if 0 < percents < _MIN_PERCENT:
        return f"less than {_MIN_PERCENT:g} %"
    # As many decimals as needed to show one digit that is not 0.
    decimals = -math.floor(math.log10(percents)) if 0 < percents < 0.95 else 0
    return f"{share * 100:.{decimals}f} %"


def share_of_expected_text(bytes_per_s: float, expected_bytes_per_s: float) -> str:
    """A rate compared with its expectation: "91 % of 1.44 GB/s". No percentage if `is_exceeded`."""
    if is_exceeded(bytes_per_s, expected_bytes_per_s):
        return f"more than the {rate_text(expected_bytes_per_s)} expected"
    return f"{share_text(bytes_per_s / expected_bytes_per_s)} of {rate_text(expected_bytes_per_s)}"


def is_exceeded(bytes_per_s: float, expected_bytes_per_s: float) -> bool:
    """Whether a rate is so far above its expectation that the expectation must be wrong."""
    return bytes_per_s >= _EXCEEDED_RATIO * expected_bytes_per_s


def times_text(ratio: float) -> str:
    """A ratio, for a sentence: "2.1 times", "12 times" or "1.05 times"."""
    return f"{ratio:.{0 if ratio >= 9.95 else 1 if ratio >= 1.095 else 2}f} times"


def _in_sentence(value: float, units: Sequence[Unit]) -> str:
    """A value with a fitting unit, without separators of thousands. 0 gets the smallest unit."""
    return _with_unit(value, units if value else units[-1:]).replace(",", "")


def _with_unit(value: float | None, units: Sequence[Unit]) -> str:
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return figure(value)
    unit = _fitting_unit(value, units)
    return f"{_short_number(value / unit.size)} {unit.symbol}"


def _fitting_unit(value: float, units: Sequence[Unit]) -> Unit:
    """The largest unit in which `value` is at least 1, else the smallest unit. For 0, the unit whose size is 1."""
    if value == 0 or not math.isfinite(value):
        return next(unit for unit in units if unit.size == 1.0 or len(units) == 1)
    # The value is rounded as it will be shown. Otherwise 999.9 us would be shown as "1,000 us".
    return next((unit for unit in units if float(f"{abs(value) / unit.size:.3g}") >= 1), units[-1])


def figure(value: float) -> str:
    """A number as text without a unit: at least three digits, or "nan" or "inf"."""
    size = abs(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if size < 1e-3 or size >= 1e7:
        return f"{value:.3g}"
    if size >= 99.95:
        return f"{value:,.0f}"
    decimals = 2 - math.floor(math.log10(float(f"{size:.3g}")))
    return f"{value:.{decimals}f}"


def _short_number(value: float) -> str:
    """A number as `figure` formats it, but without zeros at the end: "3.2", not "3.20"."""
    text = figure(value)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def _unit_of_name(name: str) -> tuple[str, tuple[Unit, ...]]:
    """The suffix of `name` that shows its unit ("" if it has none), and the units in which its values are shown."""
    plain = f"_{name.replace('.', '_')}"
    found = next(((suffix, units) for suffix, units in _SUFFIXES if plain.endswith(suffix)), None)
    if found is not None:
        return found
    # In a name such as `seconds.import`, the first word is the unit.
    head = f"_{name.partition('.')[0]}" if "." in name else ""
    return "", dict(_SUFFIXES).get(head, ())


def label(name: str) -> str:
    """The name of a figure without its unit: "busbw" for busbw_bytes_per_s, "training.time" for training.seconds."""
    if name in _LABEL_OF_UNIT:
        return _LABEL_OF_UNIT[name]
    head, dot, last = name.rpartition(".")
    if dot and last in _LABEL_OF_UNIT:
        return f"{_with_spaces(head)}.{_LABEL_OF_UNIT[last]}"
    first, dot, rest = name.partition(".")
    if dot and first in _LABEL_OF_UNIT:
        return f"{_LABEL_OF_UNIT[first]}.{_with_spaces(rest)}"
    suffix, _ = _unit_of_name(name)
    return _with_spaces(name.removesuffix(suffix if suffix != "_accuracy" else "")) or name


def _with_spaces(name: str) -> str:
    return name.replace("_", " ")


def quantity(name: str, value: Scalar | list[Scalar]) -> str:
    """The value of the figure `name` as text, with the unit that the name shows. Strings are not changed."""
    match value:
        case None:
            return ABSENT
        case bool():
            return "yes" if value else "no"
        case str():
            return value
        case list():
            return ", ".join(quantity(name, item) for item in value) or "none"
    _, units = _unit_of_name(name)
    if units:
        return _with_unit(_float(value), units)
    # Integers without a unit (counts, ports, ranks) are shown exactly.
    return str(value) if isinstance(value, int) and abs(value) < 10**18 else _short_number(_float(value))


def _float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf if value > 0 else -math.inf


def is_number(value: Scalar) -> TypeGuard[int | float]:
    """Whether `value` is a finite number, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(_float(value))


def column_unit(name: str, values: Iterable[Scalar]) -> Unit:
    """The unit for all values of the column `name`: the unit that fits their median."""
    numbers = sorted(filter(is_number, values))
    _, units = _unit_of_name(name)
    if not units or not numbers:
        return _fitting_unit(0, units) if units else _NO_UNIT
    return _fitting_unit(numbers[len(numbers) // 2], units)


def cell(value: Scalar, unit: Unit) -> str:
    """The text of a value in a column whose unit is `unit`, without the unit's symbol."""
    if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and unit is not _NO_UNIT):
        return figure(_float(value) / unit.size)
    return quantity("", value)


def listed(words: Sequence[str], limit: int | None) -> str:
    """At most `limit` words joined by commas, and the number of omitted words: "n0, n1 +3 more"."""
    return ", ".join(words[:limit]) + omitted_text(len(words), limit)


def omitted_text(number: int, limit: int | None) -> str:
    """The number of items above the limit as text: " +3 more". Empty if there are none, or if `limit` is None."""
    return f" +{number - limit:,} more" if limit is not None and number > limit else ""


_LITERAL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_RANGE = re.compile(r"(\d+)-(\d+)")
_DIGITS = re.compile(r"(\d+)")
# Only this many numbers of a name are folded, the last ones. (NodeSet takes 108 s for 4,000 names with four numbers.)
_MAX_DIMENSIONS = 4
_BRACKETED = re.compile(r"([^\[\]]*)\[([^\[\]]*)\]([^\[\]]*)")


class _Piece(NamedTuple):
    """A part of a folded text that `limit` may omit: a name or range, the text around it, and its number of names."""

    before: str
    name_or_range: str
    after: str
    name_count: int


def fold_hosts(names: Iterable[str], *, limit: int | None = None) -> str:
    """Fold host names: at most `limit` names or ranges, and the number of omitted hosts: "n[0-3,7] +12 more".

    Names with characters that have a meaning for ClusterShell's NodeSet are not folded, and follow the other names.
    """
    return _fold_hosts(tuple(dict.fromkeys(names)), limit)


# Many findings of a run name the same hosts, and folding 16,384 names takes 0.2 s.
@lru_cache(maxsize=64)
def _fold_hosts(names: tuple[str, ...], limit: int | None) -> str:
    literal = [name for name in names if _LITERAL_NAME.fullmatch(name)]
    other = [name for name in names if not _LITERAL_NAME.fullmatch(name)]
    parts = [piece for part in (_fold_dimensions(literal) if literal else ()) for piece in _pieces(part)]
    return _join_pieces([*parts, *(_Piece("", name, "", 1) for name in other)], limit)


def _fold_dimensions(names: Sequence[str]) -> list[str]:
    """Fold names with several numbers, such as r0c0 ... r3c7 to "r[0-3]c[0-7]". Only the last numbers are folded.

    For each number, from the last to the first, one pass folds the names that differ in this number alone.
    """
    rows: dict[tuple[str, ...], None] = dict.fromkeys(map(_split, names))
    for column in range(max(map(len, rows)) - 2, 0, -2):
        groups: dict[tuple[str, ...], list[str]] = {}
        for row in rows:
            # Names that have fewer numbers are not folded in this pass.
            key = (*row[:column], "", *row[column + 1 :]) if column < len(row) - 1 else row
            groups.setdefault(key, []).append(row[column] if column < len(row) - 1 else "")
        rows = {
            (*key[:column], _bracketed_ranges(numbers), *key[column + 1 :]) if column < len(key) - 1 else key: None
            for key, numbers in groups.items()
        }
    return ["".join(row) for row in rows]


def _split(name: str) -> tuple[str, ...]:
    """Split a name into text, number, text and so on, at its last `_MAX_DIMENSIONS` numbers."""
    parts = _DIGITS.split(name)
    last = 2 * _MAX_DIMENSIONS
    return ("".join(parts[:-last]), *parts[-last:]) if len(parts) > last else tuple(parts)


def _bracketed_ranges(numbers: Sequence[str]) -> str:
    """Numbers as ranges in brackets, such as "[0-3,7]" or "[08-11]". A single number gets no brackets."""
    if len(numbers) == 1:
        return numbers[0]
    # The width of numbers with leading zeros is kept; the key 0 stands for numbers without.
    padded = {len(number) for number in numbers if number[0] == "0" and len(number) > 1}
    by_width: dict[int, list[int]] = {}
    for number in numbers:
        by_width.setdefault(len(number) if len(number) in padded else 0, []).append(int(number))
    runs = sorted((first, last, width) for width, group in by_width.items() for first, last in _runs(group))
    texts = (f"{a:0{width}}" if a == b else f"{a:0{width}}-{b:0{width}}" for a, b, width in runs)
    return f"[{','.join(texts)}]"


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The first and last number of each run of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _pieces(part: str) -> list[_Piece]:
    if "[" not in part:
        return [_Piece("", part, "", 1)]
    if (match := _BRACKETED.fullmatch(part)) is None:
        # A text with two pairs of brackets ("n[0-1]-ib[0-3]") is not split.
        sizes = [sum(map(_range_length, inner.split(","))) for inner in re.findall(r"\[([^\]]*)\]", part)]
        return [_Piece("", part, "", math.prod(sizes))]
    before, inner, after = match.groups()
    return [_Piece(before, item, after, _range_length(item)) for item in inner.split(",")]


def _range_length(item: str) -> int:
    """The number of names in a range: 4 for "4-7", 1 for "4"."""
    match = _RANGE.fullmatch(item)
    return int(match[2]) - int(match[1]) + 1 if match else 1


def ranks_text(ranks: Iterable[int], *, limit: int | None = None) -> str:
    """Ranks in words: "rank 3" or "ranks 3,7-9"."""
    rank_list = list(ranks)
    return f"rank{'' if len(rank_list) == 1 else 's'} {fold_ranks(rank_list, limit=limit)}"


def _join_pieces(pieces: Sequence[_Piece], limit: int | None) -> str:
    shown = pieces[:limit]
    texts: list[str] = []
    # Consecutive pieces with the same text around them share one pair of brackets.
    for (before, after), group in groupby(shown, key=lambda piece: (piece.before, piece.after)):
        body = ",".join(piece.name_or_range for piece in group)
        framed = (before or after) and ("," in body or "-" in body)
        texts.append(f"{before}[{body}]{after}" if framed else f"{before}{body}{after}")
    left = sum(piece.name_count for piece in pieces[len(shown) :])
    return ",".join(texts) + (f" +{left:,} more" if left else "")


def fold_ranks(ranks: Iterable[int], *, limit: int | None = None) -> str:
    """Fold ranks, such as "0-3,7": at most `limit` numbers or ranges, and the number of omitted ranks (" +5 more")."""
    runs = _runs(ranks)
    return _join_pieces([_Piece("", str(a) if a == b else f"{a}-{b}", "", b - a + 1) for a, b in runs], limit)
