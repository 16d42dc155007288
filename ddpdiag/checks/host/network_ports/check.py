"""Counters of each host's network ports that rise while the run loads them.

A bad cable, transceiver or switch port passes most tests and ends a job hours later. It tells by counters, which may be
old if they are not zero; one that rises during a run is a fault that the next job meets as well. One rank of each host
reads them before the run loads the network, and once more after everything else, and each port is held against itself:
RDMA ports whose link is up, the interface that leads to the other hosts, the one that the job's library chooses
(RDZ003), and what these are made of (members of a bond, the card of a VLAN). Other interfaces (docker0, veth pairs, a
management network, loopback) are left out. On one host alone RDMA ports are looked at, and nothing without them.

Findings and their causes, with the numbers before and after and the seconds between:

Where the links of more than half of the hosts are concerned, nobody is blamed: they share the cause. Packets that are
dropped or sent again are no finding here, since a network that is full drops packets; RDZ004 judges these on
connections of its own. Counters that cannot be read (a container without /sys, a virtual function) are left out.

Fix: reseat or replace the cable and the transceiver, then try another port of the switch; if the errors come along with
the host, replace the card.

Confirm by hand: Before and after a job, `ethtool -S INTERFACE; ip -s -s link show INTERFACE; cat
/sys/class/net/INTERFACE/carrier_down_count; ibstat; perfquery; nstat -az TcpInCsumErrors`, and diff; `ethtool -m
INTERFACE` for the light that a transceiver gets; `dmesg -T | grep -i link`.

Sources: Linux's ABI documents sysfs-class-infiniband, sysfs-class-net and sysfs-class-net-statistics; NVSentinel,
docs/configuration/nic-health-monitor.md (which counters, and the limits of errors); InfiniBand architecture
specification and IEEE 802.3 (one bit error in 10^12); NVIDIA, Understanding mlx5 Linux counters; Stone and Partridge,
When the CRC and TCP checksum disagree, 2000.
"""

import os
from collections.abc import Iterator, Mapping, Sequence

from ddpdiag.checks.api import Check, Scope, Seen, Stage, new_trial, scope_groups
from ddpdiag.checks.findings import Explained
from ddpdiag.checks.host import limits as hst004
from ddpdiag.checks.host.network_ports.deltas import Limits, Pair, rises
from ddpdiag.checks.host.network_ports.judge import damages, mishaps
from ddpdiag.checks.hosts import Host, hosts_of
from ddpdiag.checks.rendezvous.interfaces import check as rdz003
from ddpdiag.checks.world import World
from ddpdiag.model import Finding, Status, Trial
from ddpdiag.model.context import Context
from ddpdiag.probes.net.adapters import NetworkLook, network_look
from ddpdiag.probes.net.interfaces import chosen_address, interface_of, library_of

FINDINGS = {
    "link-down": Explained.warning(
        "a link was lost, even if it is back (carrier_down_count, link_downed): an error where the job goes by this "
        "port, since all ranks wait until it is back, or fail; a warning for a member of a bond, or an RDMA port that "
        "the job does not take."
    ),
    "gone": Explained.warning(
        "a port that was there at the beginning and is not at the end: the card fell off the bus, or was taken away."
    ),
    "link-errors": Explained.warning(
        "symbol_error, rx_crc_errors or rx_frame_errors rose faster than `bit_errors_per_hour` (what the standards "
        "allow), link_error_recovery faster than `recoveries_per_minute`, port_rcv_errors faster than "
        "`receive_errors_per_second`, or local_link_integrity_errors or excessive_buffer_overrun_errors at all. The "
        "time counts as a minute at least (for port_rcv_errors a second), since a single event has no rate."
    ),
    "damaged": Explained.warning(
        "TCP threw away more than `damaged_segments` segments whose checksum was wrong (InCsumErrors). Ethernet drops "
        "frames that a cable damaged, so this happened inside a switch, a card or a host's memory; about one of 65,536 "
        "such segments has the right checksum all the same, and its data are wrong."
    ),
    "not-ready": Explained.note(
        "peers were not ready to receive over RDMA (rnr_nak_retry_err), and packets were sent again: good to know, "
        "since storage does the same."
    ),
}

# For a worker that has to be started anew, since the last one was ended.
_START_SECONDS = 0.5


def measure(ctx: Context) -> NetworkLook:
    towards = ctx.trial.params.get("towards")
    return network_look(None if towards is None else str(towards), os.environ, ctx.step)


def plan(seen: Seen[NetworkLook]) -> Sequence[Trial]:
    """A first look before the run loads the network, and one at the end."""
    return _second(seen) if seen.is_last else _first(seen)


