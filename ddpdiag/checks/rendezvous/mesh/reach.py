"""Findings about ways between hosts on which nothing passes, or nothing large."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import names_text
from ddpdiag.checks.rendezvous.mesh.data import Mesh, Subject, failure
from ddpdiag.model import Finding, Severity
from ddpdiag.probes.net.interfaces import Interface
from ddpdiag.probes.net.mesh import Cell
from ddpdiag.probes.net.tcp_connect import Reach
from ddpdiag.text import size_text

D = TypeVar("D")

_VERBS = {
    "refused": "are refused",
    "dropped": "get no answer",
    "unreachable": "find no way",
    "silent": "are accepted, and then nothing comes",
    "broken": "are cut",
}
_WORKS = "gloo works all the same: there the other side connects."
_SHOWN = 16


class Surroundings(Struct, frozen=True):
    """What the remedies name: the ports that a job would use, and each host's interface in use, by rank."""

    ports: str
    listening: Mapping[int, int]
    interfaces: Mapping[int, Interface]


def failures(seen: Seen[D], mesh: Mesh, around: Surroundings) -> Iterator[Finding]:
    """Ways on which no connection works.

    Of two ranks gloo lets one listen and the other one connect: as long as it works, a way in the other direction
    harms no job over gloo.
    """
    works = seen.world.backend == "gloo" and seen.own_backend_works
    bad, good = mesh.ways(lambda cell: failure(cell) in _VERBS), mesh.ways(lambda cell: failure(cell) is None)
    for subject in mesh.subjects(bad, good):
        counts = Counter(failure(cell) or "" for cell in subject.cells.values())
        word = counts.most_common(1)[0][0]
        yield seen.finding(
            word,
            f"TCP connections {subject.where} {_VERBS[word]}",
            f"TCP connections {subject.where} {_VERBS[word]}{_example(mesh, around, subject, word)}. "
            f"{_WORKS if works else _contrast(subject)} {subject.doubt}".strip(),
            severity=Severity.WARNING if works else Severity.ERROR,
            nodes=subject.nodes,
            links=subject.links,
            evidence={"ways": _ways(mesh, subject), "ports": around.ports},
            fix=_open_ports(subject, word, around.ports),
        )


def _example(mesh: Mesh, around: Surroundings, subject: Subject, word: str) -> str:
    way, cell = next((way, cell) for way, cell in subject.cells.items() if failure(cell) == word)
    port = around.listening.get(cell.peer)
    count = f"{len(subject.cells)} of {len(mesh.cells)} ways"
    return f" ({count}, such as {mesh.names[way[0]]} -> {mesh.names[way[1]]} at {cell.address} port {port})"


def _contrast(subject: Subject) -> str:
    match subject.kind:
        case "host" | "sender" | "receiver":
            return "The other hosts reach each other, and rank 0's control port is reached by all."
        case "islands":
            return "Inside these groups all is well, and rank 0's control port is reached by all."
        case "everywhere":
            return "Rank 0's control port is reached by all, so a firewall lets only some ports through."
        case _:
            return "Rank 0's control port is reached by all."


def _ways(mesh: Mesh, subject: Subject) -> list[str | int | float | bool | None]:
    ways = list(subject.cells.items())[:_SHOWN]
    return [f"{mesh.names[a]} -> {mesh.names[b]}: {failure(cell)}" for (a, b), cell in ways]


def _open_ports(subject: Subject, word: str, ports: str) -> str:
    if word == "unreachable":
        return "Look at the routes (`ip route get ADDRESS`), and name the interface that all hosts share."
    who = names_text(subject.nodes)
    match subject.kind:
        case "receiver":
            return f"Open TCP ports {ports} for the other hosts in the firewall of {who}."
        case "sender":
            return f"Let {who} connect to TCP ports {ports} of the other hosts (its firewall's outgoing rules)."
        case "host":
            return f"Open TCP ports {ports} in both directions in the firewall of {who}."
        case "links" | "pair":
            return f"Open TCP ports {ports} between these hosts, in their own firewalls and in those between them."
        case _:
            return (
                f"Open TCP ports {ports} between all hosts; or open a few, narrow net.ipv4.ip_local_port_range to them "
                "on every host, and try again with --port-range LOW-HIGH."
            )


def black_holes(seen: Seen[D], mesh: Mesh, around: Surroundings) -> Iterator[Finding]:
    """Ways on which small messages pass, and large ones do not."""
    bad, good = mesh.ways(lambda cell: failure(cell) == "black-hole"), mesh.ways(lambda cell: failure(cell) is None)
    for subject in mesh.subjects(bad, good):
        stalled = min(cell.stalled_bytes or 0 for cell in subject.cells.values())
        yield seen.finding(
            "black-hole",
            f"large packets vanish {subject.where}",
            f"{size_text(stalled)} {subject.where} get stuck, although smaller messages pass ({len(subject.cells)} of "
            f"{len(mesh.cells)} ways): packets of full size vanish. {subject.doubt}".strip(),
            nodes=subject.nodes,
            links=subject.links,
            evidence={"interfaces": mtus(mesh, around), "stalled_bytes": stalled, "ways": _ways(mesh, subject)},
            fix="Find what lies between these hosts and carries less than their MTU, a switch or a tunnel (`ping -M "
            "do -s 1472 HOST`); set the same MTU everywhere, or let ICMP pass, so that hosts learn the smaller one; "
            "net.ipv4.tcp_mtu_probing=1 helps until then.",
        )


def mtus(mesh: Mesh, around: Surroundings) -> list[str | int | float | bool | None]:
    """Each host's interface in use, with its MTU."""
    known = [(mesh.names[rank], interface) for rank, interface in around.interfaces.items() if rank in mesh.names]
    return [f"{name} {interface.name}: mtu {interface.mtu}" for name, interface in known[:_SHOWN]]


def transients(seen: Seen[D], mesh: Mesh, rows: Sequence[tuple[int, Cell]]) -> Iterator[Finding]:
    """Ways that failed, and worked when they were tried again."""
    ways = {(rank, cell.peer): failure(cell) for rank, cell in rows if failure(cell) is not None}
    links = [
        f"{mesh.names[a]} -> {mesh.names[b]}"
        for a, b in sorted(ways)
        if (a, b) in mesh.cells and failure(mesh.cells[a, b]) is None
    ]
    if links:
        yield seen.finding(
            "transient",
            "some ways between hosts failed once",
            f"{names_text(links)} failed, and worked when they were tried again.",
            links=links,
            fix="Try again; if it comes back, look at the error counters of these hosts (`ip -s link`).",
        )


def dropped_everywhere(mesh: Mesh) -> bool:
    """Is no connection accepted at all? Then trying again tells nothing new."""
    return all(cell.reach is not Reach.ACCEPTED for cell in mesh.cells.values())
