"""Pictures: SVG whose colours and fonts are those of the page around it, and files.

matplotlib is loaded only when a picture is asked for, and used without pyplot, whose state is global. The same report
gives the same bytes, whatever a matplotlibrc says.

Bars: one for each rank, or of many ranks the worst as bars and all as a histogram. Those far from the others are
hatched; those of outliers, of blamed ranks and of ranks that never joined say so. A dashed line is the median of all.

Heat map: from the row to the column. Colours are cividis, which is even for all eyes and in grey. Few cells also show
their numbers; a cross is a link that failed, an empty cell one that was not measured.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Literal, NamedTuple

from ddpdiag.errors import UsageError
from ddpdiag.render.page import ascii_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that nobody would choose: each stands for one of the page, which differs by light and dark.
INK, MUTED, GRID, BAD, WARN, PAPER = (f"#01020{digit}" for digit in "123456")
SERIES = tuple(f"#01021{digit}" for digit in "12345678")
_OF_PAGE = {
    INK: "currentColor",
    MUTED: "var(--muted)",
    GRID: "var(--line)",
    BAD: "var(--bad)",
    WARN: "var(--warn)",
    PAPER: "var(--paper)",
} | {color: f"var(--s{number})" for number, color in enumerate(SERIES, 1)}
_COLOR = re.compile("|".join(_OF_PAGE))
# So that parts are told apart without colour, too.
HATCHES = ("", "//", "\\\\", "xx", "--", "||", "++", "/")
# Inches. The box of a figure has 302 CSS pixels (3.1 inches) on a phone of 360: there letters of SMALL points, the
# smallest in use, are still 10 pixels high; elsewhere several figures stand side by side.
WIDTH = 3.4
SMALL = 8.5

# Only within tags: a label says what it says.
_TAG = re.compile(r"<[^>]*>")
# One property, or several, as matplotlib's version has it.
_FONT = re.compile(r"font: (?:(\d+) )?([\d.]+)px [^;\"]*")
_FAMILY = re.compile(r"font-family: [^;\"]*")
_ID = re.compile(r'( id="|url\(#|href="#)')
_NOT_OURS = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<!--.*?-->", re.DOTALL)
_SIZE = re.compile(r'(<svg[^>]*?) width="[\d.]+pt" height="[\d.]+pt"|(<svg[^>]*?) height="[\d.]+pt" width="[\d.]+pt"')

_MISSING = "{} needs matplotlib: python -m pip install matplotlib"


def check_available() -> None:
    """UsageError if there is no matplotlib; it is not imported, which takes a second."""
    if find_spec("matplotlib") is None:
        raise UsageError(_MISSING.format("--plot"))


@contextmanager
def drawing(option: str) -> Iterator[None]:
    """What matplotlib throws is one sentence: UsageError."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(_MISSING.format(option)) from error
    except (ImportError, AttributeError, OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"{option}: matplotlib cannot draw here: {error}") from error


@contextmanager
def file_style() -> Iterator[None]:
    """Figures that are made and saved within look as they do by default."""
    from matplotlib import rc_context
    from matplotlib.style import context

    with context("default"), rc_context({"svg.hashsalt": "ddpdiag", "grid.color": "#dddddd"}):
        yield


def saved(figure: "Figure", kind: Literal["svg", "png"]) -> bytes:
    """The file of a figure that was made within `file_style`."""
    target = BytesIO()
    # A date, a version or a random id in the file would make each one different.
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    figure.savefig(target, format=kind, metadata=metadata, dpi=144)
    return target.getvalue()


@contextmanager
def page_style() -> Iterator[None]:
    """Figures that are made and saved within look like the page."""
    from matplotlib import rc_context
    from matplotlib.style import context

    with (
        context("default"),
        rc_context(
            {
                "svg.hashsalt": "ddpdiag",
                "svg.fonttype": "none",
                "text.parse_math": False,
                "font.size": 10.0,
                "text.color": INK,
                "axes.edgecolor": MUTED,
                "axes.labelcolor": INK,
                "axes.facecolor": "none",
                "axes.titlesize": 10.0,
                "axes.titlelocation": "left",
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.axisbelow": True,
                "figure.facecolor": "none",
                "savefig.facecolor": "none",
                "grid.color": GRID,
                "grid.linewidth": 0.6,
                "xtick.color": MUTED,
                "ytick.color": MUTED,
                "xtick.labelcolor": INK,
                "ytick.labelcolor": INK,
                "legend.frameon": False,
                "legend.fontsize": SMALL,
                "hatch.linewidth": 0.8,
            }
        ),
    ):
        yield


