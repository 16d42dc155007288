"""Baseline files: JSON that holds any number of runs of the benchmark, for later ones to be held against."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from ddpdiag.bandwidth.baseline import key_of
from ddpdiag.codec import SMALLEST_NUMBER, decode, encode, read_bytes, readable
from ddpdiag.errors import UsageError
from ddpdiag.model.bench import BaselineRow, BaselineSeries, BenchRow, Measured
from ddpdiag.stats import quantile

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
    return BaselineRow(
        size_bytes=size_bytes,
        busbw_bytes_per_s=quantile(sorted(each.busbw_bytes_per_s for each in measured), 0.5),
        cv=quantile(sorted(_cv(each) for each in measured), 0.5),
    )


def _cv(measured: Measured) -> float:
    """Of the slowest rank, whose time the row shows."""
    slowest = max(measured.ranks, default=None, key=lambda own: own.seconds.mean)
    return slowest.seconds.cv if slowest else 0.0


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
        raise UsageError(f"{where} is no ddpdiag baseline: {error}") from error


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
        raise UsageError(f"{option} {path}: no such file; `--save-baseline {path}` makes one") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"{option} {path}: {reason}") from error
    return loads(text, f"{option} {path}")
