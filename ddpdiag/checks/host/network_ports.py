"""Counters of each host's network ports that rise while the run loads them.

A job may pass most tests over a bad cable, transceiver or switch port, and still fail hours later. Error counters show
such a fault. A counter that is not zero may be old, but one that rises during a run shows a fault that remains.
One rank of each host reads the counters before the run loads the network, and again after all other checks. Both
readings are compared for RDMA ports whose link is up, for the interface that leads to the other hosts, for the
interface that NCCL or gloo chooses (RDZ003), and for the interfaces below these (members of a bond, the card of a
VLAN). Other interfaces (docker0, veth pairs, loopback) are left out. On a single host only RDMA ports are read.

Findings and their causes (each finding shows the counters of both readings, and the seconds between them):

If the links of more than half of the hosts are affected, the hosts share the cause, and no host is blamed. Counters
that cannot be read (a container without /sys, a virtual function) are left out.

Fix: reseat or replace the cable and the transceiver, then try another port of the switch; if the errors stay with the
host, replace the card.

Confirm by hand: Before and after a job, `ethtool -S INTERFACE; ip -s -s link show INTERFACE; cat
/sys/class/net/INTERFACE/carrier_down_count; ibstat; perfquery; nstat -az TcpInCsumErrors`, and
diff; `dmesg -T | grep -i link`.

Sources: Linux's ABI documents sysfs-class-infiniband, sysfs-class-net and sysfs-class-net-statistics; NVSentinel,
docs/configuration/nic-health-monitor.md (which counters, and the limits of errors); InfiniBand architecture
specification and IEEE 802.3 (one bit error in 10^12); NVIDIA, Understanding mlx5 Linux counters; Stone and Partridge,
When the CRC and TCP checksum disagree, 2000.
"""

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from shlex import quote
from typing import NamedTuple

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, new_trial, scope_groups, unneeded
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.host import limits as hst004
from ddpdiag.checks.hosts import Host, hosts_of, leave_out, names_text
from ddpdiag.checks.registry import check_by_code
from ddpdiag.checks.rendezvous import interfaces as rdz003
from ddpdiag.checks.world import World
from ddpdiag.model import TCP_PART, Counters, Finding, Severity, Status, Trial
from ddpdiag.model.trial import Context
from ddpdiag.probes.net.adapters import NetworkReading, PortCounters, read_network
from ddpdiag.probes.net.interfaces import library_of
from ddpdiag.text import begun

FINDINGS = {
    "link-down": FindingSpec.warning(
        "a link was lost, even if it is back (carrier_down_count, link_downed): an error if the job uses this "
        "port, since all ranks wait until it is back, or fail; a warning for a member of a bond, or an RDMA port that "
        "the job does not use."
    ),
    "gone": FindingSpec.warning(
        "a port that was present at the beginning is missing at the end: the card fell off the bus, or was removed."
    ),
    "link-errors": FindingSpec.warning(
        "symbol_error, rx_crc_errors or rx_frame_errors rose faster than `bit_errors_per_hour` (what the standards "
        "allow), link_error_recovery faster than `recoveries_per_minute`, port_rcv_errors faster than "
        "`receive_errors_per_second`, or local_link_integrity_errors or excessive_buffer_overrun_errors faster than "
        "`overruns_per_hour` (0). The time counts as a minute at least (for port_rcv_errors a second), since a single "
        "event has no rate."
    ),
    "damaged": FindingSpec.warning(
        "TCP discarded more than `damaged_segments` segments whose checksum was wrong (InCsumErrors). Ethernet drops "
        "frames that a cable damaged, so this happened inside a switch, a card or a host's memory."
    ),
    "resent": FindingSpec.error(
        "a host sent more than `resent_share` of its TCP segments again, at least `resent_segments`, although RDZ004 "
        "had found its links without loss: the loss began later. Segments that the receiver already had do not count "
        "(TCPDSACKRecv). No host is blamed, since the sender, the receiver or a switch may lose segments."
    ),
}
SETTINGS = {
    # NVSentinel's limit for symbol errors, from the one bit error in 10^12 that InfiniBand (and Ethernet) allows.
    "bit_errors_per_hour": 120,
    # NVSentinel's limits.
    "recoveries_per_minute": 5,
    "receive_errors_per_second": 10,
    "overruns_per_hour": 0,
    # A few such segments may be stray packets from outside of the cluster.
    "damaged_segments": 3,
    # RDZ004's limit of an error. Dead connections of other programs send some segments again on a healthy host.
    "resent_share": 1e-2,
    "resent_segments": 100,
}
# By error counter: the setting with its limit, the seconds of the limit's unit of time, and the least seconds to count.
_BIT_ERRORS, _OVERRUNS = ("bit_errors_per_hour", 3600.0, 60.0), ("overruns_per_hour", 3600.0, 60.0)
_LIMITS = {
    "symbol_error": _BIT_ERRORS,
    "rx_crc_errors": _BIT_ERRORS,
    "rx_frame_errors": _BIT_ERRORS,
    "link_error_recovery": ("recoveries_per_minute", 60.0, 60.0),
    "port_rcv_errors": ("receive_errors_per_second", 1.0, 1.0),
    "local_link_integrity_errors": _OVERRUNS,
    "excessive_buffer_overrun_errors": _OVERRUNS,
}
# Each rises by one when the link is lost.
_LINK_LOSS_COUNTERS = ("carrier_down_count", "link_downed")
# The time to start a new worker, in case the last one has ended.
_START_SECONDS = 0.5

