"""The report for people: what is broken, by whom, and the way out; what was looked at, the figures; and one sentence.

Errors come first, because the first screen of a log is what is read of it; the sentence comes last, with the way out of
the first error once more, because the end of the text is what a terminal still shows. Without colour the page's own
characters are ASCII and hold no escape codes, so that it can end in a log file.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from ddpdiag.model import CheckLine, Finding, Report, Scalar, Severity, StageLine, Verdict, WorldLine
from ddpdiag.model.options import ALONE
from ddpdiag.render.evidence import LIST_SHOWN, listed, value_text
from ddpdiag.render.exports import exclude_line
from ddpdiag.render.findings import SAME_SHOWN, SEVERITIES, write_findings
from ddpdiag.render.hosts import fold_hosts
from ddpdiag.render.matrices import write_matrices
from ddpdiag.render.page import Page, one_line
from ddpdiag.render.tables import Ranks, blamed
from ddpdiag.render.timings import write_timings
from ddpdiag.render.units import count, label, seconds

_VERDICT_STYLES = {Verdict.FIT: "bold green", Verdict.UNFIT: "bold red", Verdict.UNKNOWN: "bold yellow"}
_MARK_STYLES = {"ok": "green", "warn": "yellow", "FAIL": "bold red", "??": "bold yellow", "skip": "dim"}

# What a terminal shows at once.
SCREEN_LINES = 24


def render(report: Report, *, color: bool, width: int, details: bool = False, timings: bool = False) -> str:
    """`report` as text of `width` columns; `details` adds the checks of each stage and shortens nothing.

    `timings` adds where the seconds went.
    """
    page = Page(color=color, width=width)
    page.write(_head(report), lead="ddpdiag: ", lead_style="bold")
    if details:
        page.write(f"run {report.run_id}", style="dim")
    page.blank()
    write_findings(page, report.findings, details=details, severities=SEVERITIES[:2])
    _stages(page, report, details=details)
    write_findings(page, report.findings, details=details, severities=SEVERITIES[2:])
    _skipped(page, report.checks)
    _ranks(page, report, details=details)
    _measurements(page, report.measurements if details else {})
    write_matrices(page, report.matrices, report.findings, details=details)
    if timings:
        write_timings(page, report, details=details)
    write_notes(page, report.notes)
    _without_bad(page, report)
    write_verdict(page, report)
    _write_way_out(page, report)
    return page.text()


def _head(report: Report) -> str:
    """The world in one line: "4 ranks on 2 hosts (n[0-1]), torchrun, gloo; 7.9 s of 60 s: FIT"."""
    world = report.world
    parts = (_population(world), one_line(world.launcher), one_line(world.backend))
    if world.launcher == ALONE:
        parts = (f"host {one_line(fold_hosts(world.nodes, limit=LIST_SHOWN))} alone", "", "")
    spent = f"{seconds(report.seconds)} of {seconds(report.budget_seconds)}"
    return f"{', '.join(filter(None, parts))}; {spent}: {report.verdict.value.upper()}"


def _population(world: WorldLine) -> str:
    ranks = count(world.size, "rank")
    if not world.nodes:
        return f"{ranks}, no host known"
    hosts = one_line(fold_hosts(world.nodes, limit=LIST_SHOWN))
    return f"{ranks} on {count(len(world.nodes), 'host')} ({hosts})"


def _stages(page: Page, report: Report, *, details: bool) -> None:
    name_width = max((len(one_line(stage.name)) for stage in report.stages), default=0)
    for stage in report.stages:
        checks = [check for check in report.checks if check.stage == stage.name]
        findings = _of_stage(report.findings, checks)
        mark = _mark(stage, findings)
        time = "-" if mark == "skip" else f"{stage.seconds:.2f} s"
        lead = f"{mark:<4}  {one_line(stage.name):<{name_width}}  {one_line(stage.status):<7}  {time:>7}  "
        page.write(_saying(checks, findings), lead=lead, lead_style=_MARK_STYLES[mark])
        for check in checks if details else ():
            page.write(_ran(check), indent=6, lead=f"{one_line(check.code)} {one_line(check.name)}: ")
    if report.stages:
        page.blank()


def _of_stage(findings: Iterable[Finding], checks: Iterable[CheckLine]) -> list[Finding]:
    """Findings of some checks: the check's code is what stands before the dot."""
    codes = {check.code for check in checks}
    return [finding for finding in findings if finding.code.partition(".")[0] in codes]


