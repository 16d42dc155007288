"""The rows of a benchmark as every renderer needs them, and the table of nccl-tests, letter by letter.

The lines follow `writeResultHeader`, `writeBenchmarkLinePreamble`, `writeBenchmarkLineBody`, `writePerIterReport` and
`writeResultFooter` in nccl-tests' src/util.cu, so that scripts which read its output can read this one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

from rich.bar import Bar
from rich.table import Table
from rich.text import Text

from ddpdiag.model import Report
from ddpdiag.model.bench import Bench, BenchRank, BenchReport, BenchRow, Measured, Series
from ddpdiag.render.page import Column, one_line
from ddpdiag.text import bytes_per_s

_NOTHING = BenchReport(
    asked=Bench(),
    created="",
    rows=(),
    series=(),
    ranks=(),
    notes=(),
    average_busbw_bytes_per_s=None,
    wrong=None,
    complete=False,
    sentence="",
)


class Part(NamedTuple):
    """The rows of one collective over one backend: one table, as one run of nccl-tests prints it."""

    backend: str
    collective: str
    rows: tuple[BenchRow, ...]

    @property
    def name(self) -> str:
        """ "all_reduce over gloo"."""
        return f"{self.collective} over {self.backend}"

    @property
    def modes(self) -> tuple[Measured, ...]:
        """All that was measured, in and out of place."""
        return tuple(mode for row in self.rows for mode in row.modes().values())

    @property
    def wrong(self) -> int | None:
        """Wrong elements in all rows; None if nothing was checked."""
        checked = [mode.wrong for mode in self.modes if mode.wrong is not None]
        return sum(checked) if checked else None

    @property
    def average_busbw_bytes_per_s(self) -> float | None:
        """The mean over all rows and modes, as nccl-tests has it; None without rows."""
        return fmean(mode.busbw_bytes_per_s for mode in self.modes) if self.modes else None


class Calls(NamedTuple):
    """Seconds of the single calls, each that of the rank that took longest; `cv` has no unit."""

    min: float
    max: float
    mean: float
    p50: float
    p95: float
    p99: float
    stdev: float
    cv: float
    times: tuple[float, ...] = ()


def measured(report: Report) -> BenchReport:
    """The benchmark in `report`; one without rows if none was judged."""
    return report.bench or _NOTHING


def parts(bench: BenchReport) -> tuple[Part, ...]:
    """The rows by backend and collective, in the order in which they first appear."""
    rows: dict[tuple[str, str], list[BenchRow]] = {}
    for row in bench.rows:
        rows.setdefault((row.backend, row.collective), []).append(row)
    return tuple(Part(backend, collective, tuple(of)) for (backend, collective), of in rows.items())


def reaches(bench: BenchReport, parts: Sequence[Part]) -> bool | None:
    """Do all series of `parts` reach what `--min-busbw` asks for, at their best size? None if it asks for nothing."""
    least = bench.asked.min_busbw_bytes_per_s
    if least is None or not parts:
        return None
    shown = {(part.backend, part.collective) for part in parts}
    peaks = [s.peak_busbw_bytes_per_s for s in bench.series if (s.backend, s.collective) in shown]
    return bool(peaks) and min(peaks) >= least


def devices(bench: BenchReport) -> list[BenchRank]:
    """One line for each rank, in rising order: that with the GPU, if a backend used one."""
    lines: dict[int, BenchRank] = {}
    for line in sorted(bench.ranks, key=lambda line: (line.rank, line.gpu_uuid is None)):
        lines.setdefault(line.rank, line)
    return list(lines.values())


def traits(dtype: str, op: str, root: int) -> tuple[str, ...]:
    """What distinguishes series of one collective, without what it does not have: ("float", "sum")."""
    return (dtype, *([] if op == "none" else [op]), *([] if root < 0 else [f"root {root}"]))


def short_pci(pci: str) -> str:
    """ "0000:17:00", as nccl-tests writes what NVML calls "00000000:17:00.0"."""
    domain, _, rest = one_line(pci).partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}" if rest else domain


def calls(mode: Measured) -> Calls | None:
    """Statistics over the calls of a mode, as nccl-tests' `-I` has them; None if no rank has any.

    nccl-tests takes the longest time of each call over the ranks, then statistics over the calls (src/util.cu,
    `computeIterStats`). Without the single times, each figure is the largest of the ranks' own.
    """
    if not mode.ranks:
        return None
    if all(rank.times for rank in mode.ranks):
        times = tuple(map(max, zip(*(rank.times for rank in mode.ranks), strict=False)))
        ordered, mean, stdev = sorted(times), fmean(times), pstdev(times)
        return Calls(
            min=ordered[0],
            max=ordered[-1],
            mean=mean,
            p50=ordered[len(ordered) // 2],
            p95=_percentile(ordered, 95),
            p99=_percentile(ordered, 99),
            stdev=stdev,
            cv=stdev / mean if mean > 0 else 0.0,
            times=times,
        )
    own = [(s.min, s.max, s.mean, s.median, s.p95, s.p99, s.stdev, s.cv) for s in (rank.seconds for rank in mode.ranks)]
    return Calls(*map(max, zip(*own, strict=True)))


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """nccl-tests takes the nearest rank: of 20 calls, p99 is the longest."""
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]


# nccl-tests' lines ---------------------------------------------------------------------------------------------------


_KEY = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}"
_HALF = ("time", "algbw", "busbw", "#wrong")
_HALF_UNITS = ("(us)", "(GB/s)", "(GB/s)", "")
_CALLS = ("i_min", "i_max", "i_p99", "i_cv%")
_CALLS_UNITS = ("(us)", "(us)", "(us)", "(%)")
_WIDTHS = (7, 6, 6, 6, 7, 7, 7, 7)
_WORDS = "           out-of-place                       in-place"
_WORDS_WITH_CALLS = (
    "              out-of-place (+ per-iteration)                                in-place (+ per-iteration)"
)


def number(value: float, width: int) -> str:
    """nccl-tests' `getFloatStr`: as many decimals, up to two, as leave `value` within `width`."""
    for decimals in (2, 1, 0):
        if len(text := f"{value:{width}.{decimals}f}") <= width:
            return text
    return f"{value:{width}.1e}" if width >= 7 else f"{value:{width}.0e}"


