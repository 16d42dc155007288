"""The coordinator's name on every host.

Every rank looks up MASTER_ADDR by itself, and gloo looks up the host's own name to know which address to offer to its
peers. Debian and Ubuntu install `127.0.1.1 <host name>` in /etc/hosts, so that a host offers its loopback address:
everything works on one host, and hangs on two.

Fix: correct /etc/hosts or the DNS entry; or give the address itself (`--master-addr 10.0.0.1`), and name the interface
for gloo (`GLOO_SOCKET_IFNAME=eth0`).
"""

import os
import socket
import time
from collections.abc import Iterator

from msgspec import Struct

from ddpdiag.check import Check, Context, Scope, Seen, Stage
from ddpdiag.model import Finding, Severity
from ddpdiag.probes.sockets import is_loopback, resolve

_LOOK_UP_SECONDS = 5.0


class Data(Struct, frozen=True):
    """What this host's resolver says; an empty tuple means that the name is unknown here."""

    name: str
    addresses: tuple[str, ...]
    seconds: float
    own_name: str
    own_addresses: tuple[str, ...]
    interface: str | None


def measure(ctx: Context) -> Data:
    """Look up the coordinator's name and this host's own."""
    name = os.environ.get("MASTER_ADDR", "")
    port = int(os.environ.get("MASTER_PORT", "0"))
    ctx.step(f"look up {name}")
    begin = time.perf_counter()
    addresses = resolve(name, port, _LOOK_UP_SECONDS)
    seconds = time.perf_counter() - begin
    own = socket.gethostname()
    ctx.step(f"look up {own}")
    own_addresses = resolve(own, 0, _LOOK_UP_SECONDS)
    return Data(name, addresses, seconds, own, own_addresses, os.environ.get("GLOO_SOCKET_IFNAME"))


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """Unknown names, loopback addresses in a world of several hosts, slow look-ups; one finding a host."""
    several = len(seen.world.hosts) > 1
    for (node, _), ranks in seen.world.hosts.items():
        data = next((seen.by_rank[rank] for rank in ranks if rank in seen.by_rank), None)
        if data is not None:
            yield from _judge_host(seen, node, data, 0 in ranks, several)


def _judge_host(seen: Seen[Data], node: str, data: Data, coordinator: bool, several: bool) -> Iterator[Finding]:
    if not data.addresses:
        yield seen.finding(
            "unknown",
            Severity.ERROR,
            f"{data.name} is unknown on {node}",
            f"{node} cannot resolve {data.name!r}, the coordinator's name (looked for {data.seconds:.1f} s).",
            nodes=[node],
            remedy=f"Add {data.name} to the DNS or to /etc/hosts of {node}, or start the job with the address itself.",
        )
    elif several and all(map(is_loopback, data.addresses)):
        where = "its own host" if coordinator else "another host"
        yield seen.finding(
            "loopback",
            Severity.ERROR,
            f"{data.name} is a loopback address on {node}",
            f"On {node}, {where}, {data.name} resolves to {data.addresses[0]}: others cannot be reached through it.",
            nodes=[node],
            evidence={"addresses": list(data.addresses)},
            remedy=f"Correct {data.name} in /etc/hosts of {node}, or give an address that all hosts reach.",
        )
    if data.seconds > (limit := seen.number("slow_seconds", 1.0)):
        yield seen.finding(
            "slow",
            Severity.WARNING,
            f"slow look-up on {node}",
            f"Looking up {data.name} took {data.seconds:.1f} s on {node}; {limit:g} s at most are expected.",
            nodes=[node],
            remedy=f"Check the name servers in /etc/resolv.conf of {node}.",
        )
    if several and not data.interface and (not data.own_addresses or all(map(is_loopback, data.own_addresses))):
        yield _offers_loopback(seen, node, data)


def _offers_loopback(seen: Seen[Data], node: str, data: Data) -> Finding:
    says = data.own_addresses[0] if data.own_addresses else "nothing"
    return seen.finding(
        "own",
        Severity.ERROR if seen.world.backend == "gloo" else Severity.WARNING,
        f"gloo on {node} offers a loopback address",
        f"{node} resolves its own name {data.own_name} to {says}; gloo offers that to its peers, who cannot reach it.",
        nodes=[node],
        evidence={"own_addresses": list(data.own_addresses)},
        remedy=f"Correct {data.own_name} in /etc/hosts, or set GLOO_SOCKET_IFNAME to the job's interface.",
    )


CHECK = Check(
    "RDZ002",
    "coordinator-name",
    Stage.RENDEZVOUS,
    Scope.RANK,
    manual=__doc__ or "",
    judge=judge,
    data=Data,
    measure=measure,
    deadline=15,
)
