"""The table of ranks. Blamed ranks, ranks without figures and slow ranks come first, and outliers are marked."""

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
TRAINING_STEP_PARTS = ("data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds", "wait_seconds")
# The order of columns: these come first, because a terminal has no room for all; then all others; then the last group.
_FIRST_COLUMNS = (
    "samples_per_second",
    "busbw_bytes_per_s",
    "wait_seconds",
    "forward_seconds",
    "backward_seconds",
    "host_busbw_bytes_per_s",
    "latency_seconds",
    "arrival_seconds",
)
_LAST_COLUMNS = ("data_seconds", "optimizer_seconds", "transport", "gpu_name", "gpu_uuid")
_COLUMN_NOTES = (
    ("arrival_seconds", "Arrival: time until the rank joined, from when rank 0 began to wait."),
    (
        "wait_seconds",
        "Data + forward + backward + optimizer + wait: one training step; wait: time in its all-reduce, least on the "
        "slowest rank.",
    ),
)
# If only some ranks have a value in these columns, the ranks still count as alike.
_OPTIONAL_COLUMNS = ("transport", "gpu_uuid")
_IDENTITY_COLUMNS = ("rank", "local_rank", "host")
_SEVERITY_ORDER = (Severity.ERROR, Severity.WARNING, None)
_STATE_CELLS = {Severity.ERROR: Cell("FAIL", Mark.ERROR), Severity.WARNING: Cell("warn", Mark.WARNING)}
# An outlier is at least so far from the median: a rank that joined within a second of the others is not late.
_MIN_DISTANCE = {"arrival_seconds": 1.0}
_MISSING_SHOWN = 16


def severity_of_blamed_ranks(findings: Sequence[Finding], rows: Iterable[Row]) -> dict[int, Severity]:
    """The worst severity with which each rank is blamed. A finding with hosts only blames all ranks on these hosts."""
    severity_of_rank: dict[int, Severity] = {}
    for severity in (Severity.WARNING, Severity.ERROR):
        findings_of_severity = [finding for finding in findings if finding.severity is severity]
        hosts = {host for finding in findings_of_severity if not finding.ranks for host in finding.hosts}
        on_hosts = (row.get("rank") for row in rows if row.get("host") in hosts) if hosts else ()
        named = (rank for finding in findings_of_severity for rank in finding.ranks)
        blamed_ranks = (*named, *(rank for rank in on_hosts if isinstance(rank, int)))
        severity_of_rank.update(dict.fromkeys(blamed_ranks, severity))
    return severity_of_rank


def ranks_table(report: Report) -> Table | None:
    """The table of ranks. None if no rank joined, if all joined but have no figures, or if a host was checked alone."""
    if not report.ranks or report.world.launcher == ALONE:
        return None
    rows, blame, names = report.ranks, severity_of_blamed_ranks(report.findings, report.ranks), _columns(report.ranks)
    never_joined = list(_never_joined(report))
    if not names and not never_joined:
        return None
    slow_rows = {name: _slow_rows(name, rows) for name in names if name not in TRAINING_STEP_PARTS}
    states = [_state_cell(index, row, blame, slow_rows.values()) for index, row in enumerate(rows)]
    has_states = bool(never_joined) or any(state.value for state in states)
    notes = [text for name, text in _COLUMN_NOTES if name in names]
    if any(slow_rows.values()):
        notes.append("Outlier: far from the median on the slow side, beside the spread of the others.")
    first_columns = [Column("rank"), *[Column("state")] * has_states, Column("host", no_wrap=True)]

    def cells(index: int, row: Row) -> Iterator[Scalar | Cell]:
        yield row.get("rank")
        if has_states:
            yield states[index]
        yield row.get("host")
        for name in names:
            value = row.get(name)
            yield Cell(value, Mark.WARNING) if index in slow_rows.get(name, ()) else value

    return Table(
        columns=(*first_columns, *(_column(name) for name in names)),
        rows=(
            *((rank, Cell("never joined", Mark.ERROR), None, *(None,) * len(names)) for rank in never_joined),
            *(tuple(cells(index, row)) for index, row in enumerate(rows)),
        ),
        noun="rank",
        note=" ".join(notes),
        order=(*range(len(never_joined)), *(index + len(never_joined) for index in _row_order(rows, blame, names))),
        key_columns=len(first_columns),
    )


