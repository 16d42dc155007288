"""The report as Markdown for tickets and chats: the verdict, the findings with their fixes, and folded figures.

The text always fits into a comment on GitHub: lists, tables and texts are cut, and if that is not enough, parts that do
not fit are left out. A sentence says so each time.
"""

from collections.abc import Iterator, Sequence

from ddpdiag.model import Finding, Report, Severity
from ddpdiag.render import Feature
from ddpdiag.render.blocks import Block, Code, Fold, Items, Section, Text
from ddpdiag.render.findings import blamed_text, finding_boxes
from ddpdiag.render.markup import draw_pieces, fit_pieces
from ddpdiag.render.report import kinds_of_hosts, sections
from ddpdiag.render.shell import shell_lines
from ddpdiag.text import count, fold_hosts, seconds

# Matrices are in the JSON report.
_SECTIONS = ("ranks", "stages", "environment", "checks")
# Longer tickets are not read.
_FINDINGS_SHOWN, _HOST_KINDS_SHOWN, _NAMES_SHOWN = 6, 8, 8


def render(report: Report, features: Sequence[Feature] = ()) -> str:
    """The report as Markdown, for GitHub, GitLab and most chats."""
    return "\n".join(fit_pieces(draw_pieces(blocks(report, features)))).rstrip() + "\n"


def blocks(report: Report, features: Sequence[Feature]) -> Iterator[Block]:
    """Yield the blocks of the whole report, the most important ones first."""
    yield Text(report.sentence, report.verdict_text)
    yield Text(_world_text(report))
    kinds = kinds_of_hosts(report)
    yield Items(tuple(f"{hosts}: {text}" for hosts, text in kinds[:_HOST_KINDS_SHOWN]))
    serious = finding_boxes(finding for finding in report.findings if finding.severity is not Severity.NOTE)
    for finding, parts in serious[:_FINDINGS_SHOWN]:
        yield Section(f"{finding.severity.value} {finding.code}: {finding.title}", parts)
    if others := serious[_FINDINGS_SHOWN:]:
        lines = tuple(f"{_finding_line(finding)} {finding.fix}".strip() for finding, _ in others)
        yield Fold(count(len(others), "more finding"), (Items(lines),))
    if report.workarounds:
        yield Code("\n".join(shell_lines(report.workarounds)), "The job needs these variables")
    for feature in features:
        yield from feature.blocks(report)
    notes = finding_boxes(finding for finding in report.findings if finding.severity is Severity.NOTE)
    yield Fold("Notes", (Items(tuple(f"{_finding_line(finding)} {finding.message}" for finding, _ in notes)),))
    for section in sections(report):
        if section.name in _SECTIONS:
            yield Fold(section.title, section.blocks)
    yield Fold("Notes", (Items(report.recording_problems),))


def _finding_line(finding: Finding) -> str:
    names = blamed_text((finding,), _NAMES_SHOWN)
    return f"{finding.code}: {finding.title}{f' ({names})' if names else ''}."


def _world_text(report: Report) -> str:
    world = report.world
    hosts = fold_hosts(world.hosts, limit=_NAMES_SHOWN)
    parts = [
        f"{count(world.size, 'rank')} on {count(len(world.hosts), 'host')} ({hosts})",
        world.launcher,
        world.backend,
        f"took {seconds(report.seconds)} (limit {seconds(report.budget_seconds)})",
        f"exit code {report.exit_code}",
        f"run {report.run_id}",
    ]
    return ", ".join(filter(None, parts))
