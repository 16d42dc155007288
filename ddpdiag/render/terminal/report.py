"""The report for people: the verdict; what is wrong, by whom, and the way out; what was looked at, the figures; and
the verdict once more, in one sentence.

Errors and warnings come first, because the first screen of a log is what is read of it; tables, which may be long, come
behind all findings. The sentence comes last, with the way out of the first error once more, because the end of the text
is what a terminal still shows. Without colour the page's own characters are ASCII and hold no escape codes, so that it
can end in a log file.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from ddpdiag.model import Report, Scalar, Severity, Verdict, WorldLine
from ddpdiag.model.options import ALONE
from ddpdiag.render.page import Page, one_line, write_hosts_rule
from ddpdiag.render.shell import exclude_lines, shell_line
from ddpdiag.render.terminal.findings import LIST_SHOWN, SEVERITIES, value_text, write_findings
from ddpdiag.render.terminal.matrices import write_matrices
from ddpdiag.render.terminal.ranks import Ranks, blamed
from ddpdiag.render.terminal.stages import write_skipped, write_stages, write_timings
from ddpdiag.text import count, fold_hosts, label, seconds

_VERDICT_STYLES = {Verdict.FIT: "bold green", Verdict.UNFIT: "bold red", Verdict.UNKNOWN: "bold yellow"}

# What a terminal shows at once.
SCREEN_LINES = 24


def render(report: Report, *, color: bool, width: int, details: bool = False, timings: bool = False) -> str:
    """`report` as text of `width` columns; `details` adds the checks of each stage and shortens nothing.

    `timings` adds where the seconds went.
    """
    page = Page(color=color, width=width)
    write_head(page, report)
    page.blank()
    write_findings(page, report.findings, details=details, severities=SEVERITIES[:2])
    write_stages(page, report, details=details)
    write_findings(page, report.findings, details=details, severities=SEVERITIES[2:])
    write_skipped(page, report.checks, details=details)
    _ranks(page, report, details=details)
    _measurements(page, report.measurements if details else {})
    write_matrices(page, report.matrices, report.findings, details=details)
    if timings:
        write_timings(page, report, details=details)
    write_notes(page, report.notes)
    _without_bad(page, report)
    write_verdict(page, report)
    _write_first_fix(page, report)
    return page.text()


def write_head(page: Page, report: Report) -> None:
    """The verdict and the world, and below it which run this was."""
    verdict = report.verdict
    page.write(_world(report), lead=f"ddpdiag: {verdict.value.upper()}: ", lead_style=_VERDICT_STYLES[verdict])
    page.write(_run(report), style="dim")


def _world(report: Report) -> str:
    """Such as "4 ranks on 2 hosts (n[0-1]), torchrun, gloo"."""
    world = report.world
    if world.launcher == ALONE:
        return f"host {one_line(fold_hosts(world.nodes, limit=LIST_SHOWN))} alone"
    return ", ".join(filter(None, (_population(world), one_line(world.launcher), one_line(world.backend))))


def _run(report: Report) -> str:
    """When, which run, by what, and how long: what tells one log from another."""
    version = f"ddpdiag {one_line(report.version)}" if report.version else ""
    spent = f"{seconds(report.seconds)} of {seconds(report.budget_seconds)}"
    return ", ".join(filter(None, (_begin(report.created), f"run {one_line(report.run_id)}", version, spent)))


def _begin(created: str) -> str:
    """ "2026-11-22 05:31 UTC"."""
    try:
        return f"{datetime.fromisoformat(created).astimezone(UTC):%Y-%m-%d %H:%M} UTC" if created else ""
    except (ValueError, OverflowError):
        return one_line(created)


def _population(world: WorldLine) -> str:
    ranks = count(world.size, "rank")
    if not world.nodes:
        return f"{ranks}, no host known"
    hosts = one_line(fold_hosts(world.nodes, limit=LIST_SHOWN))
    return f"{ranks} on {count(len(world.nodes), 'host')} ({hosts})"


def _ranks(page: Page, report: Report, *, details: bool) -> None:
    marks = blamed(report.findings, report.ranks)
    serious = any(finding.severity is not Severity.NOTE for finding in report.findings)
    healthy = report.verdict is Verdict.FIT and not serious
    ranks = Ranks(report.ranks, marks, details, brief=True, healthy=healthy)
    if ranks.names or details:
        write_hosts_rule(page, ranks.hosts.rule)
    for table in ranks.tables(color=page.color, width=page.width):
        page.table(table)
        page.blank()
    if ranks.note:
        page.write(ranks.note, style="dim")
        page.blank()


def _measurements(page: Page, measurements: dict[str, Scalar]) -> None:
    for name, value in measurements.items():
        page.write(f"{one_line(label(name))} = {value_text(name, value)}")
    if measurements:
        page.blank()


def write_notes(page: Page, notes: Sequence[str]) -> None:
    """What was wrong with the files, one paragraph each."""
    # The same note from a thousand files is one note.
    for note, times in Counter(notes).items():
        page.write(note if times == 1 else f"{note} ({times:,} times)", lead="note: ")
    if notes:
        page.blank()


def _without_bad(page: Page, report: Report) -> None:
    """Lines to paste that leave out the bad hosts, and the slow ones, where that can mean something."""
    for sentence, command in exclude_lines(report):
        page.write(sentence)
        page.verbatim(command, indent=4)
        page.blank()


def write_verdict(page: Page, report: Report, *, after: str = ": ") -> None:
    """The last paragraph: the verdict and its sentence; what stands `after` the verdict leads on to it."""
    verdict = report.verdict
    page.write(one_line(report.sentence), lead=f"{verdict.value.upper()}{after}", lead_style=_VERDICT_STYLES[verdict])


def _write_first_fix(page: Page, report: Report) -> None:
    """What to do about the error that the verdict names, where its finding has long left the screen."""
    errors = [finding for finding in report.findings if finding.severity is Severity.ERROR]
    first = next((finding for finding in errors if finding.ranks or finding.nodes or finding.links), None)
    first = first or next(iter(errors), None)
    if first is None or not first.fix or page.lines <= SCREEN_LINES:
        return
    alike = {node for finding in errors if finding.code == first.code for node in finding.nodes}
    all_out = ""
    if not alike.issubset(first.nodes) and exclude_lines(report):
        all_out = f"Leave the {count(len(report.hosts.bad), 'bad host')} out (see above). For each, as for the first: "
    page.write(all_out + first.fix, lead="Fix: ", lead_style="bold")
    for name, value in first.env.items():
        page.verbatim(shell_line(name, value), indent=4)
