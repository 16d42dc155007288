"""The report for people, as text for a terminal or a log file.

It begins with the verdict, the errors and the warnings, because many readers of a log see only its first screen. The
stages, the notes and the tables follow. The verdict's sentence and the fix of the first error come again at the end,
because a terminal then shows the end of the text. Without colour, all fixed texts are ASCII, for log files.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

from ddpdiag.model import CheckSummary, Finding, Report, Severity, StageSummary, Verdict
from ddpdiag.model.options import ALONE
from ddpdiag.render import Feature
from ddpdiag.render.findings import LIST_SHOWN, SAME_SHOWN, SEVERITIES, shown_count, value_text, write_findings
from ddpdiag.render.matrices import matrix_blocks
from ddpdiag.render.page import Page, one_line
from ddpdiag.render.painter import paint, write_table
from ddpdiag.render.ranks import are_ranks_alike, ranks_table
from ddpdiag.render.report import count_equal, kinds_of_hosts, outcomes_text, time_spent_sentence
from ddpdiag.render.shell import exclude_lines, shell_lines
from ddpdiag.text import count, fold_hosts, label, listed, seconds

_VERDICT_STYLES = {Verdict.FIT: "bold green", Verdict.UNFIT: "bold red", Verdict.UNKNOWN: "bold yellow"}

# The number of lines that a terminal shows at once.
SCREEN_LINES = 24


def render(report: Report, *, color: bool, width: int, details: bool = False) -> str:
    """The report as text of `width` columns. `details` adds the checks of each stage, and nothing is shortened."""
    page = Page(color=color, width=width)
    write_head(page, report)
    page.blank()
    write_findings(page, report.findings, details=details, severities=SEVERITIES[:2])
    write_inventory(page, report, details=details)
    write_stages(page, report, details=details)
    write_findings(page, report.findings, details=details, severities=SEVERITIES[2:])
    write_skipped(page, report.checks, details=details)
    if (table := ranks_table(report)) and (details or report.verdict is not Verdict.FIT or not are_ranks_alike(report)):
        write_table(page, table, details=details)
    if details:
        for name, value in report.measurements.items():
            page.write(f"{one_line(label(name))} = {value_text(name, value)}")
        if report.measurements:
            page.blank()
    paint(page, matrix_blocks(report.matrices, report.findings, details=details), details=True)
    write_file_problems(page, report.recording_problems)
    for sentence, command in exclude_lines(report):
        page.write(sentence)
        page.write_verbatim(command, indent=4)
        page.blank()
    write_verdict(page, report)
    _write_first_fix(page, report)
    return page.text()


def render_feature(report: Report, features: Sequence[Feature], *, color: bool, width: int, details: bool) -> str:
    """The report of a feature's command, with the blocks of the `features` instead of stages and ranks."""
    page = Page(color=color, width=width)
    write_head(page, report)
    page.blank()
    for feature in features:
        paint(page, feature.blocks(report), details=details)
    write_findings(page, report.findings, details=details)
    write_file_problems(page, report.recording_problems)
    write_verdict(page, report)
    return page.text()


def render_quiet(report: Report, *, color: bool, width: int) -> str:
    """A short report: the verdict, and the errors and warnings with their fixes."""
    page = Page(color=color, width=width)
    write_verdict(page, report)
    if any(finding.severity in SEVERITIES[:2] for finding in report.findings):
        page.blank()
        write_findings(page, report.findings, details=False, severities=SEVERITIES[:2])
    return f"{page.text().rstrip()}\n"


def write_head(page: Page, report: Report) -> None:
    """Write the verdict and the world, and below them the run's time, id, version and duration."""
    page.write(_world_text(report), lead=f"ddpdiag: {report.verdict_text}: ", lead_style=_verdict_style(report))
    version = f"ddpdiag {one_line(report.version)}" if report.version else ""
    spent = f"took {seconds(report.seconds)} (limit {seconds(report.budget_seconds)})"
    # These figures distinguish one log from another.
    run = (_start_text(report.created), f"run {one_line(report.run_id)}", version, spent)
    page.write(", ".join(filter(None, run)), style="dim")


