"""Compare two reports: their verdicts, findings, figures, hosts and versions.

Findings with the same code, ranks, hosts, GPUs and links (such as one for each variable) are distinguished by titles.
Numbers in the titles are ignored, because they differ from run to run.

A finding is new or gone only if its check is conclusive in the run without the finding. A check with trials is
conclusive if all its trials were done. A check that measures nothing is conclusive, unless a check of its stage had all
its trials done in the other run only. RUN003 judges how trials end. It is conclusive if no trial failed in the other
run, or if this run has trials of a check that failed there.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from msgspec import Struct

from ddpdiag.comparison import MIN_CORE_SHARE, Change, Direction, compare_facts, compare_figures, lowest_core_share
from ddpdiag.errors import ExitCode
from ddpdiag.model import Finding, Report, Severity, Status, Verdict

SCHEMA = "ddpdiag.comparison/1"
_BEST_FIRST = (Verdict.FIT, Verdict.UNKNOWN, Verdict.UNFIT)
_ORDER = tuple(Direction)
_WORDS = {direction: direction.value for direction in Direction} | {
    Direction.NEUTRAL: "other change",
    Direction.UNJUDGED: "reason not to judge",
}


class Side(Struct, frozen=True, kw_only=True):
    """One of the two runs. `source` is the name of its file, `sentence` the sentence of its verdict."""

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
    """The changes, regressions first. `compared` is the number of figures that could be compared."""

    schema: str = SCHEMA
    old: Side
    new: Side
    changes: tuple[Change, ...]
    compared: int
    sentence: str
    exit_code: int


def compare(old: Report, new: Report, *, old_source: str, new_source: str) -> Comparison:
    """Compare two reports. `old_source` and `new_source` are the names of their files."""
    count, figures = _figure_changes(old, new)
    changes = [*_verdict_change(old, new), *changed_findings(old, new), *figures]
    for name, old_text, new_text in (
        ("launcher", old.world.launcher, new.world.launcher),
        ("hosts", ", ".join(sorted(old.world.hosts)), ", ".join(sorted(new.world.hosts))),
    ):
        if old_text != new_text:
            changes.append(Change(direction=Direction.NEUTRAL, name=name, text=f"{name}: {old_text} -> {new_text}"))
    if old.snapshot is not None and new.snapshot is not None:
        changes += compare_facts(old.snapshot.facts, new.snapshot.facts)
    changes.sort(key=lambda change: _ORDER.index(change.direction))
    # Without compared figures, or if the verdict of the new run is UNKNOWN, a regression may have been missed.
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
    nothing_text = "nothing changed" if count else "no change was seen"
    figures_text = f"{_counted(count, 'figure')} compared" if count else "no figure was compared"
    return f"{', '.join(parts if changed else [nothing_text, *parts])}; {figures_text}."


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _verdict_change(old: Report, new: Report) -> Iterator[Change]:
    """Yield the change of the verdict, if any. UNKNOWN is worse than FIT. UNKNOWN after UNFIT is a neutral change."""
    if old.verdict_text == new.verdict_text:
        return
    is_better = _BEST_FIRST.index(new.verdict) < _BEST_FIRST.index(old.verdict)
    better_direction = Direction.NEUTRAL if new.verdict is Verdict.UNKNOWN else Direction.IMPROVEMENT
    direction = better_direction if is_better else Direction.REGRESSION
    if old.verdict is new.verdict:
        direction = Direction.NEUTRAL  # the finding about the slow host or rank is the regression or improvement
    text = f"verdict: {old.verdict_text} -> {new.verdict_text}: {new.sentence}"
    yield Change(direction=direction, name="verdict", text=text)


def _figure_changes(old: Report, new: Report) -> tuple[int, tuple[Change, ...]]:
    if old.snapshot is None or new.snapshot is None:
        which = "first" if old.snapshot is None else "second"
        text = f"figures were not compared: the {which} report has none"
        return 0, (Change(direction=Direction.UNJUDGED, name="figures", text=text),)
    return compare_figures(old.snapshot, new.snapshot)


_SEVERITIES = (Severity.NOTE, Severity.WARNING, Severity.ERROR)
# Codes of findings about the run of ddpdiag, which show no fault of the machine. Their changes are neutral.
_NEUTRAL_CODES = ("RUN004.", "CMP001.")
# Codes of findings that depend on times alone. Like times, they are not compared if other processes used the cores.
_TIMING_CODES = ("TRN003.straggler",)
# The check that judges how the trials of all other checks ended.
_TRIALS_CHECK = "RUN003"
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def changed_findings(old: Report, new: Report) -> Iterator[Change]:
    """Yield the changes of findings: first those that are new or have another severity, then those that are gone."""
    # False also if no check measured whether the ranks of both runs had enough of their cores.
    times_are_comparable = lowest_core_share(old.snapshot, new.snapshot) >= MIN_CORE_SHARE
    neutral_codes = _NEUTRAL_CODES if times_are_comparable else (*_NEUTRAL_CODES, *_TIMING_CODES)
    conclusive_in_old, conclusive_in_new = _conclusive_codes(old, new), _conclusive_codes(new, old)
    pairs = list(_pairs(old.findings, new.findings))
    for before, after in pairs:
        if before is None and after is not None:
            if _check_code(after) in conclusive_in_old:
                yield _change(after, "new", Direction.REGRESSION, neutral_codes)
            else:
                yield _change(after, "not checked in the old run", Direction.NEUTRAL, neutral_codes)
        elif before is not None and after is not None and before.severity is not after.severity:
            is_worse = _severity_index(after) > _severity_index(before)
            direction = Direction.REGRESSION if is_worse else Direction.IMPROVEMENT
            yield _change(after, f"changed from {before.severity.value}", direction, neutral_codes)
    for before in (before for before, after in pairs if before is not None and after is None):
        if _check_code(before) not in conclusive_in_new:
            yield _change(before, "not checked in the new run", Direction.NEUTRAL, neutral_codes)
        elif new.verdict is Verdict.UNKNOWN:
            yield _change(before, "not seen again", Direction.NEUTRAL, neutral_codes)
        else:
            yield _change(before, "gone", Direction.IMPROVEMENT, neutral_codes)


def _change(finding: Finding, word: str, direction: Direction, neutral_codes: tuple[str, ...]) -> Change:
    """The change for a finding. It is neutral for a note, and if the code begins with one of `neutral_codes`."""
    is_neutral = finding.severity is Severity.NOTE or finding.code.startswith(neutral_codes)
    return Change(
        direction=Direction.NEUTRAL if is_neutral else direction,
        name=finding.code,
        text=f"{word}: {finding.severity.value} {finding.code}: {finding.title}",
        ranks=finding.ranks,
        hosts=finding.hosts,
    )


def _conclusive_codes(report: Report, other: Report) -> frozenset[str]:
    """The codes of the checks that are conclusive in `report`, compared with `other` (see the module's docstring)."""
    measured, measured_in_other = _measured_codes(report), _measured_codes(other)
    missed_stages = {check.stage for check in report.checks if check.code in measured_in_other - measured}
    failed = {check.code for check in other.checks if check.statuses.keys() - {Status.DONE.value}}
    is_run003_conclusive = not failed or any(check.code in failed for check in report.checks if check.statuses)
    judging_checks = (check for check in report.checks if not check.measures and check.skipped_because is None)
    return measured | {
        check.code
        for check in judging_checks
        if (is_run003_conclusive if check.code == _TRIALS_CHECK else check.stage not in missed_stages)
    }


def _measured_codes(report: Report) -> frozenset[str]:
    """The codes of the checks that had trials, all of which were done on all ranks."""
    ran = (check for check in report.checks if check.measures and check.skipped_because is None and check.statuses)
    return frozenset(check.code for check in ran if check.statuses.keys() == {Status.DONE.value})


def _check_code(finding: Finding) -> str:
    return finding.code.partition(".")[0]


def _pairs(old: Sequence[Finding], new: Sequence[Finding]) -> Iterator[tuple[Finding | None, Finding | None]]:
    """Pair each finding of a run with the same finding of the other run, or with None if the other run lacks it."""
    for before, after in _grouped(old, new, lambda each: (each.code, each.ranks, each.hosts, each.gpus, each.links)):
        if len(before) <= 1 and len(after) <= 1:
            yield from zip_longest(before, after)
            continue
        before, after = (sorted(each, key=_severity_index, reverse=True) for each in (before, after))
        for same_old, same_new in _grouped(before, after, lambda each: _NUMBER.sub("#", each.title)):
            yield from zip_longest(same_old, same_new)


def _grouped(
    old: Sequence[Finding], new: Sequence[Finding], key: Callable[[Finding], object]
) -> Iterator[tuple[list[Finding], list[Finding]]]:
    """Yield, for each key, the findings of the old and of the new run with this key, in the order of the new run."""
    groups: dict[object, tuple[list[Finding], list[Finding]]] = {}
    for findings, side in ((new, 1), (old, 0)):
        for finding in findings:
            groups.setdefault(key(finding), ([], []))[side].append(finding)
    yield from groups.values()


def _severity_index(finding: Finding) -> int:
    return _SEVERITIES.index(finding.severity)
