"""Line charts and the timeline as inline SVG: the page's colours by CSS variables, sizes in CSS pixels.

In the timeline each rank has a row with its trials, coloured by stage. What failed is hatched, in red for blamed ranks
and in grey for others, and says how it ended. A triangle is the moment at which the rank joined, a cross that at which
it was lost.

Lines of a chart differ in colour and in dashes, and the legend names each, so that no reader needs colours.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from ddpdiag.model.report import Lane
from ddpdiag.render.blocks import Chart, Line, Timeline
from ddpdiag.render.page import one_line
from ddpdiag.text import column_unit, count, fold_hosts, label, quantity, ranks_text, seconds

_COLORS, _LINES_SHOWN, _NAME_LETTERS = 8, 8, 40
# A phone of 360 pixels has 302 for a chart; letters of 11.5 pixels are then still larger than 10.
_WIDTH, _HEIGHT, _LETTERS = 330, 190, 11.5
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 18, 34
_TICKS, _LINE_HEIGHT = 5, 16
_DASHES = ("", "8 3", "2 2", "8 3 2 3", "12 3", "4 4", "1 3", "12 3 2 3")


def svg_of(block: Chart | Timeline) -> str:
    """The SVG element; empty where there is nothing to draw."""
    return draw_chart(block) if isinstance(block, Chart) else _draw_timeline(block)


def in_words(block: Chart | Timeline) -> str:
    """The text beside the picture, which says what it shows."""
    return _chart_in_words(block) if isinstance(block, Chart) else _timeline_in_words(block)


def drawable(chart: Chart) -> list[Line]:
    """The first lines, without points that no axis can show."""
    lines = (
        Line(own.name, tuple(point for point in own.points if _fits(chart, *point)), own.dashed) for own in chart.lines
    )
    return [line for line in lines if line.points][:_LINES_SHOWN]


def _fits(chart: Chart, x: float, y: float) -> bool:
    return math.isfinite(x) and x > 0 and math.isfinite(y) and (y > 0 if chart.log else y >= 0) and y < 1e30


def draw_chart(chart: Chart) -> str:
    """The SVG element; empty where there is no line to draw."""
    lines = drawable(chart)
    if not lines:
        return ""
    height = _HEIGHT + _LINE_HEIGHT * len(lines)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-size="{_LETTERS}" '
        'fill="currentColor" font-family="var(--font)">'
    )
    return "".join((head, *_axes_and_lines(chart, lines), *_legend(lines), "</svg>"))


def _axes_and_lines(chart: Chart, lines: Sequence[Line]) -> Iterator[str]:
    xs = sorted({math.log2(x) for line in lines for x, _ in line.points})
    values = [y for line in lines for _, y in line.points]
    unit = column_unit(chart.y, values)
    low = math.floor(math.log10(min(values))) if chart.log else 0.0
    high = max(math.ceil(math.log10(max(values))), low + 1) if chart.log else max(values) or 1.0
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - xs[0]) / (xs[-1] - xs[0]) if xs[-1] > xs[0] else 0.5
        up = ((math.log10(y) if chart.log else y) - low) / (high - low)
        return _LEFT + across * (right - _LEFT), bottom - up * (bottom - _TOP)

    yield _text(0, 11, f"{label(chart.y)} {unit.symbol}".strip())
    ticks = (
        [10.0**power for power in range(int(low), int(high) + 1)] if chart.log else [*_round_steps(high / unit.size)]
    )
    for tick in ticks:
        y = place(2 ** xs[0], tick if chart.log else tick * unit.size)[1]
        yield f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="var(--line)"/>'
        yield _text(_LEFT - 5, y + 4, _short(tick / unit.size if chart.log else tick), "end")
    for number, tick in enumerate(shown := xs[:: max(1, -(-len(xs) // _TICKS))]):
        x, side = place(2**tick, values[0])[0], "start" if number == 0 else "middle"
        yield _text(x, bottom + 15, quantity(chart.x, round(2**tick)), "end" if x > right - 20 and number else side)
    yield _text((_LEFT + right) / 2, bottom + 30, label(chart.x), "middle") if shown else ""
    for number, line in enumerate(lines):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line.points))
        yield f'<polyline points="{points}" {_stroke(number, line)}/>'
        if not line.dashed:
            for x, y in (place(*point) for point in line.points):
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{_color(number)}"/>'


def _legend(lines: Iterable[Line]) -> Iterator[str]:
    for number, line in enumerate(lines):
        y = _HEIGHT + _LINE_HEIGHT * number
        yield f'<path d="M4 {y + 4}h26" {_stroke(number, line)}/>'
        yield _text(36, y + 8, _cut(line.name, _NAME_LETTERS))


def _stroke(number: int, line: Line) -> str:
    dashes = "4 4" if line.dashed else _DASHES[number % _COLORS]
    color = "var(--muted)" if line.dashed else _color(number)
    return f'fill="none" stroke="{color}" stroke-width="1.6"' + (f' stroke-dasharray="{dashes}"' if dashes else "")


def _color(number: int) -> str:
    return f"var(--s{number % _COLORS + 1})"


def _text(x: float, y: float, text: str, anchor: str = "start", *, halo: bool = False) -> str:
    """A text; with a `halo` it can be read on what is below it."""
    style = ' class="halo"' if halo else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _round_steps(most: float) -> Iterator[float]:
    """Round numbers from 0 up to `most`: 0, 2, 4, ... or 0, 0.5, 1, ..."""
    power = 10 ** math.floor(math.log10(most / 4))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= most / 4)
    for number in range(int(most / step + 1e-9) + 1):
        yield number * step


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 and value < 1e7 else f"{value:g}"


def _chart_in_words(chart: Chart) -> str:
    """The alternative text of a chart: both ends and the highest point of each line."""
    texts = []
    for line in drawable(chart):
        ends = dict.fromkeys((line.points[0], max(line.points, key=lambda point: point[1]), line.points[-1]))
        texts.append(f"{line.name} {', '.join(f'{quantity(chart.y, y)} at {quantity(chart.x, x)}' for x, y in ends)}")
    left = len(chart.lines) - len(texts)
    rest = f"; {count(left, 'more line')} in the JSON report" if left else ""
    return one_line(f"{label(chart.y)} over {label(chart.x)}: {'; '.join(texts)}{rest}.")


# Timeline -------------------------------------------------------------------------------------------------------------

_WIDE, _ROW, _BAR, _MARGIN = 720, 22, 15, 8
_PIXELS_PER_LETTER, _NAME_OF_RANK, _ENDS_SAID = 6.3, 20, 6
_HATCHES = (
    '<defs><pattern id="{id}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M0 0V6M0 0H6" stroke="{color}" stroke-width="1.6"/></pattern></defs>'
)


def _draw_timeline(block: Timeline) -> str:
    """The SVG element."""
    timeline = block.timeline
    colors = {stage: _color(number) for number, stage in enumerate(dict.fromkeys(bar.stage for bar in timeline.trials))}
    names = {lane.rank: _cut(f"{lane.rank} {lane.host}", _NAME_OF_RANK) for lane in timeline.lanes}
    left = 2 * _MARGIN + _PIXELS_PER_LETTER * max(map(len, names.values()))
    scale = (_WIDE - left - 2 * _MARGIN) / max(timeline.seconds, 1e-3)
    bottom = _ROW * len(names) + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {bottom + 64}" font-size="{_LETTERS}" '
        'fill="currentColor" font-family="var(--font)">',
        _HATCHES.format(id="hatch-bad", color="var(--bad)"),
        _HATCHES.format(id="hatch-muted", color="var(--muted)"),
    ]
    for tick in _round_steps(max(timeline.seconds, 1e-3)):
        x = left + tick * scale
        parts += [
            f'<path d="M{x:.1f} 0V{bottom}" stroke="var(--line)"/>',
            _text(x, bottom + 14, _short(tick), "middle"),
        ]
    parts.append(_text((left + _WIDE) / 2, bottom + 30, "seconds since the start", "middle"))
    for number, lane in enumerate(timeline.lanes):
        y = _ROW * number + 4
        blamed = lane.rank in block.blamed
        style = ' fill="var(--bad)" font-weight="bold"' if blamed else ""
        parts.append(
            f'<text x="{left - _MARGIN:.1f}" y="{y + 12}" text-anchor="end"{style}>{escape(names[lane.rank])}</text>'
        )
        parts += _lane(lane, block, colors, _Place(left, y, scale))
    parts += _timeline_legend(block, colors, bottom + 52)
    return "".join((*parts, "</svg>"))


class _Place(NamedTuple):
    """The place of a rank's row: the left end, the top, and the pixels for a second."""

    left: float
    top: float
    scale: float