# So many kinds of hosts are shown without `--details`.
_HOST_KINDS_SHOWN = 8


def write_inventory(page: Page, report: Report, *, details: bool) -> None:
    """Write a paragraph for each kind of host."""
    kinds = kinds_of_hosts(report)
    shown = len(kinds) if details else shown_count(kinds, _HOST_KINDS_SHOWN)
    for hosts, text in kinds[:shown]:
        if len(kinds) == 1:
            page.write(text, lead=f"{hosts}: ", lead_style="bold")
        else:
            page.write(f"{hosts}:", style="bold")
            page.write(text, indent=4)
    if omitted := len(kinds) - shown:
        page.write(f"{omitted:,} more kinds of hosts, with --details", style="dim")
    if kinds:
        page.blank()


def _world_text(report: Report) -> str:
    """Describe the world: "4 ranks on 2 hosts (n[0-1]), torchrun, gloo"."""
    world = report.world
    hosts = one_line(fold_hosts(world.hosts, limit=LIST_SHOWN))
    if world.launcher == ALONE:
        return f"host {hosts} alone"
    on_hosts = f" on {count(len(world.hosts), 'host')} ({hosts})" if world.hosts else ", no host known"
    words = (count(world.size, "rank") + on_hosts, one_line(world.launcher), one_line(world.backend))
    return ", ".join(filter(None, words))


def _start_text(created: str) -> str:
    """The time at which the run began: "2026-11-22 05:31 UTC". A `created` without a valid time is not changed."""
    try:
        return f"{datetime.fromisoformat(created).astimezone(UTC):%Y-%m-%d %H:%M} UTC" if created else ""
    except (ValueError, OverflowError):
        return one_line(created)


def write_file_problems(page: Page, problems: Sequence[str]) -> None:
    """Write a paragraph for each problem that occurred while files were read."""
    for problem in count_equal(problems):
        page.write(problem, lead="note: ")
    if problems:
        page.blank()


def write_verdict(page: Page, report: Report) -> None:
    """Write the verdict and its sentence."""
    page.write(one_line(report.sentence), lead=f"{report.verdict_text}: ", lead_style=_verdict_style(report))


def _verdict_style(report: Report) -> str:
    return _VERDICT_STYLES[Verdict.UNKNOWN if report.degraded else report.verdict]


def _write_first_fix(page: Page, report: Report) -> None:
    """Write once more the fix of the error that the verdict's sentence names, if the page is longer than a screen."""
    errors = [finding for finding in report.findings if finding.severity is Severity.ERROR]
    first = next((finding for finding in errors if finding.ranks or finding.hosts or finding.links), None)
    first = first or next(iter(errors), None)
    if first is None or not first.fix or page.line_count <= SCREEN_LINES:
        return
    hosts_of_code = {host for finding in errors if finding.code == first.code for host in finding.hosts}
    fix = first.fix
    if not hosts_of_code.issubset(first.hosts) and exclude_lines(report):
        failing_hosts = count(len(report.hosts.failing), "failing host")
        fix = f"Leave the {failing_hosts} out (see above). For each, as for the first: {fix}"
    page.write(fix, lead="Fix: ", lead_style="bold")
    for line in shell_lines(first.env):
        page.write_verbatim(line, indent=4)


_MARK_STYLES = {"ok": "green", "warn": "yellow", "FAIL": "bold red", "??": "bold yellow", "skip": "dim"}
# So many reasons for skipped checks are shown. More of them would fill a third of the page of a healthy run.
_REASONS_SHOWN = 3
# So many codes are listed. More are counted, which is shorter.
_CODES_SHOWN = 2


