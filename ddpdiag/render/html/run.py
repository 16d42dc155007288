"""The timeline of a run: which rank was where when, then stages, seconds, waits and checks as tables.

In the picture each rank has a row with its trials over the time, coloured by stage. What did not end well is hatched,
in red for ranks that a finding blames and in grey for those that only waited, and says how it ended; a triangle is the
moment at which the rank came, a cross that at which it was gone.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ddpdiag.model import Report, Severity
from ddpdiag.model.report import KINDS, Lane, Timeline, Unfinished
from ddpdiag.render.html.page import Cell, Figure, Section, Table, columns, words
from ddpdiag.render.plots import BAD, INK, MUTED, PAPER, SERIES, SMALL, WIDTH, inline, word
from ddpdiag.render.terminal import outcomes_text
from ddpdiag.render.terminal.findings import SEVERITIES
from ddpdiag.render.terminal.ranks import blamed
from ddpdiag.text import ABSENT, count, fold_hosts, fold_ranks, ranks_text, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

_WAITS_SHOWN, _NAMES_SHOWN, _ENDS_SAID = 10, 8, 6
# Two decimals are shown: what would read 0.00 is none.
_LEAST_SECONDS = 0.005
_NOT_WELL = frozenset({"error", "hung", "died", "raised", "unheard"})
_ROW_INCHES, _AROUND_INCHES = 0.26, 0.75
_HEIGHT = 0.7
# For a screen that is wider than a phone, where the row of a rank has room for words.
_WIDE = 2.0
# Letters of a word in a span: so many for an inch.
_LETTERS_PER_INCH = 13.0
_HATCH = "xxx"
# Of the stage's colour below the hatch.
_PALE = 0.35


def timeline_section(report: Report) -> Section:
    """The ranks over the time of the run."""
    tables = (_stages(report), _spent(report), _waits(report))
    return Section(
        name="timeline",
        title="Timeline",
        sentence="A triangle marks the moment at which a rank joined, a cross that at which it was lost. Trials that "
        "failed are cross-hatched: in red for ranks that a finding blames, in grey for all others.",
        figures=_timeline(report),
        tables=tuple(own for own in tables if own is not None and own.rows),
    )


def _timeline(report: Report) -> tuple[Figure, ...]:
    timeline = report.timeline
    if timeline is None or not timeline.lanes:
        return ()
    blamed = _blamed_ranks(report)
    bad, red = _not_well(timeline, blamed), [lane.rank for lane in timeline.lanes if lane.rank in blamed]
    rest = f"; and {len(bad) - _ENDS_SAID:,} more" if len(bad) > _ENDS_SAID else ""
    told = f"{'; '.join(bad[:_ENDS_SAID])}{rest}" if bad else "no trial was cut short"
    ranks = f"{len(timeline.lanes)} of {count(timeline.ranks_in_all, 'rank')}"
    left = [f"Blamed: {ranks_text(red)}."] if red and not bad else []
    if len(timeline.lanes) < timeline.ranks_in_all:
        left.append("Blamed, late, lost and failed ranks are chosen first.")
    if len(timeline.trials) < timeline.trials_in_all:
        left.append(f"The {len(timeline.trials)} longest of {timeline.trials_in_all:,} trials.")
    return (
        Figure(
            title="Ranks over the time of the run",
            svg=_drawn(timeline, blamed, "timeline", wide=True),
            narrow=_drawn(timeline, blamed, "timeline-narrow", wide=False),
            alt=words(f"{ranks} over {seconds(timeline.seconds)}: {told}."),
            sentence=" ".join(left),
        ),
    )


def _blamed_ranks(report: Report) -> frozenset[int]:
    """The ranks that errors blame; where none does, those that warnings blame."""
    marks = blamed(report.findings, report.ranks)
    worst = Severity.ERROR if Severity.ERROR in marks.values() else Severity.WARNING
    return frozenset(rank for rank, severity in marks.items() if severity is worst)


def _stages(report: Report) -> Table:
    """Each stage with the findings about it, then those of the run that are about none."""
    rows = [
        _stage(stage.name, stage.status, stage.severity, f"{stage.seconds:.2f}", stage.codes) for stage in report.stages
    ]
    known = {code for stage in report.stages for code in stage.codes}
    if others := [finding for finding in report.findings if finding.code not in known]:
        worst = min((finding.severity for finding in others), key=SEVERITIES.index)
        codes = tuple(dict.fromkeys(finding.code for finding in others))
        rows.append(_stage("run", "done" if worst is Severity.NOTE else worst.value, worst, ABSENT, codes))
    return Table(
        name="stages",
        caption="Stages",
        columns=columns("stage", "outcome", "seconds", "findings", right=(2,)),
        rows=tuple(rows),
    )


def _stage(name: str, status: str, severity: Severity | None, spent: str, codes: tuple[str, ...]) -> tuple[Cell, ...]:
    mark = "warn" if status in ("warning", "part", "interrupted") else ""
    return (
        Cell(words(name)),
        Cell(words(status), mark="bad" if status in _NOT_WELL or severity is Severity.ERROR else mark),
        Cell(ABSENT if status == "skipped" else spent),
        Cell(words(", ".join(codes) or ABSENT)),
    )


def _spent(report: Report) -> Table | None:
    """Where the seconds went, by stage and kind."""
    timings = report.timings
    if timings is None:
        return None
    # Why the whole is not what stands at the top of the page, where it is not.
    told, spent = seconds(report.seconds), seconds(timings.seconds)
    two = (
        f"The {spent} are from the start of rank 0's process to the verdict; the {told} at the top of the page begin "
        "when rank 0 waits for the others, and end before the judgement."
    )
    kinds = [kind for kind in KINDS if any(row.kinds.get(kind, 0.0) >= _LEAST_SECONDS for row in timings.stages)]
    return Table(
        name="seconds",
        caption=f"Where {spent} went, in seconds",
        columns=columns("stage", "total", *kinds, right=range(1, 2 + len(kinds))),
        rows=tuple(
            (
                Cell(words(row.stage)),
                Cell(f"{row.seconds:.2f}"),
                *(
                    Cell(f"{own:.2f}" if (own := row.kinds.get(kind, 0.0)) >= _LEAST_SECONDS else ABSENT)
                    for kind in kinds
                ),
            )
            for row in timings.stages
        ),
        note="" if told == spent else two,
        folded=True,
    )


def _waits(report: Report) -> Table:
    return Table(
        name="waits",
        caption="Ranks that the others waited for",
        columns=columns("ranks", "hosts", "seconds", "longest in", "by", right=(2,)),
        rows=tuple(
            (
                Cell(fold_ranks(wait.ranks, limit=_NAMES_SHOWN) or "many ranks"),
                Cell(words(fold_hosts(wait.nodes, limit=_NAMES_SHOWN)) or ABSENT),
                Cell(f"{wait.seconds:.2f}"),
                Cell(words(wait.code) or "the start"),
                Cell(words(wait.why) or ABSENT),
            )
            for wait in (report.timings.waits[:_WAITS_SHOWN] if report.timings is not None else ())
        ),
        folded=True,
    )


def checks_section(report: Report) -> Section:
    """The checks that ran, and those that did not, with the reason."""
    table = Table(
        name="check-table",
        caption=count(len(report.checks), "check"),
        columns=columns("code", "name", "stage", "outcomes"),
        rows=tuple(
            (
                *(Cell(words(text), words(text)) for text in (check.code, check.name, check.stage)),
                Cell(words(outcomes_text(check)), mark="warn" * bool(check.statuses.keys() - {"done", "skipped"})),
            )
            for check in report.checks
        ),
        sortable=True,
        folded=True,
    )
    return Section(
        name="checks",
        title="Checks",
        sentence="What could not be checked is never reported as healthy; a skipped check had nothing to check.",
        tables=(table,) if report.checks else (),
    )


class _Scene(NamedTuple):
    """What all rows share: colours by stage, the ranks to blame, inches for a second, what steps have in common."""

    timeline: Timeline
    colors: Mapping[str, str]
    blamed: Collection[int]
    inches_per_second: float
    shared: Mapping[int, str]


def _drawn(timeline: Timeline, blamed: Collection[int], name: str, *, wide: bool) -> str:
    """The SVG element, for a phone or `wide`; within `page_style`."""
    from matplotlib.figure import Figure

    stages = list(dict.fromkeys(bar.stage for bar in timeline.trials))
    colors = {stage: SERIES[number % len(SERIES)] for number, stage in enumerate(stages)}
    inches = WIDTH * (_WIDE if wide else 1.0)
    names = [word(f"{lane.rank} {lane.node}", 20 if wide else 10) for lane in timeline.lanes]
    plot_inches = inches - 0.15 - 0.085 * max(map(len, names), default=0)
    scene = _Scene(timeline, colors, blamed, plot_inches / max(timeline.seconds, 1e-3), _shared(timeline))
    handles = [*_legend(timeline, colors, blamed)]
    across = 7 if wide else 3
    height = _AROUND_INCHES + 0.22 * -(-len(handles) // across) + _ROW_INCHES * max(2, len(timeline.lanes))
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
        figure.legend(handles=handles, loc="outside lower left", ncols=across, handlelength=1.2, columnspacing=1.0)
    return inline(figure, name)


def _legend(timeline: Timeline, colors: Mapping[str, str], blamed: Collection[int]) -> "Iterator[Patch]":
    """The stages' colours, and what the hatches mean, as far as there are some."""
    from matplotlib.patches import Patch

    for stage, color in colors.items():
        yield Patch(color=color, label=word(stage))
    found = {lane.rank in blamed for lane in timeline.lanes if lane.unfinished}
    for is_blamed, text in ((True, "blamed"), (False, "failed")):
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
    for bar, took in sorted(timed, key=lambda own: own[0].number in ends):
        span, place = [(bar.begin_seconds, took)], (row - _HEIGHT / 2, _HEIGHT)
        pale = bar.number in ends
        axes.broken_barh(span, place, facecolor=(scene.colors[bar.stage], _PALE if pale else 1.0), edgecolor="none")
        if pale:
            edge = BAD if lane.rank in scene.blamed else MUTED
            axes.broken_barh(span, place, facecolor="none", edgecolor=edge, hatch=_HATCH)
            _write(axes, row, (bar.begin_seconds, took), _end(lane, ends[bar.number], scene), scene)
    if lane.arrived_seconds is None:
        axes.text(0, row, " never joined", va="center", fontsize=SMALL, color=BAD)
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