_CABLE = (
    "{commands} on {hosts} show more. Ask the administrator to reseat or replace the cable and the transceiver, then "
    "to try another port of the switch, then to replace the card."
)
# The title and the fix of each finding, with fields for the hosts and for the commands that show more.
_TEXTS = {
    "link-down": ("a network link of {hosts} went down during the run", _CABLE),
    "gone": (
        "a network port of {hosts} disappeared during the run",
        "Run `lspci | grep -i -E 'ethernet|infiniband'` on {hosts}, and as root `dmesg -T | tail -n 100`. If the card "
        "is not listed, ask the administrator to power-cycle the host, and to replace the card if it disappears again.",
    ),
    "link-errors": (
        "a network link of {hosts} had errors during the run",
        f"The job can run, but a link with errors is slow and may fail. {_CABLE}",
    ),
}


Data = NetworkReading


class Readings(NamedTuple):
    """The first and the last reading of one host's ports, and the names of the ports that the job uses there."""

    before: NetworkReading
    after: NetworkReading
    job_ports: frozenset[str]

    @property
    def seconds(self) -> float:
        """The seconds between the two readings."""
        return max(0.0, self.after.seconds - self.before.seconds)

    @property
    def tcp_rises(self) -> dict[str, int]:
        """The rise of each TCP counter that both readings have; 0 if a counter fell."""
        before = self.before.tcp
        return {name: max(0, end - before[name]) for name, end in self.after.tcp.items() if name in before}

    def port_pairs(self) -> Iterator[tuple[PortCounters, PortCounters | None]]:
        """Yield the first and last reading (None: it is gone) of each compared port. Compared are the job's ports, RDMA
        ports whose link was not down at first, and the ports below all these (members of a bond)."""
        earlier, later = ({port.name: port for port in data.ports} for data in (self.before, self.after))
        todo = [
            name for name, port in earlier.items() if name in self.job_ports or (port.rdma and port.up is not False)
        ]
        compared: set[str] = set()
        while todo:
            name = todo.pop()
            compared.add(name)
            todo += (set(earlier[name].below) & earlier.keys()) - compared
        yield from ((port, later.get(name)) for name, port in earlier.items() if name in compared)


def lost_segments(tcp: Mapping[str, int]) -> int:
    """The segments that a host sent again, by its TCP counters, without those that the receiver already had.

    On a busy host an acknowledgement is late, and the kernel then sends a segment again that was not lost: 2,831 of
    2,854 on two cores with a load of 20, and 635 of 635 between two network namespaces there.
    """
    return max(0, tcp.get("RetransSegs", 0) - _needless_segments(tcp))


def _needless_segments(tcp: Mapping[str, int]) -> int:
    return max(tcp.get("TCPDSACKRecv", 0), tcp.get("TCPDSACKRecvSegs", 0))


class PortChange(NamedTuple):
    """A change of one port. `word` is the second part of the finding's code; `clause` names the port and the change.
    `before` and `after` are the values of `counter`; all three are None if no counter shows the change."""

    word: str
    port: PortCounters
    clause: str
    used_by_job: bool
    counter: str | None = None
    before: int | None = None
    after: int | None = None


