"""The report for people: the verdict; the findings with who is blamed and the fix; what was checked, and the figures;
and the verdict once more, in one sentence.

Errors and warnings come first, because the first screen of a log is what is read of it; tables, which may be long, come
behind all findings. The sentence comes last, with the fix of the first error once more, because the end of the text
is what a terminal still shows. Without colour the page's own characters are ASCII and hold no escape codes, so that it
can end in a log file.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from ddpdiag.model import CheckLine, Finding, Report, Severity, StageLine, Verdict
from ddpdiag.model.options import ALONE
from ddpdiag.render import Feature
from ddpdiag.render.findings import LIST_SHOWN, SAME_SHOWN, SEVERITIES, most_of, value_text, write_findings
from ddpdiag.render.matrices import matrix_blocks
from ddpdiag.render.page import Page, one_line
from ddpdiag.render.painter import paint, write_table
from ddpdiag.render.ranks import are_alike, ranks_table
from ddpdiag.render.report import kinds_of_hosts, outcomes_text, time_spent
from ddpdiag.render.shell import exclude_lines, shell_lines
from ddpdiag.text import count, fold_hosts, label, listed, seconds

_VERDICT_STYLES = {Verdict.FIT: "bold green", Verdict.UNFIT: "bold red", Verdict.UNKNOWN: "bold yellow"}

# What a terminal shows at once.
SCREEN_LINES = 24


def render(report: Report, *, color: bool, width: int, details: bool = False) -> str:
    """`report` as text of `width` columns; `details` adds the checks of each stage and shortens nothing."""
    page = Page(color=color, width=width)
    write_head(page, report)
    page.blank()
    write_findings(page, report.findings, details=details, severities=SEVERITIES[:2])
    write_inventory(page, report, details=details)
    write_stages(page, report, details=details)
    write_findings(page, report.findings, details=details, severities=SEVERITIES[2:])
    write_skipped(page, report.checks, details=details)
    if (table := ranks_table(report)) and (details or report.verdict is not Verdict.FIT or not are_alike(report)):
        write_table(page, table, details=details)
    if details:
        for name, value in report.measurements.items():
            page.write(f"{one_line(label(name))} = {value_text(name, value)}")
        if report.measurements:
            page.blank()
    paint(page, matrix_blocks(report.matrices, report.findings, details=details), details=True)
    write_notes(page, report.notes)
    for sentence, command in exclude_lines(report):
        page.write(sentence)
        page.verbatim(command, indent=4)
        page.blank()
    write_verdict(page, report)
    _write_first_fix(page, report)
    return page.text()


def render_feature(report: Report, features: Sequence[Feature], *, color: bool, width: int, details: bool) -> str:
    """The report of a feature's command: the blocks of the `features` in place of stages and ranks."""
    page = Page(color=color, width=width)
    write_head(page, report)
    page.blank()
    for feature in features:
        paint(page, feature.blocks(report), details=details)
    write_findings(page, report.findings, details=details)
    write_notes(page, report.notes)
    write_verdict(page, report)
    return page.text()


def render_quiet(report: Report, *, color: bool, width: int) -> str:
    """The verdict, then errors and warnings with their fixes."""
    page = Page(color=color, width=width)
    write_verdict(page, report)
    if any(finding.severity in SEVERITIES[:2] for finding in report.findings):
        page.blank()
        write_findings(page, report.findings, details=False, severities=SEVERITIES[:2])
    return f"{page.text().rstrip()}\n"


def write_head(page: Page, report: Report) -> None:
    """Write the verdict and the world, and below them the run's time, id, version and duration."""
    page.write(_world(report), lead=f"ddpdiag: {report.verdict_text}: ", lead_style=_style(report))
    version = f"ddpdiag {one_line(report.version)}" if report.version else ""
    spent = f"took {seconds(report.seconds)} (limit {seconds(report.budget_seconds)})"
    # What distinguishes one log from another.
    run = (_begin(report.created), f"run {one_line(report.run_id)}", version, spent)
    page.write(", ".join(filter(None, run)), style="dim")


# Kinds of hosts that are shown without `--details`.
_KINDS_SHOWN = 8


