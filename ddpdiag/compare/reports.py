"""Compare two reports: their verdicts, findings, figures, hosts and versions.

Several findings of one code with the same blame (such as one for each variable) are distinguished by their titles. The
numbers in the titles are ignored, because they differ from run to run.

A finding is new or gone only if its check is conclusive in the run without it. A check is conclusive if all its trials
were done. A check without trials is not if a check of its stage is conclusive in the other run only. RUN003 judges how
trials end: it is conclusive if this run has trials of a check that ended badly in the other run, or if none did.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from msgspec import Struct

from ddpdiag.comparison import (
    LEAST_BUSY,
    Change,
    Direction,
    changed_facts,
    compared_figures,
    least_busy,
)
from ddpdiag.errors import ExitCode
from ddpdiag.model import Finding, Report, Severity, Status, Verdict

SCHEMA = "ddpdiag.comparison/1"
_VERDICTS = (Verdict.FIT, Verdict.UNKNOWN, Verdict.UNFIT)
_ORDER = tuple(Direction)
_WORDS = {direction: direction.value for direction in Direction} | {
    Direction.NEUTRAL: "other change",
    Direction.UNJUDGED: "reason not to judge",
}


class Side(Struct, frozen=True, kw_only=True):
    """One of the two runs."""

    source: str
    run_id: str
    created: str
    verdict: str
    sentence: str
    degraded: bool = False

    @property
    def verdict_text(self) -> str:
        return f"{self.verdict.upper()}{', degraded' if self.degraded else ''}"


class Comparison(Struct, frozen=True, kw_only=True):
    """The changes, regressions first; `compared` counts the figures that could be compared."""

    schema: str = SCHEMA
    old: Side
    new: Side
    changes: tuple[Change, ...]
    compared: int
    sentence: str
    exit_code: int


def compare(old: Report, new: Report, *, old_source: str, new_source: str) -> Comparison:
    """Compare two reports. The sources name their files in the result."""
    count, figures = _figures(old, new)
    changes = [
        *_verdict(old, new),
        *changed_findings(old, new),
        *figures,
    ]
    for name, was, now in (
        ("launcher", old.world.launcher, new.world.launcher),
        ("hosts", ", ".join(sorted(old.world.hosts)), ", ".join(sorted(new.world.hosts))),
    ):
        if was != now:
            changes.append(Change(direction=Direction.NEUTRAL, name=name, text=f"{name}: {was} -> {now}"))
    if old.snapshot is not None and new.snapshot is not None:
        changes += changed_facts(old.snapshot.facts, new.snapshot.facts)
    changes.sort(key=lambda change: _ORDER.index(change.direction))
    # A comparison without figures, or a new run with an unknown verdict, is never reported as healthy.
    code = ExitCode.FIT if count and new.verdict is not Verdict.UNKNOWN else ExitCode.UNKNOWN
    if any(change.direction is Direction.REGRESSION for change in changes):
        code = ExitCode.UNFIT
    return Comparison(
        old=_side(old, old_source),
        new=_side(new, new_source),
        changes=tuple(changes),
        compared=count,
        sentence=_sentence(changes, count),
        exit_code=code,
    )


def _side(report: Report, source: str) -> Side:
    return Side(
        source=source,
        run_id=report.run_id,
        created=report.snapshot.created if report.snapshot else "",
        verdict=report.verdict.value,
        sentence=report.sentence,
        degraded=report.degraded,
    )


def _sentence(changes: list[Change], count: int) -> str:
    numbers = {direction: sum(change.direction is direction for change in changes) for direction in _ORDER}
    parts = [_counted(number, _WORDS[direction]) for direction, number in numbers.items() if number]
    changed = any(change.direction is not Direction.UNJUDGED for change in changes)
    none = "nothing changed" if count else "no change was seen"
    of = f"{_counted(count, 'figure')} compared" if count else "no figure was compared"
    return f"{', '.join(parts if changed else [none, *parts])}; {of}."


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _verdict(old: Report, new: Report) -> Iterator[Change]:
    """Yield the change of the verdict, if any. UNKNOWN is worse than FIT, and is no improvement after UNFIT."""
    if old.verdict_text == new.verdict_text:
        return
    better = _VERDICTS.index(new.verdict) < _VERDICTS.index(old.verdict)
    cured = Direction.NEUTRAL if new.verdict is Verdict.UNKNOWN else Direction.IMPROVEMENT
    direction = cured if better else Direction.REGRESSION
    if old.verdict is new.verdict:
        direction = Direction.NEUTRAL  # the finding about the slow host or rank is the regression or improvement
    text = f"verdict: {old.verdict_text} -> {new.verdict_text}: {new.sentence}"
    yield Change(direction=direction, name="verdict", text=text)


def _figures(old: Report, new: Report) -> tuple[int, tuple[Change, ...]]:
    if old.snapshot is None or new.snapshot is None:
        which = "first" if old.snapshot is None else "second"
        text = f"figures were not compared: the {which} report has none"
        return 0, (Change(direction=Direction.UNJUDGED, name="figures", text=text),)
    return compared_figures(old.snapshot, new.snapshot)


_SEVERITIES = (Severity.NOTE, Severity.WARNING, Severity.ERROR)
# Codes of findings about ddpdiag's run, which are no fault of the machine.
_MINOR = ("RUN004.", "CMP001.")
# Codes of findings from times alone: they are not judged if other processes used the cores, as the times are not.
_OF_TIMES = ("TRN003.straggler",)
# The check that judges how the trials of all other checks ended.
_OF_ALL_TRIALS = ("RUN003",)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def changed_findings(old: Report, new: Report) -> Iterator[Change]:
    """The findings that are new or changed, then those that are gone."""
    # False if no check measured whether the ranks of both runs had enough of their cores.
    times_are_judged = least_busy(old.snapshot, new.snapshot) >= LEAST_BUSY
    minor = _MINOR if times_are_judged else (*_MINOR, *_OF_TIMES)
    conclusive_then, conclusive_now = _conclusive(old, new), _conclusive(new, old)
    pairs = list(_pairs(old.findings, new.findings))
    for was, now in pairs:
        if was is None and now is not None:
            if _check_code(now) in conclusive_then:
                yield _change(now, "new", Direction.REGRESSION, minor)
            else:
                yield _change(now, "not checked in the old run", Direction.NEUTRAL, minor)
        elif was is not None and now is not None and was.severity is not now.severity:
            direction = Direction.REGRESSION if _rank(now) > _rank(was) else Direction.IMPROVEMENT
            yield _change(now, f"changed from {was.severity.value}", direction, minor)
    for was in (was for was, now in pairs if was is not None and now is None):
        if _check_code(was) not in conclusive_now:
            yield _change(was, "not checked in the new run", Direction.NEUTRAL, minor)
        elif new.verdict is Verdict.UNKNOWN:
            yield _change(was, "not seen again", Direction.NEUTRAL, minor)
        else:
            yield _change(was, "gone", Direction.IMPROVEMENT, minor)


def _change(finding: Finding, word: str, direction: Direction, minor: tuple[str, ...]) -> Change:
    """The change for a finding: neutral for a note, and for a code that begins with one of `minor`."""
    is_minor = finding.severity is Severity.NOTE or finding.code.startswith(minor)
    return Change(
        direction=Direction.NEUTRAL if is_minor else direction,
        name=finding.code,
        text=f"{word}: {finding.severity.value} {finding.code}: {finding.title}",
        ranks=finding.ranks,
        hosts=finding.hosts,
    )


def _conclusive(report: Report, other: Report) -> frozenset[str]:
    """The codes of checks that are conclusive in `report`, compared with `other` (see the module)."""
    measured, wanted = _measured(report), _measured(other)
    missed = {line.stage for line in report.checks if line.code in wanted - measured}
    failed = {line.code for line in other.checks if line.statuses.keys() - {Status.DONE.value}}
    tried = not failed or any(line.code in failed for line in report.checks if line.statuses)
    judged = (line for line in report.checks if not line.measures and line.skipped_because is None)
    return measured | {
        line.code for line in judged if (tried if line.code in _OF_ALL_TRIALS else line.stage not in missed)
    }


def _measured(report: Report) -> frozenset[str]:
    """The codes of checks that had trials, all of them done on all ranks."""
    done = (line for line in report.checks if line.measures and line.skipped_because is None and line.statuses)
    return frozenset(line.code for line in done if line.statuses.keys() == {Status.DONE.value})


def _check_code(finding: Finding) -> str:
    return finding.code.partition(".")[0]


def _pairs(old: Sequence[Finding], new: Sequence[Finding]) -> Iterator[tuple[Finding | None, Finding | None]]:
    """Pair the same findings of both runs, with None if a run lacks one. The gravest of several are paired first."""
    for was, now in _alike(old, new, lambda each: (each.code, each.ranks, each.hosts, each.gpus, each.links)):
        if len(was) <= 1 and len(now) <= 1:
            yield from zip_longest(was, now)
            continue
        was, now = (sorted(each, key=_rank, reverse=True) for each in (was, now))
        for same, again in _alike(was, now, lambda each: _NUMBER.sub("#", each.title)):
            yield from zip_longest(same, again)


def _alike(
    old: Sequence[Finding], new: Sequence[Finding], key: Callable[[Finding], object]
) -> Iterator[tuple[list[Finding], list[Finding]]]:
    """For each key, the findings of the old and of the new run that have it, in the order of the new findings."""
    groups: dict[object, tuple[list[Finding], list[Finding]]] = {}
    for findings, side in ((new, 1), (old, 0)):
        for finding in findings:
            groups.setdefault(key(finding), ([], []))[side].append(finding)
    yield from groups.values()


def _rank(finding: Finding) -> int:
    return _SEVERITIES.index(finding.severity)
