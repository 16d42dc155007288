"""Remarks on training scripts: one line each for people, editors and `grep`, and JSON."""

import textwrap
from collections.abc import Iterator

from ddpdiag.codec import encode
from ddpdiag.lint.rule import LintReport, Remark, ScriptLine
from ddpdiag.model import Severity
from ddpdiag.render.page import LEAST_WIDTH, one_line

_COLORS = {Severity.ERROR: "31", Severity.WARNING: "33", Severity.INFO: "36"}


def as_json(report: LintReport) -> bytes:
    """The whole report, with hints."""
    return encode(report) + b"\n"


def page(report: LintReport, *, details: bool, width: int, color: bool) -> str:
    """A paragraph for each remark, then one line that counts; hints with `details` only."""
    shown = [each for each in report.remarks if details or each.severity is not Severity.INFO]
    paragraphs = [_remark(each, max(width, LEAST_WIDTH), color=color) for each in shown]
    notes = [f"{one_line(each.path)}: not judged: {each.not_judged}" for each in _left_out(report, details=details)]
    return "\n".join([*paragraphs, *notes, *_summary(report, details=details)]) + "\n"


def _remark(remark: Remark, width: int, *, color: bool) -> str:
    """The place, the code and what goes wrong; below it what to do. The first line is not broken before its code."""
    severity = remark.severity.value
    if color:
        severity = f"\x1b[1;{_COLORS[remark.severity]}m{severity}\x1b[0m"
    place = f"{one_line(remark.path)}:{remark.line}:{remark.column}"
    body = [
        *textwrap.wrap(one_line(remark.message), width - 4, break_long_words=False, break_on_hyphens=False),
        *textwrap.wrap("-> " + one_line(remark.remedy), width - 4, break_long_words=False, break_on_hyphens=False),
    ]
    return "\n".join([f"{place}: {severity} {remark.code} {remark.name}", *(f"    {line}" for line in body)])


def _left_out(report: LintReport, *, details: bool) -> Iterator[ScriptLine]:
    """Scripts that were not judged: all of them with `details`, else only if that is all there is to say."""
    left_out = [script for script in report.scripts if script.not_judged is not None]
    if details or (len(left_out) == len(report.scripts) and len(left_out) == 1):
        yield from left_out


def _summary(report: LintReport, *, details: bool) -> Iterator[str]:
    judged = sum(script.not_judged is None for script in report.scripts)
    counts = {severity: sum(r.severity is severity for r in report.remarks) for severity in Severity}
    faults = (Severity.ERROR, Severity.WARNING)
    said = ", ".join(_count(counts[severity], severity.value) for severity in faults if counts[severity])
    parts = [f"{_count(judged, 'script')} judged" + (f": {said}" if said else ": nothing found" if judged else "")]
    if (others := len(report.scripts) - judged) and not (judged == 0 and others == 1):
        parts.append(f"{_count(others, 'file')} not judged" + ("" if details else " (--details)"))
    if hints := counts[Severity.INFO]:
        parts.append(_count(hints, "hint") + ("" if details else " (--details)"))
    if ignored := sum(script.ignored for script in report.scripts):
        parts.append(f"{ignored} ignored by comments")
    yield "; ".join(parts)
    if any(r.severity is not Severity.INFO or details for r in report.remarks):
        first = next(r for r in report.remarks if r.severity is not Severity.INFO or details)
        yield f"`ddpdiag explain {first.code}` says more, with sources."


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