def columns(*, per_iteration: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names and units of what a row has for each mode."""
    return (_HALF + _CALLS, _HALF_UNITS + _CALLS_UNITS) if per_iteration else (_HALF, _HALF_UNITS)


def header(*, per_iteration: bool) -> tuple[str, ...]:
    """The three lines above the rows, without the empty comment before them."""
    names, units = columns(per_iteration=per_iteration)
    return (
        _KEY.format("", "", "", "", "") + (_WORDS_WITH_CALLS if per_iteration else _WORDS),
        _KEY.format("size", "count", "type", "redop", "root") + _spread(names) * 2,
        _KEY.format("(B)", "(elements)", "", "", "") + _spread(units) * 2,
    )


def _spread(words: Sequence[str]) -> str:
    return "".join(f"  {word:>{width}}" for word, width in zip(words, _WIDTHS, strict=False))


def line(row: BenchRow, *, per_iteration: bool) -> str:
    """One row. Out of place is blank where it was not measured, as in nccl-tests; in place it is N/A, which its
    readers can tell from a row that only has that."""
    dtype, op = one_line(row.dtype), one_line(row.op)
    key = f"{row.size_bytes:12d}  {row.count:12d}  {dtype:>8}  {op:>6}  {row.root:6d}"
    out, inside = (_half(mode, per_iteration=per_iteration) for mode in (row.out_of_place, row.in_place))
    return key + _spread(out if row.out_of_place else [""] * len(out)) + _spread(inside)


def _half(mode: Measured | None, *, per_iteration: bool) -> tuple[str, ...]:
    """Time in us, algbw and busbw in GB/s, wrong elements; with `per_iteration` min, max, p99 and cv of the calls."""
    if mode is None:
        return ("N/A",) * (8 if per_iteration else 4)
    texts = (
        number(mode.seconds * 1e6, 7),
        number(mode.algbw_bytes_per_s / 1e9, 6),
        number(mode.busbw_bytes_per_s / 1e9, 6),
        "N/A" if mode.wrong is None else f"{float(mode.wrong):g}",
    )
    if not per_iteration:
        return texts
    if (of := calls(mode)) is None:
        return (*texts, *("N/A",) * 4)
    return (*texts, *(number(seconds * 1e6, 7) for seconds in (of.min, of.max, of.p99)), number(of.cv * 100, 7))


def footer(part: Part, okay: bool | None) -> Iterator[str]:
    """The two lines below the rows. What was not checked is not called OK."""
    wrong, average = part.wrong, part.average_busbw_bytes_per_s
    checked = "N/A not checked" if wrong is None else f"{wrong:d} {'FAILED' if wrong else 'OK'}"
    yield f"# {'Out of bounds values':<20} : {checked}"
    word = {None: "", True: "OK", False: "FAILED"}[okay]
    figure = "N/A" if average is None else f"{average / 1e9:g}"
    yield f"# {'Avg bus bandwidth':<20} : {figure} {word}"


# With bars, in a terminal --------------------------------------------------------------------------------------------


_LEAST_BAR, _MOST_BAR, _GAP = 10, 40, 2
_WRONG = "bold red"

# Columns that only need room where rows differ in them.
_KEYS: tuple[tuple[str, Callable[[BenchRow], str]], ...] = (
    ("type", lambda row: one_line(row.dtype)),
    ("redop", lambda row: one_line(row.op)),
    ("root", lambda row: str(row.root)),
)


class Scale(NamedTuple):
    """What a bar of full length means."""

    busbw_bytes_per_s: float
    word: str

    @property
    def label(self) -> tuple[str, str]:
        """Two lines above the end of the bars."""
        return self.word, bytes_per_s(self.busbw_bytes_per_s)

    def bar(self, mode: Measured | None, width: int) -> Bar:
        """A bar of at most `width`; an empty one for what was not measured."""
        busbw, full = mode.busbw_bytes_per_s if mode else 0.0, self.busbw_bytes_per_s
        share = min(busbw / full, 1.0) if full > 0 and math.isfinite(busbw) else 0.0
        return Bar(1.0, 0.0, share, width=width, color="cyan")


def scale(part: Part, series: Sequence[Series]) -> Scale:
    """The best of a table, or what its series should reach, if that is more."""
    best = max((m.busbw_bytes_per_s for m in part.modes if math.isfinite(m.busbw_bytes_per_s)), default=0.0)
    expected = max((s.expectation.busbw_bytes_per_s for s in series if s.expectation), default=0.0)
    return Scale(expected, "expected") if expected > best else Scale(best, "best")


def wide(part: Part, full: Scale, *, per_iteration: bool, width: int) -> Table | None:
    """nccl-tests' rows, with bars where there is room; None if the rows themselves do not fit `width`."""
    heads = header(per_iteration=per_iteration)
    lines = [line(row, per_iteration=per_iteration) for row in part.rows]
    longest = max(map(len, (*heads, *lines)))
    room = _bar_room(width - longest)
    if longest > width:
        return None
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, _GAP, 0, 0))
    for head, label in zip(heads, ("", *full.label), strict=True):
        table.add_row(Text(head, "dim"), Text(label.rjust(room) if room else "", "dim"))
    for row, text in zip(part.rows, lines, strict=True):
        style = _WRONG if any(mode.wrong for mode in row.modes().values()) else ""
        table.add_row(Text(text, style), full.bar(row.natural(), room) if room else "")
    return table


