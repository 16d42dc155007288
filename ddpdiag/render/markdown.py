"""The report for tickets and chat: the verdict first, then who is to blame and what to do; figures are folded away.

It stays below what GitHub takes as a comment, whatever was found: lists and tables end after their first lines, long
texts are cut, and at last whole parts are left out, the last ones first. Each time it says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from ddpdiag.model import Finding, Report, Scalar, Severity
from ddpdiag.render import Feature
from ddpdiag.render.blocks import Fold
from ddpdiag.render.findings import SAME_SHOWN, SEVERITIES, grouped, most_of, subjects
from ddpdiag.render.markup import Piece, fence, fitting, folded, listed, name, painted, said, size, tabled
from ddpdiag.render.report import kinds_of_hosts, sections
from ddpdiag.render.shell import shell_lines
from ddpdiag.text import count, fold_hosts, label, quantity, seconds

_NOTES, _KINDS = 40, 8
# Matrices are in the JSON report.
_SECTIONS = ("ranks", "stages", "environment", "checks")
_VALUES = 8
# Bytes of single parts; the sentence, the notes and most tables are far shorter.
_SENTENCE, _NOTE, _WORKAROUNDS = 2_000, 600, 4_000
_SMALL_TABLE, _TABLE = 6_000, 10_000


def render(report: Report, features: Sequence[Feature] = ()) -> str:
    """`report` as Markdown: GitHub, GitLab and most chats draw it."""
    return "\n".join(fitting(_pieces(report, features))).rstrip() + "\n"


def _pieces(report: Report, features: Sequence[Feature]) -> Iterator[Piece]:
    head = f"**{report.verdict_text}**: {said(report.sentence, _SENTENCE)}"
    yield Piece("the verdict", [head, "", _world(report), ""])
    kinds = [f"- {said(hosts, _BRIEF)}: {said(text, _BRIEF)}" for hosts, text in kinds_of_hosts(report)[:_KINDS]]
    lines = listed(kinds, "kind of host", total=len(report.inventory), most=_SMALL_TABLE)
    yield Piece("the hosts", [*lines, ""] if lines else [])
    yield from _serious(report.findings)
    needed = (
        f"**The job needs {count(len(report.workarounds), 'variable')}**, in the JSON report (`--write-workaround`)."
    )
    copied = _to_copy(report.workarounds, _WORKAROUNDS, ["**The job needs these variables:**", ""], needed)
    yield Piece("the variables that the job needs", copied)
    for feature in features:
        yield from painted(feature.blocks(report))
    yield Piece("notes", folded("Notes", _notes(report.findings)))
    for section in sections(report):
        if section.name in _SECTIONS:
            yield from painted((Fold(section.title, section.blocks),))
    notes = [f"- {said(note, _NOTE)}" for note in report.notes[:_NOTES]]
    yield Piece("notes", folded("Notes", listed(notes, "note", total=len(report.notes), most=_TABLE)))


def _world(report: Report) -> str:
    world = report.world
    hosts = fold_hosts(world.hosts, limit=_VALUES)
    parts = [
        f"{count(world.size, 'rank')} on {count(len(world.hosts), 'host')} ({name(hosts, 600)})",
        name(world.launcher),
        name(world.backend),
        f"took {seconds(report.seconds)} (limit {seconds(report.budget_seconds)})",
        f"exit code {report.exit_code}",
        f"run {name(report.run_id)}",
    ]
    return ", ".join(parts)


def _to_copy(variables: Mapping[str, str | None], most: int, head: Sequence[str], otherwise: str) -> list[str]:
    """Lines to be copied behind a `head`: all of them, or none."""
    lines = fence("\n".join(shell_lines(variables)))
    return [*([*head, *lines] if size(lines) <= most else [otherwise]), ""] if variables else []


# A ticket that is longer is not read.
_SHOWN, _FOLDED, _NOTE_LINES = 6, 24, 20

# Bytes of the parts of one finding, and of those that are folded away together.
_TITLE, _MESSAGE, _FIX, _NAMES, _ENV, _EVIDENCE = 400, 2_000, 1_000, 200, 800, 1_500
_BRIEF, _BEHIND, _NOTE_BYTES = 600, 12_000, 8_000
_EVIDENCE_SHOWN = 40


def _serious(findings: Sequence[Finding]) -> Iterator[Piece]:
    """Errors and warnings, a few of each code: the first ones in full, the others folded away."""
    pieces: list[tuple[int, list[str]]] = []
    for shown, others in _groups(findings, SEVERITIES[:2]):
        pieces += [(1, _finding_lines(finding)) for finding in shown]
        pieces += [(len(others), [_more(others), ""])] if others else []
    yield from (Piece("a finding", lines) for _, lines in pieces[:_SHOWN])
    number = sum(number for number, _ in pieces[_SHOWN:])
    more = count(number, "more finding")
    yield Piece(more, folded(more, _behind(pieces[_SHOWN:])))


def _behind(pieces: Sequence[tuple[int, Sequence[str]]]) -> list[str]:
    """The lines of the folded pieces, and the number of those that are left out."""
    lines: list[str] = []
    left = 0
    for place, (number, own) in enumerate(pieces):
        if place < _FOLDED and not left and size(lines) + size(own) <= _BEHIND:
            lines += own
        else:
            left += number
    return lines + ([f"- {count(left, 'more finding')}, in the JSON report"] if left else [])


def _notes(findings: Sequence[Finding]) -> list[str]:
    """A line for each note."""
    lines: list[str] = []
    for shown, others in _groups(findings, SEVERITIES[2:]):
        for finding in shown:
            blame = f" ({names})" if (names := _blamed(finding)) else ""
            title, message = said(finding.title, _TITLE), said(finding.message, _BRIEF)
            lines.append(f"- {name(finding.code)} {title}{blame}: {message}")
        lines += [_more(others)] if others else []
    return listed(lines[:_NOTE_LINES], "line", total=len(lines), most=_NOTE_BYTES)


def _groups(
    findings: Sequence[Finding], severities: Sequence[Severity]
) -> Iterator[tuple[list[Finding], list[Finding]]]:
    """Of each code the findings that are shown, and those like them that are not."""
    for (severity, _), group in grouped(findings).items():
        if severity in severities:
            most = most_of(group, SAME_SHOWN)
            yield group[:most], group[most:]


def _more(findings: Sequence[Finding]) -> str:
    """One line for findings that look like those before them."""
    blame = _blamed(*findings)
    return f"- {name(findings[0].code)} {len(findings):,} more like these{f': {blame}' if blame else ''}"


def _finding_lines(finding: Finding) -> list[str]:
    """One finding: what, who, numbers, what to do."""
    head = f"### {finding.severity.value} {name(finding.code)}: {said(finding.title, _TITLE)}"
    lines = [head, "", said(finding.message, _MESSAGE)]
    if blame := _blamed(finding):
        lines += ["", f"- **{'About' if finding.severity is Severity.NOTE else 'Blamed'}:** {blame}"]
    elif finding.severity is not Severity.NOTE and not finding.of_the_run:
        lines += ["", "- **Blamed:** none: the evidence names no single rank, host, GPU or link"]
    else:
        lines.append("")
    if finding.fix:
        lines.append(f"- **Fix:** {said(finding.fix, _FIX)}")
    lines.append("")
    lines += _to_copy(finding.env, _ENV, [], f"{count(len(finding.env), 'variable')} that helped, in the JSON report.")
    evidence = islice(finding.evidence.items(), _EVIDENCE_SHOWN)
    cells = [(name(label(figure), cell=True), _value(figure, own)) for figure, own in evidence]
    total = len(finding.evidence)
    return lines + folded("Evidence", tabled(("figure", "value"), cells, "figure", total=total, most=_EVIDENCE))


def _blamed(*findings: Finding) -> str:
    """The blamed subjects: "rank `3`, host `n1`", or empty."""
    return ", ".join(f"{kind} {name(names, 2 * _NAMES)}" for kind, names in subjects(findings, _VALUES))


def _value(figure: str, own: Scalar | list[Scalar]) -> str:
    """A value of a table's cell, with its unit."""
    if isinstance(own, list):
        more = f" and {len(own) - _VALUES} more" if len(own) > _VALUES else ""
        return (", ".join(_value(figure, item) for item in own[:_VALUES]) or "none") + more
    return "not known" if own is None else said(quantity(figure, own), _BRIEF)