def write_inventory(page: Page, report: Report, *, details: bool) -> None:
    """Write a paragraph for each kind of host."""
    kinds = kinds_of_hosts(report)
    most = len(kinds) if details else most_of(kinds, _KINDS_SHOWN)
    for hosts, text in kinds[:most]:
        if len(kinds) == 1:
            page.write(text, lead=f"{hosts}: ", lead_style="bold")
        else:
            page.write(f"{hosts}:", style="bold")
            page.write(text, indent=4)
    if left := len(kinds) - most:
        page.write(f"{left:,} more kinds of hosts, with --details", style="dim")
    if kinds:
        page.blank()


def _world(report: Report) -> str:
    """The world in words: "4 ranks on 2 hosts (n[0-1]), torchrun, gloo"."""
    world = report.world
    hosts = one_line(fold_hosts(world.hosts, limit=LIST_SHOWN))
    if world.launcher == ALONE:
        return f"host {hosts} alone"
    on_hosts = f" on {count(len(world.hosts), 'host')} ({hosts})" if world.hosts else ", no host known"
    words = (count(world.size, "rank") + on_hosts, one_line(world.launcher), one_line(world.backend))
    return ", ".join(filter(None, words))


def _begin(created: str) -> str:
    """The time at which the run began: "2026-11-22 05:31 UTC"."""
    try:
        return f"{datetime.fromisoformat(created).astimezone(UTC):%Y-%m-%d %H:%M} UTC" if created else ""
    except (ValueError, OverflowError):
        return one_line(created)


def write_notes(page: Page, notes: Sequence[str]) -> None:
    """Write a paragraph for each problem of the files that were read."""
    # The same note from a thousand files is one note.
    for note, times in Counter(notes).items():
        page.write(note if times == 1 else f"{note} ({times:,} times)", lead="note: ")
    if notes:
        page.blank()


def write_verdict(page: Page, report: Report) -> None:
    """Write the last paragraph: the verdict and its sentence."""
    page.write(one_line(report.sentence), lead=f"{report.verdict_text}: ", lead_style=_style(report))


def _style(report: Report) -> str:
    return _VERDICT_STYLES[Verdict.UNKNOWN if report.degraded else report.verdict]


def _write_first_fix(page: Page, report: Report) -> None:
    """Repeat the fix of the error that the verdict names, if its finding has left the screen."""
    errors = [finding for finding in report.findings if finding.severity is Severity.ERROR]
    first = next((finding for finding in errors if finding.ranks or finding.hosts or finding.links), None)
    first = first or next(iter(errors), None)
    if first is None or not first.fix or page.lines <= SCREEN_LINES:
        return
    alike = {node for finding in errors if finding.code == first.code for node in finding.hosts}
    all_out = ""
    if not alike.issubset(first.hosts) and exclude_lines(report):
        all_out = (
            f"Leave the {count(len(report.hosts.failing), 'bad host')} out (see above). For each, as for the first: "
        )
    page.write(all_out + first.fix, lead="Fix: ", lead_style="bold")
    for line in shell_lines(first.env):
        page.verbatim(line, indent=4)


_MARK_STYLES = {"ok": "green", "warn": "yellow", "FAIL": "bold red", "??": "bold yellow", "skip": "dim"}
# The reasons of most skipped checks. With more of them, a third of a healthy page would be such reasons.
_REASONS_SHOWN = 3
# So many codes take no more room than their number.
_CODES_SHOWN = 2


def write_stages(page: Page, report: Report, *, details: bool) -> None:
    """Write a line for each stage, with `details` also for each of its checks."""
    name_width = max((len(one_line(stage.name)) for stage in report.stages), default=0)
    for stage in report.stages:
        checks = [check for check in report.checks if check.stage == stage.name]
        codes = {check.code for check in checks}
        # A check's code is what stands before the dot.
        findings = [finding for finding in report.findings if finding.code.partition(".")[0] in codes]
        mark = _mark(stage, findings)
        time = "-" if mark == "skip" else f"{stage.seconds:.2f} s"
        lead = f"{mark:<4}  {one_line(stage.name):<{name_width}}  {time:>8}  "
        saying = one_line(stage.note) or _saying(stage, mark, checks, findings)
        page.write(saying, lead=lead, lead_style=_MARK_STYLES[mark])
        for check in checks if details else ():
            page.write(outcomes_text(check), indent=6, lead=f"{one_line(check.code)} {one_line(check.name)}: ")
    if details and report.stages:
        page.write(time_spent(report))
    if report.stages:
        page.blank()


