"""The course of a run: a row for each rank, its trials over the time, coloured by stage.

What did not end well is hatched, in red for ranks that a finding blames and in grey for those that only waited, and
says how it ended; a triangle is the moment at which the rank came, a cross that at which it was gone.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ddpdiag.model.timeline import Lane, Timeline, Unfinished
from ddpdiag.render.plots.drawing import BAD, INK, MUTED, PAPER, SERIES, SMALL, WIDTH, inline, word
from ddpdiag.text import fold_hosts, fold_ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

_ROW_INCHES, _AROUND_INCHES = 0.26, 0.75
_HEIGHT = 0.7
# For a screen that is wider than a phone, where the row of a rank has room for words.
_WIDE = 2.0
# Letters of a word in a span: so many for an inch.
_LETTERS_PER_INCH = 13.0
_HATCH = "xxx"
# Of the stage's colour below the hatch.
_PALE = 0.35


class _Scene(NamedTuple):
    """What all rows share: colours by stage, the ranks to blame, inches for a second, what steps have in common."""

    timeline: Timeline
    colors: Mapping[str, str]
    blamed: Collection[int]
    inches_per_second: float
    shared: Mapping[int, str]


def draw_timeline(timeline: Timeline, blamed: Collection[int], name: str, *, wide: bool) -> str:
    """The SVG element, for a phone or `wide`; within `page_style`."""
    from matplotlib.figure import Figure

    stages = list(dict.fromkeys(bar.stage for bar in timeline.trials))
    colors = {stage: SERIES[number % len(SERIES)] for number, stage in enumerate(stages)}
    inches = WIDTH * (_WIDE if wide else 1.0)
    names = [word(f"{lane.rank} {lane.node}", 20 if wide else 10) for lane in timeline.lanes]
    plot_inches = inches - 0.15 - 0.085 * max(map(len, names), default=0)
    scene = _Scene(timeline, colors, blamed, plot_inches / max(timeline.seconds, 1e-3), _shared(timeline))
    handles = [*_stages(colors), *_ends(timeline, blamed)]
    columns = 7 if wide else 3
    height = _AROUND_INCHES + 0.22 * -(-len(handles) // columns) + _ROW_INCHES * max(2, len(timeline.lanes))
    figure: Figure = Figure(figsize=(inches, height), layout="constrained")
    axes = figure.subplots()
    for row, lane in enumerate(timeline.lanes):
        _lane(axes, row, lane, scene)
    axes.set_yticks(range(len(timeline.lanes)), names)
    for tick, lane in zip(axes.get_yticklabels(), timeline.lanes, strict=True):
        tick.set(color=BAD, fontweight="bold") if lane.rank in blamed else None
    axes.set_ylim(len(timeline.lanes) - 0.4, -0.6)
    axes.set_xlim(0, 1.02 * max(timeline.seconds, 1e-3))
    axes.set_xlabel("seconds since the start")
    axes.grid(visible=True, axis="x")
    axes.tick_params(axis="y", length=0)
    if handles:
        figure.legend(handles=handles, loc="outside lower left", ncols=columns, handlelength=1.2, columnspacing=1.0)
    return inline(figure, name)


def _stages(colors: Mapping[str, str]) -> "Iterator[Patch]":
    from matplotlib.patches import Patch

    for stage, color in colors.items():
        yield Patch(color=color, label=word(stage))


def _ends(timeline: Timeline, blamed: Collection[int]) -> "Iterator[Patch]":
    """What the hatches mean, as far as there are some."""
    from matplotlib.patches import Patch

    found = {lane.rank in blamed for lane in timeline.lanes if lane.unfinished}
    for is_blamed, text in ((True, "blamed"), (False, "did not end well")):
        if is_blamed in found:
            yield Patch(facecolor="none", edgecolor=BAD if is_blamed else MUTED, hatch=_HATCH, label=text)


def _shared(timeline: Timeline) -> dict[int, str]:
    """What the steps begin with at which the ranks of a trial stopped, of each trial: "connect all ranks: "."""
    steps: dict[int, list[str]] = {}
    for lane in timeline.lanes:
        for own in lane.unfinished:
            steps.setdefault(own.number, []).append(own.at)
    heads = {number: {at.rpartition(": ")[0] for at in own} for number, own in steps.items()}
    return {number: f"{head}: " for number, own in heads.items() if len(own) == 1 and (head := next(iter(own)))}


def _lane(axes: "Axes", row: int, lane: Lane, scene: _Scene) -> None:
    ends = {own.number: own for own in lane.unfinished}
    timed = [(bar, took) for bar, took in zip(scene.timeline.trials, lane.seconds, strict=True) if took is not None]
    # What did not end well lies above the others, with its words.
    for bar, seconds in sorted(timed, key=lambda own: own[0].number in ends):
        span, place = [(bar.begin_seconds, seconds)], (row - _HEIGHT / 2, _HEIGHT)
        pale = bar.number in ends
        axes.broken_barh(span, place, facecolor=(scene.colors[bar.stage], _PALE if pale else 1.0), edgecolor="none")
        if pale:
            edge = BAD if lane.rank in scene.blamed else MUTED
            axes.broken_barh(span, place, facecolor="none", edgecolor=edge, hatch=_HATCH)
            _word(axes, row, (bar.begin_seconds, seconds), _end(lane, ends[bar.number], scene), scene)
    if lane.arrived_seconds is None:
        axes.text(0, row, " never came", va="center", fontsize=SMALL, color=BAD)
    else:
        axes.plot([lane.arrived_seconds], [row], marker=">", markersize=4, color=INK, clip_on=False)
    if lane.gone_seconds is not None:
        axes.plot([lane.gone_seconds], [row], marker="X", markersize=6, color=BAD)


def _end(lane: Lane, ended: Unfinished, scene: _Scene) -> tuple[str, ...]:
    """How it ended, from the longest text to the shortest: one that its span has room for is shown."""
    whose = "blamed, " if lane.rank in scene.blamed else ""
    step = ended.at.removeprefix(scene.shared.get(ended.number, ""))
    told = (ended.at, step) if ended.at else ()
    return (*(f"{whose}{ended.status} at {at}" for at in told), f"{whose}{ended.status}", whose[:-2] or ended.status)


def _word(axes: "Axes", row: int, span: tuple[float, float], texts: Sequence[str], scene: _Scene) -> None:
    """Into the span, or the shortest beside one that is too short for it."""
    begin, seconds = span
    inches = seconds * scene.inches_per_second
    fitting = next((text for text in texts if len(text) + 2 <= inches * _LETTERS_PER_INCH), "")
    if fitting:
        at, side = begin + seconds / 2, "center"
    elif begin + seconds < 0.75 * scene.timeline.seconds:
        at, side = begin + seconds, "left"
    else:
        at, side = begin, "right"
    box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.0}
    text = word(fitting or texts[-1], 60)
    axes.text(at, row, text if fitting else f" {text} ", va="center", ha=side, fontsize=SMALL, color=INK, bbox=box)


def said(timeline: Timeline, blamed: Collection[int]) -> Sequence[str]:
    """What did not end well, in words, blamed ranks first: "rank 3 on h1 hung in COL001 (wait), blamed"."""
    codes = {bar.number: bar.code for bar in timeline.trials}
    what: dict[tuple[bool, str], list[Lane]] = {}
    for lane in timeline.lanes:
        is_blamed = lane.rank in blamed
        if lane.arrived_seconds is None:
            what.setdefault((is_blamed, "never came"), []).append(lane)
        for own in lane.unfinished:
            at = f" ({own.at})" if own.at else ""
            what.setdefault((is_blamed, f"{own.status} in {codes[own.number]}{at}"), []).append(lane)
    ordered = sorted(what.items(), key=lambda item: not item[0][0])
    return [f"{_who(lanes)} {told}{', blamed' if is_blamed else ''}" for (is_blamed, told), lanes in ordered]


def _who(lanes: Sequence[Lane]) -> str:
    noun = "rank" if len(lanes) == 1 else "ranks"
    # A "?" stands for a host that nobody has named.
    hosts = [lane.node for lane in lanes if lane.node.strip("?")]
    on = f" on {fold_hosts(hosts)}" if hosts else ""
    return f"{noun} {fold_ranks(lane.rank for lane in lanes)}{on}"