def port_changes(readings: Readings, rise_limit: Callable[[str, float], float]) -> Iterator[PortChange]:
    """Yield the changes of one host's ports. `rise_limit(counter, seconds)` returns the largest rise that is no error.
    A counter is ignored if it fell (it was reset, or its 32 bits wrapped), or if only one reading has it. Counters of
    InfiniBand ports stop at their largest value (255 for link_downed), so that later changes do not show."""
    for old, new in readings.port_pairs():
        used_by_job = old.name in readings.job_ports
        label = f"{old.name}{f' (PCI {old.pci})' if old.pci else ''}"
        if new is None:
            text = f"{label} was present at the beginning and is missing at the end"
            yield PortChange("gone", old, text, used_by_job)
            continue
        risen = {name: end for name, start in old.counters.items() if (end := new.counters.get(name, start)) > start}
        link_state = {True: " and is up again", False: " and is still down", None: ""}[new.up]
        for counter, end in risen.items():
            start, limit = old.counters[counter], rise_limit(counter, readings.seconds)
            text = f"{counter} of {label} rose from {start} to {end}"
            if counter in _LINK_LOSS_COUNTERS:
                text += f": its link was lost{link_state}"
                yield PortChange("link-down", old, text, used_by_job, counter, start, end)
            elif end - start > limit:
                text += f" (at most {limit:g} expected)"
                yield PortChange("link-errors", old, text, used_by_job, counter, start, end)
        if old.up and new.up is False and not risen.keys() & {*_LINK_LOSS_COUNTERS}:
            text = f"the link of {label} was up at the beginning and is down at the end"
            yield PortChange("link-down", old, text, used_by_job)


def measure(ctx: Context) -> NetworkReading:
    """Read this host's counters, and the port on the route to `towards`, a parameter with another host's address."""
    towards = ctx.trial.params.get("towards")
    return read_network(None if towards is None else str(towards), os.environ, ctx.step)


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """Plan one reading by a rank of each host, and at the end a second one by the ranks that could read counters."""
    if seen.is_last:
        groups = tuple((rank,) for rank in sorted(_first_readings(seen)) if rank in seen.world.living_ranks)
        is_due = len(seen.trials) == 1 and groups
        return (new_trial(seen, groups=groups, params=seen.trials[0].params),) if is_due else ()
    limits = seen.of(hst004.CHECK).by_rank.values()
    # If there is only one host, and HST004 found no RDMA device there, there is nothing to read.
    has_no_counters = len(seen.world.hosts) == 1 and limits and all(row.rdma == () for row in limits)
    if seen.trials or has_no_counters:
        return ()
    leaders = [group[0] for group in scope_groups(Scope.HOST, seen.world)]
    # All hosts look up the route to the second host. The second host itself uses its route to the first host.
    params = {"towards": seen.world.arrivals[leaders[1]].address} if len(leaders) > 1 else {}
    return (new_trial(seen, params=params),)


def skip(seen: Seen[Data]) -> SkipReason | None:
    """Skip the second reading if the first one shows no counter on any host."""
    if not seen.is_last or _first_readings(seen):
        return None
    if len(seen.world.hosts) == 1:
        return unneeded("there is one host only, without an RDMA port")
    return unneeded("no host shows counters of its network")


def last_seconds(seen: Seen[Data]) -> float:
    """The seconds that the last reading may take: as long as the slowest earlier one, plus the start of a worker."""
    return max((o.seconds for o in seen.outcomes if o.status is Status.DONE), default=0.0) + _START_SECONDS


def _first_readings(seen: Seen[Data]) -> Mapping[int, NetworkReading]:
    """The first readings that contain a counter, by rank."""
    number = seen.trials[0].number if seen.trials else None
    readings = {row.place.rank: row.data for row in seen.rows if row.trial.number == number}
    return {rank: reading for rank, reading in readings.items() if reading.ports or reading.tcp}


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    readings = dict(readings_by_host(seen))
    rise_limit = partial(allowed_rise, seen)
    all_changes = [(host, change) for host, pair in readings.items() for change in port_changes(pair, rise_limit)]
    for word in _TEXTS:
        affected: dict[Host, list[PortChange]] = defaultdict(list)
        for host, change in all_changes:
            if change.word == word:
                affected[host].append(change)
        # If more than half of several hosts are affected, they share the cause, and get one finding.
        is_common = len(affected) > max(1, len(readings) / 2)
        for subset in [affected] if is_common else [{host: changes} for host, changes in affected.items()]:
            yield _port_finding(seen, word, readings, subset)
    yield from _damaged_segments(seen, readings)
    yield from _resent_segments(seen, readings)


