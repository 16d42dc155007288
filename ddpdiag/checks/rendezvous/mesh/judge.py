"""Findings about links between hosts: nothing passes, nothing large, less than on others, or with losses."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import names_text
from ddpdiag.checks.matrix import Link
from ddpdiag.checks.registry import by_code
from ddpdiag.checks.rendezvous.mesh.data import (
    Data,
    Mesh,
    Subject,
    failure,
    lost_share,
    median_rate,
    mesh_of,
    usual_rate,
)
from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.model.recording import TOLD_TO_LEAVE
from ddpdiag.probes.net.interfaces import Interface
from ddpdiag.probes.net.mesh_listener import LARGE
from ddpdiag.probes.net.tcp_connect import Reach
from ddpdiag.text import count, rate_text, size_text

_VERBS = {
    "refused": "are refused",
    "dropped": "get no answer",
    "unreachable": "find no route",
    "silent": "are accepted, but then no data arrive",
    "broken": "are closed right after they are made",
}
# What works all the same, by the kind of subject.
_CONTRASTS = {
    **dict.fromkeys(
        ("host", "sender", "receiver"),
        "The other hosts reach each other, and all hosts reach rank 0's control port.",
    ),
    "islands": "Inside these groups all links work, and all hosts reach rank 0's control port.",
    "everywhere": "All hosts reach rank 0's control port, so a firewall lets only some ports through.",
}
_OPEN = {
    "receiver": "Open TCP ports {ports} for the other hosts in the firewall of {who}.",
    "sender": "Let {who} connect to TCP ports {ports} of the other hosts (its firewall's outgoing rules).",
    "host": "Open TCP ports {ports} in both directions in the firewall of {who}.",
    **dict.fromkeys(
        ("links", "pair"),
        "Open TCP ports {ports} between these hosts, in their own firewalls and in those between them.",
    ),
}
_OPEN_ALL = (
    "Open TCP ports {ports} between all hosts; or open a few, narrow net.ipv4.ip_local_port_range to them on every "
    "host, and try again with --port-range LOW-HIGH."
)
_WORKS = "gloo still works: there the other side connects."
_SHOWN = 16
# One TCP connection from Python fills 10 Gbit/s, and a part of what is faster.
_ONE_CONNECTION_BYTES_PER_S = 1.25e9
_ADVICE = {
    "host": "Compare `ethtool` (speed, duplex) and `ip -s link` of {0} with another host; try its cable and port.",
    "sender": "Look at what {0} sends through: shapers (`tc qdisc`), `ethtool`, `ip -s link`, its cable and port.",
    "receiver": "Look at what {0} receives through: `ethtool`, `ip -s link` (drops), policers, its cable and port.",
    "links": "Look at what lies between these hosts: switches, routes (`ip route get`), cables.",
    "pair": "Compare `ethtool`, `tc qdisc` and `ip -s link` of both hosts.",
}
_ALL_ADVICE = "Compare `ethtool` with what the network should give, and name the fast one (GLOO_SOCKET_IFNAME)."


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """What fails, what gets stuck, what is slow, what loses packets, and what passed in the end."""
    mesh = mesh_of(seen)
    yield from _failures(seen, mesh)
    yield from _black_holes(seen, mesh)
    # A cancelled run may end before the repetition: a rate that was measured once may only show a busy host.
    if not (any(event.kind in TOLD_TO_LEAVE for event in seen.recording.events) and seen.check.plan(seen)):
        rates = Rates(seen, mesh)
        yield from _slow(seen, mesh, rates)
        yield from _lossy(seen, mesh, rates)
    failed = {(row.place.rank, cell.peer) for row in seen.rows for cell in row.data.cells if failure(cell) is not None}
    passed = [link for link in sorted(failed) if link in mesh.cells and failure(mesh.cells[link]) is None]
    if passed:
        links = [f"{mesh.names[a]} -> {mesh.names[b]}" for a, b in passed]
        yield seen.finding(
            "transient",
            f"{count(len(links), 'TCP connection')} between hosts failed once",
            f"{names_text(links)} failed at the first attempt and worked at the second.",
            links=links,
            fix="Nothing now. If another run shows it again, look at the error counters of these hosts (`ip -s link`).",
        )


def _failures(seen: Seen[Data], mesh: Mesh) -> Iterator[Finding]:
    """Links on which no connection works.

    Of two ranks gloo lets one listen and the other one connect: as long as it works, a link in the other direction
    harms no job over gloo.
    """
    works = seen.world.backend == "gloo" and seen.own_backend_works
    bad, good = mesh.links(lambda cell: failure(cell) in _VERBS), mesh.links(lambda cell: failure(cell) is None)
    # The ports that a job would use.
    known = {data.ephemeral for data in seen.by_rank.values() if data.ephemeral is not None}
    own = f"{min(low for low, _ in known)}-{max(high for _, high in known)}" if known else "32768-60999"
    ports = seen.options.port_range or own
    for subject in mesh.subjects(bad, good):
        counts = Counter(failure(cell) or "" for cell in subject.cells.values())
        word = counts.most_common(1)[0][0]
        (a, b), cell = next((link, cell) for link, cell in subject.cells.items() if failure(cell) == word)
        number = f"{len(subject.cells)} of the {len(mesh.cells)} connections that were tried"
        at = f"{mesh.names[a]} -> {mesh.names[b]} at {cell.address} port {seen.by_rank[cell.peer].port}"
        contrast = _CONTRASTS.get(subject.kind, "All hosts reach rank 0's control port.")
        fix = _OPEN.get(subject.kind, _OPEN_ALL).format(ports=ports, who=names_text(subject.nodes))
        if word == "unreachable":
            fix = "Look at the routes (`ip route get ADDRESS`), and name the interface that all hosts share."
        yield seen.finding(
            word,
            f"TCP connections {subject.where} {_VERBS[word]}",
            f"TCP connections {subject.where} {_VERBS[word]} ({number}, such as {at}). "
            f"{_WORKS if works else contrast} {subject.doubt}".strip(),
            severity=Severity.WARNING if works else Severity.ERROR,
            nodes=subject.nodes,
            links=subject.links,
            evidence={"ways": _links(mesh, subject), "ports": ports},
            fix=fix,
        )


def _links(mesh: Mesh, subject: Subject) -> list[Scalar]:
    links = list(subject.cells.items())[:_SHOWN]
    return [f"{mesh.names[a]} -> {mesh.names[b]}: {failure(cell)}" for (a, b), cell in links]


def _black_holes(seen: Seen[Data], mesh: Mesh) -> Iterator[Finding]:
    """Links on which small messages pass, and large ones do not."""
    bad, good = mesh.links(lambda cell: failure(cell) == "black-hole"), mesh.links(lambda cell: failure(cell) is None)
    in_use = [(mesh.names[rank], own) for rank, own in _in_use(seen).items() if rank in mesh.names]
    for subject in mesh.subjects(bad, good):
        stalled = min(cell.stalled_bytes or 0 for cell in subject.cells.values())
        yield seen.finding(
            "black-hole",
            f"large packets are lost {subject.where}",
            f"Messages of {size_text(stalled)} {subject.where} get stuck, but smaller ones pass ({len(subject.cells)} "
            f"of {len(mesh.cells)} links): packets of full size are lost. {subject.doubt}".strip(),
            nodes=subject.nodes,
            links=subject.links,
            evidence={
                "interfaces": [f"{name} {interface.name}: mtu {interface.mtu}" for name, interface in in_use[:_SHOWN]],
                "stalled_bytes": stalled,
                "ways": _links(mesh, subject),
            },
            fix="Find the switch or tunnel between these hosts that carries less than their MTU (`ping -M do -s 1472 "
            "HOST`); set the same MTU everywhere, or let ICMP pass, so that hosts learn the smaller MTU; "
            "net.ipv4.tcp_mtu_probing=1 helps until then.",
        )


def dropped_everywhere(mesh: Mesh) -> bool:
    """Is no connection accepted at all? Then trying again shows nothing new."""
    return all(cell.reach is not Reach.ACCEPTED for cell in mesh.cells.values())


class Expected(NamedTuple):
    """A rate that a link falls short of, and where it comes from. `serious`: far below it is an error."""

    bytes_per_s: float
    source: str
    serious: bool


class Rates:
    """The rates of a mesh, held against what can be expected of them."""

    def __init__(self, seen: Seen[Data], mesh: Mesh) -> None:
        self._mesh = mesh
        self._interfaces = _in_use(seen)
        self._seen = seen
        between = {link: cell for link, cell in mesh.cells.items() if link not in mesh.inside}
        self._usual = usual_rate(between)
        self.short = {link: short for link in between if (short := self._short(link)) is not None}
        # Those that lost segments in every repetition.
        share, least = seen.number("lost_share"), seen.number("lost_segments")
        self.lossy = mesh.links(
            lambda cell: (lost_share(cell) or 0.0) > share and (cell.retransmitted or 0) >= least,
        )

    def _short(self, link: Link) -> Expected | None:
        """The first expectation that the link falls short of; one of 0 is none."""
        rate, ratio = self._mesh.cells[link].bytes_per_s, self._seen.number("slow_ratio")
        wanted, least = self._seen.number("expected_bytes_per_s"), self._seen.number("least_bytes_per_s")
        if rate is None:
            return None
        if rate * ratio < wanted:
            return Expected(wanted, "as --set RDZ004.expected_bytes_per_s expects", True)
        # On a busy host a process may have to wait for a core; that is no matter of the network.
        noise = self._seen.number("noise_seconds")
        if self._usual and rate * ratio < self._usual and LARGE / rate - LARGE / self._usual > noise:
            two = len(self._mesh.names) == 2
            source = "what the other direction reaches" if two else "what most of the other hosts reach"
            return Expected(self._usual, source, True)
        # What the interfaces at both ends can carry, as far as they report it.
        ends = [(self._mesh.names[end], self._interfaces.get(end)) for end in link]
        known = [(own.bytes_per_s, f"{own.name} of {name}") for name, own in ends if own and own.bytes_per_s]
        if known:
            slowest, whose = min(known)
            possible = min(slowest, _ONE_CONNECTION_BYTES_PER_S)
            if rate * self._seen.number("very_slow_ratio") < possible:
                return Expected(possible, f"what {whose} can carry", False)
        return Expected(least, "the least that a job should have", False) if rate < least else None


def _slow(seen: Seen[Data], mesh: Mesh, rates: Rates) -> Iterator[Finding]:
    """Links that fall short of what is expected."""
    rated = mesh.links(lambda cell: cell.bytes_per_s is not None) - mesh.inside
    for subject in mesh.subjects(rates.short.keys(), rated):
        rate = median_rate(subject.cells.values())
        expected = max(rates.short[link] for link in subject.cells)
        very = expected.serious and rate * seen.number("very_slow_ratio") < expected.bytes_per_s
        lost = subject.usual_loss
        again = f"; {100 * lost:.2g} % of the segments had to be sent again" if lost > seen.number("lost_share") else ""
        yield seen.finding(
            "slow",
            f"slow network {subject.where}: {rate_text(rate)}",
            f"TCP reaches {rate_text(rate)} {subject.where} (median of {count(len(subject.cells), 'link')}); "
            f"{rate_text(expected.bytes_per_s)} is {expected.source}{again}. {subject.doubt}".strip(),
            severity=Severity.ERROR if very or _lossy_interfaces(seen, subject) else Severity.WARNING,
            nodes=subject.nodes,
            links=subject.links,
            evidence={
                "bytes_per_s": rate,
                "expected_bytes_per_s": expected.bytes_per_s,
                "source": expected.source,
                "lost_share": lost,
            },
            fix=_ADVICE.get(subject.kind, _ALL_ADVICE).format(*subject.nodes),
        )


def _lossy(seen: Seen[Data], mesh: Mesh, rates: Rates) -> Iterator[Finding]:
    """Links that lose packets, and are not slow already."""
    counted = mesh.links(lambda cell: cell.segments is not None and failure(cell) is None)
    for subject in mesh.subjects(rates.lossy - rates.short.keys(), counted - rates.lossy):
        share = subject.usual_loss
        used = _lossy_interfaces(seen, subject)
        job = f" The job's traffic takes {names_text(used, _SHOWN)}." if used else ""
        yield seen.finding(
            "loss",
            f"{100 * share:.2g} % of the packets are lost {subject.where}",
            f"{100 * share:.2g} % of the segments {subject.where} had to be sent again, in every repetition.{job} "
            f"{subject.doubt}".strip(),
            severity=Severity.ERROR if used else Severity.WARNING,
            nodes=subject.nodes,
            links=subject.links,
            evidence={
                "lost_share": share,
                "bytes_per_s": median_rate(subject.cells.values()),
                "interfaces": [*used[:_SHOWN]],
            },
            fix=_ADVICE.get(subject.kind, _ALL_ADVICE).format(*subject.nodes),
        )


def _lossy_interfaces(seen: Seen[Data], subject: Subject) -> tuple[str, ...]:
    """Interfaces that carry the job's traffic, such as "eth0 of n1", where `lossy_share` is lost or more.

    They are those of the hosts that the links are blamed on, or else of the senders.
    """
    # If NCCL takes RDMA ports, as HST006 saw, its data do not go through TCP.
    looks = seen.of(by_code("HST006")).by_rank.values() if seen.world.backend == "nccl" else ()
    by_rdma = any(port.taken for look in looks for port in look.ports)
    if subject.usual_loss < seen.number("lossy_share") or len(seen.trials) < 2 or by_rdma:
        return ()
    offered = {rank: data.offered for rank, data in seen.by_rank.items()}
    used = {
        rank: interface.name
        for rank, data in seen.by_rank.items()
        for interface in data.interfaces
        if data.offered in interface.addresses
    }
    links = [link for link, cell in subject.cells.items() if link[0] in used and cell.address == offered.get(link[1])]
    names = {rank: seen.world.node_of(rank) for link in links for rank in link if rank in used}
    senders = {names[a] for a, _ in links}
    return tuple(
        f"{used[rank]} of {name}" for rank, name in sorted(names.items()) if name in (subject.nodes or senders)
    )


def _in_use(seen: Seen[Data]) -> dict[int, Interface]:
    """The interface that each host's connections went out of."""
    return {rank: data.interfaces[0] for rank, data in seen.by_rank.items() if data.interfaces}
