"""TCP between all hosts.

gloo opens a connection between every two ranks, NCCL between many of them, each on a free port of its own; rank 0's
port alone is not enough. So one rank of each host listens on such a port, at the address that a job would offer there,
and all connect to all: a small message, one of 64 KiB, and 16 MiB for the rate, one at a time on each host. If a link
fails or is slow, all are measured once more, and the better result counts. If ranks of several hosts waited for each
other in a later check, the links are tested again at the end of the run, and what fails then counts: a link may be cut
during a run. Beyond 64 hosts there are groups of at most 64, and the measurement `mesh.pairs` shows how many pairs of
hosts were tested.

Failing links are explained by their pattern: if all links from and to one host fail, or all in one direction, the host
is named; a single link is named itself; if links fail everywhere, no host is named, since the hosts share the cause.
With two hosts it cannot be decided which side is at fault.

Findings and their causes:

Fix: open the ephemeral ports (net.ipv4.ip_local_port_range) between the hosts, in both directions; set the same MTU;
compare `ethtool` and `ip -s link` of the named host with those of another.

Confirm by hand: Between two hosts `nc -l 45000` and `nc -vz HOST 45000` in both directions; `iperf3 -s` and `iperf3 -c
HOST` for the rate; `ping -M do -s 8972 HOST` for the MTU; `ip -s link` for errors.

Sources: NCCL user guide, networking; gloo's transport/tcp/pair.h (five times the time-out); Mathis et al., The
macroscopic behavior of the TCP congestion avoidance algorithm, 1997; RFC 2923 (path MTU black holes).
"""

import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, new_trial, optional, scope_groups
from ddpdiag.checks.blame import blamed
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.matrix import pair_matrix
from ddpdiag.checks.rendezvous.mesh.data import AT_END, Data, failure, mesh_of
from ddpdiag.checks.rendezvous.mesh.judge import Rates, dropped_everywhere
from ddpdiag.checks.rendezvous.mesh.judge import judge as judge
from ddpdiag.model import Kind, Matrix, Scalar, Status, Trial
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.kernel import sys_root
from ddpdiag.probes.net.interfaces import (
    bindable,
    ephemeral_ports,
    interface_of,
    interfaces,
    library_of,
    offered_address,
    wanted,
)
from ddpdiag.probes.net.mesh import Peer, survey
from ddpdiag.probes.net.mesh_listener import CONNECT_SECONDS, STALL_SECONDS, Listener
from ddpdiag.probes.net.tcp_connect import allowed_ports, resolve

FINDINGS = {
    **dict.fromkeys(
        ("refused", "dropped", "unreachable"),
        FindingSpec(
            "a firewall that rejects or drops, or no route. gloo would wait five times its time-out. Over gloo only "
            "one of two ranks connects to the other: where gloo works all the same, this is a warning."
        ),
    ),
    **dict.fromkeys(
        ("silent", "broken"),
        FindingSpec("the connection is accepted, then no data arrive, or it is cut: a proxy, an overloaded host."),
    ),
    "black-hole": FindingSpec.error(
        "small messages pass, large ones are lost: hosts or switches with different MTUs, and ICMP filtered."
    ),
    "slow": FindingSpec(
        "less than a third (a warning) or a tenth (an error) of what most hosts reach, and more than `noise_seconds` "
        "longer for 16 MiB (so long may a process wait for a core on a busy host); or less than a third of "
        "`expected_bytes_per_s`, a tenth of the interface's nominal speed (of which one TCP connection is expected to "
        "fill 10 Gbit/s at most), or `least_bytes_per_s` (what 100 Mbit/s gives is less, what 1 Gbit/s gives is much "
        "more). Of containers, what those on one machine reach among themselves is not compared with the network."
    ),
    "loss": FindingSpec(
        "segments had to be sent again in every repetition, more than `lost_share` and at least `lost_segments`: a bad "
        "cable or port, a policer. One of a thousand leaves 4.5 Gbit/s to a connection of 0.1 ms (Mathis et al., "
        "1997). A warning; an error from `lossy_share` (1 %) on the interface that carries the job's traffic: that of "
        "the address which the job's library offers (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), unless NCCL takes an "
        "RDMA port. This also holds for a link that is slow."
    ),
    "transient": FindingSpec.note("it passed when it was repeated."),
}

# A full mesh of more would take too long: groups of at most so many hosts.
MAX_HOSTS = 64
# For the supervisor's deadline to be later than the worker's own.
_MARGIN_SECONDS = 3.0
_NAME_SECONDS = 2.0


def measure(ctx: Context) -> Data:
    """Listen, exchange addresses, and measure the link to every other host of the group."""
    seconds = ctx.trial.deadline_seconds
    end = time.monotonic() + seconds - min(_MARGIN_SECONDS, seconds / 2)
    known = interfaces(sys_root(os.environ)) or ()
    ctx.step("look up the own name")
    own = bindable(resolve(socket.gethostname(), 0, _NAME_SECONDS) or ())
    offered = offered_address(str(ctx.trial.params["library"]), wanted(os.environ), own, known)
    turn = threading.Lock()
    listener = Listener(allowed_ports(ctx.options), turn, end)
    openings = ctx.exchange(f"{listener.port} {listener.token} {offered or ''}")
    us = openings[ctx.group_rank].host
    one = offered is None or offered in (resolve(us, 0, _NAME_SECONDS) or ())
    mine = {address for interface in known for address in interface.addresses}
    peers = []
    for number, (rank, opening) in enumerate(zip(ctx.group, openings, strict=True)):
        port, token, address = opening.offer.split(" ")
        # An address that this host has as well (docker0's) is left out: it leads back here.
        address = "" if address in mine else address
        if number != ctx.group_rank:
            peer = Peer(rank=rank, number=number, offered=address, host=opening.host, port=int(port), token=token)
            peers.append(peer)
    cells = survey(peers, ctx.group_rank, listener, turn, end, ctx.step, addresses=1 if one else 2)
    used = dict.fromkeys(interface_of(cell.source, known) for cell in cells)
    return Data(
        offered=offered,
        port=listener.port,
        interfaces=tuple(interface for interface in used if interface is not None),
        ephemeral=ephemeral_ports(),
        cells=cells,
    )


