"""Who is blamed, as the pictures and tables of the page mark it."""

from ddpdiag.model import Report, Severity
from ddpdiag.render.rank_lines import blamed


def marks_of(report: Report) -> dict[int, Severity]:
    """The worst that each rank is blamed for, or its host as a whole."""
    return blamed(report.findings, report.ranks)


def culprits_of(report: Report) -> frozenset[int]:
    """The ranks that errors blame; where none does, those that warnings blame."""
    marks = marks_of(report)
    worst = Severity.ERROR if Severity.ERROR in marks.values() else Severity.WARNING
    return frozenset(rank for rank, severity in marks.items() if severity is worst)