def allowed_rise(seen: Seen[Data], counter: str, seconds: float) -> float:
    """The largest rise of a counter in `seconds` that is no error; infinite if the counter counts no errors."""
    setting, unit, least_seconds = _LIMITS.get(counter, ("", 1.0, 0.0))
    return seen.setting(setting) / unit * max(seconds, least_seconds) if setting else math.inf


def readings_by_host(seen: Seen[Data]) -> Iterator[tuple[Host, Readings]]:
    """Yield each host whose counters one rank read twice, with these two readings."""
    first = _first_readings(seen)
    last = {row.place.rank: row.data for row in seen.rows if row.trial.number != seen.trials[0].number}
    interfaces = seen.of(rdz003.CHECK).by_rank
    for host in hosts_of(seen):
        rank = next((rank for rank in host.ranks if rank in first and rank in last), None)
        if rank is not None:
            data = next((interfaces[rank] for rank in host.ranks if rank in interfaces), None)
            yield host, Readings(first[rank], last[rank], _job_ports(seen.world, first[rank], data))


def _job_ports(world: World, reading: NetworkReading, data: rdz003.Data | None) -> frozenset[str]:
    """The names of the ports that the job uses between hosts: the interface of the kernel's route, the interface whose
    address NCCL or gloo offers (from RDZ003's `data`), and NCCL's RDMA ports in a job over NCCL; empty for one host."""
    if len(world.hosts) == 1:
        return frozenset()
    names = {reading.route}
    if data is not None and (interface := data.interface_for(library_of(world.backend))) is not None:
        names.add(interface.name)
    nccl_ports = {port.name for port in reading.ports if port.used_by_nccl} if world.backend == "nccl" else set()
    return frozenset(filter(None, names - {"lo"} | nccl_ports))


def _port_finding(
    seen: Seen[Data], word: str, readings: Mapping[Host, Readings], affected: Mapping[Host, Sequence[PortChange]]
) -> Finding:
    """The finding on changes of one kind. If several hosts are affected, they share the cause, and none is blamed."""
    names, is_common_cause = [host.name for host in affected], len(affected) > 1
    all_changes = [change for changes in affected.values() for change in changes]
    affects_job = word != "link-errors" and any(change.used_by_job for change in all_changes)
    lines = [
        f"on {host.name}, within the {readings[host].seconds:.1f} s of the run, "
        + names_text([change.clause for change in changes])
        for host, changes in affected.items()
    ]
    message_end = " The job uses this port." if affects_job else ""
    message_end += " More than half of the hosts are affected, so they share the cause." if is_common_cause else ""
    title, fix = _TEXTS[word]
    fix_start = f"{begun(leave_out(names))} until this is repaired. " if affects_job else ""
    if is_common_cause:
        fix_start = "First look at the switch that these hosts share, and at its log. "
    return seen.finding(
        word,
        title.format(hosts=f"{len(names)} of {len(readings)} hosts" if is_common_cause else names[0]),
        f"{begun('; '.join(lines))}.{message_end}",
        severity=Severity.ERROR if affects_job else None,
        hosts=() if is_common_cause else names,
        evidence={
            "ports": [change.port.name for change in all_changes],
            "pci": [change.port.pci for change in all_changes],
            "counters": [change.counter for change in all_changes],
            "before": [change.before for change in all_changes],
            "after": [change.after for change in all_changes],
            "seconds": round(max(readings[host].seconds for host in affected), 3),
        },
        fix=fix_start + fix.format(commands=_commands(all_changes[0].port), hosts=names_text(names)),
    )


def _commands(port: PortCounters) -> str:
    """The commands that show a port's state and counters, as text."""
    adapter, number = map(quote, port.name.partition(":")[::2])
    if port.rdma:
        return f"`ibstat {adapter} {number}` and `perfquery -C {adapter} -P {number}` (as root)"
    return f"`ethtool -S {adapter}`, `ip -s -s link show {adapter}` and `dmesg -T | grep -i {adapter}` (as root)"


