"""Hosts that break nothing, and that the job waits for."""

from collections.abc import Sequence

from ddpdiag.model import Finding, Severity

# By which share of what is usual: the evidence of FAB001's findings.
_SHARE = "slower_share"


def slow_hosts(findings: Sequence[Finding]) -> dict[str, float]:
    """Hosts that warnings call slower than most, each with the share by which it is; the slowest first."""
    shares: dict[str, float] = {}
    for finding in findings:
        share = finding.evidence.get(_SHARE)
        if finding.severity is Severity.WARNING and isinstance(share, float):
            shares |= {node: max(share, shares.get(node, 0.0)) for node in finding.nodes}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