def are_ranks_alike(report: Report) -> bool:
    """Whether all ranks joined, have the same severity of blame (or none), and have values in the same columns."""
    blame, names = severity_of_blamed_ranks(report.findings, report.ranks), _columns(report.ranks)
    severities = {_severity_of(row, blame) for row in report.ranks}
    names = tuple(name for name in names if name not in _OPTIONAL_COLUMNS)
    filled_columns = {tuple(row.get(name) is None for name in names) for row in report.ranks}
    return len(severities) <= 1 and len(filled_columns) <= 1 and len(report.ranks) == report.world.size


def _columns(rows: Sequence[Row]) -> tuple[str, ...]:
    """The names of the columns that have values, except those of a rank's identity; the important ones are first."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)
    others = [name for name in names if name not in (*_IDENTITY_COLUMNS, *_FIRST_COLUMNS, *_LAST_COLUMNS)]
    return tuple(name for name in (*_FIRST_COLUMNS, *others, *_LAST_COLUMNS) if name in names)


def _column(name: str) -> Column:
    if name == "gpu_uuid":
        return Column("GPU", no_wrap=True)
    return Column(name=name, bar=column_unit(name, (1.0,)).symbol != "")


def _severity_of(row: Row, blame: Mapping[int, Severity]) -> Severity | None:
    return blame.get(rank) if isinstance(rank := row.get("rank"), int) else None


def _state_cell(index: int, row: Row, blame: Mapping[int, Severity], slow_rows: Iterable[frozenset[int]]) -> Cell:
    """The cell for the severity with which a rank is blamed, or for an outlier among its figures, or an empty cell."""
    if (severity := _severity_of(row, blame)) is not None:
        return _STATE_CELLS[severity]
    return Cell("outlier", Mark.WARNING) if any(index in indices for indices in slow_rows) else Cell(None)


def _never_joined(report: Report) -> Iterator[int]:
    """Yield the first `_MISSING_SHOWN` of the ranks that never joined."""
    joined = {row.get("rank") for row in report.ranks}
    return islice((rank for rank in range(report.world.size) if rank not in joined), _MISSING_SHOWN)


def _row_order(rows: Sequence[Row], blame: Mapping[int, Severity], names: Sequence[str]) -> list[int]:
    """The indices of the rows, with blamed ranks first, then ranks with missing figures, then the slowest ranks."""
    numbers = {name: sorted(filter(is_number, (row.get(name) for row in rows))) for name in names}
    medians = {name: quantile(values, 0.5) for name, values in numbers.items() if values}

    def sort_key(index: int) -> tuple[int, int, float]:
        row = rows[index]
        missing_figures = sum(row.get(name) is None for name in names)
        slowness = max((_slowness(name, row.get(name), median) for name, median in medians.items()), default=0.0)
        return _SEVERITY_ORDER.index(_severity_of(row, blame)), -missing_figures, -slowness

    return sorted(range(len(rows)), key=sort_key)


def _slowness(name: str, value: Scalar, median: float) -> float:
    """How many times slower than the median the value is, or 0 for a figure that does not show speed."""
    if isinstance(value, bool) or not isinstance(value, int | float) or median <= 0:
        return 0.0
    if not math.isfinite(value):
        return math.inf
    if name.endswith(("_per_s", "_per_second")):
        return median / value if value > 0 else math.inf
    # Fast ranks wait for slow ranks during backward, so a long backward does not show a slow rank.
    return value / median if name.endswith("_seconds") and name != "backward_seconds" else 0.0


def _slow_rows(name: str, rows: Sequence[Row]) -> frozenset[int]:
    """The indices of the rows whose figure `name` is an outlier on the slow side."""
    numbers = [(index, float(value)) for index, row in enumerate(rows) if is_number(value := row.get(name))]
    if not column_unit(name, (1.0,)).symbol or len(numbers) < 2:
        return frozenset()
    values = [value for _, value in numbers]
    median, higher_is_better = quantile(sorted(values), 0.5), name.endswith(("_per_s", "_per_second"))
    min_distance = _MIN_DISTANCE.get(name, 0.0)
    return frozenset(
        numbers[n][0]
        for n in outliers(values)
        if (values[n] < median) is higher_is_better and abs(values[n] - median) >= min_distance
    )