def _damaged_segments(seen: Seen[Data], readings: Mapping[Host, Readings]) -> Iterator[Finding]:
    """The finding on hosts that received more than `damaged_segments` TCP segments with a wrong checksum."""
    limit = seen.setting("damaged_segments")
    damaged = {host: rise for host, pair in readings.items() if (rise := pair.tcp_rises.get("InCsumErrors", 0)) > limit}
    if not damaged:
        return
    names = [host.name for host in damaged]
    blamed_hosts = [] if len(damaged) > max(1, len(readings) / 2) else names
    counts = "; ".join(
        f"{host.name} received {rise:,} TCP segments with a wrong checksum (InCsumErrors)"
        for host, rise in damaged.items()
    )
    yield seen.finding(
        "damaged",
        f"damaged TCP segments arrived on {names_text(names)}",
        f"During the run {counts}; at most {limit:g} are expected. Ethernet drops frames that a cable damages. So the "
        "data are damaged in a switch, a network card or a host's memory, of the sender or of the receiver.",
        hosts=blamed_hosts,
        evidence={"hosts": [*names], "damaged": [*damaged.values()]},
        fix=(f"{begun(leave_out(blamed_hosts))} until this is repaired. " if blamed_hosts else "")
        + f"To find the sender, run `iperf3 -s` on {names[0]}, `iperf3 -c {quote(names[0])}` on one other host at a "
        f"time, and `nstat -az TcpInCsumErrors` on {names[0]} after each. If the errors come with one sender only, "
        f"leave that host out instead; if with all, {names[0]} or its switch is at fault.",
    )


def _resent_segments(seen: Seen[Data], readings: Mapping[Host, Readings]) -> Iterator[Finding]:
    """The finding on hosts that sent many segments again; empty if RDZ004 measured such a loss, and reports it."""
    limit, least = seen.setting("resent_share"), seen.setting("resent_segments")
    resent = {host: lost_segments(pair.tcp_rises) for host, pair in readings.items()}
    # OutSegs does not count segments that are sent again.
    sent = {
        host: pair.tcp_rises.get("RetransSegs", 0) + pair.tcp_rises.get("OutSegs", 0) for host, pair in readings.items()
    }
    lossy = [host for host in readings if resent[host] >= least and resent[host] > limit * sent[host]]
    cells = [cell for row in seen.of(check_by_code("RDZ004")).by_rank.values() for cell in row.cells]
    if not lossy or any(cell.segments and (cell.retransmitted or 0) > limit * cell.segments for cell in cells):
        return
    earlier = "RDZ004 measured the links before, and lost less, so the loss began later. " if cells else ""
    names = [host.name for host in lossy]
    counts = "; ".join(
        f"{host.name} sent {resent[host]:,} of {sent[host]:,} TCP segments again "
        f"({100 * resent[host] / sent[host]:.2g} %)"
        for host in lossy
    )
    yield seen.finding(
        "resent",
        f"TCP segments from {names_text(names)} were lost during the run",
        f"During the run {counts}; at most {100 * limit:g} % is expected. {earlier}These counters do not tell the "
        "sender from its receivers.",
        evidence={"affected": [*names], "resent": [resent[host] for host in lossy]},
        fix="Run `ddpdiag check --select RDZ004` again now: it measures each link, and names the host that loses "
        f"packets. `nstat -az TcpRetransSegs TcpExtTCPDSACKRecv` on {names_text(names)} shows whether it goes on.",
    )


def report(seen: Seen[Data]) -> Contribution:
    """Contribute the last counters of the compared ports of each host, and those of its TCP connections."""
    rows = []
    for host, readings in readings_by_host(seen):
        ports = {port.name: port.counters for _, port in readings.port_pairs() if port is not None}
        if tcp := readings.after.tcp:
            ports[TCP_PART] = {
                "sent_segments": tcp.get("OutSegs", 0),
                "resent_segments": tcp.get("RetransSegs", 0),
                "needless_segments": _needless_segments(tcp),
                "damaged_segments": tcp.get("InCsumErrors", 0),
            }
        for part, counters in ports.items():
            totals = {name: number for name, number in counters.items() if number}
            rows.append(Counters(host=host.name, part=part, totals=totals))
    return Contribution(counters=tuple(rows))


CHECK: Check[Data] = Check(__name__, "HST006", "network-counters", Stage.HOST, Scope.HOST)
