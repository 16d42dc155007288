"""Counters of each host's network ports that rise while the run loads them.

A bad cable, transceiver or switch port passes most tests and ends a job hours later. It shows in counters: one that is
not zero may be old, but one that rises during a run is a fault that the next job meets as well. One rank of each host
reads them before the run loads the network, and again after everything else, and each port is compared with itself:
RDMA ports whose link is up, the interface that leads to the other hosts, the one that the job's library chooses
(RDZ003), and the interfaces below these (members of a bond, the card of a VLAN). Other interfaces (docker0, veth pairs,
a management network, loopback) are left out. On one host alone only RDMA ports are read.

Findings and their causes, with the numbers before and after and the seconds between:

If the links of more than half of the hosts are affected, no host is blamed: they share the cause. Counters that cannot
be read (a container without /sys, a virtual function) are left out.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from shlex import quote
from typing import NamedTuple

from ddpdiag.checks.api import Check, Scope, Seen, SkipReason, Stage, new_trial, scope_groups, unneeded
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.host import limits as hst004
from ddpdiag.checks.hosts import Host, hosts_of, leave_out, names_text
from ddpdiag.checks.registry import by_code
from ddpdiag.checks.rendezvous import interfaces as rdz003
from ddpdiag.checks.world import World
from ddpdiag.model import Finding, Severity, Status, Trial
from ddpdiag.model.trial import Context
from ddpdiag.probes.net.adapters import NetworkLook, PortCounters, network_look
from ddpdiag.probes.net.interfaces import chosen_address, interface_of, library_of
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
        "had found its links without loss: the loss began later. No host is blamed, since the sender, the receiver or "
        "a switch may lose them."
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
# By error counter: the setting of its limit, the seconds of the limit's unit, and the shortest time that counts.
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
_DOWNS = ("carrier_down_count", "link_downed")
# The time to start a new worker, if the last one was ended.
_START_SECONDS = 0.5

_CABLE = (
    "{commands} on {hosts} show more. Ask the administrator to reseat or replace the cable and the transceiver, then "
    "to try another port of the switch, then to replace the card."
)
# The title and the fix of each finding, with places for the hosts and for the commands that show more.
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


class Pair(NamedTuple):
    """One host's ports at the beginning and at the end, and the names of the ports that the job uses."""

    before: NetworkLook
    after: NetworkLook
    job_ports: frozenset[str]

    @property
    def seconds(self) -> float:
        """The time between the two readings."""
        return max(0.0, self.after.seconds - self.before.seconds)

    def rise(self, counter: str) -> int:
        """The rise of one of TCP's counters; 0 if the counter cannot be read."""
        start, end = (look.tcp.get(counter) for look in (self.before, self.after))
        return 0 if start is None or end is None else max(0, end - start)

    def ports(self) -> Iterator[tuple[PortCounters, PortCounters | None]]:
        """Yield the ports that a job may use, and those below them, as first and last read (None: gone).

        These are the job's ports, and RDMA ports whose link was up.
        """
        earlier, later = ({port.name: port for port in look.ports} for look in (self.before, self.after))
        used = {
            name for name, port in earlier.items() if name in self.job_ports or (port.rdma and port.up is not False)
        }
        todo = list(used)
        while todo:
            below = set(earlier[todo.pop()].below) - used
            todo += below & earlier.keys()
            used |= below
        yield from ((port, later.get(name)) for name, port in earlier.items() if name in used)


class CounterDelta(NamedTuple):
    """A change of one port. `text` is a clause that names the port; `used_by_job` says that the job uses it."""

    word: str
    port: PortCounters
    text: str
    used_by_job: bool
    counter: str | None = None
    before: int | None = None
    after: int | None = None


