"""The course of a run: a row for each rank, its trials over the time, coloured by stage.

What did not end well is hatched and says how; a triangle is the moment at which the rank came, a cross that at which it
was gone.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddpdiag.model.timeline import Bar, Lane, Timeline, Unfinished
from ddpdiag.render.hosts import fold_hosts, fold_ranks
from ddpdiag.render.plots.drawing import BAD, INK, PAPER, SERIES, WIDTH, inline, word

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW_INCHES, _AROUND_INCHES = 0.24, 0.95
_HEIGHT = 0.7
# A span of so much of the run has room for a word, and for the step's name, cut to so many letters.
_WORD_SHARE, _STEP_SHARE, _LETTERS = 0.12, 0.35, 34


def draw_timeline(timeline: Timeline, name: str) -> str:
    """The SVG element; within `page_style`."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    stages = list(dict.fromkeys(bar.stage for bar in timeline.trials))
    colors = {stage: SERIES[number % len(SERIES)] for number, stage in enumerate(stages)}
    legend = 0.2 * -(-len(stages) // 3)
    height = _AROUND_INCHES + legend + _ROW_INCHES * max(2, len(timeline.lanes))
    figure: Figure = Figure(figsize=(1.5 * WIDTH, height), layout="constrained")
    axes = figure.subplots()
    for row, lane in enumerate(timeline.lanes):
        _lane(axes, row, lane, timeline, colors)
    axes.set_yticks(range(len(timeline.lanes)), [word(_label(lane), 20) for lane in timeline.lanes])
    axes.set_ylim(len(timeline.lanes) - 0.4, -0.6)
    axes.set_xlim(0, 1.02 * max(timeline.seconds, 1e-3))
    axes.set_xlabel("seconds since the start")
    axes.grid(visible=True, axis="x")
    axes.tick_params(axis="y", length=0)
    handles = [Patch(color=colors[stage], label=word(stage)) for stage in stages]
    if handles:
        figure.legend(handles=handles, loc="outside lower left", ncols=4, handlelength=1.2, columnspacing=1.0)
    return inline(figure, name)


def _label(lane: Lane) -> str:
    return f"{lane.rank}  {lane.node}"


def _lane(axes: "Axes", row: int, lane: Lane, timeline: Timeline, colors: dict[str, str]) -> None:
    ends = {own.number: own for own in lane.unfinished}
    for bar, seconds in zip(timeline.trials, lane.seconds, strict=True):
        if seconds is None or bar.number in ends:
            continue
        span = [(bar.begin_seconds, seconds)]
        axes.broken_barh(span, (row - _HEIGHT / 2, _HEIGHT), facecolor=colors[bar.stage], edgecolor="none")
    for bar, seconds in zip(timeline.trials, lane.seconds, strict=True):
        if seconds is not None and bar.number in ends:
            _bad(axes, row, bar, seconds, ends[bar.number], timeline.seconds)
    if lane.arrived_seconds is None:
        axes.text(0, row, " never came", va="center", fontsize=8, color=BAD)
    else:
        axes.plot([lane.arrived_seconds], [row], marker=">", markersize=4, color=INK, clip_on=False)
    if lane.gone_seconds is not None:
        axes.plot([lane.gone_seconds], [row], marker="X", markersize=6, color=BAD)


def _bad(axes: "Axes", row: int, bar: Bar, seconds: float, ended: Unfinished, whole: float) -> None:
    """How it ended is written into the span, or beside one that is too short for it."""
    span = [(bar.begin_seconds, seconds)]
    axes.broken_barh(span, (row - _HEIGHT / 2, _HEIGHT), facecolor="none", edgecolor=BAD, hatch="xxx")
    if seconds > _WORD_SHARE * whole:
        at, side = bar.begin_seconds + seconds / 2, "center"
    elif bar.begin_seconds + seconds < 0.75 * whole:
        at, side = bar.begin_seconds + seconds, "left"
    else:
        at, side = bar.begin_seconds, "right"
    text = f"{ended.status}: {ended.at}" if ended.at and seconds > _STEP_SHARE * whole else f" {ended.status} "
    box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.0}
    axes.text(at, row, word(text, _LETTERS), va="center", ha=side, fontsize=8, color=INK, bbox=box)


def said(timeline: Timeline) -> Sequence[str]:
    """What did not end well, in words: "ranks 0-2 on h[0-1] hung in COL001 (connect all ranks: wait)"."""
    codes = {bar.number: bar.code for bar in timeline.trials}
    what: dict[str, list[Lane]] = {}
    for lane in timeline.lanes:
        if lane.arrived_seconds is None:
            what.setdefault("never came", []).append(lane)
        for own in lane.unfinished:
            at = f" ({own.at})" if own.at else ""
            what.setdefault(f"{own.status} in {codes[own.number]}{at}", []).append(lane)
    return [f"{_who(lanes)} {told}" for told, lanes in what.items()]


def _who(lanes: Sequence[Lane]) -> str:
    noun = "rank" if len(lanes) == 1 else "ranks"
    return f"{noun} {fold_ranks(lane.rank for lane in lanes)} on {fold_hosts(lane.node for lane in lanes)}"
