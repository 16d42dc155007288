"""What other checks know of why messages between hosts do not arrive, which explains a collective that hangs there."""

from collections.abc import Sequence, Set
from typing import NamedTuple, TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.model import Finding, Outcome, Severity, Trial

D = TypeVar("D")

_SLOW = "RDZ004.slow"
# As torch's flight recorder names them; of others an element has one byte at least.
_BYTES = {"Float": 4, "Double": 8, "Long": 8, "Int": 4, "Half": 2, "BFloat16": 2}
# What needs so much of a trial's time for one collective leaves too little for the others.
_SHARE_OF_TIME = 0.5


def causes(seen: Seen[D]) -> tuple[Finding, ...]:
    """Errors about ways on which nothing passes, then about addresses that peers cannot reach."""
    found = (finding for code in ("RDZ004", "RDZ002", "RDZ003") for finding in seen.findings_of(code))
    return tuple(finding for finding in found if finding.severity is Severity.ERROR and finding.code != _SLOW)


def between(known: Sequence[Finding], nodes: Set[str]) -> tuple[Finding, ...]:
    """Those causes that concern a collective of these hosts.

    Of hosts that share the cause (no host, no link) all are concerned.
    """
    return tuple(finding for finding in known if _concerns(finding, nodes)) if len(nodes) > 1 else ()


def _concerns(finding: Finding, nodes: Set[str]) -> bool:
    if finding.links:
        return any(nodes >= {*link.split(" -> ")} for link in finding.links)
    return not finding.nodes or not nodes.isdisjoint(finding.nodes)


class Slow(NamedTuple):
    """A way so slow that a collective could not pass in time, and in words how long that takes."""

    cause: Finding
    why: str


def slow_ways(seen: Seen[D]) -> tuple[Finding, ...]:
    """Errors about ways on which far less passes than on others."""
    found = seen.findings_of("RDZ004")
    return tuple(finding for finding in found if finding.severity is Severity.ERROR and finding.code == _SLOW)


def too_slow(known: Sequence[Finding], trial: Trial, outcomes: Sequence[Outcome]) -> Slow | None:
    """The way on which what was posted last takes half of the trial's time or longer.

    Whatever the collective, nearly all of its bytes come from each host or go to it once: no less time than that.
    """
    posted = [o.collectives[-1] for o in outcomes if o.collectives]
    size_bytes = max((own.elements * _BYTES.get(own.dtype, 1) for own in posted), default=0)
    for cause in known:
        rate = cause.evidence["bytes_per_s"]
        if isinstance(rate, float) and size_bytes >= rate * trial.deadline_seconds * _SHARE_OF_TIME:
            took = f"its {size_bytes / 1e6:.3g} MB need {size_bytes / rate:.3g} s at {rate / 1e6:.3g} MB/s"
            return Slow(cause, f"{took}, and all of the trial had {trial.deadline_seconds:.3g} s")
    return None