def counter_deltas(pair: Pair, allowed: Callable[[str, float], float]) -> Iterator[CounterDelta]:
    """Find the changes of one host's ports; `allowed(counter, seconds)` is the rise of a counter that is no error.

    A counter that fell was reset or wrapped (hardware counts in 32 bits), and did not rise. A counter that only one
    reading has did not rise, either. Counters of an InfiniBand port stop at their largest value (255 for link_downed).
    """
    for old, new in pair.ports():
        used = old.name in pair.job_ports
        label = f"{old.name}{f' (PCI {old.pci})' if old.pci else ''}"
        if new is None:
            text = f"{label} was present at the beginning and is missing at the end"
            yield CounterDelta("gone", old, text, used)
            continue
        risen = {name: end for name, start in old.counters.items() if (end := new.counters.get(name, start)) > start}
        now = {True: " and is up again", False: " and is still down", None: ""}[new.up]
        for counter, end in risen.items():
            start, most = old.counters[counter], allowed(counter, pair.seconds)
            text = f"{counter} of {label} rose from {start} to {end}"
            if counter in _DOWNS:
                text += f": its link was lost{now}"
                yield CounterDelta("link-down", old, text, used, counter, start, end)
            elif end - start > most:
                text += f" (at most {most:g} expected)"
                yield CounterDelta("link-errors", old, text, used, counter, start, end)
        if old.up and new.up is False and not risen.keys() & {*_DOWNS}:
            text = f"the link of {label} was up at the beginning and is down at the end"
            yield CounterDelta("link-down", old, text, used)


def measure(ctx: Context) -> NetworkLook:
    towards = ctx.trial.params.get("towards")
    return network_look(None if towards is None else str(towards), os.environ, ctx.step)


def plan(seen: Seen[NetworkLook]) -> Sequence[Trial]:
    """Plan one reading by a rank of each host, and a last one by the ranks whose first reading had counters."""
    if seen.is_last:
        groups = tuple((rank,) for rank in sorted(_begun(seen)) if rank in seen.world.living)
        is_due = len(seen.trials) == 1 and groups
        return (new_trial(seen, groups=groups, params=seen.trials[0].params),) if is_due else ()
    limits = seen.of(hst004.CHECK).by_rank.values()
    # If there is only one host, and HST004 found no RDMA device there, there is nothing to read.
    alone = len(seen.world.hosts) == 1 and limits and all(row.rdma == () for row in limits)
    if seen.trials or alone:
        return ()
    leaders = [group[0] for group in scope_groups(Scope.HOST, seen.world)]
    # All ranks get the address of the second host. The second host itself needs it, too: it leads to the first host.
    params = {"towards": seen.world.arrivals[leaders[1]].address} if len(leaders) > 1 else {}
    return (new_trial(seen, params=params),)


def skip(seen: Seen[NetworkLook]) -> SkipReason | None:
    """Skip the comparison if no host has read a counter."""
    if not seen.is_last or _begun(seen):
        return None
    alone = len(seen.world.hosts) == 1
    return unneeded(
        "there is one host only, without an RDMA port" if alone else "no host shows counters of its network"
    )


def last_seconds(seen: Seen[NetworkLook]) -> float:
    """The expected time of the last reading: the time of the first reading, and the start of a worker."""
    return max((o.seconds for o in seen.outcomes if o.status is Status.DONE), default=0.0) + _START_SECONDS


def _begun(seen: Seen[NetworkLook]) -> Mapping[int, NetworkLook]:
    """The first readings that contain a counter, by rank."""
    number = seen.trials[0].number if seen.trials else None
    looks = {row.place.rank: row.data for row in seen.rows if row.trial.number == number}
    return {rank: look for rank, look in looks.items() if look.ports or look.tcp}


def judge(seen: Seen[NetworkLook]) -> Iterator[Finding]:
    pairs = dict(_pairs(seen))
    deltas = {host: tuple(counter_deltas(pair, partial(allowed, seen))) for host, pair in pairs.items()}
    for word in _TEXTS:
        changes = {host: [delta for delta in rows if delta.word == word] for host, rows in deltas.items()}
        changed = {host: rows for host, rows in changes.items() if rows}
        is_shared = _is_shared(len(changed), len(pairs))
        for part in [changed] if is_shared else [{host: rows} for host, rows in changed.items()]:
            yield _finding(seen, word, pairs, part)
    yield from _damages(seen, pairs)
    yield from _resent(seen, pairs)


