"""Findings of two runs: which are new, gone, more or graver, and which cannot be told.

Several of one code that blame alike (a variable each) are told apart by their titles without the numbers in these,
which differ from run to run.

What one run did not look at is neither new nor gone. A check has looked where all its trials were done. One that judges
what others saw has looked where those of its stage did that looked in the other run; RUN003 and RUN005, which judge how
trials end, where a check was tried that ended badly in the other run.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from ddpdiag.comparison.figures import Change, Direction, times_are_judged
from ddpdiag.model import Finding, Report, Severity, Status, Verdict

_Key = tuple[object, ...]
_SEVERITIES = (Severity.NOTE, Severity.WARNING, Severity.ERROR)
# What befell our own run, and no fault of the machine.
_MINOR = ("RUN004.", "CMP001.")
# Findings from times alone: where these are not judged, since others used the cores, neither are they.
_OF_TIMES = ("TRN003.straggler", "TRN003.network")
# They judge how the trials of all checks ended.
_OF_ALL_TRIALS = ("RUN003", "RUN005")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def changed_findings(old: Report, new: Report) -> Iterator[Change]:
    """What is new or changed, then what is gone."""
    minor = _MINOR if times_are_judged(old.snapshot, new.snapshot) else (*_MINOR, *_OF_TIMES)
    then, here = _looked(old, new), _looked(new, old)
    pairs = list(_pairs(_by_key(old.findings), _by_key(new.findings)))
    for was, now in pairs:
        if was is None and now is not None:
            yield _new(
                now, minor, looked=_code(now) in then or (now.severity is Severity.ERROR and _arose(now, old, new))
            )
        elif was is not None and now is not None and was.severity is not now.severity:
            rises = _rank(now) > _rank(was)
            direction = Direction.REGRESSION if rises else Direction.IMPROVEMENT
            yield _change(now, f"changed from {was.severity.value}", direction, minor)
    yield from (
        _gone(was, new, minor, looked=_code(was) in here) for was, now in pairs if was is not None and now is None
    )


def _new(now: Finding, minor: tuple[str, ...], *, looked: bool) -> Change:
    if not looked:
        return _change(now, "not looked at then", Direction.NEUTRAL, minor)
    return _change(now, "new", Direction.REGRESSION, minor)


def _gone(was: Finding, new: Report, minor: tuple[str, ...], *, looked: bool) -> Change:
    if not looked:
        return _change(was, "not looked at now", Direction.NEUTRAL, minor)
    if new.verdict is Verdict.UNKNOWN:
        return _change(was, "not seen again", Direction.NEUTRAL, minor)
    return _change(was, "gone", Direction.IMPROVEMENT, minor)


def _change(finding: Finding, word: str, direction: Direction, minor: tuple[str, ...]) -> Change:
    """Good to know is neither better nor worse, nor are codes that begin like `minor`."""
    is_minor = finding.severity is Severity.NOTE or finding.code.startswith(minor)
    return Change(
        direction=Direction.NEUTRAL if is_minor else direction,
        name=finding.code,
        text=f"{word}: {finding.severity.value} {finding.code}: {finding.title}",
        ranks=finding.ranks,
        nodes=finding.nodes,
    )


# What was looked at --------------------------------------------------------------------------------------------------


def _looked(report: Report, other: Report) -> frozenset[str]:
    """Codes of the checks that looked in this report, as far as the other one needs them."""
    measured, wanted = _measured(report), _measured(other)
    missed = {line.stage for line in report.checks if line.code in wanted - measured}
    failed = {line.code for line in other.checks if line.statuses.keys() - {Status.DONE.value}}
    tried = not failed or any(line.code in failed for line in report.checks if line.statuses)
    judged = (line for line in report.checks if not line.measures and line.skipped_because is None)
    return measured | {
        line.code for line in judged if (tried if line.code in _OF_ALL_TRIALS else line.stage not in missed)
    }


def _measured(report: Report) -> frozenset[str]:
    """Checks that were tried, and whose trials were done on all ranks."""
    done = (line for line in report.checks if line.measures and line.skipped_because is None and line.statuses)
    return frozenset(line.code for line in done if line.statuses.keys() == {Status.DONE.value})


def _arose(finding: Finding, old: Report, new: Report) -> bool:
    """Does the finding's check follow one that was well then, and is not now; or one of which the same is true?"""
    follows = {line.code: line.follows for line in new.checks}
    then = _looked(old, new)
    waiting, met = [_code(finding)], set[str]()
    while waiting:
        for code in follows.get(waiting.pop(), ()):
            if code in then and _is_well(old, code) and not _is_well(new, code):
                return True
            if code not in then and code not in met:
                met.add(code)
                waiting.append(code)
    return False


def _is_well(report: Report, code: str) -> bool:
    serious = (finding for finding in report.findings if finding.severity is not Severity.NOTE)
    return code in _measured(report) and code not in map(_code, serious)


def _code(finding: Finding) -> str:
    return finding.code.partition(".")[0]


# Which finding is which ----------------------------------------------------------------------------------------------


def _by_key(findings: Sequence[Finding]) -> dict[_Key, list[Finding]]:
    found: dict[_Key, list[Finding]] = {}
    for finding in findings:
        key = (finding.code, finding.ranks, finding.nodes, finding.gpus, finding.links)
        found.setdefault(key, []).append(finding)
    return found


def _pairs(
    before: Mapping[_Key, Sequence[Finding]], now: Mapping[_Key, Sequence[Finding]]
) -> Iterator[tuple[Finding | None, Finding | None]]:
    """The same finding then and now; None where a run has fewer of them. The gravest are paired first."""
    for key in dict.fromkeys((*now, *before)):
        was, is_ = before.get(key, ()), now.get(key, ())
        if len(was) <= 1 and len(is_) <= 1:
            yield from zip_longest(was, is_)
            continue
        old, new = _by_title(was), _by_title(is_)
        for title in dict.fromkeys((*new, *old)):
            yield from zip_longest(old.get(title, ()), new.get(title, ()))


def _by_title(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for finding in sorted(findings, key=_rank, reverse=True):
        found.setdefault(_NUMBER.sub("#", finding.title), []).append(finding)
    return found


def _rank(finding: Finding) -> int:
    return _SEVERITIES.index(finding.severity)
