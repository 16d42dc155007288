"""Every rank came.

A rank that never reaches rank 0 leaves all others waiting in `init_process_group` until the time-out, and torch says
"1/2 clients joined" without saying which. Here rank 0 calls the roll over its own channel and waits `--board-wait`
seconds.

Causes: the process was never started (wrong node count, a host that is down), it died at once (a missing module, an old
Python), it was started with another coordinator address, port or run id, or a firewall keeps it from rank 0.

Fix: look at that rank's own output first: a ddpdiag that cannot reach rank 0 says what a plain TCP connection met.
"""

from collections.abc import Iterator

from msgspec import Struct

from ddpdiag.check import Check, Scope, Seen, Stage, nothing_planned
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.model import EventKind, Finding, Severity, Verdict


class Nothing(Struct, frozen=True):
    """This check judges what others saw."""


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    """One finding for all ranks that never came."""
    absent = sorted(e.rank for e in seen.recording.events if e.kind is EventKind.ABSENT and e.rank is not None)
    if not absent:
        return
    came = len(seen.world.arrivals)
    waited = max(e.seconds for e in seen.recording.events if e.kind is EventKind.ABSENT)
    who = ranks_text(absent)
    yield seen.finding(
        "absent",
        Severity.ERROR,
        f"{who} never came",
        f"{came} of {seen.world.size} ranks came within {waited:.0f} s; {who} did not.{_likely_hosts(seen, absent)}",
        ranks=absent,
        evidence={"came": came, "expected": seen.world.size, "waited_seconds": round(waited, 1)},
        remedy="Look at that rank's own output; start it with the same coordinator address, port and run id.",
    )


def _likely_hosts(seen: Seen[Nothing], absent: list[int]) -> str:
    """Launchers number ranks host by host, so an absent rank belongs beside its neighbours."""
    sizes = {place.local_world_size for place in seen.world.places.values()}
    if len(sizes) != 1 or not (size := sizes.pop()):
        return ""
    homes = {rank // size for rank in absent}
    known = {place.rank // size: place.node for place in seen.world.places.values()}
    named = [known[home] for home in sorted(homes) if home in known]
    return f" They belong on {', '.join(named)} if ranks are numbered host by host." if named else ""


CHECK = Check(
    "RUN001",
    "roll-call",
    Stage.RUN,
    Scope.WORLD,
    manual=__doc__ or "",
    judge=judge,
    data=Nothing,
    plan=nothing_planned,
    effect=Verdict.UNKNOWN,
)
