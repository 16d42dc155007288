"""The report for people: what was looked at, the figures, what is wrong with whom, and one sentence.

The sentence comes last, because the end of the text is what a terminal still shows. Without colour the page's own
characters are ASCII and hold no escape codes, so that it can end in a log file.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeGuard

from ddpdiag.model import CheckLine, Finding, Report, Scalar, Severity, StageLine, Verdict, WorldLine
from ddpdiag.render.exports import exclude_line, shell_line
from ddpdiag.render.hosts import fold_hosts, fold_ranks
from ddpdiag.render.matrices import write_matrices
from ddpdiag.render.page import Page, one_line
from ddpdiag.render.tables import Ranks, blamed
from ddpdiag.render.timings import write_timings
from ddpdiag.render.units import count, label, quantity, seconds

# What was asked for, what was not looked at, or how the run was ended: there is nobody to look for.
_OF_THE_RUN = (".unsupported", ".unmeasured", ".budget", ".told")
_ORDER = (Severity.ERROR, Severity.WARNING, Severity.INFO)
_SEVERITY_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.INFO: "bold cyan"}
_VERDICT_STYLES = {Verdict.FIT: "bold green", Verdict.UNFIT: "bold red", Verdict.UNKNOWN: "bold yellow"}
_MARK_STYLES = {"ok": "green", "warn": "yellow", "FAIL": "bold red", "??": "bold yellow", "skip": "dim"}

# One finding a rank, on a thousand ranks: the first few show what it looks like, the rest is a list of names.
SAME_SHOWN = 3
# Where several codes have many, one of each: beyond so many findings a page is no longer read.
FINDINGS_SHOWN = 5
# Names and values of one kind in one line.
LIST_SHOWN = 8


def render(report: Report, *, color: bool, width: int, details: bool = False, timings: bool = False) -> str:
    """`report` as text of `width` columns; `details` adds the checks of each stage and shortens nothing.

    `timings` adds where the seconds went.
    """
    page = Page(color=color, width=width)
    page.write(_head(report), lead="ddpdiag: ", lead_style="bold")
    if details:
        page.write(f"run {report.run_id}", style="dim")
    page.blank()
    _stages(page, report, details=details)
    _ranks(page, report, details=details)
    _measurements(page, report.measurements if details else {})
    write_matrices(page, report.matrices, report.findings, details=details)
    if timings:
        write_timings(page, report, details=details)
    write_findings(page, report.findings, details=details)
    _skipped(page, report.checks)
    write_notes(page, report.notes)
    _without_bad(page, report)
    write_verdict(page, report)
    return page.text()


def _head(report: Report) -> str:
    """The world in one line: "4 ranks on 2 hosts (n[0-1]), torchrun, gloo; 7.9 s of 60 s"."""
    world = report.world
    parts = (_population(world), one_line(world.launcher), one_line(world.backend))
    return f"{', '.join(filter(None, parts))}; {seconds(report.seconds)} of {seconds(report.budget_seconds)}"


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
    words = [_counted(severity, findings) for severity in _ORDER]
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
    return f"{count(len(codes), severity.value)}: {_listed(tuple(dict.fromkeys(codes)), SAME_SHOWN)}" if codes else ""


def _failed(check: CheckLine) -> bool:
    return bool(check.statuses.keys() - {"done", "skipped"})


def _ran(check: CheckLine) -> str:
    """How a check's trials ended: "3 done, 1 hung"."""
    if check.skipped_because is not None:
        return f"skipped: {one_line(check.skipped_because)}"
    return ", ".join(f"{number:,} {one_line(status)}" for status, number in check.statuses.items()) or (
        "not run" if check.measures else "judged from what other checks saw"
    )


def _listed(words: Sequence[str], limit: int | None) -> str:
    """Words joined by commas; of more than `limit`, how many are left out."""
    return ", ".join(words[:limit]) + _left_out(len(words), limit)


def _left_out(number: int, limit: int | None) -> str:
    return f" +{number - limit:,} more" if limit is not None and number > limit else ""


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
        page.write(f"{one_line(label(name))} = {_value(name, value)}")
    if measurements:
        page.blank()


def write_findings(page: Page, findings: Sequence[Finding], *, details: bool) -> None:
    """The findings, errors first; many of one code are shown by a few, unless `details`."""
    groups: dict[tuple[Severity, str], list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: _ORDER.index(finding.severity)):
        groups.setdefault((finding.severity, finding.code), []).append(finding)
    few = SAME_SHOWN if sum(_shown(group, SAME_SHOWN) for group in groups.values()) <= FINDINGS_SHOWN else 1
    for group in groups.values():
        most = len(group) if details else _shown(group, few)
        for finding in group[:most]:
            _finding(page, finding, details=details)
        _more(page, group[most:])


