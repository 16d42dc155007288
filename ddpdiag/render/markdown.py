"""The report for tickets and chat: the verdict first, then who is to blame and what to do; figures are folded away."""

from collections.abc import Iterator, Sequence

from ddpdiag.model import Finding, Report, Scalar, Severity
from ddpdiag.render.exports import shell_line
from ddpdiag.render.findings import SAME_SHOWN, SEVERITIES, grouped, shown_of
from ddpdiag.render.hosts import fold_hosts, fold_ranks
from ddpdiag.render.markdown_bench import bench_lines, train_lines
from ddpdiag.render.markup import block, code, folded, table, words
from ddpdiag.render.units import count, label, quantity, seconds

# A ticket that is longer is not read, and GitHub takes 65,536 characters; the JSON report has everything.
_SHOWN, _FOLDED = 6, 24
_INFOS, _NOTES, _FIGURES = 20, 40, 60
_ROWS = 64
_VALUES = 8


def render(report: Report) -> str:
    """`report` as Markdown: GitHub, GitLab and most chats draw it."""
    lines = [f"**{report.verdict.value.upper()}**: {words(report.sentence)}", "", _world(report), ""]
    lines += _serious(report.findings)
    lines += _exports(report)
    lines += bench_lines(report.bench) if report.bench is not None else []
    lines += train_lines(report.train) if report.train is not None else []
    lines += folded("Good to know", _capped(_infos(report.findings), _INFOS, "line"))
    lines += folded("Ranks", _ranks(report.ranks))
    lines += folded("Checks and stages", _checks(report))
    lines += folded("Measurements", _measurements(report))
    lines += folded("Notes", _capped([f"- {words(note)}" for note in report.notes], _NOTES, "note"))
    return "\n".join(lines).rstrip() + "\n"


def _world(report: Report) -> str:
    world = report.world
    hosts = fold_hosts(world.nodes, limit=_VALUES)
    parts = [
        f"{count(world.size, 'rank')} on {count(len(world.nodes), 'host')} ({code(hosts)})",
        code(world.launcher),
        code(world.backend),
        f"{seconds(report.seconds)} of {seconds(report.budget_seconds)}",
        f"exit code {report.exit_code}",
        f"run {code(report.run_id)}",
    ]
    return ", ".join(parts)


def _serious(findings: Sequence[Finding]) -> list[str]:
    """Errors and warnings, a few of each code: the first ones in full, the others folded away."""
    pieces: list[tuple[int, list[str]]] = []
    for group in _groups(findings, SEVERITIES[:2]):
        most = shown_of(group, SAME_SHOWN)
        pieces += [(1, finding_lines(finding)) for finding in group[:most]]
        pieces += [(len(group) - most, [_more(group[most:]), ""])] if group[most:] else []
    left = sum(number for number, _ in pieces[_SHOWN + _FOLDED :])
    behind = [line for _, lines in pieces[_SHOWN : _SHOWN + _FOLDED] for line in lines]
    behind += [f"- {count(left, 'more finding')}, in the JSON report"] if left else []
    number = sum(number for number, _ in pieces[_SHOWN:])
    return [line for _, lines in pieces[:_SHOWN] for line in lines] + folded(count(number, "more finding"), behind)


def _groups(findings: Sequence[Finding], severities: Sequence[Severity]) -> Iterator[list[Finding]]:
    return (group for (severity, _), group in grouped(findings).items() if severity in severities)


def _more(findings: Sequence[Finding]) -> str:
    """One line for findings that look like those before them."""
    whom = blamed(*findings)
    return f"- {code(findings[0].code)} {len(findings):,} more like these{f': {whom}' if whom else ''}"


def _infos(findings: Sequence[Finding]) -> list[str]:
    lines: list[str] = []
    for group in _groups(findings, SEVERITIES[2:]):
        most = shown_of(group, SAME_SHOWN)
        lines += [_brief(finding) for finding in group[:most]]
        lines += [_more(group[most:])] if group[most:] else []
    return lines


def _capped(lines: Sequence[str], most: int, noun: str) -> list[str]:
    """The first lines of a list, and how many more there are."""
    left = len(lines) - most
    return [*lines[:most], *([f"- {count(left, f'more {noun}')}, in the JSON report"] if left > 0 else [])]


