"""The course of the run: timeline, stages, seconds, checks."""

from ddpdiag.model import CheckLine, Report, Severity, StageLine
from ddpdiag.model.timings import KINDS
from ddpdiag.render.hosts import fold_hosts, fold_ranks
from ddpdiag.render.html.page import Cell, Column, Figure, Section, Table, words
from ddpdiag.render.plots.timeline import draw_timeline, said
from ddpdiag.render.units import ABSENT, count, seconds

_WAITS_SHOWN, _NAMES_SHOWN, _SAID = 10, 8, 6
_BAD = frozenset({"error", "hung", "died", "raised", "unheard"})


def timeline_section(report: Report) -> Section:
    """Who was where when."""
    return Section(
        name="timeline",
        title="Timeline",
        sentence="A triangle is the moment at which a rank came, a cross that at which it was lost; what did not end "
        "well is cross-hatched.",
        figures=_timeline(report),
        tables=(*_stages(report), *_spent(report), *_waits(report)),
    )


def _timeline(report: Report) -> tuple[Figure, ...]:
    timeline = report.timeline
    if timeline is None or not timeline.lanes:
        return ()
    bad = said(timeline)
    rest = f"; and {len(bad) - _SAID:,} more" if len(bad) > _SAID else ""
    told = f"{'; '.join(bad[:_SAID])}{rest}" if bad else "all that is shown ended well"
    ranks = f"{len(timeline.lanes)} of {count(timeline.ranks_in_all, 'rank')}"
    left = []
    if len(timeline.lanes) < timeline.ranks_in_all:
        left.append("Those worth a look were chosen.")
    if len(timeline.trials) < timeline.trials_in_all:
        left.append(f"The {len(timeline.trials)} longest of {timeline.trials_in_all:,} trials.")
    return (
        Figure(
            title="Ranks over the time of the run",
            svg=draw_timeline(timeline, "timeline"),
            alt=words(f"{ranks} over {seconds(timeline.seconds)}: {told}."),
            sentence=" ".join(left),
            wide=True,
        ),
    )


def _stages(report: Report) -> tuple[Table, ...]:
    if not report.stages:
        return ()
    own = {
        stage.name: [f for f in report.findings if f.code.partition(".")[0] in _codes(report.checks, stage.name)]
        for stage in report.stages
    }
    return (
        Table(
            name="stages",
            caption="Stages",
            columns=(Column("stage"), Column("outcome"), Column("seconds", right=True), Column("findings")),
            rows=tuple(
                (
                    Cell(words(stage.name)),
                    Cell(words(stage.status), mark=_mark(stage)),
                    Cell(f"{stage.seconds:.2f}" if stage.status != "skipped" else ABSENT),
                    Cell(words(", ".join(dict.fromkeys(f.code for f in own[stage.name])) or ABSENT)),
                )
                for stage in report.stages
            ),
        ),
    )


def _codes(checks: tuple[CheckLine, ...], stage: str) -> frozenset[str]:
    return frozenset(check.code for check in checks if check.stage == stage)


def _mark(stage: StageLine) -> str:
    if stage.status in _BAD or stage.severity is Severity.ERROR:
        return "bad"
    return "warn" if stage.status in ("warning", "part", "interrupted") else ""


def _spent(report: Report) -> tuple[Table, ...]:
    """Where the seconds went, by stage and kind."""
    timings = report.timings
    if timings is None or not timings.stages:
        return ()
    kinds = [kind for kind in KINDS if any(row.kinds.get(kind, 0.0) >= 0.005 for row in timings.stages)]
    return (
        Table(
            name="seconds",
            caption=f"Where {seconds(timings.seconds)} went, in seconds",
            columns=(Column("stage"), Column("in all", right=True), *(Column(kind, right=True) for kind in kinds)),
            rows=tuple(
                (
                    Cell(words(row.stage)),
                    Cell(f"{row.seconds:.2f}"),
                    *(
                        Cell(f"{spent:.2f}" if (spent := row.kinds.get(kind, 0.0)) >= 0.005 else ABSENT)
                        for kind in kinds
                    ),
                )
                for row in timings.stages
            ),
            folded=True,
        ),
    )


def _waits(report: Report) -> tuple[Table, ...]:
    timings = report.timings
    waits = timings.waits[:_WAITS_SHOWN] if timings is not None else ()
    if not waits:
        return ()
    return (
        Table(
            name="waits",
            caption="For whom the others waited",
            columns=(
                Column("ranks"),
                Column("hosts"),
                Column("seconds", right=True),
                Column("longest in"),
                Column("by"),
            ),
            rows=tuple(
                (
                    Cell(fold_ranks(wait.ranks, limit=_NAMES_SHOWN) or "many alike"),
                    Cell(words(fold_hosts(wait.nodes, limit=_NAMES_SHOWN)) or ABSENT),
                    Cell(f"{wait.seconds:.2f}"),
                    Cell(words(wait.code) or "the start"),
                    Cell(words(wait.why) or ABSENT),
                )
                for wait in waits
            ),
            folded=True,
        ),
    )


def checks_section(report: Report) -> Section:
    """What was looked at, and what was not, with the reason."""
    return Section(
        name="checks",
        title="Checks",
        sentence="What could not be looked at is never called healthy; what was skipped had nothing to look at.",
        tables=(
            Table(
                name="check-table",
                caption=count(len(report.checks), "check"),
                columns=(Column("code"), Column("name"), Column("stage"), Column("outcomes")),
                rows=tuple(map(_check, report.checks)),
                sortable=True,
                folded=True,
            ),
        )
        if report.checks
        else (),
    )


def _check(check: CheckLine) -> tuple[Cell, ...]:
    ran = ", ".join(f"{number:,} {status}" for status, number in check.statuses.items())
    idle = "not run" if check.measures else "judged from what other checks saw"
    skipped = f"skipped: {check.skipped_because}" if check.skipped_because is not None else ""
    failed = bool(check.statuses.keys() - {"done", "skipped"})
    texts = (check.code, check.name, check.stage)
    return (
        *(Cell(words(text), words(text)) for text in texts),
        Cell(words(skipped or ran or idle), mark="warn" * failed),
    )
