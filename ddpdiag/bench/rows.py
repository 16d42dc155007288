"""The rows of a benchmark as nccl-tests' table, with exactly its characters, and as CSV.

The lines follow `writeResultHeader`, `writeBenchmarkLinePreamble`, `writeBenchmarkLineBody` and `writeResultFooter` in
nccl-tests' src/util.cu, so that scripts for its output can read this table.
"""

import csv
from collections.abc import Iterator, Sequence
from io import StringIO
from statistics import fmean
from typing import NamedTuple

from ddpdiag.codec import readable
from ddpdiag.model import Report
from ddpdiag.model.bench import IN_PLACE, BenchRank, BenchReport, BenchRow
from ddpdiag.render.page import one_line


class Part(NamedTuple):
    """The rows of one collective over one backend, which are the table of one run of nccl-tests."""

    backend: str
    collective: str
    rows: tuple[BenchRow, ...]

    @property
    def name(self) -> str:
        """The name of the part, such as "all_reduce over gloo"."""
        return f"{self.collective} over {self.backend}"


def measured(report: Report) -> BenchReport:
    """The benchmark of a report; ValueError if it has none."""
    if report.bench is None:
        raise ValueError("the report has no benchmark")
    return report.bench


def parts(bench: BenchReport) -> tuple[Part, ...]:
    """Group the rows by backend and collective, in the order in which these first appear."""
    rows: dict[tuple[str, str], list[BenchRow]] = {}
    for row in bench.rows:
        rows.setdefault((row.backend, row.collective), []).append(row)
    return tuple(Part(backend, collective, tuple(group)) for (backend, collective), group in rows.items())


def reaches(bench: BenchReport, part: Part) -> bool | None:
    """Whether all series of `part` reach `--min-busbw` at their best size; None without that option."""
    if (least := bench.asked.min_busbw_bytes_per_s) is None:
        return None
    series = [one for one in bench.series if (one.backend, one.collective) == (part.backend, part.collective)]
    return bool(series) and all(one.peak_busbw_bytes_per_s >= least for one in series)


def devices(bench: BenchReport) -> list[BenchRank]:
    """One line for each rank, in the order of ranks: a line with a GPU if any backend used one."""
    lines: dict[int, BenchRank] = {}
    for line in sorted(bench.ranks, key=lambda line: (line.rank, line.gpu_uuid is None)):
        lines.setdefault(line.rank, line)
    return list(lines.values())


def _spread(words: Sequence[str]) -> str:
    """Right-align four words in the columns of one mode (out-of-place or in-place)."""
    return "".join(f"  {word:>{width}}" for word, width in zip(words, (7, 6, 6, 6), strict=True))


_KEY = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}"
_HALF = ("time", "algbw", "busbw", "#wrong")
_HALF_UNITS = ("(us)", "(GB/s)", "(GB/s)", "")
_WORDS = "           out-of-place                       in-place"
# The three lines above the rows, without the empty comment before them.
HEADER = (
    _KEY.format("", "", "", "", "") + _WORDS,
    _KEY.format("size", "count", "type", "redop", "root") + _spread(_HALF) * 2,
    _KEY.format("(B)", "(elements)", "", "", "") + _spread(_HALF_UNITS) * 2,
)


def number(value: float, width: int) -> str:
    """Format `value` with as many decimals, up to two, as fit into `width`, like nccl-tests' `getFloatStr`."""
    for decimals in (2, 1, 0):
        if len(text := f"{value:{width}.{decimals}f}") <= width:
            return text
    return f"{value:{width}.1e}" if width >= 7 else f"{value:{width}.0e}"


def line(row: BenchRow) -> str:
    """The table's line for a row, with N/A in the columns of the mode that torch does not have."""
    op = "sum" if "reduce" in row.collective else "none"
    root = 0 if row.collective in ("broadcast", "reduce") else -1
    key = f"{row.size_bytes:12d}  {row.count:12d}  {one_line(row.dtype):>8}  {op:>6}  {root:6d}"
    figures = (
        number(row.seconds * 1e6, 7),
        number(row.algbw_bytes_per_s / 1e9, 6),
        number(row.busbw_bytes_per_s / 1e9, 6),
        "N/A" if row.wrong is None else f"{float(row.wrong):g}",
    )
    halves = (("N/A",) * 4, figures) if row.collective in IN_PLACE else (figures, ("N/A",) * 4)
    return key + "".join(map(_spread, halves))


def footer(part: Part, okay: bool | None) -> Iterator[str]:
    """The two lines below the rows: wrong elements ("not checked" without a check), and the mean bus bandwidth."""
    wrong = [row.wrong for row in part.rows if row.wrong is not None]
    checked = f"{sum(wrong):d} {'FAILED' if sum(wrong) else 'OK'}" if wrong else "N/A not checked"
    yield f"# {'Out of bounds values':<20} : {checked}"
    word = {None: "", True: "OK", False: "FAILED"}[okay]
    yield f"# {'Avg bus bandwidth':<20} : {fmean(row.busbw_bytes_per_s for row in part.rows) / 1e9:g} {word}"


COLUMNS = (*BenchRow.__struct_fields__, "slowest_host")


def to_csv(report: Report) -> str:
    """The rows in SI units as CSV with a header. Unknown values are empty; other non-finite ones nan, inf or -inf."""
    text, bench = StringIO(), measured(report)
    hosts = {line.rank: line.host for line in devices(bench)}
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in bench.rows:
        values = (*(getattr(row, name) for name in COLUMNS[:-1]), hosts.get(row.slowest_rank))
        writer.writerow([readable(one_line(value)) if isinstance(value, str) else value for value in values])
    return text.getvalue()
