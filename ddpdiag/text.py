"""Numbers in sentences: three digits, a unit that fits, ASCII.

Rates and times step by 1000 (GB/s is 1e9 bytes per second), sizes by 1024, as in nccl-tests' options and columns.
"""

import math
from collections.abc import Sequence

_RATES = ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))
_SIZES = ((1024.0**4, "TiB"), (1024.0**3, "GiB"), (1024.0**2, "MiB"), (1024.0, "KiB"), (1.0, "B"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def rate_text(bytes_per_s: float) -> str:
    """Such as "1.31 GB/s"."""
    return _text(bytes_per_s, _RATES)


def size_text(size_bytes: float) -> str:
    """Such as "64 MiB"."""
    return _text(size_bytes, _SIZES)


def time_text(seconds: float) -> str:
    """Such as "120 us"."""
    return _text(seconds, _TIMES)


def share_text(share: float) -> str:
    """Such as "91 %"."""
    return f"{share:.0%}".replace("%", " %")


def times_text(ratio: float) -> str:
    """Such as "2.1x"."""
    return f"{ratio:.1f}x" if ratio < 9.95 else f"{ratio:.0f}x"


def begun(sentence: str) -> str:
    """With a capital letter in front."""
    return sentence[:1].upper() + sentence[1:]


def count_text(count: int, noun: str) -> str:
    """Such as "1 host" or "3 hosts"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _text(value: float, units: Sequence[tuple[float, str]]) -> str:
    if not math.isfinite(value):
        return str(value)
    # Rounded as it will be shown, else 999.9 us would read "1000 us".
    fitting = (unit for unit in units if float(f"{abs(value) / unit[0]:.3g}") >= 1)
    size, symbol = next(fitting, units[-1])
    return f"{_digits(value / size)} {symbol}"


def _digits(number: float) -> str:
    """Three digits without zeros at the end; all digits in front of the point, since 1023 KiB has four."""
    if abs(number) >= 100:
        return f"{number:.0f}"
    text = f"{number:.3g}"
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text
