"""MASTER_PORT, as the job will use it.

Every rank of a job connects to MASTER_ADDR:MASTER_PORT before anything else. So one rank of each host does, under the
name that its own resolver gives, while rank 0 listens there and proves by a random word that the answer is its own.
Under torchrun its agent listens already; then the agent is reached.

Findings and their causes, for all of which torch reports "client socket has timed out":

Names that are unknown, or resolve to loopback, are RDZ002's findings.

Fix: open MASTER_PORT between the hosts, or choose another one; derive it from the job's id, so that jobs do not clash:
`export MASTER_PORT=$((20000 + SLURM_JOB_ID % 9000))`.

Confirm by hand: On rank 0's host `ss -ltnp "sport = :$MASTER_PORT"`; from another host `nc -vz $MASTER_ADDR
$MASTER_PORT` while `nc -l $MASTER_PORT` runs there; `sysctl net.ipv4.ip_local_port_range`.

Sources: torch/csrc/distributed/c10d/socket.cpp and TCPStore.cpp; torch/distributed/rendezvous.py
(TORCHELASTIC_USE_AGENT_STORE); ip(7), ip_local_port_range.
"""

import errno
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, Stage, new_trial, scope_groups
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import left_out
from ddpdiag.checks.rendezvous.port_faults import Data, failure_finding, itself, not_even_itself, not_listening
from ddpdiag.model import Finding, Scalar, Severity, Trial
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.programs import holder_of
from ddpdiag.probes.net.interfaces import ephemeral_ports, is_local
from ddpdiag.probes.net.tcp_connect import PortAnswer, PortListener, Reach, answered, check_port, is_loopback

FINDINGS = {
    "taken": FindingSpec.error(
        "another process listens on MASTER_PORT on rank 0's host, such as another job with the same default port, or "
        "one that did not end. The process and the port are named; the host is not to blame."
    ),
    "unusable": FindingSpec.error("rank 0 may not listen there (ports below 1024).", same_item=True),
    "elsewhere": FindingSpec.error(
        "rank 0's host does not reach itself under MASTER_ADDR: the address is another host's."
    ),
    "nobody": FindingSpec.error(
        "torchrun should serve the store (TORCHELASTIC_USE_AGENT_STORE), but no process listens; an outer or an older "
        "launcher set the variable.",
        same_item=True,
    ),
    **dict.fromkeys(
        ("refused", "dropped", "unreachable", "stranger"),
        FindingSpec.error(
            "a host cannot reach rank 0's port: a firewall that rejects or drops, no route, or another machine that "
            "answers under this name. If none of several other hosts can reach it, rank 0's host is blamed (but not "
            "for `stranger`), and also if it cannot even reach itself. Otherwise the failing links are named, and "
            "neither of their ends."
        ),
    ),
    "itself": FindingSpec.error(
        "MASTER_ADDR is also an address of that host, such as docker0's, or a name that /etc/hosts gives to it."
    ),
    "partly": FindingSpec.note("there are so many hosts that not all of them tried."),
    "ephemeral": FindingSpec.note(
        "the kernel also gives MASTER_PORT to outgoing connections (net.ipv4.ip_local_port_range), so it can be taken "
        "at any time."
    ),
}

# A lost first packet is sent again after 1 s, and after 3 s: three tries.
_CONNECT_SECONDS = 4.0
# A host that cannot get through is given up by rank 0 after this time, counted from the barrier.
_VISIT_SECONDS = 6.0
# Hosts beyond these are not tried: rank 0 greets one after the other.
MAX_HOSTS = 1024
_AGENT = "agent"


def measure(ctx: Context) -> Data:
    """Rank 0 listens itself, unless torchrun's agent does; the others wait for its word. Then all connect."""
    name, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    if ctx.group_rank > 0 or ctx.trial.params["agent_store"]:
        word = ctx.barrier(_AGENT).offer
        found = _checked(ctx, name, port, word) if word else None
        return Data(name=name, port=port, port_check=found, is_own=_is_own(found))
    own = ephemeral_ports()
    ephemeral = own if own is not None and own[0] <= port <= own[1] else None
    word = secrets.token_hex(16)
    ctx.step(f"listen on port {port}")
    try:
        listener = PortListener(port, word)
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, str(error))
        holder = holder_of(port) if error.errno == errno.EADDRINUSE else None
        ctx.barrier("")
        return Data(name=name, port=port, error=code, holder=holder, ephemeral=ephemeral)
    try:
        ctx.barrier(word)
        end = time.monotonic() + _VISIT_SECONDS
        found = _checked(ctx, name, port, word)
        ctx.step("wait for the other hosts")
        listener.wait(len(ctx.group), end - time.monotonic())
    finally:
        listener.close()
    return Data(name=name, port=port, port_check=found, ephemeral=ephemeral, is_own=_is_own(found))


