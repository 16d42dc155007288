"""Earlier runs of a benchmark: the files that keep them, which of them is comparable, and what became worse.

A baseline file is JSON that holds any number of runs. Only the same collective on the same shape of world and the same
hardware is compared; else a sentence states what differs.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from shlex import quote
from typing import NamedTuple

import msgspec
from msgspec import Struct

from ddpdiag.bandwidth import factor
from ddpdiag.codec import SMALLEST_NUMBER, decode, encode, read_bytes, readable
from ddpdiag.errors import UsageError
from ddpdiag.model.bench import BaselineRow, BaselineSeries, BenchRow, Measured
from ddpdiag.stats import quantile

# SuperBench's rule for one's own baseline.
WORSE_SHARE = 0.05
# Chosen, not measured: small messages differ more between two runs (where the processes lie) than within one.
SLOWER_SHARE = 0.2
# Not cv / sqrt(calls): the calls of one run are disturbed together, so their mean is not that much steadier than they.
SPREADS = 2
_SHOWN = 4


class Worse(NamedTuple):
    """A size that lost bus bandwidth (bytes per second), and by which share of the old one."""

    size_bytes: int
    old_bytes_per_s: float
    new_bytes_per_s: float
    share: float


class Slower(NamedTuple):
    """Small messages that take longer: seconds of the size in the middle, and by which share of the old ones (in the
    median of the `sizes`)."""

    size_bytes: int
    old_seconds: float
    new_seconds: float
    share: float
    sizes: int


def shape_of(hosts: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """`BaselineSeries.shape` of a world: "16 ranks", "2 hosts", and how these differ where they do."""
    sizes = sorted(len(ranks) for ranks in hosts.values())
    uneven = f" ({sizes[0]} to {sizes[-1]} ranks each)" if sizes and sizes[0] != sizes[-1] else ""
    return {"ranks": _number(sum(sizes), "rank"), "hosts": f"{_number(len(sizes), 'host')}{uneven}"}


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _kind(series: BaselineSeries) -> tuple[str, ...]:
    return series.collective, series.backend, series.dtype, series.op


def key_of(series: BaselineSeries) -> tuple[object, ...]:
    """Runs with the same one are comparable."""
    return *_kind(series), frozenset(series.shape.items()), frozenset(series.fabric.items())


def find(baselines: Sequence[BaselineSeries], series: BaselineSeries) -> BaselineSeries | str:
    """The run that `series` is comparable with, or a sentence without its full stop: why there is none."""
    alike = [other for other in baselines if _kind(other) == _kind(series)]
    if not alike:
        held = list(dict.fromkeys(_kind_text(other) for other in baselines))
        more = f" and {len(held) - _SHOWN} more" if len(held) > _SHOWN else ""
        return f"the baseline has no {_kind_text(series)}, it has {', '.join(held[:_SHOWN]) or 'no run at all'}{more}"
    # The last one counts: it is the newest, if a file was put together by hand.
    nearest = min(reversed(alike), key=lambda other: sum(map(len, _differing(other, series))))
    shape, fabric = _differing(nearest, series)
    parts = []
    if shape:
        was, now = (" on ".join(each.shape.values()) or "an unknown world" for each in (nearest, series))
        parts.append(f"the baseline is of {was}, this run of {now}")
    for name in fabric:
        was, now = (each.fabric.get(name, "unknown") for each in (nearest, series))
        parts.append(f"{name} of the baseline: {was}, of this run: {now}")
    return "; ".join(parts) or nearest


def _kind_text(series: BaselineSeries) -> str:
    op = "" if series.op == "none" else f" {series.op}"
    return f"{series.collective} over {series.backend} ({series.dtype}{op})"


def _differing(old: BaselineSeries, new: BaselineSeries) -> tuple[list[str], list[str]]:
    """The names in which the shapes, and the fabrics, of two runs differ."""
    shape, fabric = (
        [name for name in dict.fromkeys((*was, *now)) if was.get(name) != now.get(name)]
        for was, now in ((old.shape, new.shape), (old.fabric, new.fabric))
    )
    return shape, fabric


def worse(old: BaselineSeries, new: BaselineSeries) -> tuple[Worse, ...]:
    """The sizes that lost more than 5 % of their bus bandwidth, and more than the calls of either run spread.

    Only sizes from that on which reached half of the old peak: below it a call's own cost counts, see `slower`. The
    spread is one of times, so what is held against it is how much longer a call takes.
    """
    pairs = _pairs(old, new)
    return tuple(
        Worse(was.size_bytes, was.busbw_bytes_per_s, now.busbw_bytes_per_s, share)
        for was, now, ratio in pairs[_first_large(pairs) :]
        if (share := 1 - now.busbw_bytes_per_s / was.busbw_bytes_per_s) > WORSE_SHARE
        and ratio - 1 > SPREADS * max(was.cv, now.cv)
    )


def slower(old: BaselineSeries, new: BaselineSeries, ranks: int) -> Slower | None:
    """Have small messages become slower, in the median of all that are too small for half of the old bandwidth?

    None if they have not, by 20 % and by more than their calls spread. Together, since each of them is noisy.
    """
    pairs = _pairs(old, new)
    small = pairs[: _first_large(pairs)]
    if not small or not (share := factor(old.collective, ranks)):
        return None
    longer = quantile(sorted(ratio for _, _, ratio in small), 0.5) - 1
    spread = quantile(sorted(max(was.cv, now.cv) for was, now, _ in small), 0.5)
    if longer <= max(SLOWER_SHARE, SPREADS * spread):
        return None
    was, now, _ = small[len(small) // 2]
    moved = was.size_bytes * share
    return Slower(was.size_bytes, moved / was.busbw_bytes_per_s, moved / now.busbw_bytes_per_s, longer, len(small))


def missing(old: BaselineSeries, new: BaselineSeries) -> tuple[int, ...]:
    """The sizes at which the baseline reached half of its peak, in rising order, if this run measured none of them.

    Then `worse` has nothing to compare that counts. Empty where at least one was measured.
    """
    held = _measured(old)
    peak = max((row.busbw_bytes_per_s for row in held.values()), default=0.0)
    large = tuple(size for size, row in held.items() if 2 * row.busbw_bytes_per_s >= peak)
    return () if _measured(new).keys() & set(large) else large


def _measured(series: BaselineSeries) -> dict[int, BaselineRow]:
    """The row of each size, in rising order, where there was any bus bandwidth."""
    rows = sorted(series.rows, key=lambda row: row.size_bytes)
    return {row.size_bytes: row for row in rows if 0 < row.busbw_bytes_per_s < math.inf}


class _Pair(NamedTuple):
    """A size in both runs, and how many times as long it takes in the new one."""

    old: BaselineRow
    new: BaselineRow
    ratio: float


def _pairs(old: BaselineSeries, new: BaselineSeries) -> list[_Pair]:
    """The sizes that both runs measured, in rising order."""
    now = _measured(new)
    return [
        _Pair(was, now[size], was.busbw_bytes_per_s / now[size].busbw_bytes_per_s)
        for size, was in _measured(old).items()
        if size in now
    ]


def _first_large(pairs: Sequence[_Pair]) -> int:
    """Where the sizes begin that reach half of the old peak."""
    peak = max((pair.old.busbw_bytes_per_s for pair in pairs), default=0.0)
    return next((at for at, pair in enumerate(pairs) if 2 * pair.old.busbw_bytes_per_s >= peak), 0)


# Baseline files -------------------------------------------------------------------------------------------------------


SCHEMA = "ddpdiag.baseline/1"


class _Head(Struct, frozen=True):
    schema: str


class _File(Struct, frozen=True):
    schema: str
    series: tuple[BaselineSeries, ...]


def series_of(
    rows: Iterable[BenchRow], *, shape: Mapping[str, str], fabric: Mapping[str, str], created: str
) -> tuple[BaselineSeries, ...]:
    """This run as a baseline: a series for each collective, backend, dtype and op.

    Of a size with several rows (cycles, roots) it holds the median.
    """
    groups: dict[tuple[str, str, str, str], dict[int, list[Measured]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if (measured := row.natural()) is not None:
            groups[row.collective, row.backend, row.dtype, row.op][row.size_bytes].append(measured)
    return tuple(
        BaselineSeries(
            collective=collective,
            backend=backend,
            dtype=dtype,
            op=op,
            shape=dict(shape),
            fabric=dict(fabric),
            created=created,
            rows=tuple(_row(size, measured) for size, measured in sorted(sizes.items())),
        )
        for (collective, backend, dtype, op), sizes in groups.items()
    )


def _row(size_bytes: int, measured: Sequence[Measured]) -> BaselineRow:
    # The spread is that of the slowest rank, whose time the row shows.
    slowest = [max((rank.seconds for rank in each.ranks), default=None, key=lambda own: own.mean) for each in measured]
    return BaselineRow(
        size_bytes=size_bytes,
        busbw_bytes_per_s=quantile(sorted(each.busbw_bytes_per_s for each in measured), 0.5),
        cv=quantile(sorted(own.cv if own else 0.0 for own in slowest), 0.5),
    )


def dumps(series: Iterable[BaselineSeries]) -> str:
    """The text of a baseline file."""
    return msgspec.json.format(encode(_File(SCHEMA, tuple(series))), indent=1).decode() + "\n"


def loads(text: str, where: str) -> tuple[BaselineSeries, ...]:
    """The runs in a baseline file's text. UsageError, with `where` as its subject, for anything else."""
    data = readable(text).encode()
    try:
        if (schema := decode(data, _Head).schema) != SCHEMA:
            raise UsageError(f"{where} has schema {schema!r}; this ddpdiag reads {SCHEMA!r}")
        return decode(data, _File, least=SMALLEST_NUMBER).series
    except msgspec.DecodeError as error:
        raise UsageError(f"{where}: not a ddpdiag baseline: {error}") from error


def merge(old: Iterable[BaselineSeries], new: Iterable[BaselineSeries]) -> tuple[BaselineSeries, ...]:
    """The runs of both; a new one takes the place of the old one that it is comparable with."""
    return tuple({key_of(series): series for series in (*old, *new)}.values())


def read_baseline(option: str, path: str, *, missing: tuple[BaselineSeries, ...] | None) -> tuple[BaselineSeries, ...]:
    """The runs in a baseline file; `missing` if there is no such file, or UsageError where that is None."""
    try:
        text = read_bytes(path).decode()
    except FileNotFoundError as error:
        if missing is not None:
            return missing
        raise UsageError(f"{option} {path}: no such file; `--save-baseline {quote(path)}` makes one") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"{option} {path}: {reason}") from error
    return loads(text, f"{option} {path}")
