"""Who is blamed, as the pictures and tables of the page mark it."""

from ddpdiag.model import Report, Severity
from ddpdiag.render.tables import blamed


def marks_of(report: Report) -> dict[int, Severity]:
    """The worst that each rank is blamed for, or its host as a whole."""
    marks: dict[int, Severity] = {}
    whole = [finding for finding in report.findings if not finding.ranks]
    for severity in (Severity.WARNING, Severity.ERROR):
        named = {node for finding in whole if finding.severity is severity for node in finding.nodes}
        for row in report.ranks if named else ():
            if row.get("node") in named and isinstance(rank := row.get("rank"), int):
                marks[rank] = severity
    own = blamed(report.findings)
    return {**own, **marks, **{rank: severity for rank, severity in own.items() if severity is Severity.ERROR}}


def culprits_of(report: Report) -> frozenset[int]:
    """The ranks that errors blame; where none does, those that warnings blame."""
    marks = marks_of(report)
    worst = Severity.ERROR if Severity.ERROR in marks.values() else Severity.WARNING
    return frozenset(rank for rank, severity in marks.items() if severity is worst)
