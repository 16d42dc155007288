"""Findings for people: what is wrong, with whom, what to do, and then the figures.

Who reads at night wants the way out before the evidence, so that of the first finding all of it, but for the figures,
stands on the first screen.
"""

from collections.abc import Iterable, Sequence
from typing import TypeGuard

from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.render.exports import shell_line
from ddpdiag.render.hosts import fold_hosts, fold_ranks
from ddpdiag.render.page import Page, one_line
from ddpdiag.render.units import label, quantity

SEVERITIES = (Severity.ERROR, Severity.WARNING, Severity.INFO)
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.INFO: "bold cyan"}

# One finding a rank, on a thousand ranks: the first few show what it looks like, the rest is a list of names.
SAME_SHOWN = 3
# Where several codes have many, one of each: beyond so many findings a page is no longer read.
FINDINGS_SHOWN = 5
# Names and values of one kind in one line.
LIST_SHOWN = 8


def grouped(findings: Iterable[Finding]) -> dict[tuple[Severity, str], list[Finding]]:
    """Findings of one severity and code together, errors first."""
    groups: dict[tuple[Severity, str], list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)):
        groups.setdefault((finding.severity, finding.code), []).append(finding)
    return groups


def write_findings(
    page: Page, findings: Sequence[Finding], *, details: bool, severities: Sequence[Severity] = SEVERITIES
) -> None:
    """Those of the `severities`, errors first; where all `findings` are many, a few of each code, unless `details`."""
    groups = grouped(findings)
    few = SAME_SHOWN if sum(shown_of(group, SAME_SHOWN) for group in groups.values()) <= FINDINGS_SHOWN else 1
    for (severity, _), group in groups.items():
        if severity not in severities:
            continue
        most = len(group) if details else shown_of(group, few)
        for finding in group[:most]:
            _finding(page, finding, details=details)
        _more(page, group[most:])


def shown_of(group: Sequence[Finding], few: int) -> int:
    """How many of one code are shown: "and 1 more" would take the room of the one."""
    return len(group) if len(group) <= few + 1 else few


def _finding(page: Page, finding: Finding, *, details: bool) -> None:
    limit = None if details else LIST_SHOWN
    lead = f"{finding.severity.value} {one_line(finding.code)}: "
    page.write(one_line(finding.title), style="bold", lead=lead, lead_style=_STYLES[finding.severity])
    page.write(finding.message, indent=4)
    if blame := _blame((finding,), limit):
        # Good to know is no blame.
        word = "about: " if finding.severity is Severity.INFO else "blamed: "
        page.write(blame, indent=4, lead=word, lead_style="bold")
    elif finding.severity is not Severity.INFO and not finding.of_the_run:
        page.write("nobody can be blamed: the evidence points at no single rank, host, GPU or link", indent=4)
    if finding.remedy:
        page.write(finding.remedy, indent=4, lead="Fix: ", lead_style="bold")
    for name, value in finding.env.items():
        page.verbatim(shell_line(name, value), indent=8)
    _evidence(page, finding, details=details)
    page.blank()


def _more(page: Page, findings: Sequence[Finding]) -> None:
    """One line for findings that look like those before them."""
    if not findings:
        return
    lead = f"{findings[0].severity.value} {one_line(findings[0].code)}: "
    blame = _blame(findings, LIST_SHOWN) or "nobody can be blamed"
    text = f"{len(findings):,} more like these: {blame}; the JSON report has all of them"
    page.write(text, lead=lead, lead_style=_STYLES[findings[0].severity])
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
        ("GPU", len(gpus), listed(gpus, limit)),
        ("link", len(links), listed(links, limit)),
    )
    return "; ".join(f"{noun if number == 1 else noun + 's'} {names}" for noun, number, names in kinds if number)


def _evidence(page: Page, finding: Finding, *, details: bool) -> None:
    """Figures in one paragraph; below it what takes a line for each item: tables, and with `details` all sentences."""
    limit = None if details else LIST_SHOWN
    tables = {name: value for name, value in finding.evidence.items() if _is_table(value, details=details)}
    figures = {name: value for name, value in finding.evidence.items() if name not in tables}
    text = "; ".join(f"{one_line(label(name))} = {value_text(name, value, limit)}" for name, value in figures.items())
    if text:
        page.write(text, style="dim", indent=4)
    for name, value in tables.items():
        page.write(f"{one_line(label(name))}:", style="dim", indent=4)
        for item in value[:limit]:
            head, mark, rest = one_line(item).partition(": ")
            page.write(rest or head, style="dim", indent=6, lead=head + mark if rest else "", lead_style="dim")
        if more := left_out(len(value), limit):
            page.write(more.strip(), style="dim", indent=6)


def _is_table(value: Scalar | list[Scalar], *, details: bool) -> TypeGuard[list[str]]:
    """Is every item a row, such as "rank 3: hung", or with `details` a sentence or a frame of a stack?"""
    mark = " " if details else ": "
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) and mark in item for item in value)


def value_text(name: str, value: Scalar | list[Scalar], limit: int | None = None) -> str:
    """A value with its unit, in ASCII."""
    if value is None:
        return "not known"
    if isinstance(value, list) and value:
        return ", ".join(value_text(name, item) for item in value[:limit]) + left_out(len(value), limit)
    return one_line(quantity(name, value))


def listed(words: Sequence[str], limit: int | None) -> str:
    """Words joined by commas; of more than `limit`, how many are left out."""
    return ", ".join(words[:limit]) + left_out(len(words), limit)


def left_out(number: int, limit: int | None) -> str:
    """How many names of `number` are not shown."""
    return f" +{number - limit:,} more" if limit is not None and number > limit else ""