def inline(figure: "Figure", name: str) -> str:
    """The SVG element of a figure that was made within `page_style`; `name` keeps its ids apart from other figures'."""
    target = BytesIO()
    figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    text = _NOT_OURS.sub("", target.getvalue().decode())
    return _TAG.sub(lambda tag: _of_page(tag[0], name), text).strip()


def _of_page(tag: str, name: str) -> str:
    tag = _COLOR.sub(lambda match: _OF_PAGE[match[0]], tag)
    tag = _FONT.sub(lambda match: f"font: {match[1] or 400} {match[2]}px var(--font)", tag)
    tag = _FAMILY.sub("font-family: var(--font)", tag)
    tag = _SIZE.sub(lambda match: match[1] or match[2], tag)
    return _ID.sub(lambda match: f"{match[1]}{name}-", tag)


def plain(text: str) -> str:
    """`text` as it is: no formula between dollar signs, and no letter that the built-in font lacks."""
    return ascii_line(text).replace("$", r"\$")


def word(text: str, most: int = 28) -> str:
    """A label within `page_style`, where dollar signs mean themselves; a long one is cut."""
    shown = ascii_line(text)
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


_ROW_INCHES, _AROUND_INCHES, _HISTOGRAM_INCHES = 0.2, 0.75, 1.6
_BINS = 40
# Of a name, so that bars have half of the width at least.
_LETTERS = 20
OUTLIER = "outlier"


class Bar(NamedTuple):
    """A rank's value, in the unit of the figure. `mark` says why it stands out ("blamed", OUTLIER), or nothing."""

    label: str
    value: float
    mark: str = ""
    is_outlier: bool = False


class Bars(NamedTuple):
    """What is drawn: the bars from the top, a dashed line (the median of all values, or what `line_name` says), and all
    values where the bars are not all."""

    unit: str
    bars: Sequence[Bar]
    line: float | None
    all_values: Sequence[float] = ()
    noun: str = "ranks"
    line_name: str = "the median"


def draw_bars(what: Bars, name: str) -> str:
    """The SVG element; within `page_style`."""
    from matplotlib.figure import Figure

    height = _AROUND_INCHES + _ROW_INCHES * max(2, len(what.bars))
    histogram = _HISTOGRAM_INCHES if what.all_values else 0.0
    figure = Figure(figsize=(WIDTH, height + histogram), layout="constrained")
    *above, bottom = figure.subplots(2, height_ratios=(histogram, height)) if histogram else [figure.subplots()]
    for axes in above:
        axes.hist(what.all_values, bins=_BINS, color=SERIES[0])
        if what.line is not None:
            axes.axvline(what.line, color=INK, linestyle="--", linewidth=1)
        # One of ten thousand shall be seen, too.
        axes.set_yscale("symlog", linthresh=1)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_ylabel(f"{what.noun} (log scale)")
        axes.set_xlabel(what.unit)
        axes.grid(visible=True, axis="y")
    rows = range(len(what.bars))
    drawn = bottom.barh(rows, [bar.value for bar in what.bars], height=0.7, color=SERIES[0])
    for patch, bar in zip(drawn, what.bars, strict=True):
        if bar.is_outlier:
            patch.set(facecolor="none", edgecolor=WARN if bar.mark == OUTLIER else BAD, hatch="////")
        if bar.mark:
            bottom.annotate(
                bar.mark, (patch.get_width(), patch.get_y() + patch.get_height() / 2), xytext=(3, 0),
                textcoords="offset points", va="center", fontsize=SMALL, color=INK if bar.mark == OUTLIER else BAD,
                bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.6},
            )  # fmt: skip
    if what.line is not None:
        bottom.axvline(what.line, color=INK, linestyle="--", linewidth=1)
    bottom.set_yticks(rows, [word(bar.label, _LETTERS) for bar in what.bars])
    bottom.invert_yaxis()
    # Room for the word behind the longest bar.
    bottom.margins(x=0.22 if any(bar.mark for bar in what.bars) else 0.05)
    bottom.set_xlim(left=0)
    dashed = f"dashed: {what.line_name}" if what.line is not None else ""
    bottom.set_xlabel(", ".join(filter(None, (what.unit, dashed))))
    bottom.grid(visible=True, axis="x")
    bottom.tick_params(axis="y", length=0)
    return inline(figure, name)


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


