"""Draw line charts as inline SVG. Colours are CSS variables of the page, and sizes are CSS pixels.

Lines differ in colour and in dashes, and the legend names each line, so that no reader needs colours.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from ddpdiag.render.blocks import Chart, Line
from ddpdiag.render.page import clip_text, one_line
from ddpdiag.text import column_unit, count, label, quantity

_COLORS, _LINES_SHOWN, _NAME_LETTERS = 8, 8, 40
# On a phone with 360 pixels a chart has 302 pixels. Letters of 11.5 pixels are then still larger than 10 pixels.
_WIDTH, _HEIGHT, _FONT_SIZE = 330, 190, 11.5
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 18, 34
_TICKS, _LINE_HEIGHT = 5, 16
_DASHES = ("", "8 3", "2 2", "8 3 2 3", "12 3", "4 4", "1 3", "12 3 2 3")


def drawable(chart: Chart) -> list[Line]:
    """The lines of a chart that can be drawn: the first `_LINES_SHOWN`, without points that no axis can show."""
    lines = (
        Line(line.name, tuple((x, y) for x, y in line.points if 0 < x < math.inf and 0 <= y < 1e30), line.is_dashed)
        for line in chart.lines
    )
    return [line for line in lines if line.points][:_LINES_SHOWN]


def svg_of(chart: Chart) -> str:
    """The SVG element of a chart, or an empty text if there is no line to draw."""
    lines = drawable(chart)
    if not lines:
        return ""
    height = _HEIGHT + _LINE_HEIGHT * len(lines)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-size="{_FONT_SIZE}" '
        'fill="currentColor" font-family="var(--font)">'
    )
    return "".join((head, *_axes_and_lines(chart, lines), *_legend(lines), "</svg>"))


def _axes_and_lines(chart: Chart, lines: Sequence[Line]) -> Iterator[str]:
    xs = sorted({math.log2(x) for line in lines for x, _ in line.points})
    values = [y for line in lines for _, y in line.points]
    unit = column_unit(chart.y_name, values)
    highest = max(values) or 1.0
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def position(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - xs[0]) / (xs[-1] - xs[0]) if xs[-1] > xs[0] else 0.5
        return _LEFT + across * (right - _LEFT), bottom - y / highest * (bottom - _TOP)

    yield _text(0, 11, f"{label(chart.y_name)} {unit.symbol}".strip())
    for tick in _round_steps(highest / unit.size):
        y = position(2 ** xs[0], tick * unit.size)[1]
        yield f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="var(--line)"/>'
        yield _text(_LEFT - 5, y + 4, _tick_text(tick), "end")
    for number, tick in enumerate(shown := xs[:: max(1, -(-len(xs) // _TICKS))]):
        x, side = position(2**tick, values[0])[0], "start" if number == 0 else "middle"
        side = "end" if x > right - 20 and number else side
        yield _text(x, bottom + 15, quantity(chart.x_name, round(2**tick)), side)
    yield _text((_LEFT + right) / 2, bottom + 30, label(chart.x_name), "middle") if shown else ""
    for number, line in enumerate(lines):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (position(*point) for point in line.points))
        yield f'<polyline points="{points}" {_stroke(number, line)}/>'
        if not line.is_dashed:
            for x, y in (position(*point) for point in line.points):
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{_color(number)}"/>'


def _legend(lines: Iterable[Line]) -> Iterator[str]:
    for number, line in enumerate(lines):
        y = _HEIGHT + _LINE_HEIGHT * number
        yield f'<path d="M4 {y + 4}h26" {_stroke(number, line)}/>'
        yield _text(36, y + 8, clip_text(line.name, _NAME_LETTERS))


def _stroke(number: int, line: Line) -> str:
    dashes = "4 4" if line.is_dashed else _DASHES[number % _COLORS]
    color = "var(--muted)" if line.is_dashed else _color(number)
    return f'fill="none" stroke="{color}" stroke-width="1.6"' + (f' stroke-dasharray="{dashes}"' if dashes else "")


def _color(number: int) -> str:
    return f"var(--s{number % _COLORS + 1})"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _round_steps(highest: float) -> Iterator[float]:
    """Yield round numbers from 0 up to `highest`: 0, 2, 4, ... or 0, 0.5, 1, ..."""
    power = 10 ** math.floor(math.log10(highest / 4))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= highest / 4)
    for number in range(int(highest / step + 1e-9) + 1):
        yield number * step


def _tick_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 and value < 1e7 else f"{value:g}"


def alt_text(chart: Chart) -> str:
    """Describe a chart in words: the first, the highest and the last point of each line."""
    texts = []
    for line in drawable(chart):
        ends = dict.fromkeys((line.points[0], max(line.points, key=lambda point: point[1]), line.points[-1]))
        points = (f"{quantity(chart.y_name, y)} at {quantity(chart.x_name, x)}" for x, y in ends)
        texts.append(f"{line.name} {', '.join(points)}")
    omitted = len(chart.lines) - len(texts)
    rest = f"; {count(omitted, 'more line')} in the JSON report" if omitted else ""
    return one_line(f"{label(chart.y_name)} over {label(chart.x_name)}: {'; '.join(texts)}{rest}.")