def skip(seen: Seen[Any]) -> SkipReason | None:
    """There must be a network; a request of the stage does not require it."""
    return optional(None if len(seen.world.hosts) > 1 else "there is one host only")


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """All links once, and once more if one of them looks bad; at the end, if ranks waited for each other since then."""
    groups = _groups([group[0] for group in scope_groups(Scope.NODE, seen.world)])
    params: dict[str, str | int | float | bool] = {"library": library_of(seen.world.backend)}
    if seen.is_last:
        due = _waited(seen) and not any(trial.params.get(AT_END) for trial in seen.trials)
        return (new_trial(seen, groups=groups, params={**params, AT_END: True}),) if due else ()
    if not seen.trials:
        return (new_trial(seen, groups=groups, params=params),) if groups else ()
    if len(seen.trials) > 1 or not seen.succeeded(seen.trials[0]):
        return ()
    mesh = mesh_of(seen)
    rates, cells = Rates(seen, mesh), mesh.cells.values()
    doubtful = rates.short or rates.lossy or any(cell.missed or failure(cell) for cell in cells)
    again = new_trial(seen, groups=seen.trials[0].groups, params=seen.trials[0].params)
    return (again,) if doubtful and not dropped_everywhere(mesh) else ()


def last_seconds(seen: Seen[Data]) -> float:
    """Some links take up to `CONNECT_SECONDS` and `STALL_SECONDS` to fail, the others as long as before."""
    took = max((o.seconds for o in seen.outcomes if o.status is Status.DONE), default=0.0)
    return took + CONNECT_SECONDS + STALL_SECONDS + _MARGIN_SECONDS


def _waited(seen: Seen[Data]) -> bool:
    """Whether ranks of several hosts waited for each other in a trial after the links were tested, without a culprit
    whose process shows why."""
    tested = max((trial.number for trial in seen.trials), default=0)
    for trial in seen.recording.trials:
        if trial.number <= tested or trial.may_fail or trial.kind is not Kind.TORCH:
            continue
        outcomes = [o for o in seen.recording.outcomes if o.trial == trial.number]
        for group in trial.groups:
            blame = blamed([o for o in outcomes if o.rank in group])
            if blame and len(seen.world.nodes_of(group)) > 1 and not (blame.ranks and blame.status is not Status.HUNG):
                return True
    return False


def _groups(leaders: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Groups of nearly the same size; neighbours, which often share a switch, are put into different ones."""
    count = -(-len(leaders) // MAX_HOSTS)
    groups = tuple(tuple(leaders[start::count]) for start in range(count))
    return tuple(group for group in groups if len(group) > 1)


def figures(seen: Seen[Data]) -> Mapping[str, Scalar]:
    """How many pairs of hosts were tested, the slowest and the usual link, and the longest round trip."""
    mesh = mesh_of(seen)
    if not mesh.cells:
        return {}
    rates = [cell.bytes_per_s for cell in mesh.cells.values() if cell.bytes_per_s is not None]
    trips = [cell.round_trip_seconds for cell in mesh.cells.values() if cell.round_trip_seconds is not None]
    pairs = {frozenset(link) for link in mesh.cells}
    hosts = len(seen.world.hosts)
    return {
        "mesh.pairs": f"{len(pairs)} of {hosts * (hosts - 1) // 2}",
        "mesh.min_bytes_per_s": min(rates, default=None),
        "mesh.median_bytes_per_s": median(rates) if rates else None,
        "mesh.max_round_trip_seconds": max(trips, default=None),
    }


def matrices(seen: Seen[Data]) -> Sequence[Matrix]:
    """The rate of each link between hosts; 0 where nothing, or nothing large, passed."""
    mesh = mesh_of(seen)
    number = {rank: host for host, ranks in enumerate(seen.world.hosts.values()) for rank in ranks}
    names = tuple(name for name, _ in seen.world.hosts)
    rates = {(number[a], number[b]): cell.bytes_per_s or 0.0 for (a, b), cell in mesh.cells.items()}
    matrix = pair_matrix("rdz.mesh", "One TCP connection between two hosts", names, rates)
    return () if matrix is None else (matrix,)


def report(seen: Seen[Data]) -> Contribution:
    """All that the check adds to the report."""
    return Contribution(figures=figures(seen), matrices=tuple(matrices(seen)))


SETTINGS = {
    "slow_ratio": 3.0,
    "very_slow_ratio": 10.0,
    "noise_seconds": 0.02,
    "expected_bytes_per_s": 0.0,
    "least_bytes_per_s": 30e6,
    "lost_share": 1e-3,
    "lossy_share": 1e-2,
    "lost_segments": 10.0,
}
CHECK: Check[Data] = Check(__name__, "RDZ004", "mesh", Stage.RENDEZVOUS, Scope.NODE, deadline=15)
