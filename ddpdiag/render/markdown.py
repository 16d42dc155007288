"""The report for tickets and chat: the verdict first, then who is to blame and what to do; figures are folded away.

It stays below what GitHub takes as a comment, whatever was found: lists and tables end after their first lines, long
texts are cut, and at last whole parts are left out, the last ones first. Each time it says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from ddpdiag.model import Report, Scalar
from ddpdiag.render.exports import shell_line
from ddpdiag.render.hosts import fold_hosts
from ddpdiag.render.markdown_findings import infos, serious, value
from ddpdiag.render.markdown_size import Piece, fitting, listed, name, said, size, tabled
from ddpdiag.render.markup import block, folded, words
from ddpdiag.render.sections import Sections
from ddpdiag.render.units import count, label, seconds

_NOTES, _FIGURES, _ROWS, _CHECKS = 40, 60, 64, 120
_VALUES = 8
# Bytes of single parts; the sentence, the notes and most tables are far shorter.
_SENTENCE, _NOTE, _EXPORTS = 2_000, 600, 4_000
_SMALL_TABLE, _TABLE, _RANKS = 6_000, 10_000, 16_000


def render(report: Report, features: Sequence[Sections] = ()) -> str:
    """`report` as Markdown: GitHub, GitLab and most chats draw it."""
    return "\n".join(fitting(_pieces(report, features))).rstrip() + "\n"


def _pieces(report: Report, features: Sequence[Sections]) -> Iterator[Piece]:
    head = f"**{report.verdict.value.upper()}**: {said(report.sentence, _SENTENCE)}"
    yield Piece("the verdict", [head, "", _world(report), ""])
    yield from serious(report.findings)
    yield Piece("the variables that the job needs", _exports(report))
    for feature in features:
        yield from feature.pieces(report)
    yield Piece("what is good to know", folded("Good to know", infos(report.findings)))
    yield Piece("ranks", folded("Ranks", _ranks(report.ranks)))
    yield Piece("checks and stages", folded("Checks and stages", _checks(report)))
    yield Piece("measurements", folded("Measurements", _measurements(report.measurements)))
    notes = [f"- {said(note, _NOTE)}" for note in report.notes[:_NOTES]]
    yield Piece("notes", folded("Notes", listed(notes, "note", total=len(report.notes), most=_TABLE)))


def _world(report: Report) -> str:
    world = report.world
    hosts = fold_hosts(world.nodes, limit=_VALUES)
    parts = [
        f"{count(world.size, 'rank')} on {count(len(world.nodes), 'host')} ({name(hosts, 600)})",
        name(world.launcher),
        name(world.backend),
        f"{seconds(report.seconds)} of {seconds(report.budget_seconds)}",
        f"exit code {report.exit_code}",
        f"run {name(report.run_id)}",
    ]
    return ", ".join(parts)


def _exports(report: Report) -> list[str]:
    """Lines to be copied: all of them, or none."""
    if not report.exports:
        return []
    lines = block("\n".join(shell_line(variable, own) for variable, own in report.exports.items()), "sh")
    if size(lines) > _EXPORTS:
        return [f"**The job needs {count(len(report.exports), 'variable')}**, in the JSON report (`--env-file`).", ""]
    return ["**The job needs these variables:**", "", *lines, ""]


def _ranks(ranks: Sequence[dict[str, Scalar]]) -> list[str]:
    """A table of all columns that some rank has; the first ones only of very many ranks."""
    columns = list(dict.fromkeys(column for row in ranks for column in row))
    rows = [
        [value(column, row[column]) if row.get(column) is not None else "-" for column in columns]
        for row in ranks[:_ROWS]
    ]
    return tabled([words(label(column)) for column in columns], rows, "rank", total=len(ranks), most=_RANKS)


def _checks(report: Report) -> list[str]:
    stages = [(name(s.name, cell=True), said(s.status, _NOTE), seconds(s.seconds)) for s in report.stages[:_CHECKS]]
    checks = [
        (
            name(check.code, cell=True),
            said(check.name, _NOTE),
            said(check.stage, _NOTE),
            said(", ".join(f"{number} {status}" for status, number in check.statuses.items()), _NOTE) or "-",
            said(check.skipped_because or "", _NOTE) or "-",
        )
        for check in report.checks[:_CHECKS]
    ]
    first = tabled(("stage", "status", "time"), stages, "stage", total=len(report.stages), most=_SMALL_TABLE)
    headers = ("check", "name", "stage", "ranks", "skipped because")
    second = tabled(headers, checks, "check", total=len(report.checks), most=_TABLE)
    return [*first, "", *second] if first and second else first or second


def _measurements(found: Mapping[str, Scalar]) -> list[str]:
    """Under the names that scripts know, in which the unit stands."""
    rows = [(name(figure, cell=True), value(figure, own)) for figure, own in islice(found.items(), _FIGURES)]
    return tabled(("figure", "value"), rows, "figure", total=len(found), most=_SMALL_TABLE)
