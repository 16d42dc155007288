"""Every rank stayed to the end.

A rank's supervisor came and then fell silent: it was killed (SIGKILL, the memory limit), stopped, its host went down,
or the network between it and rank 0 was cut. Launchers kill the remaining processes as soon as one is gone, so those
who said that they were told to leave are bystanders, and who said nothing is to blame.

Fix: look for the out-of-memory killer (`dmesg | grep -i oom`) and for the job's limits on that host; check that the
host is up.
"""

from collections.abc import Iterator

from ddpdiag.check import Check, Scope, Seen, Stage, nothing_planned
from ddpdiag.checks.run001 import Nothing
from ddpdiag.model import EventKind, Finding, Severity


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    """One finding for each rank that fell silent."""
    for event in seen.recording.events:
        if event.kind is EventKind.LOST and event.rank is not None:
            node = seen.world.node_of(event.rank)
            yield seen.finding(
                "lost",
                Severity.ERROR,
                f"rank {event.rank} was lost",
                f"rank {event.rank} on {node} came, and was gone after {event.seconds:.1f} s: {event.detail}.",
                ranks=[event.rank],
                evidence={"seconds": round(event.seconds, 1)},
                remedy=f"Look on {node} for a kill (dmesg, the job's memory limit), a stopped process, or a crash.",
            )


CHECK = Check(
    "RUN002",
    "presence",
    Stage.RUN,
    Scope.WORLD,
    manual=__doc__ or "",
    judge=judge,
    data=Nothing,
    plan=nothing_planned,
)