def finding_lines(finding: Finding) -> list[str]:
    """One finding: what, who, numbers, what to do."""
    lines = [f"### {finding.severity.value} {code(finding.code)}: {words(finding.title)}", "", words(finding.message)]
    if whom := blamed(finding):
        lines += ["", f"- **{'About' if finding.severity is Severity.INFO else 'Blamed'}:** {whom}"]
    elif finding.severity is not Severity.INFO and not finding.of_the_run:
        lines += ["", "- **Blamed:** nobody, the evidence names no single rank, host, GPU or link"]
    else:
        lines.append("")
    if finding.remedy:
        lines.append(f"- **Fix:** {words(finding.remedy)}")
    lines.append("")
    if finding.env:
        lines += [*block("\n".join(shell_line(name, value) for name, value in finding.env.items()), "sh"), ""]
    rows = [(code(label(name), cell=True), _value(name, value)) for name, value in finding.evidence.items()]
    return lines + folded("Evidence", table(("figure", "value"), rows) if rows else ())


def blamed(*findings: Finding) -> str:
    """Who is named: "rank `3`, host `n1`", or nothing."""
    ranks = {rank for finding in findings for rank in finding.ranks}
    nodes = tuple(dict.fromkeys(node for finding in findings for node in finding.nodes))
    gpus = tuple(dict.fromkeys(gpu for finding in findings for gpu in finding.gpus))
    links = tuple(dict.fromkeys(link for finding in findings for link in finding.links))
    kinds = (
        ("rank", len(ranks), fold_ranks(ranks, limit=_VALUES)),
        ("host", len(nodes), fold_hosts(nodes, limit=_VALUES)),
        ("GPU", len(gpus), _listed(gpus)),
        ("link", len(links), _listed(links)),
    )
    return ", ".join(f"{noun if number == 1 else noun + 's'} {code(names)}" for noun, number, names in kinds if number)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_VALUES]) + (f" +{len(names) - _VALUES} more" if len(names) > _VALUES else "")


def _value(name: str, value: Scalar | list[Scalar]) -> str:
    """A value of a table's cell, with its unit."""
    if isinstance(value, list):
        more = f" and {len(value) - _VALUES} more" if len(value) > _VALUES else ""
        return (", ".join(_value(name, item) for item in value[:_VALUES]) or "none") + more
    return "not known" if value is None else words(quantity(name, value))


def _brief(finding: Finding) -> str:
    whom = blamed(finding)
    return f"- {code(finding.code)} {words(finding.title)}{f' ({whom})' if whom else ''}: {words(finding.message)}"


def _exports(report: Report) -> list[str]:
    if not report.exports:
        return []
    text = "\n".join(shell_line(name, value) for name, value in report.exports.items())
    return ["**The job needs these variables:**", "", *block(text, "sh"), ""]


def _ranks(ranks: Sequence[dict[str, Scalar]]) -> list[str]:
    """A table of all columns that some rank has; the first ones only of very many ranks."""
    if not ranks:
        return []
    columns = list(dict.fromkeys(name for row in ranks for name in row))
    rows = [[_value(name, row.get(name)) if row.get(name) is not None else "-" for name in columns] for row in ranks]
    lines = table([words(label(name)) for name in columns], rows[:_ROWS])
    return lines + ([f"\n{count(len(rows) - _ROWS, 'more rank')}"] if len(rows) > _ROWS else [])


def _checks(report: Report) -> list[str]:
    stages = [(code(s.name, cell=True), words(s.status), seconds(s.seconds)) for s in report.stages]
    checks = [
        (
            code(check.code, cell=True),
            words(check.name),
            words(check.stage),
            words(", ".join(f"{number} {status}" for status, number in check.statuses.items())) or "-",
            words(check.skipped_because or "") or "-",
        )
        for check in report.checks
    ]
    first = table(("stage", "status", "time"), stages) if stages else []
    second = table(("check", "name", "stage", "ranks", "skipped because"), checks) if checks else []
    return [*first, "", *second] if first and second else first or second


def _measurements(report: Report) -> list[str]:
    rows = [(code(name, cell=True), _value(name, value)) for name, value in report.measurements.items()]
    left = len(rows) - _FIGURES
    more = [f"\n{count(left, 'more figure')}, in the JSON report"] if left > 0 else []
    return [*table(("figure", "value"), rows[:_FIGURES]), *more] if rows else []