def _mark(stage: StageLine, findings: Sequence[Finding]) -> str:
    severities = {finding.severity for finding in findings} | {stage.severity}
    if Severity.ERROR in severities:
        return "FAIL"
    if stage.status == "skipped":
        return "skip"
    if stage.status not in ("done", "warning"):
        return "??"  # Not looked at is not healthy.
    return "warn" if stage.status == "warning" or Severity.WARNING in severities else "ok"


def _saying(stage: StageLine, mark: str, checks: Sequence[CheckLine], findings: Sequence[Finding]) -> str:
    """The most important words on a stage: its findings, else its failed checks, else the number of its checks."""
    words = []
    for severity in SEVERITIES:  # "2 errors: COL002.slow, COL003.wrong"
        if codes := [one_line(finding.code) for finding in findings if finding.severity is severity]:
            names = listed(tuple(dict.fromkeys(codes)), SAME_SHOWN)
            words.append(f"{count(len(codes), severity.value)}: {names}")
    broken = [
        f"{one_line(check.code)}: {outcomes_text(check)}"
        for check in checks
        if check.statuses.keys() - {"done", "skipped"}
    ]
    # An error that RUN002 to RUN004 report about a trial is none of the stage's own findings.
    if all(finding.severity is not Severity.ERROR for finding in findings):
        words = [*broken, *words]
    if words:
        return "; ".join(words)
    # The mark shows the status of every stage except those that were not checked completely.
    status = one_line(stage.status) if mark == "??" else ""
    return "; ".join(filter(None, (status, _numbers(mark, checks))))


def _numbers(mark: str, checks: Sequence[CheckLine]) -> str:
    """The number of checks, in words: "3 checks, 1 skipped"."""
    skipped = sum(check.skipped_because is not None for check in checks)
    idle = sum(check.measures and not check.statuses and check.skipped_because is None for check in checks)
    ran = len(checks) - skipped - idle
    if mark == "skip" and skipped == len(checks):
        return count(skipped, "check") if checks else "no checks"
    parts = [count(ran, "check")] if ran else []
    parts += [f"{number:,} {what}" for number, what in ((skipped, "skipped"), (idle, "not run")) if number]
    return ", ".join(parts) or "no checks"


def write_skipped(page: Page, checks: Sequence[CheckLine], *, details: bool) -> None:
    """Write the reasons for skipped checks: all with `details`, else those of most checks."""
    reasons: dict[str, list[str]] = {}
    for check in checks:
        if check.skipped_because is not None:
            reasons.setdefault(one_line(check.skipped_because), []).append(one_line(check.code))
    if not reasons:
        return
    if details:
        for reason, codes in reasons.items():
            page.write(f"{reason}: {', '.join(codes)}", style="dim", lead="skip  ", lead_style="dim")
    else:
        page.write(_in_short(reasons), style="dim", lead="not checked: ", lead_style="dim")
    page.blank()


def _in_short(reasons: dict[str, list[str]]) -> str:
    """Reasons in words: "12 checks (no GPU is visible on any host), RDZ006 (no shared directory was given)"."""
    by_number = sorted(reasons.items(), key=lambda reason: -len(reason[1]))
    most = most_of(by_number, _REASONS_SHOWN)
    parts = [
        f"{', '.join(codes) if len(codes) <= _CODES_SHOWN else count(len(codes), 'check')} ({reason})"
        for reason, codes in by_number[:most]
    ]
    left = sum(len(codes) for _, codes in by_number[most:])
    parts += [f"{left:,} more"] if left else []
    unnamed = left or any(len(codes) > _CODES_SHOWN for codes in reasons.values())
    return f"{', '.join(parts)}{'; all with --details' if unnamed else ''}"
