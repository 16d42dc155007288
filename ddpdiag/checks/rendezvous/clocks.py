"""Clocks of the hosts.

While hosts are connected for RDZ004 each asks the other for its time, as NTP does, and the quickest of several answers
counts. A host whose clock is off by more than `off_seconds` (2 s) from most others is named; if no majority agrees, as
with two hosts, none is named. Between hosts that could not connect nothing is known.

A wrong clock breaks no collective. It puts log lines of different hosts into a wrong order, which misleads the search
for the first failure, and it makes Kerberos tickets, TLS certificates and `make`-like tools fail.

Findings:

Fix: let chrony or NTP run on the named host (`chronyc tracking`, `timedatectl`).

Confirm by hand: `for h in HOSTS; do ssh $h date +%s.%N; done`; `chronyc tracking` on the named host.

Sources: RFC 5905 (NTP: offset and delay of four time stamps).
"""

from collections.abc import Iterator, Mapping
from statistics import median

from ddpdiag.checks.api import Check, Nothing, Scope, Seen, Stage
from ddpdiag.checks.findings import Explained
from ddpdiag.checks.hosts import names_text
from ddpdiag.checks.rendezvous.mesh import check as rdz004
from ddpdiag.checks.rendezvous.mesh.data import mesh_of
from ddpdiag.model import Finding

FINDINGS = {
    "off": Explained.warning("a host's clock differs from most others' by more than `off_seconds`."),
    "unreadable": Explained.not_seen("RDZ004, which asks the hosts for their time, was not run."),
}

_HARM = "logs of different hosts cannot be put in order, and Kerberos and TLS may fail"


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    """Hosts that disagree with most others."""
    met = seen.of(rdz004.CHECK)
    if len(seen.world.hosts) > 1 and not met.trials and seen.options.select:
        yield seen.finding(
            "unreadable",
            "the clocks were not compared",
            "RDZ004 (mesh), which asks the other hosts for their time, was not run, so the difference is not known.",
            fix="Select RDZ004 as well.",
        )
    mesh = mesh_of(met)
    limit = seen.number("off_seconds")
    for group in mesh.groups:
        offsets = {link: cell.offset_seconds for link, cell in mesh.cells.items() if link[0] in group}
        behind = _differences({link: value for link, value in offsets.items() if value is not None})
        members = sorted(rank for rank in group if behind.get(rank))
        # Those whose time is about that of more than half of the group, themselves included.
        near = {rank: 1 + sum(abs(seconds) <= limit for seconds in behind[rank].values()) for rank in members}
        usual = {rank for rank in members if 2 * near[rank] > len(members)}
        unsettled: list[int] = []
        for rank in members:
            known = [-seconds for other, seconds in behind[rank].items() if other in usual]
            if rank not in usual and known:
                yield from _off(seen, mesh.names[rank], median(known), len(usual))
            elif rank not in usual and max(map(abs, behind[rank].values())) > limit:
                unsettled.append(rank)
        if unsettled:
            nodes = [mesh.names[rank] for rank in unsettled]
            other, seconds = max(behind[unsettled[0]].items(), key=lambda item: abs(item[1]))
            yield seen.finding(
                "off",
                f"clocks differ by {abs(seconds):.1f} s",
                f"The clocks of {names_text(nodes)} differ, those of {nodes[0]} and {mesh.names[other]} by "
                f"{abs(seconds):.1f} s, and no majority shows which is right: {_HARM}.",
                evidence={"difference_seconds": round(abs(seconds), 3), "hosts": list(nodes[:16])},
                fix="Let chrony or NTP set the clocks of all hosts (`chronyc tracking`, `timedatectl`).",
            )


def _off(seen: Seen[Nothing], node: str, ahead: float, others: int) -> Iterator[Finding]:
    """A host whose clock is so far ahead of those that agree; behind if it is negative."""
    if abs(ahead) <= seen.number("off_seconds"):
        return
    word = "ahead of" if ahead > 0 else "behind"
    yield seen.finding(
        "off",
        f"the clock of {node} is {abs(ahead):.1f} s {word} the others'",
        f"The clock of {node} is {abs(ahead):.1f} s {word} those of {others} hosts that agree: {_HARM}.",
        nodes=[node],
        evidence={"ahead_seconds": round(ahead, 3)},
        fix=f"Let chrony or NTP set the clock of {node} (`chronyc tracking`, `timedatectl`).",
    )


def _differences(offsets: Mapping[tuple[int, int], float]) -> dict[int, dict[int, float]]:
    """For each host the others' clocks minus its own, from both ends where both measured."""
    both: dict[int, dict[int, list[float]]] = {}
    for (a, b), seconds in offsets.items():
        both.setdefault(a, {}).setdefault(b, []).append(seconds)
        both.setdefault(b, {}).setdefault(a, []).append(-seconds)
    return {host: {other: median(own) for other, own in others.items()} for host, others in both.items()}


CHECK = Check(
    "RDZ007",
    "clock",
    Stage.RENDEZVOUS,
    Scope.NODE,
    manual=__doc__ or "",
    findings=FINDINGS,
    judge=judge,
    data=Nothing,
    ground=rdz004.ground,  # one clock agrees with itself
    optional=True,
    settings={"off_seconds": 2.0},
)