def _write(axes: "Axes", row: int, span: tuple[float, float], texts: Sequence[str], scene: _Scene) -> None:
    """Into the span, or the shortest beside one that is too short for it."""
    begin, took = span
    inches = took * scene.inches_per_second
    fitting = next((text for text in texts if len(text) + 2 <= inches * _LETTERS_PER_INCH), "")
    if fitting:
        at, side = begin + took / 2, "center"
    elif begin + took < 0.75 * scene.timeline.seconds:
        at, side = begin + took, "left"
    else:
        at, side = begin, "right"
    box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.0}
    text = word(fitting or texts[-1], 60)
    axes.text(at, row, text if fitting else f" {text} ", va="center", ha=side, fontsize=SMALL, color=INK, bbox=box)


def _not_well(timeline: Timeline, blamed: Collection[int]) -> Sequence[str]:
    """What did not end well, in words, blamed ranks first: "rank 3 on h1 hung in COL001 (wait), blamed"."""
    codes = {bar.number: bar.code for bar in timeline.trials}
    what: dict[tuple[bool, str], list[Lane]] = {}
    for lane in timeline.lanes:
        is_blamed = lane.rank in blamed
        if lane.arrived_seconds is None:
            what.setdefault((is_blamed, "never joined"), []).append(lane)
        for own in lane.unfinished:
            at = f" ({own.at})" if own.at else ""
            what.setdefault((is_blamed, f"{own.status} in {codes[own.number]}{at}"), []).append(lane)
    ordered = sorted(what.items(), key=lambda item: not item[0][0])
    texts = []
    for (is_blamed, told), lanes in ordered:
        # A "?" stands for a host that no rank has named.
        hosts = [lane.node for lane in lanes if lane.node.strip("?")]
        who = ranks_text(lane.rank for lane in lanes) + (f" on {fold_hosts(hosts)}" if hosts else "")
        texts.append(f"{who} {told}{', blamed' if is_blamed else ''}")
    return texts
