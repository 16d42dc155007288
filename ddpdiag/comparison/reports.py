"""Two reports held against each other: verdicts, findings, figures, what they ran on."""

from collections.abc import Iterator

from ddpdiag.comparison.figures import changed_facts, compared_figures, least_busy
from ddpdiag.comparison.findings import changed_findings
from ddpdiag.comparison.matrices import changed_matrices
from ddpdiag.errors import ExitCode
from ddpdiag.model import Report, Verdict
from ddpdiag.model.comparison import Change, Comparison, Direction, Side

_VERDICTS = (Verdict.FIT, Verdict.UNKNOWN, Verdict.UNFIT)
_ORDER = tuple(Direction)
_WORDS = {direction: direction.value for direction in Direction} | {
    Direction.NEUTRAL: "other change",
    Direction.UNJUDGED: "reason not to judge",
}


def compare(old: Report, new: Report, *, old_source: str, new_source: str) -> Comparison:
    """What changed from the old run to the new one."""
    count, figures = _figures(old, new)
    changes = [
        *_verdict(old, new),
        *changed_findings(old, new),
        *figures,
        *changed_matrices(old.matrices, new.matrices, least_busy(old.snapshot, new.snapshot)),
        *_world(old, new),
        *_facts(old, new),
    ]
    changes.sort(key=lambda change: _ORDER.index(change.direction))
    return Comparison(
        old=_side(old, old_source),
        new=_side(new, new_source),
        changes=tuple(changes),
        compared=count,
        sentence=_sentence(changes, count),
        exit_code=_exit_code(changes, count, new.verdict),
    )


def _exit_code(changes: list[Change], count: int, verdict: Verdict) -> ExitCode:
    """That nothing was held against each other, or that the new run could not look, is no good news."""
    if any(change.direction is Direction.REGRESSION for change in changes):
        return ExitCode.UNFIT
    return ExitCode.FIT if count and verdict is not Verdict.UNKNOWN else ExitCode.UNKNOWN


def _side(report: Report, source: str) -> Side:
    created = report.snapshot.created if report.snapshot else ""
    return Side(
        source=source, run_id=report.run_id, created=created, verdict=report.verdict.value, sentence=report.sentence
    )


def _sentence(changes: list[Change], count: int) -> str:
    parts = []
    for direction in _ORDER:
        if number := sum(change.direction is direction for change in changes):
            parts.append(_counted(number, _WORDS[direction]))
    changed = any(change.direction is not Direction.UNJUDGED for change in changes)
    none = "nothing changed" if count else "no change was seen"
    of = f"{_counted(count, 'figure')} compared" if count else "no figure was compared"
    return f"{', '.join(parts if changed else [none, *parts])}; {of}."


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _verdict(old: Report, new: Report) -> Iterator[Change]:
    """A run that could not look is worse than one that was fit, and does not say that one became better."""
    if old.verdict is not new.verdict:
        better = _VERDICTS.index(new.verdict) < _VERDICTS.index(old.verdict)
        cured = Direction.NEUTRAL if new.verdict is Verdict.UNKNOWN else Direction.IMPROVEMENT
        yield Change(
            direction=cured if better else Direction.REGRESSION,
            name="verdict",
            text=f"verdict: {old.verdict.value.upper()} -> {new.verdict.value.upper()}: {new.sentence}",
        )


def _figures(old: Report, new: Report) -> tuple[int, tuple[Change, ...]]:
    if old.snapshot is None or new.snapshot is None:
        which = "first" if old.snapshot is None else "second"
        text = f"figures were not compared: the {which} report is of a ddpdiag that kept none; give its recording"
        return 0, (Change(direction=Direction.UNJUDGED, name="figures", text=text),)
    return compared_figures(old.snapshot, new.snapshot)


def _world(old: Report, new: Report) -> Iterator[Change]:
    for name, was, now in (
        ("launcher", old.world.launcher, new.world.launcher),
        ("hosts", ", ".join(sorted(old.world.nodes)), ", ".join(sorted(new.world.nodes))),
    ):
        if was != now:
            yield Change(direction=Direction.NEUTRAL, name=name, text=f"{name}: {was} -> {now}")


def _facts(old: Report, new: Report) -> Iterator[Change]:
    if old.snapshot is not None and new.snapshot is not None:
        yield from changed_facts(old.snapshot.facts, new.snapshot.facts)
