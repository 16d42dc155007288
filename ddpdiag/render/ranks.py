"""The table of ranks: blamed, silent and slow ones first; figures that are outliers in colour."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from ddpdiag.model import Finding, Report, Scalar, Severity
from ddpdiag.model.options import ALONE
from ddpdiag.render.blocks import Cell, Column, Mark, Table
from ddpdiag.stats import outliers, quantile
from ddpdiag.text import column_unit, is_number

Row = Mapping[str, Scalar]

# The parts of a training step; their sum is the step.
STEP = ("data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds", "wait_seconds")
# The first and last columns: a terminal has room for the first ones. Other columns come between the two groups.
_MOST = (
    "samples_per_second",
    "busbw_bytes_per_s",
    "wait_seconds",
    "forward_seconds",
    "backward_seconds",
    "host_busbw_bytes_per_s",
    "latency_seconds",
    "arrival_seconds",
)
_LEAST = ("data_seconds", "optimizer_seconds", "transport", "gpu_name", "gpu_uuid")
_MEANINGS = (
    ("arrival_seconds", "Arrival: time until the rank joined, from when rank 0 began to wait."),
    (
        "wait_seconds",
        "Data + forward + backward + optimizer + wait: one training step; wait: time in its all-reduce, least on the "
        "slowest rank.",
    ),
)
# Columns that may be empty for some ranks, which are not different for that.
_OPTIONAL = ("transport", "gpu_uuid")
_IDENTITY = ("rank", "local_rank", "host")
_ORDER = (Severity.ERROR, Severity.WARNING, None)
_STATES = {Severity.ERROR: Cell("FAIL", Mark.ERROR), Severity.WARNING: Cell("warn", Mark.WARNING)}
# Ranks that arrive within a second of each other are not late, however close the others are.
_LEAST_AWAY = {"arrival_seconds": 1.0}
_MISSING_SHOWN = 16


def blamed(findings: Sequence[Finding], rows: Iterable[Row]) -> dict[int, Severity]:
    """The worst severity for which each rank is blamed. If only a host is blamed, each rank of it is."""
    marks: dict[int, Severity] = {}
    for severity in (Severity.WARNING, Severity.ERROR):
        own = [finding for finding in findings if finding.severity is severity]
        hosts = {host for finding in own if not finding.ranks for host in finding.hosts}
        theirs = (row.get("rank") for row in rows if row.get("host") in hosts) if hosts else ()
        named = (rank for finding in own for rank in finding.ranks)
        marks.update(dict.fromkeys((*named, *(rank for rank in theirs if isinstance(rank, int))), severity))
    return marks


def ranks_table(report: Report) -> Table | None:
    """The ranks of a report as a table; None if they have no figures, or the host was checked alone."""
    if not report.ranks or report.world.launcher == ALONE:
        return None
    rows, marks, names = report.ranks, blamed(report.findings, report.ranks), _columns(report.ranks)
    missing = list(_never_joined(report))
    if not names and not missing:
        return None
    slow = {name: _slow_places(name, rows) for name in names if name not in STEP}
    states = [_state(place, row, marks, slow.values()) for place, row in enumerate(rows)]
    has_states = bool(missing) or any(state.value for state in states)
    notes = [text for name, text in _MEANINGS if name in names]
    notes += ["Outlier: far from the median on the slow side, beside the spread of the others."] * any(slow.values())
    head = [Column("rank"), *[Column("state")] * has_states, Column("host", whole=True)]

    def cells(place: int, row: Row) -> Iterator[Scalar | Cell]:
        yield row.get("rank")
        if has_states:
            yield states[place]
        yield row.get("host")
        for name in names:
            value = row.get(name)
            yield Cell(value, Mark.WARNING) if place in slow.get(name, ()) else value

    return Table(
        columns=(*head, *(_column(name) for name in names)),
        rows=(
            *((rank, Cell("never joined", Mark.ERROR), None, *(None,) * len(names)) for rank in missing),
            *(tuple(cells(place, row)) for place, row in enumerate(rows)),
        ),
        noun="rank",
        note=" ".join(notes),
        order=(*range(len(missing)), *(place + len(missing) for place in _order(rows, marks, names))),
        names=len(head),
    )


def are_alike(report: Report) -> bool:
    """Whether all ranks joined, are blamed alike (all or none), and have the same columns."""
    marks, names = blamed(report.findings, report.ranks), _columns(report.ranks)
    blames = {_mark(row, marks) for row in report.ranks}
    columns = {tuple(row.get(name) is None for name in names if name not in _OPTIONAL) for row in report.ranks}
    return len(blames) <= 1 and len(columns) <= 1 and len(report.ranks) == report.world.size


def _columns(rows: Sequence[Row]) -> tuple[str, ...]:
    """Columns beyond a rank's identity that have a value, the important ones first."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)
    others = [name for name in names if name not in (*_IDENTITY, *_MOST, *_LEAST)]
    return tuple(name for name in (*_MOST, *others, *_LEAST) if name in names)


