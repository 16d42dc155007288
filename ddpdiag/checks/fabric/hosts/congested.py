"""The finding of a part of the fabric that slows down several hosts."""

from collections.abc import Sequence
from typing import TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.fabric.congestion import usual_of
from ddpdiag.checks.fabric.hosts.data import FabricState
from ddpdiag.checks.fabric.notes import Congested
from ddpdiag.checks.fabric.rules import Bar
from ddpdiag.checks.hosts import names_text
from ddpdiag.model import Finding, Severity
from ddpdiag.text import rate_text

D = TypeVar("D")

_SHOWN = 8
# By whether it is slow in quiet rounds as well.
_CONGESTED = (
    "They share a part of the network that does not carry all of them at once: no host is at fault.",
    "They share a part of the network that is slow in quiet rounds as well: no host is blamed.",
)


def congested(seen: Seen[D], fabric: FabricState, part: Congested, bar: Bar, serious: Severity) -> Finding:
    """The part with the hosts behind it; `serious` is how much it matters where it is slow in quiet rounds as well."""
    units = fabric.of_domain(part.domain) or part.units
    names = [[fabric.fleet.names[unit] for unit in side] for side in part.sides or (units,)]
    where = f"between {_side(names[0])} and {_side(names[1])}" if part.sides else f"behind {_side(names[0])}"
    loaded, quiet = usual_of(part.loaded), usual_of(part.quiet)
    in_quiet = quiet is not None and quiet < bar.least
    rate = "not known" if quiet is None else f"{rate_text(quiet)} busbw"
    known = f"{part.domain}: " if part.domain is not None else ""
    return seen.finding(
        "congested",
        f"{known}the network {where} is {'slow' if in_quiet else 'slow while other hosts communicate'}",
        f"{_pairs_text(part)} usually reach {rate_text(loaded or 0.0)} busbw while other hosts communicate; in quiet "
        f"rounds: {rate}. Other pairs reach {rate_text(bar.usual)}. {_CONGESTED[in_quiet]}",
        severity=serious if in_quiet else Severity.WARNING,
        nodes=(),
        evidence={
            "hosts": [fabric.fleet.names[unit] for unit in units],
            "sides": [" ".join(side) for side in names] if part.sides else [],
            "domain": str(part.domain) if part.domain is not None else None,
            "loaded_bytes_per_s": loaded,
            "quiet_bytes_per_s": quiet,
            "usual_bytes_per_s": bar.usual,
        },
        fix="Ask the network team what these hosts share (leaf switch, uplinks, trunks): its load by other jobs, links "
        "that are down, its oversubscription, and its counters of drops, ECN marks and PFC pauses. No host needs to be "
        "replaced.",
    )


def _side(names: Sequence[str]) -> str:
    return names_text(names) if len(names) <= _SHOWN else f"{len(names)} hosts ({names_text(names, 3)})"


def _pairs_text(part: Congested) -> str:
    return "Pairs across" if part.sides else f"Pairs of these {len(part.units)} hosts with others"