def _checked(ctx: Context, name: str, port: int, word: str) -> PortAnswer:
    ctx.step(f"connect to {name}:{port}")
    return check_port(name, port, _CONNECT_SECONDS, who=str(ctx.place.rank), word=None if word == _AGENT else word)


def _is_own(found: PortAnswer | None) -> bool | None:
    return None if found is None or found.reached.address is None else is_local(found.reached.address)


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """One group of one rank per host, rank 0's first."""
    leaders = [rank for group in scope_groups(Scope.NODE, seen.world) for rank in group]
    if seen.trials or 0 not in leaders:
        return ()
    agent = any(arrival.agent_store for arrival in seen.world.arrivals.values())
    return (new_trial(seen, groups=(tuple(leaders[:MAX_HOSTS]),), params={"agent_store": agent}),)


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """First what is wrong on rank 0's host: it explains what the others met."""
    answers = seen.by_rank
    first, node = answers.get(0), seen.world.node_of(0)
    if first is not None and first.error is not None:
        yield not_listening(seen, node, first)
    elif first is not None and (own := _failure(seen, 0, first)) is not None:
        yield not_even_itself(seen, node, first, own)
    else:
        others = {rank: data.port_check for rank, data in answers.items() if rank != 0 and data.port_check is not None}
        failed = {rank: why for rank in others if (why := _failure(seen, rank, answers[rank])) is not None}
        if themselves := {rank: answers[rank] for rank in failed if answers[rank].is_own}:
            yield itself(seen, node, themselves)
        failed = {rank: why for rank, why in failed.items() if rank not in themselves}
        got = sum(map(answered, others.values()))
        for why in dict.fromkeys(failed.values()):
            ranks = {rank: answers[rank] for rank in failed if failed[rank] == why}
            yield failure_finding(seen, node, ranks, why, got=got, of=got + len(failed))
    if first is not None and first.ephemeral is not None and first.error is None and len(seen.world.hosts) > 1:
        low, high = first.ephemeral
        below = 29500 if low > 29500 else low - 1
        yield seen.finding(
            "ephemeral",
            f"MASTER_PORT {first.port} is an ephemeral port",
            f"MASTER_PORT {first.port} lies within {low}-{high}, the ports that {node} uses for outgoing connections. "
            "One of these may hold the port when the job starts, and rank 0 then cannot listen.",
            evidence={"port": first.port, "from": low, "to": high},
            fix=f"Choose a port below this range in every process: `export MASTER_PORT={below}`."
            if below >= 1024
            else f"As root reserve the port on {node}: `sysctl -w net.ipv4.ip_local_reserved_ports={first.port}`.",
        )
    if seen.trials:
        yield from left_out(seen, MAX_HOSTS, "MASTER_PORT", "tried to connect to MASTER_PORT")


def usable(seen: Seen[Data]) -> bool:
    """May a job meet on MASTER_PORT, as far as is known?"""
    return not any(finding.severity is Severity.ERROR for finding in judge(seen))


def _failure(seen: Seen[Data], rank: int, data: Data) -> str | None:
    """Why this host did not get through, in one word; None if it did, or if the reason is RDZ002's."""
    found = data.port_check
    if found is None or answered(found):
        return None
    reached = found.reached
    if reached.reach in (Reach.UNKNOWN_NAME, Reach.SLOW_NAME):
        return None
    if rank != 0 and reached.address is not None and is_loopback(reached.address):
        return None
    return "stranger" if reached.reach is Reach.ACCEPTED else reached.reach.value


def figures(seen: Seen[Data]) -> Mapping[str, Scalar]:
    """How long the slowest of the hosts that got through took, and how many did."""
    seconds = [
        d.port_check.reached.seconds
        for d in seen.by_rank.values()
        if d.port_check is not None and answered(d.port_check)
    ]
    if not seconds:
        return {}
    return {"master_port.hosts": len(seconds), "master_port.slowest_seconds": max(seconds)}


def report(seen: Seen[Data]) -> Contribution:
    """All that the check adds to the report."""
    return Contribution(figures=figures(seen))


CHECK: Check[Data] = Check(__name__, "RDZ005", "master-port", Stage.RENDEZVOUS, Scope.NODE, deadline=15)
