"""Write the rows of a benchmark as the table of nccl-tests, character for character, and as CSV.

The lines follow `writeResultHeader`, `writeBenchmarkLinePreamble`, `writeBenchmarkLineBody` and `writeResultFooter` in
nccl-tests' src/util.cu, so that scripts for the output of nccl-tests can read the table. Its rows have columns for two
modes, out-of-place and in-place; torch has each collective in one of them only.
"""

import csv
from collections.abc import Iterator, Sequence
from io import StringIO
from statistics import fmean
from typing import NamedTuple

from ddpdiag.bandwidth import SPLIT_COLLECTIVES, rounded_size
from ddpdiag.codec import readable
from ddpdiag.model import Report
from ddpdiag.model.bench import IN_PLACE, BenchRank, BenchReport, BenchRequest, BenchRow
from ddpdiag.render.page import one_line


class SweepTable(NamedTuple):
    """The rows of one collective over one backend. A run of nccl-tests prints one such table."""

    backend: str
    collective: str
    rows: tuple[BenchRow, ...]

    @property
    def name(self) -> str:
        """The title of the table, such as "all_reduce over gloo"."""
        return f"{self.collective} over {self.backend}"


def bench_of(report: Report) -> BenchReport:
    """The benchmark of a report. Raises ValueError if the report has none."""
    if report.bench is None:
        raise ValueError("the report has no benchmark")
    return report.bench


def sweep_tables(bench: BenchReport) -> tuple[SweepTable, ...]:
    """Group the rows by backend and collective, in the order of the first row of each group."""
    rows: dict[tuple[str, str], list[BenchRow]] = {}
    for row in bench.rows:
        rows.setdefault((row.backend, row.collective), []).append(row)
    return tuple(SweepTable(backend, collective, tuple(group)) for (backend, collective), group in rows.items())


def reaches_minimum(bench: BenchReport, table: SweepTable) -> bool | None:
    """Whether the peak of each dtype in `table` reaches `--min-busbw`. None if this option was not given."""
    if (minimum := bench.request.min_busbw_bytes_per_s) is None:
        return None
    series = [one for one in bench.series if (one.backend, one.collective) == (table.backend, table.collective)]
    return bool(series) and all(one.peak_busbw_bytes_per_s >= minimum for one in series)


def rank_devices(bench: BenchReport, table: SweepTable | None = None) -> list[BenchRank]:
    """One entry of `bench.ranks` for each rank, sorted by rank: that of `table`, or without a table the first."""
    rank_by_number: dict[int, BenchRank] = {}
    for line in sorted(bench.ranks, key=lambda line: line.rank):
        if table is None or (line.backend, line.collective) == (table.backend, table.collective):
            rank_by_number.setdefault(line.rank, line)
    return list(rank_by_number.values())


def lacks_sizes(table: SweepTable, request: BenchRequest, ranks: int) -> bool:
    """Whether the largest requested size is missing in `table`: large sizes are left out first."""
    last, parts = table.rows[-1], ranks if table.collective in SPLIT_COLLECTIVES else 1
    element_bytes = max(1, last.size_bytes // max(1, last.count * parts))
    largest = rounded_size(table.collective, max(request.sizes, default=0), element_bytes, ranks)
    return last.size_bytes < largest.size_bytes


def _align_mode(texts: Sequence[str]) -> str:
    """Right-align the four texts of one mode (time, algbw, busbw, wrong) in their columns."""
    return "".join(f"  {word:>{width}}" for word, width in zip(texts, (7, 6, 6, 6), strict=True))


_KEY_FORMAT = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}"
_MODE_TITLES = ("time", "algbw", "busbw", "#wrong")
_MODE_UNITS = ("(us)", "(GB/s)", "(GB/s)", "")
_MODE_NAMES = "           out-of-place                       in-place"
# The three lines above the rows, without the empty comment before them.
HEADER_LINES = (
    _KEY_FORMAT.format("", "", "", "", "") + _MODE_NAMES,
    _KEY_FORMAT.format("size", "count", "type", "redop", "root") + _align_mode(_MODE_TITLES) * 2,
    _KEY_FORMAT.format("(B)", "(elements)", "", "", "") + _align_mode(_MODE_UNITS) * 2,
)


def format_number(value: float, width: int) -> str:
    """Format `value` like nccl-tests' `getFloatStr`: with up to two decimals that fit into `width`, or an exponent."""
    for decimals in (2, 1, 0):
        if len(text := f"{value:{width}.{decimals}f}") <= width:
            return text
    return f"{value:{width}.1e}" if width >= 7 else f"{value:{width}.0e}"


def row_line(row: BenchRow) -> str:
    """The line of the table for a row. The mode that torch lacks for the collective is shown as N/A."""
    reduction = "sum" if "reduce" in row.collective else "none"
    root = 0 if row.collective in ("broadcast", "reduce") else -1
    key = f"{row.size_bytes:12d}  {row.count:12d}  {one_line(row.dtype):>8}  {reduction:>6}  {root:6d}"
    values = (
        format_number(row.seconds * 1e6, 7),
        format_number(row.algbw_bytes_per_s / 1e9, 6),
        format_number(row.busbw_bytes_per_s / 1e9, 6),
        "N/A" if row.wrong is None else f"{float(row.wrong):g}",
    )
    modes = (("N/A",) * 4, values) if row.collective in IN_PLACE else (values, ("N/A",) * 4)
    return key + "".join(map(_align_mode, modes))


def footer_lines(table: SweepTable, is_reached: bool | None) -> Iterator[str]:
    """Yield two lines: the number of wrong elements, and the mean bus bandwidth with OK or FAILED for `is_reached`."""
    wrong = [row.wrong for row in table.rows if row.wrong is not None]
    checked = f"{sum(wrong):d} {'FAILED' if sum(wrong) else 'OK'}" if wrong else "N/A not checked"
    yield f"# {'Out of bounds values':<20} : {checked}"
    verdict = {None: "", True: "OK", False: "FAILED"}[is_reached]
    mean = fmean(row.busbw_bytes_per_s for row in table.rows) / 1e9
    # Acceptance suites read digits and points only: of 5.3e-05 they would take 5.3.
    yield f"# {'Avg bus bandwidth':<20} : {f'{mean:.9f}' if mean < 1e-4 else f'{mean:g}'} {verdict}"


CSV_COLUMNS = (*BenchRow.__struct_fields__, "slowest_host")


def to_csv(report: Report) -> str:
    """The rows as CSV in SI units, with a header. None is an empty field; a number may be nan, inf or -inf."""
    text, bench = StringIO(), bench_of(report)
    hosts = {line.rank: line.host for line in rank_devices(bench)}
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in bench.rows:
        values = (*(getattr(row, name) for name in CSV_COLUMNS[:-1]), hosts.get(row.slowest_rank))
        writer.writerow([readable(one_line(value)) if isinstance(value, str) else value for value in values])
    return text.getvalue()
