"""Bus bandwidth and latency over the size of the message, as pictures for the HTML page."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

from ddpdiag.bench.rows import traits
from ddpdiag.model.bench import BenchReport, BenchRow, Expectation, Measured, Series
from ddpdiag.render.plots import SERIES, WIDTH, inline, plain, word
from ddpdiag.text import byte_count, bytes_per_s, is_exceeded, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito, "Color universal design" (2008), without the yellow, which is too pale for a line.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# So that lines can be distinguished without colour, too.
_MARKERS = "osD^vPX"
_LEGEND_WIDTH = 44
_MOST_TICKS = 9
# Each turn of the colours takes other markers.
_MOST_CURVES = 21
_LEGEND_INCHES = 0.3
_BUSBW, _LATENCY = "Bus bandwidth (GB/s)", "Latency"
# A narrow panel has room for so many.
MOST_PANEL_CURVES = 8

_Key = tuple[str, str, str, str, int]


class Curve(NamedTuple):
    """One line of each panel: SI units, sizes in rising order. `levels` are bandwidths to expect, by their labels."""

    label: str
    sizes: tuple[int, ...]
    busbws: tuple[float, ...]
    seconds: tuple[float, ...]
    levels: dict[str, float]


def draw_panels(report: BenchReport) -> tuple[str, str] | None:
    """Bus bandwidth and latency as two SVG elements for a page; None if nothing was measured. Within `page_style`."""
    from matplotlib.figure import Figure

    if not (curves := curves_of(report)[:MOST_PANEL_CURVES]):
        return None
    elements = []
    for title in (_BUSBW, _LATENCY):
        entries = len(curves) + sum(bool(curve.levels) for curve in curves if title is _BUSBW)
        figure = Figure(figsize=(WIDTH, 2.6 + 0.2 * entries), layout="constrained")
        axes = figure.subplots()
        for number, curve in enumerate(curves):
            color, marker = SERIES[number % len(SERIES)], _MARKERS[number % len(_MARKERS)]
            values = [busbw / 1e9 for busbw in curve.busbws] if title is _BUSBW else curve.seconds
            axes.plot(curve.sizes, values, color=color, marker=marker, markersize=4, label=word(curve.label, 40))
            for level in curve.levels.values() if title is _BUSBW else ():
                label = f"expected: {bytes_per_s(level)}"
                axes.axhline(level / 1e9, color=color, linestyle="--", linewidth=1.2, label=label)
        # The page has the title above the picture.
        _finish(axes, curves, title="")
        axes.set_ylim(bottom=0) if title is _BUSBW else _latencies(axes)
        axes.set_ylabel("GB/s" if title is _BUSBW else "time of a call")
        figure.legend(loc="outside lower left", ncols=1, handlelength=2)
        elements.append(inline(figure, "busbw" if title is _BUSBW else "latency"))
    return elements[0], elements[1]


def _latencies(axes: "Axes") -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    # Not every picture spans a decade, and each should show some numbers.
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: seconds(value))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _finish(axes: "Axes", curves: Sequence[Curve], title: str) -> None:
    """Sizes as people write them, some of those that were measured."""
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_xlabel("Size")
    axes.set_xscale("log", base=2)
    ticks = size_ticks(sorted({size for curve in curves for size in curve.sizes}))
    axes.set_xticks(ticks, [byte_count(size) for size in ticks], rotation=30, ha="right")
    axes.set_xticks([], minor=True)
    axes.grid(visible=True, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def size_ticks(sizes: Sequence[int]) -> list[int]:
    """Of sizes in rising order a few that are evenly spaced on a logarithmic axis."""
    # A little less, so that rounding drops none of a geometric series.
    apart = (sizes[-1] / sizes[0]) ** (1 / (_MOST_TICKS - 1)) * 0.99
    ticks = [sizes[0]]
    for size in sizes[1:]:
        if size >= ticks[-1] * apart:
            ticks.append(size)
    return ticks


def curves_of(report: BenchReport) -> list[Curve]:
    """One curve for each series."""
    found: dict[_Key, dict[int, list[Measured]]] = {}
    for row in report.rows:
        if (mode := row.natural()) is not None and row.size_bytes > 0:
            found.setdefault(_key(row), {}).setdefault(row.size_bytes, []).append(mode)
    pairs = Counter(key[:2] for key in found)
    curves = []
    for key, sizes in found.items():
        collective, backend, dtype, op, root = key
        # What distinguishes it from others of that name: ", float, sum".
        apart = traits(dtype, op, root) if pairs[key[:2]] > 1 else ()
        name = plain(", ".join((f"{collective} over {backend}", *apart)))
        curves.append(_curve(name, sizes, [one for one in report.series if _key(one) == key]))
    return curves


def _key(of: BenchRow | Series) -> _Key:
    return of.collective, of.backend, of.dtype, of.op, of.root


def expectation_of(series: Series) -> Expectation | None:
    """What a series should reach; None where nothing says so, or where it reached so much more that it was wrong."""
    expected = series.expectation
    wrong = expected is not None and is_exceeded(series.peak_busbw_bytes_per_s, expected.busbw_bytes_per_s)
    return None if wrong else expected


def _curve(name: str, sizes: dict[int, list[Measured]], series: Sequence[Series]) -> Curve:
    rows = sorted(sizes.items())
    levels = [expectation for s in series if (expectation := expectation_of(s)) is not None]
    return Curve(
        label=name,
        sizes=tuple(size for size, _ in rows),
        busbws=tuple(fmean(mode.busbw_bytes_per_s for mode in modes) for _, modes in rows),
        seconds=tuple(fmean(mode.seconds for mode in modes) for _, modes in rows),
        levels={
            fill(f"expected {bytes_per_s(e.busbw_bytes_per_s)}: {plain(e.source)}", _LEGEND_WIDTH): e.busbw_bytes_per_s
            for e in levels
        },
    )