# So many numbers in a row can be read.
NUMBERS_SHOWN = 8
_ROOMY, _MOST_DIGITS = 4, 5
# Beside a row for each, and across, where they are turned.
_NAMES_DOWN, _NAMES_ACROSS = 24, 12
_SCALE_INCHES = 0.75
# A long name is cut; a letter is so wide. A map of one row still has a height.
_LONGEST, _LETTER_INCHES, _LEAST_INCHES = 14, 0.075, 0.25
# Colours reach down to half of the best at least.
_LEAST_SPAN = 0.5


class Scale(NamedTuple):
    """The values at both ends of the colours, and their unit."""

    low: float
    high: float
    unit: str


def scale_of(rates: Sequence[float], unit: str) -> Scale:
    """For these rates (0 is none); noise is not stretched over all colours."""
    found = [rate for rate in rates if rate]
    high = max(found, default=1.0)
    return Scale(min(min(found, default=0.0), _LEAST_SPAN * high), high, unit)


def draw_heat(
    rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[float | None]], scale: Scale, name: str
) -> str:
    """The SVG element; `cells` are in the scale's unit, 0 is a link that failed. Within `page_style`."""
    from matplotlib.figure import Figure

    left, above = (_LETTER_INCHES * max(len(word(name, _LONGEST)) for name in names) for names in (rows, columns))
    inches = min(WIDTH - left - 0.15, 0.2 + 0.5 * len(columns))
    height = max(_LEAST_INCHES, inches * len(rows) / max(1, len(columns)))
    figure: Figure = Figure(figsize=(WIDTH, height + above + _SCALE_INCHES), layout="constrained")
    top, bottom = figure.subplots(2, height_ratios=(height + above, 0.12))
    _map(top, cells, scale.low, scale.high)
    # Of many names every n-th.
    top.spines[:].set_visible(False)
    top.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    across, down = -(-len(columns) // _NAMES_ACROSS), -(-len(rows) // _NAMES_DOWN)
    top.set_xticks(
        range(0, len(columns), across), [word(name, _LONGEST) for name in columns[::across]], rotation=60, ha="left",
        rotation_mode="anchor", fontsize=SMALL,
    )  # fmt: skip
    top.set_yticks(range(0, len(rows), down), [word(name, _LONGEST) for name in rows[::down]], fontsize=SMALL)
    # An image rather than matplotlib's own colour bar, which is 256 shapes.
    bottom.imshow(
        [range(256)], cmap="cividis", aspect="auto", extent=(scale.low, scale.high, 0, 1), interpolation="none"
    )
    bottom.set_yticks([])
    bottom.set_xlabel(scale.unit)
    bottom.spines[:].set(visible=True, edgecolor=MUTED)
    return inline(figure, name)


def _map(axes: "Axes", cells: Sequence[Sequence[float | None]], low: float, high: float) -> None:
    numbers = [[cell if cell else float("nan") for cell in row] for row in cells]
    axes.imshow(numbers, cmap="cividis", vmin=low, vmax=high, interpolation="none", aspect="equal")
    failed = [(x, y) for y, row in enumerate(cells) for x, cell in enumerate(row) if cell == 0]
    if failed:
        across, down = zip(*failed, strict=True)
        axes.scatter(across, down, marker="x", color=BAD, s=max(4.0, 600 / len(cells[0]) ** 1.5))
    if max(len(cells), len(cells[0])) > NUMBERS_SHOWN:
        return
    for y, row in enumerate(cells):
        for x, cell in enumerate(row):
            if cell:
                # Cividis is dark at its low end: white on dark, black on light.
                ink = "#ffffff" if cell < low + 0.5 * (high - low) else "#000000"
                axes.text(x, y, _number(cell, len(row)), ha="center", va="center", fontsize=SMALL, color=ink)


def _number(cell: float, columns: int) -> str:
    """Three digits; what needs more room than one of many columns has is next to nothing."""
    text = f"{cell:.3g}"
    return text if columns <= _ROOMY or len(text) <= _MOST_DIGITS else "<0.01" if cell < 0.01 else f"{cell:.2g}"
