"""Rates of pairs as a heat map: from the row to the column.

Colours are cividis, which is even for all eyes and in grey. Few cells also show their numbers; a cross is a way that
failed, an empty cell one that was not measured.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ddpdiag.render.plots.drawing import BAD, MUTED, SMALL, WIDTH, inline, word

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Cells = Sequence[Sequence[float | None]]

# So many numbers in a row can be read.
NUMBERS_SHOWN = 8
_ROOMY, _MOST_DIGITS = 4, 5
# Beside a row for each, and across, where they are turned.
_NAMES_DOWN, _NAMES_ACROSS = 24, 12
_SCALE_INCHES = 0.75
# A long name is cut; a letter is so wide. A map of one row still has a height.
_LETTERS, _LETTER_INCHES, _LEAST_INCHES = 14, 0.075, 0.25
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


def draw_heat(rows: Sequence[str], columns: Sequence[str], cells: Cells, scale: Scale, name: str) -> str:
    """The SVG element; `cells` are in the scale's unit, 0 is a way that failed. Within `page_style`."""
    from matplotlib.figure import Figure

    left, above = (_LETTER_INCHES * max(len(word(name, _LETTERS)) for name in names) for names in (rows, columns))
    inches = min(WIDTH - left - 0.15, 0.2 + 0.5 * len(columns))
    height = max(_LEAST_INCHES, inches * len(rows) / max(1, len(columns)))
    figure: Figure = Figure(figsize=(WIDTH, height + above + _SCALE_INCHES), layout="constrained")
    top, bottom = figure.subplots(2, height_ratios=(height + above, 0.12))
    _map(top, cells, scale.low, scale.high)
    _names(top, rows, columns)
    _legend(bottom, scale)
    return inline(figure, name)


def _map(axes: "Axes", cells: Cells, low: float, high: float) -> None:
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


def _names(axes: "Axes", rows: Sequence[str], columns: Sequence[str]) -> None:
    """Of many names every n-th."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    across, down = -(-len(columns) // _NAMES_ACROSS), -(-len(rows) // _NAMES_DOWN)
    axes.set_xticks(
        range(0, len(columns), across), [word(name, _LETTERS) for name in columns[::across]], rotation=60, ha="left",
        rotation_mode="anchor", fontsize=SMALL,
    )  # fmt: skip
    axes.set_yticks(range(0, len(rows), down), [word(name, _LETTERS) for name in rows[::down]], fontsize=SMALL)


def _legend(axes: "Axes", scale: Scale) -> None:
    # An image rather than matplotlib's own colour bar, which is 256 shapes.
    axes.imshow([range(256)], cmap="cividis", aspect="auto", extent=(scale.low, scale.high, 0, 1), interpolation="none")
    axes.set_yticks([])
    axes.set_xlabel(scale.unit)
    axes.spines[:].set(visible=True, edgecolor=MUTED)
