"""The course of the run: timeline, stages, seconds, checks."""

from ddpdiag.model import CheckLine, Report, Severity, StageLine
from ddpdiag.model.timings import KINDS
from ddpdiag.render.html.page import Cell, Column, Figure, Section, Table, words
from ddpdiag.render.plots.timeline import draw_timeline, said
from ddpdiag.render.terminal.findings import SEVERITIES
from ddpdiag.render.terminal.ranks import blamed
from ddpdiag.text import ABSENT, count, fold_hosts, fold_ranks, seconds

_WAITS_SHOWN, _NAMES_SHOWN, _SAID = 10, 8, 6
# The stage of findings that are about the run as a whole.
_RUN = "run"
_BAD = frozenset({"error", "hung", "died", "raised", "unheard"})


def timeline_section(report: Report) -> Section:
    """Who was where when."""
    return Section(
        name="timeline",
        title="Timeline",
        sentence="A triangle is the moment at which a rank came, a cross that at which it was lost. What did not end "
        "well is cross-hatched: in red for ranks that a finding blames, in grey for all others.",
        figures=_timeline(report),
        tables=(*_stages(report), *_spent(report), *_waits(report)),
    )


def _timeline(report: Report) -> tuple[Figure, ...]:
    timeline = report.timeline
    if timeline is None or not timeline.lanes:
        return ()
    blamed = blamed_ranks(report)
    bad, red = said(timeline, blamed), [lane.rank for lane in timeline.lanes if lane.rank in blamed]
    rest = f"; and {len(bad) - _SAID:,} more" if len(bad) > _SAID else ""
    told = f"{'; '.join(bad[:_SAID])}{rest}" if bad else "no trial was cut short"
    ranks = f"{len(timeline.lanes)} of {count(timeline.ranks_in_all, 'rank')}"
    left = [f"Blamed: {count(len(red), 'rank').split()[-1]} {fold_ranks(red)}."] if red and not bad else []
    if len(timeline.lanes) < timeline.ranks_in_all:
        left.append("Those worth a look were chosen.")
    if len(timeline.trials) < timeline.trials_in_all:
        left.append(f"The {len(timeline.trials)} longest of {timeline.trials_in_all:,} trials.")
    return (
        Figure(
            title="Ranks over the time of the run",
            svg=draw_timeline(timeline, blamed, "timeline", wide=True),
            narrow=draw_timeline(timeline, blamed, "timeline-narrow", wide=False),
            alt=words(f"{ranks} over {seconds(timeline.seconds)}: {told}."),
            sentence=" ".join(left),
        ),
    )


def _stages(report: Report) -> tuple[Table, ...]:
    """Each stage with the findings about it, then those of the run that are about none."""
    rows = [_stage(stage.name, stage.status, stage.severity, _spent_in(stage), stage.codes) for stage in report.stages]
    known = {code for stage in report.stages for code in stage.codes}
    if others := [finding for finding in report.findings if finding.code not in known]:
        worst = min((finding.severity for finding in others), key=SEVERITIES.index)
        codes = tuple(dict.fromkeys(finding.code for finding in others))
        rows.append(_stage(_RUN, "done" if worst is Severity.NOTE else worst.value, worst, ABSENT, codes))
    if not rows:
        return ()
    return (
        Table(
            name="stages",
            caption="Stages",
            columns=(Column("stage"), Column("outcome"), Column("seconds", right=True), Column("findings")),
            rows=tuple(rows),
        ),
    )


def _stage(name: str, status: str, severity: Severity | None, spent: str, codes: tuple[str, ...]) -> tuple[Cell, ...]:
    return (
        Cell(words(name)),
        Cell(words(status), mark=_mark(status, severity)),
        Cell(spent),
        Cell(words(", ".join(codes) or ABSENT)),
    )


def _spent_in(stage: StageLine) -> str:
    return ABSENT if stage.status == "skipped" else f"{stage.seconds:.2f}"


def _mark(status: str, severity: Severity | None) -> str:
    if status in _BAD or severity is Severity.ERROR:
        return "bad"
    return "warn" if status in ("warning", "part", "interrupted") else ""


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
            note=_two_durations(report.seconds, timings.seconds),
            folded=True,
        ),
    )


def _two_durations(seconds_told: float, seconds_spent: float) -> str:
    """Why the whole is not what stands at the top of the page, where it is not."""
    told, spent = seconds(seconds_told), seconds(seconds_spent)
    if told == spent:
        return ""
    return (
        f"The {spent} are from the start of rank 0's process to the verdict; the {told} at the top of the page begin "
        "when rank 0 waits for the others, and end before the judgement."
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


def blamed_ranks(report: Report) -> frozenset[int]:
    """The ranks that errors blame; where none does, those that warnings blame."""
    marks = blamed(report.findings, report.ranks)
    worst = Severity.ERROR if Severity.ERROR in marks.values() else Severity.WARNING
    return frozenset(rank for rank, severity in marks.items() if severity is worst)
