"""Every rank joined.

A rank that never reaches rank 0 makes all others wait in `init_process_group` until the timeout, and torch reports
"1/2 clients joined" without the rank numbers. In ddpdiag every rank connects to rank 0, which knows the ranks that
joined, and waits `--join-timeout` seconds for the others. If the launcher (Slurm) states each rank's host, the hosts of
absent ranks are named.

If no rank of another host joined, the cause may be on rank 0's own host (its firewall, the address given for it), so no
rank of another host is blamed. No rank is blamed if ranks have different world sizes (LCH001), because absent ranks may
not exist.

Findings:

Causes: the process was never started (wrong node count, a host that is down), it died at once (a missing module, an old
Python), it was started with another coordinator address, port or run id, or a firewall blocks its path to rank 0.

Fix: look at that rank's own output first: a ddpdiag that cannot reach rank 0 prints the result of a plain TCP
connection.

Confirm by hand: Look at the output of the named rank; on its host `ps -ef | grep ddpdiag`; `squeue -j JOB -o %N` and
`sacct -j JOB --format=JobID,State,NodeList,ExitCode` for tasks that were never started.

Sources: torch/csrc/distributed/c10d/TCPStore.cpp ("clients joined"); PyTorch pull request 111805.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from shlex import quote

from ddpdiag.checks.api import Check, Contribution, MovedFinding, Nothing, Scope, Seen, Stage
from ddpdiag.checks.findings import Effect, FindingSpec
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.world import short_name
from ddpdiag.model import EventKind, Finding

FINDINGS = {
    "absent": FindingSpec.error("a rank never joined. Its host is named where it is known.", effect=Effect.UNKNOWN)
}

_LOOPBACK = ("localhost", "127.", "::1")


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    """One finding for all ranks that never joined; none if all joined."""
    events = {e.rank: e for e in seen.recording.events if e.kind is EventKind.ABSENT and e.rank is not None}
    absent = sorted(events)
    if not absent:
        return
    who = ranks_text(absent)
    seconds = max(event.seconds for event in events.values())
    layout_hosts = _layout_hosts(seen, absent)
    hosts = _known_hosts(layout_hosts, absent)
    blamed, doubt = _blamed_ranks(seen, absent, layout_hosts)
    belong = "It belongs" if len(absent) == 1 else "They belong"
    location = f" {belong} on {names_text(hosts)}." if hosts else ""
    fix = (
        "Check that these ranks were started, and read their output. They need the same MASTER_ADDR, MASTER_PORT and "
        "WORLD_SIZE as the others, and the same --run-id where one is given."
    )
    if seen.world.launcher == "slurm" and hosts:
        # A process that was never started wrote no output, but Slurm may know the reason.
        fix += f" Run `scontrol show node {quote(hosts[0])}`, and read slurmd's log there."
    yield seen.finding(
        "absent",
        f"{who} never joined",
        f"{len(seen.world.arrivals)} of {seen.world.size} ranks joined within {seconds:.0f} s; {who} did not."
        f"{location}{doubt}",
        ranks=blamed,
        hosts=_known_hosts(layout_hosts, blamed),
        evidence={"came": len(seen.world.arrivals), "expected": seen.world.size, "waited_seconds": round(seconds, 1)},
        fix=fix,
    )


def _layout_hosts(seen: Seen[Nothing], absent: Sequence[int]) -> dict[int, str]:
    """The hosts of absent ranks in the launcher's layout; empty if it is unknown, or wrong for a rank that joined."""
    layout, places = seen.recording.header.layout, seen.world.places
    if len(layout) != seen.world.size:
        return {}
    is_right = all(short_name(layout[rank]) == short_name(place.host) for rank, place in places.items())
    return {rank: layout[rank] for rank in absent} if is_right else {}


def _known_hosts(layout_hosts: Mapping[int, str], ranks: Collection[int]) -> tuple[str, ...]:
    """The known hosts of these ranks, each once."""
    return tuple(dict.fromkeys(layout_hosts[rank] for rank in ranks if rank in layout_hosts))


def _blamed_ranks(
    seen: Seen[Nothing], absent: Sequence[int], layout_hosts: Mapping[int, str]
) -> tuple[Sequence[int], str]:
    """The absent ranks to blame, and a sentence with the reason why the others are not blamed (empty if all are)."""
    if any(event.kind is EventKind.MISMATCH for event in seen.recording.events):
        return (), " Ranks have different world sizes (LCH001), so the absent ranks may not exist: no rank is blamed."
    arrivals = seen.world.arrivals
    if len(seen.world.hosts) != 1 or (0 in arrivals and arrivals[0].master_addr.startswith(_LOOPBACK)):
        return absent, ""
    place = next(iter(seen.world.places.values()))
    only_host, per_host = place.host, place.local_world_size or 1
    # Ranks joined from one host only. Its absent ranks are found by the host's name if the layout is known, else by
    # their number.
    by_number = {rank for rank in absent if per_host >= seen.world.size or rank // per_host == place.rank // per_host}
    by_name = {rank for rank, host in layout_hosts.items() if short_name(host) == short_name(only_host)}
    local_ranks = [rank for rank in absent if rank in (by_name if rank in layout_hosts else by_number)]
    if len(local_ranks) == len(absent):
        return absent, ""
    others = "no other rank" if local_ranks else "no rank"
    return local_ranks, (
        f" No rank of another host joined, so the cause may be on {only_host} itself (its firewall, the address that "
        f"was given for it): {others} is blamed."
    )


def report(seen: Seen[Nothing]) -> Contribution:
    """Show the finding under the launch stage."""
    return Contribution(moved_findings=tuple(MovedFinding(Stage.LAUNCH, finding) for finding in seen.findings))


CHECK: Check[Nothing] = Check(__name__, "RUN001", "roll-call", Stage.RUN, Scope.WORLD)