def narrow(part: Part, full: Scale, *, per_iteration: bool, width: int) -> Iterator[tuple[str, Table]]:
    """For each mode that was measured its name and a table, in which columns whose rows are all alike are left out."""
    for name in ("out_of_place", "in_place"):
        rows = [(row, mode) for row in part.rows if (mode := row.modes().get(name)) is not None]
        if rows:
            yield name.replace("_", " "), _compact(rows, full, per_iteration=per_iteration, width=width)


def alike(part: Part) -> str:
    """What all rows have in common, for the line above a narrow table: "float, sum"."""
    shared = [(name, word(part.rows[0])) for name, word in _KEYS if not _differs(word, part.rows)]
    return ", ".join(f"root {text}" if name == "root" else text for name, text in shared if text not in ("-1", "none"))


def _differs(word: Callable[[BenchRow], str], rows: Sequence[BenchRow]) -> bool:
    return len({word(row) for row in rows}) > 1


def _compact(of: Sequence[tuple[BenchRow, Measured]], full: Scale, *, per_iteration: bool, width: int) -> Table:
    rows = [row for row, _ in of]
    size = _column("size", "(B)", [str(row.size_bytes) for row in rows])
    count = _column("count", "(elements)", [str(row.count) for row in rows])
    keys = [_column(name, "", list(map(word, rows))) for name, word in _KEYS if _differs(word, rows)]
    texts = zip(*(_half(mode, per_iteration=per_iteration) for _, mode in of), strict=True)
    names = zip(*columns(per_iteration=per_iteration), strict=True)
    figures = [_column(name, unit, text) for (name, unit), text in zip(names, texts, strict=True)]
    shown = [size, count, *keys, *figures]
    if _width(shown) > width:
        shown.remove(count)
    room = _bar_room(width - _width(shown))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for column in shown:
        table.add_column(Text(column.header), justify="right", no_wrap=True)
    table.add_column(Text("\n".join(full.label) if room else ""), justify="right")
    for at, (_, mode) in enumerate(of):
        cells = [Text(column.cells[at], _WRONG if mode.wrong else "") for column in shown]
        table.add_row(*cells, full.bar(mode, room) if room else "")
    return table


def _column(name: str, unit: str, texts: Sequence[str]) -> Column:
    return Column(f"{name}\n{unit}", tuple(text.strip() for text in texts), right=True)


def _width(shown: Sequence[Column]) -> int:
    return sum(column.width + _GAP for column in shown) - _GAP


def _bar_room(left: int) -> int:
    """Columns for bars of what is left of a line; none if that is too little for them to be useful."""
    room = min(left - _GAP, _MOST_BAR)
    return room if room >= _LEAST_BAR else 0
