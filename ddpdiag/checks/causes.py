"""What other checks know of why messages between hosts do not arrive, which explains a collective that hangs there."""

from collections.abc import Sequence, Set
from typing import TypeVar

from ddpdiag.check import Seen
from ddpdiag.checks import rdz002, rdz003, rdz004
from ddpdiag.model import Finding, Severity

D = TypeVar("D")


def causes(seen: Seen[D]) -> tuple[Finding, ...]:
    """Errors about ways on which nothing passes, then about addresses that peers cannot reach."""
    names, interfaces = seen.of(rdz002.CHECK), seen.of(rdz003.CHECK)
    found = (*rdz004.severed(seen.of(rdz004.CHECK)), *rdz002.judge(names), *rdz003.judge(interfaces))
    return tuple(finding for finding in found if finding.severity is Severity.ERROR)


def between(known: Sequence[Finding], nodes: Set[str]) -> tuple[Finding, ...]:
    """Those causes that concern a collective of these hosts.

    Of hosts that share the cause (no host, no link) all are concerned.
    """
    return tuple(finding for finding in known if _concerns(finding, nodes)) if len(nodes) > 1 else ()


def _concerns(finding: Finding, nodes: Set[str]) -> bool:
    if finding.links:
        return any(nodes >= {*link.split(" -> ")} for link in finding.links)
    return not finding.nodes or not nodes.isdisjoint(finding.nodes)