def _mark(stage: StageLine, findings: Sequence[Finding]) -> str:
    severities = {finding.severity for finding in findings}
    if Severity.ERROR in severities:
        return "FAIL"
    if stage.status == "skipped":
        return "skip"
    if stage.status not in ("done", "warning"):
        return "??"  # Not looked at is not healthy.
    return "warn" if stage.status == "warning" or Severity.WARNING in severities else "ok"


def _saying(checks: Sequence[CheckLine], findings: Sequence[Finding]) -> str:
    """What is most worth saying of a stage: its findings, else what did not run well, else how many checks it had."""
    words = [_counted(severity, findings) for severity in SEVERITIES]
    broken = [f"{one_line(check.code)}: {_ran(check)}" for check in checks if _failed(check)]
    skipped = sum(check.skipped_because is not None for check in checks)
    idle = sum(check.measures and not check.statuses and check.skipped_because is None for check in checks)
    ran = len(checks) - skipped - idle
    parts = (
        count(ran, "check") if ran else "",
        *(f"{n} {what}" for n, what in ((skipped, "skipped"), (idle, "not run")) if n),
    )
    counts = ", ".join(filter(None, parts))
    return "; ".join(filter(None, words)) or "; ".join(broken) or counts or "no checks"


def _counted(severity: Severity, findings: Sequence[Finding]) -> str:
    """ "2 errors: COL002.slow, COL003.wrong"."""
    codes = [one_line(finding.code) for finding in findings if finding.severity is severity]
    return f"{count(len(codes), severity.value)}: {listed(tuple(dict.fromkeys(codes)), SAME_SHOWN)}" if codes else ""


def _failed(check: CheckLine) -> bool:
    return bool(check.statuses.keys() - {"done", "skipped"})


def _ran(check: CheckLine) -> str:
    """How a check's trials ended: "3 done, 1 hung"."""
    if check.skipped_because is not None:
        return f"skipped: {one_line(check.skipped_because)}"
    return ", ".join(f"{number:,} {one_line(status)}" for status, number in check.statuses.items()) or (
        "not run" if check.measures else "judged from what other checks saw"
    )


def _ranks(page: Page, report: Report, *, details: bool) -> None:
    ranks = Ranks(report.ranks, blamed(report.findings), details)
    for table in ranks.tables(color=page.color, width=page.width):
        page.table(table)
        page.blank()
    if ranks.remark:
        page.write(ranks.remark, style="dim")
        page.blank()


def _measurements(page: Page, measurements: dict[str, Scalar]) -> None:
    for name, value in measurements.items():
        page.write(f"{one_line(label(name))} = {value_text(name, value)}")
    if measurements:
        page.blank()


def _skipped(page: Page, checks: Sequence[CheckLine]) -> None:
    """One line for each reason."""
    reasons: dict[str, list[str]] = {}
    for check in checks:
        if check.skipped_because is not None:
            reasons.setdefault(check.skipped_because, []).append(one_line(check.code))
    for reason, codes in reasons.items():
        page.write(f"{one_line(reason)}: {', '.join(codes)}", style="dim", lead="skip  ", lead_style="dim")
    if reasons:
        page.blank()


def write_notes(page: Page, notes: Sequence[str]) -> None:
    """What was wrong with the files, one paragraph each."""
    # The same note from a thousand files is one note.
    for note, times in Counter(notes).items():
        page.write(note if times == 1 else f"{note} ({times:,} times)", lead="note: ")
    if notes:
        page.blank()


def _without_bad(page: Page, report: Report) -> None:
    """A line to paste that leaves the bad hosts out, where that can mean something."""
    if (told := exclude_line(report)) is None:
        return
    sentence, command = told
    page.write(sentence)
    page.verbatim(command, indent=4)
    page.blank()


def write_verdict(page: Page, report: Report) -> None:
    """The last paragraph: the verdict and its sentence."""
    verdict = report.verdict
    page.write(one_line(report.sentence), lead=f"{verdict.value.upper()}: ", lead_style=_VERDICT_STYLES[verdict])


def _write_way_out(page: Page, report: Report) -> None:
    """What to do about the first error, where its finding has long left the screen."""
    first = next((finding for finding in report.findings if finding.severity is Severity.ERROR), None)
    if first is not None and first.remedy and page.lines > SCREEN_LINES:
        page.write(first.remedy, lead="Fix: ", lead_style="bold")
