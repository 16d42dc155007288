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
from ddpdiag.checks.rendezvous.mesh.fixes import ask_who_answers, compare, find_mtu, find_route, open_ports
from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.model.recording import TOLD_TO_LEAVE
from ddpdiag.probes.net.interfaces import Interface
from ddpdiag.probes.net.mesh_listener import LARGE
from ddpdiag.probes.net.tcp_connect import Reach
from ddpdiag.text import begun, count, rate_text, size_text

_VERBS = {
    "refused": "are refused",
    "dropped": "get no answer",
    "unreachable": "fail: no route to host",
    "silent": "carry no data",
    "broken": "are closed at once",
}
# The same of one connection.
_ONE = {
    "refused": "is refused",
    "dropped": "gets no answer",
    "unreachable": "fails with 'no route to host'",
    "silent": "is accepted, but no data arrive",
    "broken": "is closed right after it is made",
}
# What works all the same, by the kind of subject.
_REACHED = "all hosts reach ddpdiag's own port on {first}, rank 0's host, so the network works on that port"
_CONTRASTS = {
    **dict.fromkeys(("host", "sender", "receiver"), f"The other hosts reach each other. {begun(_REACHED)}."),
    "islands": f"Inside these groups all connections work. {begun(_REACHED)}.",
    "everywhere": f"{begun(_REACHED)}, and a firewall may block the others.",
}
_WORKS = "gloo still works: there the other side connects."
_SHOWN = 16
# One TCP connection from Python fills 10 Gbit/s, and a part of what is faster.
_ONE_CONNECTION_BYTES_PER_S = 1.25e9


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
        ends = [*dict.fromkeys(mesh.names[end] for link in passed for end in link)]
        hosts = names_text(ends) if len(ends) <= 4 else "these hosts"
        plural = "connection" if len(links) == 1 else "connections"
        yield seen.finding(
            "transient",
            f"{count(len(links), 'TCP connection')} between hosts failed once",
            f"The TCP {plural} {names_text(links)} failed at the first attempt and worked at the second.",
            links=links,
            fix=f"Nothing to do now. If it fails again in another run, run `ip -s link` on {hosts} before and after, "
            "and compare errors and dropped.",
        )


def _failures(seen: Seen[Data], mesh: Mesh) -> Iterator[Finding]:
    """Links on which no connection works.

    Of two ranks gloo lets one listen and the other one connect: as long as it works, a link in the other direction
    harms no job over gloo.
    """
    works = seen.world.backend == "gloo" and seen.job_backend_works
    bad, good = mesh.links(lambda cell: failure(cell) in _VERBS), mesh.links(lambda cell: failure(cell) is None)
    # The ports that a job would use.
    known = {data.ephemeral for data in seen.by_rank.values() if data.ephemeral is not None}
    own = f"{min(low for low, _ in known)}-{max(high for _, high in known)}" if known else "32768-60999"
    ports = seen.options.port_range or own
    for subject in mesh.subjects(bad, good):
        counts = Counter(failure(cell) or "" for cell in subject.cells.values())
        word = counts.most_common(1)[0][0]
        (a, b), cell = next((link, cell) for link, cell in subject.cells.items() if failure(cell) == word)
        since = " They worked at the start of the run." if mesh.cut.issuperset(subject.cells) else ""
        fail = "fails: the one" if len(subject.cells) == 1 else "fail: those"
        port, address = seen.by_rank[cell.peer].port, cell.address or "unknown"
        at = f"{mesh.names[a]} -> {mesh.names[b]} (address {address}, port {port})"
        contrast = _CONTRASTS.get(subject.kind, f"{begun(_REACHED)}.").format(first=seen.world.node_of(0))
        if word == "unreachable":
            fix = find_route(subject, mesh.names[a], mesh.names[b], cell.address)
        else:
            fix = open_ports(subject, ports) if word in ("refused", "dropped") else ask_who_answers(subject, word)
        yield seen.finding(
            word,
            f"TCP connections {subject.where} {_VERBS[word]}",
            f"{len(subject.cells)} of the {len(mesh.cells)} tested TCP connections {fail} {subject.where}. For example "
            f"{at} {_ONE[word]}.{since} {_WORKS if works else contrast} {subject.doubt}".strip(),
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
            f"large packets {subject.where} are lost",
            f"Messages of {size_text(stalled)} {subject.where} do not arrive, but smaller ones do "
            f"({len(subject.cells)} of {len(mesh.cells)} tested links). So packets of full size are lost, most likely "
            f"because a switch or tunnel has a smaller MTU. {subject.doubt}".strip(),
            nodes=subject.nodes,
            links=subject.links,
            evidence={
                "interfaces": [f"{name} {interface.name}: mtu {interface.mtu}" for name, interface in in_use[:_SHOWN]],
                "stalled_bytes": stalled,
                "ways": _links(mesh, subject),
            },
            fix=find_mtu(subject, mesh, _in_use(seen)),
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
            return Expected(wanted, "the rate that --set RDZ004.expected_bytes_per_s gives", True)
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
        again = f" {100 * lost:.2g} % of the segments had to be sent again." if lost > seen.number("lost_share") else ""
        yield seen.finding(
            "slow",
            f"slow network {subject.where}: {rate_text(rate)}",
            f"A TCP connection {subject.where} carries only {rate_text(rate)} (median of "
            f"{count(len(subject.cells), 'link')}). {rate_text(expected.bytes_per_s)} is {expected.source}.{again} "
            f"{subject.doubt}".strip(),
            severity=Severity.ERROR if very or _lossy_interfaces(seen, subject) else Severity.WARNING,
            nodes=subject.nodes,
            links=subject.links,
            evidence={
                "bytes_per_s": rate,
                "expected_bytes_per_s": expected.bytes_per_s,
                "source": expected.source,
                "lost_share": lost,
            },
            fix=compare(subject, mesh, _in_use(seen), is_slow=True),
        )


def _lossy(seen: Seen[Data], mesh: Mesh, rates: Rates) -> Iterator[Finding]:
    """Links that lose packets, and are not slow already."""
    counted = mesh.links(lambda cell: cell.segments is not None and failure(cell) is None)
    for subject in mesh.subjects(rates.lossy - rates.short.keys(), counted - rates.lossy):
        share = subject.usual_loss
        used = _lossy_interfaces(seen, subject)
        job = f" The job's traffic uses {names_text(used, _SHOWN)}." if used else ""
        each = "in the measurement" if len(seen.trials) == 1 else f"in each of {len(seen.trials)} measurements"
        yield seen.finding(
            "loss",
            f"{100 * share:.2g} % of the packets {subject.where} are lost",
            f"{100 * share:.2g} % of the TCP segments {subject.where} had to be sent again, {each}. At most "
            f"{100 * seen.number('lost_share'):g} % is expected.{job} {subject.doubt}".strip(),
            severity=Severity.ERROR if used else Severity.WARNING,
            nodes=subject.nodes,
            links=subject.links,
            evidence={
                "lost_share": share,
                "bytes_per_s": median_rate(subject.cells.values()),
                "interfaces": [*used[:_SHOWN]],
            },
            fix=compare(subject, mesh, _in_use(seen), is_slow=False),
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