def _shown(group: Sequence[Finding], few: int) -> int:
    """How many of one code are shown: "and 1 more" would take the room of the one."""
    return len(group) if len(group) <= few + 1 else few


def _finding(page: Page, finding: Finding, *, details: bool) -> None:
    limit = None if details else LIST_SHOWN
    lead = f"{finding.severity.value} {one_line(finding.code)}: "
    page.write(one_line(finding.title), style="bold", lead=lead, lead_style=_SEVERITY_STYLES[finding.severity])
    page.write(finding.message, indent=4)
    if blame := _blame((finding,), limit):
        # Good to know is no blame.
        word = "about: " if finding.severity is Severity.INFO else "blamed: "
        page.write(blame, indent=4, lead=word, lead_style="bold")
    elif finding.severity is not Severity.INFO and not finding.code.endswith(_OF_THE_RUN):
        page.write("nobody can be blamed: the evidence points at no single rank, host, GPU or link", indent=4)
    _evidence(page, finding, details=details)
    if finding.remedy:
        page.write(finding.remedy, indent=4, lead="Fix: ", lead_style="bold")
    for name, value in finding.env.items():
        page.verbatim(shell_line(name, value), indent=8)
    page.blank()


def _more(page: Page, findings: Sequence[Finding]) -> None:
    """One line for findings that look like those before them."""
    if not findings:
        return
    lead = f"{findings[0].severity.value} {one_line(findings[0].code)}: "
    blame = _blame(findings, LIST_SHOWN) or "nobody can be blamed"
    text = f"{len(findings):,} more like these: {blame}; the JSON report has all of them"
    page.write(text, lead=lead, lead_style=_SEVERITY_STYLES[findings[0].severity])
    page.blank()


def _blame(findings: Sequence[Finding], limit: int | None) -> str:
    """Who is blamed in some findings: "rank 3; host n1; link n0 -> n1"; empty if nobody is."""
    ranks = {rank for finding in findings for rank in finding.ranks}
    nodes = dict.fromkeys(node for finding in findings for node in finding.nodes)
    gpus = tuple(dict.fromkeys(one_line(gpu) for finding in findings for gpu in finding.gpus))
    links = tuple(dict.fromkeys(one_line(link) for finding in findings for link in finding.links))
    kinds = (
        ("rank", len(ranks), fold_ranks(ranks, limit=limit)),
        ("host", len(nodes), one_line(fold_hosts(nodes, limit=limit))),
        ("GPU", len(gpus), _listed(gpus, limit)),
        ("link", len(links), _listed(links, limit)),
    )
    return "; ".join(f"{noun if number == 1 else noun + 's'} {names}" for noun, number, names in kinds if number)


def _evidence(page: Page, finding: Finding, *, details: bool) -> None:
    """Figures in one paragraph; below it what takes a line for each item: tables, and with `details` all sentences."""
    limit = None if details else LIST_SHOWN
    tables = {name: value for name, value in finding.evidence.items() if _is_table(value, details=details)}
    figures = {name: value for name, value in finding.evidence.items() if name not in tables}
    text = "; ".join(f"{one_line(label(name))} = {_value(name, value, limit)}" for name, value in figures.items())
    if text:
        page.write(text, style="dim", indent=4)
    for name, value in tables.items():
        page.write(f"{one_line(label(name))}:", style="dim", indent=4)
        for item in value[:limit]:
            head, mark, rest = one_line(item).partition(": ")
            page.write(rest or head, style="dim", indent=6, lead=head + mark if rest else "", lead_style="dim")
        if left_out := _left_out(len(value), limit):
            page.write(left_out.strip(), style="dim", indent=6)


def _is_table(value: Scalar | list[Scalar], *, details: bool) -> TypeGuard[list[str]]:
    """Is every item a row, such as "rank 3: hung", or with `details` a sentence or a frame of a stack?"""
    mark = " " if details else ": "
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) and mark in item for item in value)


def _value(name: str, value: Scalar | list[Scalar], limit: int | None = None) -> str:
    """A value with its unit, in ASCII."""
    if value is None:
        return "not known"
    if isinstance(value, list) and value:
        return ", ".join(_value(name, item) for item in value[:limit]) + _left_out(len(value), limit)
    return one_line(quantity(name, value))


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