def allowed(seen: Seen[NetworkLook], counter: str, seconds: float) -> float:
    """The rise of a counter that is allowed in `seconds`; infinite if the counter counts no errors."""
    setting, unit, least = _LIMITS.get(counter, ("", 1.0, 0.0))
    return seen.number(setting) / unit * max(seconds, least) if setting else math.inf


def _pairs(seen: Seen[NetworkLook]) -> Iterator[tuple[Host, Pair]]:
    """The first and the last reading of each host, both by the same rank."""
    begun = _begun(seen)
    later = {row.place.rank: row.data for row in seen.rows if row.trial.number != seen.trials[0].number}
    interfaces = seen.of(rdz003.CHECK).by_rank
    for host in hosts_of(seen):
        rank = next((rank for rank in host.ranks if rank in begun and rank in later), None)
        if rank is not None:
            offer = next((interfaces[rank] for rank in host.ranks if rank in interfaces), None)
            yield host, Pair(begun[rank], later[rank], _job_ports(seen.world, begun[rank], offer))


def _job_ports(world: World, look: NetworkLook, offer: rdz003.Data | None) -> frozenset[str]:
    """The names of the ports that the job uses between hosts: that of the kernel's route, the interface whose address
    the job's library offers (RDZ003), and NCCL's RDMA ports. Empty for a single host."""
    if len(world.hosts) == 1:
        return frozenset()
    names = {look.route}
    if offer is not None and offer.interfaces is not None:
        address = chosen_address(library_of(world.backend), offer.names, offer.own_addresses, offer.interfaces)
        interface = interface_of(address, offer.interfaces)
        names.add(interface.name if interface is not None else None)
    taken = {port.name for port in look.ports if port.taken} if world.backend == "nccl" else set()
    return frozenset(filter(None, names - {"lo"} | taken))


def _is_shared(affected: int, hosts: int) -> bool:
    """Whether more than half of several hosts are affected, so that they share the cause."""
    return affected > 1 and 2 * affected > hosts


def _finding(
    seen: Seen[NetworkLook], word: str, pairs: Mapping[Host, Pair], changes: Mapping[Host, Sequence[CounterDelta]]
) -> Finding:
    """The finding for the changes of one kind: on one blamed host, or on most hosts without blame."""
    names, shared = [host.name for host in changes], len(changes) > 1
    deltas = [delta for rows in changes.values() for delta in rows]
    breaks = word != "link-errors" and any(delta.used_by_job for delta in deltas)
    lines = [
        f"on {host.name}, within the {pairs[host].seconds:.1f} s of the run, "
        + names_text([delta.text for delta in rows])
        for host, rows in changes.items()
    ]
    end = " The job uses this port." if breaks else ""
    end += " More than half of the hosts are affected, so they share the cause." if shared else ""
    title, fix = _TEXTS[word]
    begin = f"{begun(leave_out(names))} until this is repaired. " if breaks else ""
    begin = "First look at the switch that these hosts share, and at its log. " if shared else begin
    return seen.finding(
        word,
        title.format(hosts=f"{len(names)} of {len(pairs)} hosts" if shared else names[0]),
        f"{begun('; '.join(lines))}.{end}",
        severity=Severity.ERROR if breaks else None,
        hosts=() if shared else names,
        evidence={
            "ports": [delta.port.name for delta in deltas],
            "pci": [delta.port.pci for delta in deltas],
            "counters": [delta.counter for delta in deltas],
            "before": [delta.before for delta in deltas],
            "after": [delta.after for delta in deltas],
            "seconds": round(max(pairs[host].seconds for host in changes), 3),
        },
        fix=begin + fix.format(commands=_commands(deltas[0].port), hosts=names_text(names)),
    )


