"""One figure of many ranks: a bar for each, or of many ranks the worst as bars and all as a histogram.

Bars far from the others are hatched; those of outliers, of blamed ranks and of ranks that never came say so. A dashed
line is the median of all.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ddpdiag.render.plots.drawing import BAD, HATCHES, INK, PAPER, SERIES, SMALL, WARN, WIDTH, inline, word

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW_INCHES, _AROUND_INCHES, _HISTOGRAM_INCHES = 0.2, 0.75, 1.6
_BINS = 40
# Of a name, so that bars have half of the width at least.
_LETTERS = 20
OUTLIER = "outlier"


class Bar(NamedTuple):
    """A rank's value, in the unit of the figure. `mark` says why it stands out ("blamed", OUTLIER), or nothing; `far`:
    its value lies far from the others'."""

    label: str
    value: float
    mark: str = ""
    far: bool = False


class Bars(NamedTuple):
    """What is drawn: the bars from the top, a dashed line (the median of all values, or what `line_name` says), and all
    values where the bars are not all."""

    unit: str
    bars: Sequence[Bar]
    line: float | None
    everybody: Sequence[float] = ()
    noun: str = "ranks"
    line_name: str = "the median"


def draw_bars(what: Bars, name: str) -> str:
    """The SVG element; within `page_style`."""
    from matplotlib.figure import Figure

    height = _AROUND_INCHES + _ROW_INCHES * max(2, len(what.bars))
    if not what.everybody:
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        _bars(figure.subplots(), what)
        return inline(figure, name)
    figure = Figure(figsize=(WIDTH, height + _HISTOGRAM_INCHES), layout="constrained")
    top, bottom = figure.subplots(2, height_ratios=(_HISTOGRAM_INCHES, height))
    _histogram(top, what)
    _bars(bottom, what)
    return inline(figure, name)


def _bars(axes: "Axes", what: Bars) -> None:
    rows = range(len(what.bars))
    drawn = axes.barh(rows, [bar.value for bar in what.bars], height=0.7, color=SERIES[0])
    for patch, bar in zip(drawn, what.bars, strict=True):
        if bar.far:
            patch.set(facecolor="none", edgecolor=WARN if bar.mark == OUTLIER else BAD, hatch="////")
        if bar.mark:
            axes.annotate(
                bar.mark, (patch.get_width(), patch.get_y() + patch.get_height() / 2), xytext=(3, 0),
                textcoords="offset points", va="center", fontsize=SMALL, color=INK if bar.mark == OUTLIER else BAD,
                bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.6},
            )  # fmt: skip
    _line(axes, what)
    axes.set_yticks(rows, [word(bar.label, _LETTERS) for bar in what.bars])
    axes.invert_yaxis()
    # Room for the word behind the longest bar.
    axes.margins(x=0.22 if any(bar.mark for bar in what.bars) else 0.05)
    axes.set_xlim(left=0)
    dashed = f"dashed: {what.line_name}" if what.line is not None else ""
    axes.set_xlabel(", ".join(filter(None, (what.unit, dashed))))
    axes.grid(visible=True, axis="x")
    axes.tick_params(axis="y", length=0)


def _line(axes: "Axes", what: Bars) -> None:
    if what.line is not None:
        axes.axvline(what.line, color=INK, linestyle="--", linewidth=1)


def _histogram(axes: "Axes", what: Bars) -> None:
    axes.hist(what.everybody, bins=_BINS, color=SERIES[0])
    _line(axes, what)
    # One of ten thousand shall be seen, too.
    axes.set_yscale("symlog", linthresh=1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylabel(f"{what.noun} (log scale)")
    axes.set_xlabel(what.unit)
    axes.grid(visible=True, axis="y")


def draw_stacks(unit: str, labels: Sequence[str], parts: Sequence[tuple[str, Sequence[float]]], name: str) -> str:
    """A row for each label, with its parts one after the other; each part has its colour and its hatch."""
    from matplotlib.figure import Figure

    height = _AROUND_INCHES + 0.35 + _ROW_INCHES * max(2, len(labels))
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    begin = [0.0] * len(labels)
    for number, (part, values) in enumerate(parts):
        color, hatch = SERIES[number % len(SERIES)], HATCHES[number % len(HATCHES)]
        axes.barh(
            range(len(labels)), values, left=begin, height=0.7, label=word(part), facecolor=color, edgecolor=PAPER,
            hatch=hatch, linewidth=0,
        )  # fmt: skip
        begin = [left + value for left, value in zip(begin, values, strict=True)]
    axes.set_yticks(range(len(labels)), [word(label, _LETTERS) for label in labels])
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.grid(visible=True, axis="x")
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower left", ncols=min(3, len(parts)), handlelength=1.6, columnspacing=1.0)
    return inline(figure, name)
