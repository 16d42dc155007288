"""The rows of a benchmark as every renderer needs them: the table of nccl-tests, letter by letter, and CSV.

The lines follow `writeResultHeader`, `writeBenchmarkLinePreamble`, `writeBenchmarkLineBody` and `writeResultFooter` in
nccl-tests' src/util.cu, so that scripts which read its output can read this one.
"""

import csv
from collections.abc import Iterator, Sequence
from io import StringIO
from statistics import fmean
from typing import NamedTuple

from ddpdiag.codec import readable
from ddpdiag.model import Report
from ddpdiag.model.bench import BenchRank, BenchReport, BenchRow, Measured
from ddpdiag.render.page import one_line


class Part(NamedTuple):
    """The rows of one collective over one backend: the table of one run of nccl-tests."""

    backend: str
    collective: str
    rows: tuple[BenchRow, ...]

    @property
    def name(self) -> str:
        """ "all_reduce over gloo"."""
        return f"{self.collective} over {self.backend}"

    @property
    def modes(self) -> tuple[Measured, ...]:
        """All modes of all rows."""
        return tuple(mode for row in self.rows for mode in row.modes().values())

    @property
    def wrong(self) -> int | None:
        """Wrong elements in all rows; None if nothing was checked."""
        checked = [mode.wrong for mode in self.modes if mode.wrong is not None]
        return sum(checked) if checked else None

    @property
    def average_busbw_bytes_per_s(self) -> float | None:
        """The mean over all rows and modes, as in nccl-tests; None without rows."""
        return fmean(mode.busbw_bytes_per_s for mode in self.modes) if self.modes else None


def measured(report: Report) -> BenchReport:
    """The benchmark of a report that has one; ValueError for another report."""
    if report.bench is None:
        raise ValueError("the report has no benchmark")
    return report.bench


def parts(bench: BenchReport) -> tuple[Part, ...]:
    """The rows by backend and collective, in the order in which they first appear."""
    rows: dict[tuple[str, str], list[BenchRow]] = {}
    for row in bench.rows:
        rows.setdefault((row.backend, row.collective), []).append(row)
    return tuple(Part(backend, collective, tuple(of)) for (backend, collective), of in rows.items())


def reaches(bench: BenchReport, part: Part) -> bool | None:
    """Whether all series of `part` reach `--min-busbw` at their best size; None without that option."""
    if (least := bench.asked.min_busbw_bytes_per_s) is None:
        return None
    own = [one for one in bench.series if (one.backend, one.collective) == (part.backend, part.collective)]
    return bool(own) and all(one.peak_busbw_bytes_per_s >= least for one in own)


def devices(bench: BenchReport) -> list[BenchRank]:
    """One line for each rank in rising order: the one with a GPU, if a backend used one."""
    lines: dict[int, BenchRank] = {}
    for line in sorted(bench.ranks, key=lambda line: (line.rank, line.gpu_uuid is None)):
        lines.setdefault(line.rank, line)
    return list(lines.values())


def traits(dtype: str, op: str, root: int) -> tuple[str, ...]:
    """The traits that distinguish series of one collective, such as ("float", "sum")."""
    return (dtype, *([] if op == "none" else [op]), *([] if root < 0 else [f"root {root}"]))


def short_pci(pci: str) -> str:
    """ "0000:17:00", nccl-tests' form of NVML's "00000000:17:00.0"."""
    domain, _, rest = one_line(pci).partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}" if rest else domain


# nccl-tests' lines ---------------------------------------------------------------------------------------------------


def _spread(words: Sequence[str]) -> str:
    """Words right-aligned in the columns of one mode."""
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
    """nccl-tests' `getFloatStr`: as many decimals, up to two, as leave `value` within `width`."""
    for decimals in (2, 1, 0):
        if len(text := f"{value:{width}.{decimals}f}") <= width:
            return text
    return f"{value:{width}.1e}" if width >= 7 else f"{value:{width}.0e}"


def line(row: BenchRow) -> str:
    """One row. Out of place is blank where it was not measured, as in nccl-tests; in place it is N/A, so that scripts
    can distinguish it from a row that has only that."""
    dtype, op = one_line(row.dtype), one_line(row.op)
    key = f"{row.size_bytes:12d}  {row.count:12d}  {dtype:>8}  {op:>6}  {row.root:6d}"
    out = _half(row.out_of_place) if row.out_of_place else ("",) * 4
    return key + _spread(out) + _spread(_half(row.in_place))


def _half(mode: Measured | None) -> tuple[str, ...]:
    """Time in us, algbw and busbw in GB/s, wrong elements."""
    if mode is None:
        return ("N/A",) * 4
    return (
        number(mode.seconds * 1e6, 7),
        number(mode.algbw_bytes_per_s / 1e9, 6),
        number(mode.busbw_bytes_per_s / 1e9, 6),
        "N/A" if mode.wrong is None else f"{float(mode.wrong):g}",
    )


def footer(part: Part, okay: bool | None) -> Iterator[str]:
    """The two lines below the rows; values that were not checked are not OK."""
    wrong, average = part.wrong, part.average_busbw_bytes_per_s
    checked = "N/A not checked" if wrong is None else f"{wrong:d} {'FAILED' if wrong else 'OK'}"
    yield f"# {'Out of bounds values':<20} : {checked}"
    word = {None: "", True: "OK", False: "FAILED"}[okay]
    figure = "N/A" if average is None else f"{average / 1e9:g}"
    yield f"# {'Avg bus bandwidth':<20} : {figure} {word}"


# CSV -----------------------------------------------------------------------------------------------------------------


_ROW = ("backend", "collective", "size_bytes", "count", "dtype", "op", "root")
_MODE = ("seconds", "algbw_bytes_per_s", "busbw_bytes_per_s", "wrong", "calls")
COLUMNS = (*_ROW, "mode", *_MODE, "slowest_rank", "slowest_host")


def to_csv(report: Report) -> str:
    """The rows in SI units as CSV with a header; an unknown value is empty, a non-finite number nan, inf or -inf."""
    text, bench = StringIO(), measured(report)
    hosts = {line.rank: readable(one_line(line.host)) for line in devices(bench)}
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in bench.rows:
        key = [getattr(row, name) for name in _ROW]
        key = [readable(one_line(value)) if isinstance(value, str) else value for value in key]
        for name, mode in row.modes().items():
            rank = mode.slowest[0] if mode.slowest else None
            figures = (getattr(mode, figure) for figure in _MODE)
            writer.writerow((*key, name, *figures, rank, None if rank is None else hosts.get(rank)))
    return text.getvalue()
