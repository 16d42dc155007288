"""The ways between hosts as a matrix of cells, and whom to name for the bad ones.

A cell that was measured twice counts as the better of both.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from statistics import median
from typing import NamedTuple, TypeVar

from msgspec import Struct, structs

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import names_text
from ddpdiag.checks.matrix import Way, explain, ways_of
from ddpdiag.probes.net.mesh import Cell
from ddpdiag.probes.net.mesh_listener import LARGE
from ddpdiag.probes.net.tcp_connect import Reach

D = TypeVar("D")

TWO_HOSTS = "Two hosts cannot tell which side is at fault; add a third one to find out."
_NOBODY = (Reach.UNREACHABLE, Reach.UNKNOWN_NAME, Reach.SLOW_NAME)
_SHOWN_LINKS = 8


class Subject(NamedTuple):
    """Who is named for some bad ways; `where` says it in words, such as "from the other hosts to h1"."""

    kind: str
    where: str
    nodes: tuple[str, ...]
    links: tuple[str, ...]
    cells: Mapping[Way, Cell]

    @property
    def doubt(self) -> str:
        """What to add where two ends are all there is."""
        return TWO_HOSTS if self.kind == "pair" else ""


class Mesh(Struct, frozen=True):
    """The cells between the hosts' leaders, by way (rank from, rank to), within groups that were measured together.

    `inside` are ways that never leave a machine, between containers on it, where there are several machines: what they
    reach, no network does.
    """

    groups: tuple[tuple[int, ...], ...]
    cells: dict[Way, Cell]
    names: dict[int, str]
    inside: frozenset[Way] = frozenset()

    def ways(self, fits: Callable[[Cell], bool]) -> frozenset[Way]:
        """The ways whose cell fits."""
        return frozenset(way for way, cell in self.cells.items() if fits(cell))

    def subjects(self, bad: Set[Way], good: Set[Way]) -> Iterator[Subject]:
        """Whom to name for the bad ways; those that are neither bad nor good say nothing."""
        for group in self.groups:
            members = frozenset(group)
            own = {way for way in bad if way[0] in members}
            pattern = explain(own, {way for way in good - bad if way[0] in members})
            for kind, hosts, ways in ways_of(pattern, own) if pattern is not None else ():
                yield self._subject(kind if len(group) > 2 else "pair", group, hosts, ways)

    def _subject(self, kind: str, group: Sequence[int], hosts: Sequence[int], ways: frozenset[Way]) -> Subject:
        nodes = tuple(self.names[host] for host in hosts)
        named = kind in ("links", "pair")
        links = tuple(f"{self.names[a]} -> {self.names[b]}" for a, b in sorted(ways)) if named else ()
        cells = {way: self.cells[way] for way in sorted(ways)}
        return Subject(kind, self._where(kind, group, nodes, links), nodes, links, cells)

    def _where(self, kind: str, group: Sequence[int], nodes: Sequence[str], links: Sequence[str]) -> str:
        match kind:
            case "host":
                return f"between {nodes[0]} and the other hosts"
            case "sender":
                return f"from {nodes[0]} to the other hosts"
            case "receiver":
                return f"from the other hosts to {nodes[0]}"
            case "links" | "pair":
                return f"on {names_text(links, _SHOWN_LINKS)}"
            case "islands":
                return f"between groups of hosts ({names_text([self.names[rank] for rank in group])})"
            case _:
                return f"between {names_text([self.names[rank] for rank in group])}"


def mesh_of(seen: Seen[D], cells_of: Callable[[D], Sequence[Cell]]) -> Mesh:
    """All cells of a check's trials; what a host says of one that gave no answer is an echo, and left out."""
    answered = {row.place.rank for row in seen.rows}
    merged: dict[Way, Cell] = {}
    for row in seen.rows:
        for cell in cells_of(row.data):
            if cell.peer in answered:
                way = (row.place.rank, cell.peer)
                merged[way] = better(merged[way], cell) if way in merged else cell
    groups = tuple(dict.fromkeys(group for trial in seen.trials for group in trial.groups))
    return Mesh(groups, merged, {rank: seen.world.node_of(rank) for rank in answered}, _inside(seen, merged))


def _inside(seen: Seen[D], ways: Iterable[Way]) -> frozenset[Way]:
    machines = {rank: arrival.host_id for rank, arrival in seen.world.arrivals.items() if arrival.host_id}
    if len(set(machines.values())) < 2:
        return frozenset()
    return frozenset((a, b) for a, b in ways if machines.get(a, a) == machines.get(b, b))


def failure(cell: Cell) -> str | None:
    """Why nothing, or nothing large, passes; the word of the finding."""
    if cell.reach is not Reach.ACCEPTED:
        return "unreachable" if cell.reach in _NOBODY else str(cell.reach.value)
    if cell.stalled_bytes is None:
        return None
    if cell.broken:
        return "broken"
    return "black-hole" if cell.stalled_bytes else "silent"


def better(one: Cell, other: Cell) -> Cell:
    """The better of two measurements of one way, with the best that either saw."""

    def rank(cell: Cell) -> tuple[int, bool, int, float]:
        reach = -list(Reach).index(cell.reach)  # they are in order, the best first
        return reach, failure(cell) is None, cell.passed_bytes, cell.bytes_per_s or 0.0

    best, rest = sorted((one, other), key=rank, reverse=True)
    nearer = min((best, rest), key=lambda cell: _or_endless(cell.round_trip_seconds))
    cleaner = min((best, rest), key=lambda cell: _or_endless(lost_share(cell)))
    return structs.replace(
        best,
        missed=None if None in (one.missed, other.missed) else best.missed,
        bytes_per_s=max((cell.bytes_per_s for cell in (one, other) if cell.bytes_per_s is not None), default=None),
        round_trip_seconds=nearer.round_trip_seconds,
        offset_seconds=nearer.offset_seconds,
        segments=cleaner.segments,
        retransmitted=cleaner.retransmitted,
    )


def _or_endless(value: float | None) -> float:
    return float("inf") if value is None else value


def lost_share(cell: Cell) -> float | None:
    """Share of the segments that had to be sent again, if the kernel said."""
    return cell.retransmitted / cell.segments if cell.segments and cell.retransmitted is not None else None


def large_seconds(bytes_per_s: float) -> float:
    """How long the large size takes at this rate."""
    return LARGE / bytes_per_s


def usual_rate(cells: Mapping[Way, Cell]) -> float | None:
    """What more than half of the hosts reach on their best way, or None without rates.

    Not the median of all ways: of three hosts, one slow one has its part in four of six.
    """
    best: dict[int, float] = {}
    for way, cell in cells.items():
        for end in way:
            if cell.bytes_per_s is not None:
                best[end] = max(best.get(end, 0.0), cell.bytes_per_s)
    ordered = sorted(best.values())
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def median_rate(cells: Iterable[Cell]) -> float:
    """The median of those that have a rate; some must."""
    return median(cell.bytes_per_s for cell in cells if cell.bytes_per_s is not None)