def _lane(lane: Lane, block: Timeline, colors: Mapping[str, str], place: _Place) -> Iterator[str]:
    ends = {own.number: own for own in lane.unfinished}
    blamed = lane.rank in block.blamed
    timed = [(bar, took) for bar, took in zip(block.timeline.trials, lane.seconds, strict=True) if took is not None]
    middle = place.top + 12
    # What failed lies above the rest, with its words.
    for bar, took in sorted(timed, key=lambda own: own[0].number in ends):
        x, width = place.left + bar.begin_seconds * place.scale, max(took * place.scale, 0.5)
        box = f'x="{x:.1f}" y="{place.top}" width="{width:.1f}" height="{_BAR}"'
        if (ended := ends.get(bar.number)) is None:
            yield f'<rect {box} fill="{colors[bar.stage]}"/>'
            continue
        yield f'<rect {box} fill="{colors[bar.stage]}" fill-opacity="0.35"/>'
        yield f'<rect {box} fill="url(#hatch-{"bad" if blamed else "muted"})"/>'
        text = f"{'blamed, ' if blamed else ''}{ended.status}"
        step = f"{text} at {ended.at}" if ended.at else text
        text = _cut(step if len(step) * _PIXELS_PER_LETTER < width else text, 60)
        # Beside a bar that is too short for it, where the page has room.
        room = x + width + len(text) * _PIXELS_PER_LETTER < _WIDE
        inside = len(text) * _PIXELS_PER_LETTER < width
        x, side = (x + width / 2, "middle") if inside else (x + width + 3, "start") if room else (x - 3, "end")
        yield _text(x, middle, text, side, halo=True)
    if lane.arrived_seconds is None:
        yield _text(place.left + 3, middle, "never joined", halo=True)
    else:
        x = place.left + lane.arrived_seconds * place.scale
        yield f'<path d="M{x:.1f} {place.top + 3}l7 4.5l-7 4.5z"/>'
    if lane.gone_seconds is not None:
        x = place.left + lane.gone_seconds * place.scale
        yield f'<path d="M{x - 5:.1f} {place.top + 2}l10 11m0 -11l-10 11" stroke="var(--bad)" stroke-width="2.5"/>'


