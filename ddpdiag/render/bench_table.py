"""The table of nccl-tests, letter by letter.

The lines follow `writeResultHeader`, `writeBenchmarkLinePreamble`, `writeBenchmarkLineBody`, `writePerIterReport` and
`writeResultFooter` in nccl-tests' src/util.cu, so that scripts which read its output read ours.
"""

from collections.abc import Iterator, Sequence

from ddpdiag.model.bench import BenchRow, Measured
from ddpdiag.render.bench_rows import Calls, Part, calls
from ddpdiag.render.page import one_line

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
    out = half(row.out_of_place, per_iteration=per_iteration)
    inside = half(row.in_place, per_iteration=per_iteration)
    blank = _spread([""] * len(inside))
    return key + (blank if row.out_of_place is None else _spread(out)) + _spread(inside)


def half(mode: Measured | None, *, per_iteration: bool) -> tuple[str, ...]:
    """Time in us, algbw and busbw in GB/s, wrong elements; with `per_iteration` min, max, p99 and cv of the calls."""
    if mode is None:
        return ("N/A",) * (8 if per_iteration else 4)
    texts = (
        number(mode.seconds * 1e6, 7),
        number(mode.algbw_bytes_per_s / 1e9, 6),
        number(mode.busbw_bytes_per_s / 1e9, 6),
        "N/A" if mode.wrong is None else f"{float(mode.wrong):g}",
    )
    return texts + _call_texts(calls(mode)) if per_iteration else texts


def _call_texts(of: Calls | None) -> tuple[str, ...]:
    if of is None:
        return ("N/A",) * 4
    return (*(number(seconds * 1e6, 7) for seconds in (of.min, of.max, of.p99)), number(of.cv * 100, 7))


def footer(part: Part, okay: bool | None) -> Iterator[str]:
    """The two lines below the rows. What was not checked is not called OK."""
    wrong, average = part.wrong, part.average_busbw_bytes_per_s
    checked = "N/A not checked" if wrong is None else f"{wrong:d} {'FAILED' if wrong else 'OK'}"
    yield f"# {'Out of bounds values':<20} : {checked}"
    word = {None: "", True: "OK", False: "FAILED"}[okay]
    figure = "N/A" if average is None else f"{average / 1e9:g}"
    yield f"# {'Avg bus bandwidth':<20} : {figure} {word}"
