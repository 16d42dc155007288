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
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import names_text
from ddpdiag.checks.rendezvous.mesh import check as rdz004
from ddpdiag.checks.rendezvous.mesh.data import mesh_of
from ddpdiag.model import Finding

FINDINGS = {
    "off": FindingSpec.warning("a host's clock differs from most others' by more than `off_seconds`."),
    "unreadable": FindingSpec.not_seen("RDZ004, which asks the hosts for their time, was not run."),
}

_HARM = "Training works, but log lines of different hosts are in the wrong order, and Kerberos and TLS may fail."
_FIX = (
    "Run `chronyc tracking` or `timedatectl` on {} to see whether its clock is synchronized. As root correct it: "
    "`chronyc makestep` with chrony, `timedatectl set-ntp true` with systemd-timesyncd."
)


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    """Hosts that disagree with most others."""
    met = seen.of(rdz004.CHECK)
    if len(seen.world.hosts) > 1 and not met.trials and seen.options.select:
        yield seen.finding(
            "unreadable",
            "the clocks were not compared",
            "The clocks of the hosts were not compared. RDZ004 (TCP between all hosts) asks the hosts for their time, "
            "and it was not run.",
            fix="Run again with both checks: `ddpdiag check --select RDZ004,RDZ007`.",
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
                f"The clocks of {nodes[0]} and {mesh.names[other]} differ by {abs(seconds):.1f} s; at most {limit:g} s "
                f"is expected. There is no majority among {names_text(nodes)}, so no host is blamed. {_HARM}",
                evidence={"difference_seconds": round(abs(seconds), 3), "hosts": list(nodes[:16])},
                fix=_FIX.format("each of these hosts"),
            )


def _off(seen: Seen[Nothing], node: str, ahead: float, others: int) -> Iterator[Finding]:
    """A host whose clock is so far ahead of those that agree; behind if it is negative."""
    if abs(ahead) <= seen.number("off_seconds"):
        return
    word, limit = "ahead of" if ahead > 0 else "behind", seen.number("off_seconds")
    agree = f"{others} other hosts, which agree with each other" if others > 1 else "the other host"
    yield seen.finding(
        "off",
        f"the clock of {node} is {abs(ahead):.1f} s {word} the others",
        f"The clock of {node} is {abs(ahead):.1f} s {word} {agree}; at most {limit:g} s is expected. {_HARM}",
        nodes=[node],
        evidence={"ahead_seconds": round(ahead, 3)},
        fix=_FIX.format(node),
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