def _timeline_legend(block: Timeline, colors: Mapping[str, str], y: float) -> Iterator[str]:
    """The colours of the stages, and the hatches that are in use."""
    failed = {lane.rank in block.blamed for lane in block.timeline.lanes if lane.unfinished}
    entries = {
        **colors,
        **({"blamed": "url(#hatch-bad)"} if True in failed else {}),
        **({"failed": "url(#hatch-muted)"} if False in failed else {}),
    }
    x: float = _MARGIN
    for name, fill in entries.items():
        text = _cut(name, _NAME_OF_RANK)
        yield f'<rect x="{x:.1f}" y="{y - 10}" width="16" height="11" fill="{fill}"/>'
        yield _text(x + 20, y, text)
        x += 36 + _PIXELS_PER_LETTER * len(text)


def _timeline_in_words(block: Timeline) -> str:
    """The failed trials with their ranks, blamed ranks first: "rank 3 on h1 hung in COL001, blamed"."""
    timeline = block.timeline
    codes = {bar.number: bar.code for bar in timeline.trials}
    lanes: dict[tuple[bool, str], list[Lane]] = {}
    for lane in timeline.lanes:
        blamed = lane.rank in block.blamed
        if lane.arrived_seconds is None:
            lanes.setdefault((blamed, "never joined"), []).append(lane)
        for end in lane.unfinished:
            at = f" ({end.at})" if end.at else ""
            lanes.setdefault((blamed, f"{end.status} in {codes[end.number]}{at}"), []).append(lane)
    texts = []
    for (blamed, ending), group in sorted(lanes.items(), key=lambda item: not item[0][0]):
        # A "?" stands for a host that no rank has named.
        hosts = [lane.host for lane in group if lane.host.strip("?")]
        ranks = ranks_text(lane.rank for lane in group) + (f" on {fold_hosts(hosts)}" if hosts else "")
        texts.append(f"{ranks} {ending}{', blamed' if blamed else ''}")
    more = f"; and {len(texts) - _ENDS_SAID:,} more" if len(texts) > _ENDS_SAID else ""
    said = f"{'; '.join(texts[:_ENDS_SAID])}{more}" if texts else "no trial was cut short"
    blamed_ranks = [lane.rank for lane in timeline.lanes if lane.rank in block.blamed]
    rest = f" Blamed: {ranks_text(blamed_ranks)}." if blamed_ranks and not texts else ""
    if len(timeline.lanes) < timeline.ranks_in_all:
        rest += " Blamed, late, lost and failed ranks are chosen first."
    if len(timeline.trials) < timeline.trials_in_all:
        rest += f" The {len(timeline.trials)} longest of {timeline.trials_in_all:,} trials."
    ranks = f"{len(timeline.lanes)} of {count(timeline.ranks_in_all, 'rank')}"
    return one_line(f"{ranks} over {seconds(timeline.seconds)}: {said}.{rest}")


def _cut(text: str, most: int) -> str:
    line = one_line(text)
    return line if len(line) <= most else f"{line[: most - 3]}..."