def write_stages(page: Page, report: Report, *, details: bool) -> None:
    """Write a line for each stage, and with `details` also for each check of the stage."""
    name_width = max((len(one_line(stage.name)) for stage in report.stages), default=0)
    for stage in report.stages:
        checks = [check for check in report.checks if check.stage == stage.name]
        codes = {check.code for check in checks}
        # The code of a finding is the code of its check, a dot and a name.
        findings = [finding for finding in report.findings if finding.code.partition(".")[0] in codes]
        mark = _stage_mark(stage, findings)
        time = "-" if mark == "skip" else f"{stage.seconds:.2f} s"
        lead = f"{mark:<4}  {one_line(stage.name):<{name_width}}  {time:>8}  "
        summary = one_line(stage.detail) or _stage_summary(stage, mark, checks, findings)
        page.write(summary, lead=lead, lead_style=_MARK_STYLES[mark])
        for check in checks if details else ():
            page.write(outcomes_text(check), indent=6, lead=f"{one_line(check.code)} {one_line(check.name)}: ")
    if details and report.stages:
        page.write(time_spent_sentence(report))
    if report.stages:
        page.blank()


def _stage_mark(stage: StageSummary, findings: Sequence[Finding]) -> str:
    severities = {finding.severity for finding in findings} | {stage.severity}
    if Severity.ERROR in severities:
        return "FAIL"
    if stage.status == "skipped":
        return "skip"
    if stage.status not in ("done", "warning"):
        return "??"  # A stage that was not checked completely is not healthy.
    return "warn" if stage.status == "warning" or Severity.WARNING in severities else "ok"


def _stage_summary(stage: StageSummary, mark: str, checks: Sequence[CheckSummary], findings: Sequence[Finding]) -> str:
    """Describe a stage by its findings and failed checks, or, if there are none, by its number of checks."""
    words = []
    for severity in SEVERITIES:  # "2 errors: COL002.slow, COL003.wrong"
        if codes := [one_line(finding.code) for finding in findings if finding.severity is severity]:
            names = listed(tuple(dict.fromkeys(codes)), SAME_SHOWN)
            words.append(f"{count(len(codes), severity.value)}: {names}")
    failed_checks = [
        f"{one_line(check.code)}: {outcomes_text(check)}"
        for check in checks
        if check.statuses.keys() - {"done", "skipped"}
    ]
    # The error for a failed trial may be reported by RUN002 to RUN004, which are not checks of this stage.
    if all(finding.severity is not Severity.ERROR for finding in findings):
        words = [*failed_checks, *words]
    if words:
        return "; ".join(words)
    # The mark shows the status of every stage except those that were not checked completely.
    status = one_line(stage.status) if mark == "??" else ""
    return "; ".join(filter(None, (status, _check_counts(mark, checks))))


def _check_counts(mark: str, checks: Sequence[CheckSummary]) -> str:
    """The numbers of checks as text: "3 checks, 1 skipped"."""
    skipped = sum(check.skipped_because is not None for check in checks)
    not_run = sum(check.measures and not check.statuses and check.skipped_because is None for check in checks)
    ran = len(checks) - skipped - not_run
    if mark == "skip" and skipped == len(checks):
        return count(skipped, "check") if checks else "no checks"
    parts = [count(ran, "check")] if ran else []
    parts += [f"{number:,} {what}" for number, what in ((skipped, "skipped"), (not_run, "not run")) if number]
    return ", ".join(parts) or "no checks"


def write_skipped(page: Page, checks: Sequence[CheckSummary], *, details: bool) -> None:
    """Write why checks were skipped. Without `details`, only the reasons with the most checks are written."""
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
        page.write(_short_reasons(reasons), style="dim", lead="not checked: ", lead_style="dim")
    page.blank()


def _short_reasons(reasons: dict[str, list[str]]) -> str:
    """The most frequent reasons: "12 checks (no GPU is visible on any host), RDZ006 (no shared directory)"."""
    codes_by_reason = sorted(reasons.items(), key=lambda reason: -len(reason[1]))
    shown = shown_count(codes_by_reason, _REASONS_SHOWN)
    parts = [
        f"{', '.join(codes) if len(codes) <= _CODES_SHOWN else count(len(codes), 'check')} ({reason})"
        for reason, codes in codes_by_reason[:shown]
    ]
    omitted = sum(len(codes) for _, codes in codes_by_reason[shown:])
    parts += [f"{omitted:,} more"] if omitted else []
    is_shortened = omitted or any(len(codes) > _CODES_SHOWN for codes in reasons.values())
    return f"{', '.join(parts)}{'; all with --details' if is_shortened else ''}"
