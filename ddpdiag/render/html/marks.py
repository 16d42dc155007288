"""Who is blamed, as the pictures of the page mark it."""

from ddpdiag.model import Report, Severity
from ddpdiag.render.rank_lines import blamed


def culprits_of(report: Report) -> frozenset[int]:
    """The ranks that errors blame; where none does, those that warnings blame."""
    marks = blamed(report.findings, report.ranks)
    worst = Severity.ERROR if Severity.ERROR in marks.values() else Severity.WARNING
    return frozenset(rank for rank, severity in marks.items() if severity is worst)