def _column(name: str) -> Column:
    if name == "gpu_uuid":
        return Column("GPU", whole=True)
    return Column(name=name, bar=column_unit(name, (1.0,)).symbol != "")


def _mark(row: Row, marks: Mapping[int, Severity]) -> Severity | None:
    return marks.get(rank) if isinstance(rank := row.get("rank"), int) else None


def _state(place: int, row: Row, marks: Mapping[int, Severity], slow: Iterable[frozenset[int]]) -> Cell:
    """The cell that shows whether the rank is blamed, or else whether one of its figures is an outlier."""
    if (severity := _mark(row, marks)) is not None:
        return _STATES[severity]
    return Cell("outlier", Mark.WARNING) if any(place in places for places in slow) else Cell(None)


def _never_joined(report: Report) -> Iterator[int]:
    """The first ranks that never joined."""
    joined = {row.get("rank") for row in report.ranks}
    return islice((rank for rank in range(report.world.size) if rank not in joined), _MISSING_SHOWN)


def _order(rows: Sequence[Row], marks: Mapping[int, Severity], names: Sequence[str]) -> list[int]:
    """The indices of the rows: blamed ranks first, then ranks without figures, then the slowest."""
    numbers = {name: sorted(filter(is_number, (row.get(name) for row in rows))) for name in names}
    medians = {name: quantile(values, 0.5) for name, values in numbers.items() if values}

    def worth(place: int) -> tuple[int, int, float]:
        row = rows[place]
        silent = sum(row.get(name) is None for name in names)
        slowness = max((_slowness(name, row.get(name), median) for name, median in medians.items()), default=0.0)
        return _ORDER.index(_mark(row, marks)), -silent, -slowness

    return sorted(range(len(rows)), key=worth)


def _slowness(name: str, value: Scalar, median: float) -> float:
    """How many times slower than the median the value is; 0 for a figure that says nothing about speed."""
    if isinstance(value, bool) or not isinstance(value, int | float) or median <= 0:
        return 0.0
    if not math.isfinite(value):
        return math.inf
    if name.endswith(("_per_s", "_per_second")):
        return median / value if value > 0 else math.inf
    # Fast ranks wait in backward for slow ones, so a long backward is no sign of a slow rank.
    return value / median if name.endswith("_seconds") and name != "backward_seconds" else 0.0


def _slow_places(name: str, rows: Sequence[Row]) -> frozenset[int]:
    """The indices of the rows whose figure `name` is an outlier on the slow side."""
    numbers = [(place, float(value)) for place, row in enumerate(rows) if is_number(value := row.get(name))]
    if not column_unit(name, (1.0,)).symbol or len(numbers) < 2:
        return frozenset()
    values = [value for _, value in numbers]
    median, higher_is_better = quantile(sorted(values), 0.5), name.endswith(("_per_s", "_per_second"))
    least = _LEAST_AWAY.get(name, 0.0)
    return frozenset(
        numbers[n][0]
        for n in outliers(values)
        if (values[n] < median) is higher_is_better and abs(values[n] - median) >= least
    )