def _commands(port: PortCounters) -> str:
    """The commands that show a port's state and counters, as text."""
    adapter, number = map(quote, port.name.partition(":")[::2])
    if port.rdma:
        return f"`ibstat {adapter} {number}` and `perfquery -C {adapter} -P {number}` (as root)"
    return f"`ethtool -S {adapter}`, `ip -s -s link show {adapter}` and `dmesg -T | grep -i {adapter}` (as root)"


def _damages(seen: Seen[NetworkLook], pairs: Mapping[Host, Pair]) -> Iterator[Finding]:
    """The finding for hosts that received more than `damaged_segments` segments with a wrong checksum."""
    most = seen.number("damaged_segments")
    damaged = {host: rise for host, pair in pairs.items() if (rise := pair.rise("InCsumErrors")) > most}
    if not damaged:
        return
    names = [host.name for host in damaged]
    blamed = [] if _is_shared(len(damaged), len(pairs)) else names
    counts = "; ".join(
        f"{host.name} received {rise:,} TCP segments with a wrong checksum (InCsumErrors)"
        for host, rise in damaged.items()
    )
    yield seen.finding(
        "damaged",
        f"damaged TCP segments arrived on {names_text(names)}",
        f"During the run {counts}; at most {most:g} are expected. Ethernet drops frames that a cable damages. So the "
        "data are damaged in a switch, a network card or a host's memory, of the sender or of the receiver.",
        hosts=blamed,
        evidence={"hosts": [*names], "damaged": [*damaged.values()]},
        fix=(f"{begun(leave_out(blamed))} until this is repaired. " if blamed else "")
        + f"To find the sender, run `iperf3 -s` on {names[0]}, `iperf3 -c {quote(names[0])}` on one other host at a "
        f"time, and `nstat -az TcpInCsumErrors` on {names[0]} after each. If the errors come with one sender only, "
        f"leave that host out instead; if with all, {names[0]} or its switch is at fault.",
    )


def _resent(seen: Seen[NetworkLook], pairs: Mapping[Host, Pair]) -> Iterator[Finding]:
    """The finding for a loss that began after RDZ004 measured the links; an earlier loss is RDZ004's finding."""
    most, least = seen.number("resent_share"), seen.number("resent_segments")
    rises = {host: (pair.rise("RetransSegs"), pair.rise("OutSegs")) for host, pair in pairs.items()}
    resent = {host: (again, again + new) for host, (again, new) in rises.items() if again >= least}
    lossy = {host: counts for host, counts in resent.items() if counts[0] > most * counts[1]}
    cells = [cell for row in seen.of(by_code("RDZ004")).by_rank.values() for cell in row.cells]
    if not lossy or any(cell.segments and (cell.retransmitted or 0) > most * cell.segments for cell in cells):
        return
    before = "RDZ004 measured the links before, and lost less, so the loss began later. " if cells else ""
    names = [host.name for host in lossy]
    counts = "; ".join(
        f"{host.name} sent {again:,} of {of:,} TCP segments again ({100 * again / of:.2g} %)"
        for host, (again, of) in lossy.items()
    )
    yield seen.finding(
        "resent",
        f"TCP segments from {names_text(names)} were lost during the run",
        f"During the run {counts}; at most {100 * most:g} % is expected. {before}These counters do not tell the sender "
        "from its receivers.",
        evidence={"affected": [*names], "resent": [again for again, _ in lossy.values()]},
        fix="Run `ddpdiag check --select RDZ004` again now: it measures each link, and names the host that loses "
        f"packets. `nstat -az TcpRetransSegs` on {names_text(names)} shows whether it goes on.",
    )


Data = NetworkLook
CHECK: Check[Data] = Check(__name__, "HST006", "network-counters", Stage.HOST, Scope.HOST)