def _first(seen: Seen[NetworkLook]) -> Sequence[Trial]:
    """One rank of each host; all are told where another host is."""
    if seen.trials or _is_alone_without_rdma(seen):
        return ()
    leaders = [group[0] for group in scope_groups(Scope.NODE, seen.world)]
    # The second host is also told its own address, which is the one that leads to the first.
    params = {"towards": seen.world.arrivals[leaders[1]].address} if len(leaders) > 1 else {}
    return (new_trial(seen, params=params),)


def _is_alone_without_rdma(seen: Seen[NetworkLook]) -> bool:
    """Is there one host only, of which HST004 knows that it has no RDMA?"""
    known = seen.of(hst004.CHECK).by_rank.values()
    return len(seen.world.hosts) == 1 and bool(known) and all(limits.rdma == () for limits in known)


def _second(seen: Seen[NetworkLook]) -> Sequence[Trial]:
    """The ranks that saw something at the beginning."""
    groups = tuple((rank,) for rank in sorted(_begun(seen)) if rank in seen.world.living)
    if len(seen.trials) != 1 or not groups:
        return ()
    return (new_trial(seen, groups=groups, params=seen.trials[0].params),)


def moot(seen: Seen[NetworkLook]) -> str | None:
    """Without a first look there is nothing to compare with."""
    if _begun(seen):
        return None
    alone = len(seen.world.hosts) == 1
    return "there is one host only, without an RDMA port" if alone else "no host shows counters of its network"


def last(seen: Seen[NetworkLook]) -> float:
    """As long as the first look."""
    return max((o.seconds for o in seen.outcomes if o.status is Status.DONE), default=0.0) + _START_SECONDS


def _begun(seen: Seen[NetworkLook]) -> Mapping[int, NetworkLook]:
    """Each first look that saw something."""
    number = seen.trials[0].number if seen.trials else None
    looks = {row.place.rank: row.data for row in seen.rows if row.trial.number == number}
    return {rank: look for rank, look in looks.items() if look.ports or look.tcp}


def judge(seen: Seen[NetworkLook]) -> Iterator[Finding]:
    pairs = dict(_pairs(seen))
    limits = Limits(
        bit_errors_per_hour=seen.number("bit_errors_per_hour"),
        recoveries_per_minute=seen.number("recoveries_per_minute"),
        receive_errors_per_second=seen.number("receive_errors_per_second"),
        damaged_segments=seen.number("damaged_segments"),
    )
    found = {host: tuple(rises(pair, limits)) for host, pair in pairs.items()}
    yield from mishaps(seen, pairs, found)
    yield from damages(seen, pairs, limits.damaged_segments)


def _pairs(seen: Seen[NetworkLook]) -> Iterator[tuple[Host, Pair]]:
    """Both looks of each host, by the same rank."""
    begun = _begun(seen)
    later = {row.place.rank: row.data for row in seen.rows if row.trial.number != seen.trials[0].number}
    interfaces = seen.of(rdz003.CHECK).by_rank
    for host in hosts_of(seen):
        rank = next((rank for rank in host.ranks if rank in begun and rank in later), None)
        if rank is not None:
            own = next((interfaces[rank] for rank in host.ranks if rank in interfaces), None)
            yield host, Pair(begun[rank], later[rank], _ways(seen.world, begun[rank], own))


def _ways(world: World, look: NetworkLook, own: rdz003.Data | None) -> frozenset[str]:
    """Ports by which the job goes to other hosts: what the kernel's route says, what RDZ003 saw, what NCCL takes."""
    if len(world.hosts) == 1:
        return frozenset()
    ways = {look.route, _chosen(library_of(world.backend), own)} - {None, "lo"}
    taken = {port.name for port in look.ports if port.taken} if world.backend == "nccl" else set()
    return frozenset(filter(None, ways | taken))


def _chosen(library: str, own: rdz003.Data | None) -> str | None:
    """The interface whose address the job's library offers."""
    if own is None or own.interfaces is None:
        return None
    address = chosen_address(library, own.names, own.own_addresses, own.interfaces)
    interface = interface_of(address, own.interfaces)
    return interface.name if interface is not None else None


CHECK = Check(
    "HST006",
    "network-counters",
    Stage.HOST,
    Scope.NODE,
    manual=__doc__ or "",
    findings=FINDINGS,
    measure=measure,
    judge=judge,
    data=NetworkLook,
    plan=plan,
    moot=moot,
    last=last,
    settings={
        # NVSentinel's limit for symbol errors, from the one bit error in 10^12 that InfiniBand (and Ethernet) allows.
        "bit_errors_per_hour": 120,
        # NVSentinel's limits.
        "recoveries_per_minute": 5,
        "receive_errors_per_second": 10,
        # A stray packet from outside of the cluster is none of the job's.
        "damaged_segments": 3,
    },
)
