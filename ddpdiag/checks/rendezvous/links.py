"""RDZ004's links between hosts as a matrix of cells, and the hosts or links to name in findings on bad ones.

If a link was measured twice, the better result counts.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from statistics import median
from typing import NamedTuple

from msgspec import Struct, structs

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import names_text
from ddpdiag.checks.matrix import Link, explain, links_of
from ddpdiag.probes.net.interfaces import Interface
from ddpdiag.probes.net.mesh import Cell
from ddpdiag.probes.net.tcp_connect import Reach

TWO_HOSTS = "With two hosts it cannot be decided which side is at fault; add a third one to find out."
# The parameter that marks the trial at the end of the run.
AT_END = "at end"
_NO_HOST = (Reach.UNREACHABLE, Reach.UNKNOWN_NAME, Reach.SLOW_NAME)
_SHOWN_LINKS = 8
_WHERE = {
    "host": "between {host} and the other hosts",
    "sender": "from {host} to the other hosts",
    "receiver": "from the other hosts to {host}",
    "links": "on {links}",
    "pair": "on {links}",
    "islands": "between groups of hosts ({group})",
    "everywhere": "between {group}",
}


class Data(Struct, frozen=True, kw_only=True):
    """The view of one host: the address that a job would offer (None: none that others could use), its listener's port,
    the interfaces that its connections went out of, the kernel's ephemeral ports, and a cell for each other host."""

    offered: str | None
    port: int
    interfaces: tuple[Interface, ...]
    ephemeral: tuple[int, int] | None
    cells: tuple[Cell, ...]


class Subject(NamedTuple):
    """The hosts or links to name for some bad links; `where` is the place in words ("from h1 to the other hosts")."""

    kind: str
    where: str
    hosts: tuple[str, ...]
    links: tuple[str, ...]
    cells: Mapping[Link, Cell]

    @property
    def doubt(self) -> str:
        """The sentence that either end may be at fault, if there are two hosts; else empty."""
        return TWO_HOSTS if self.kind == "pair" else ""

    @property
    def lost_share(self) -> float:
        """The median share of lost segments of the links, each by its better measurement."""
        return median(map(lost_share, self.cells.values()))

    @property
    def rate(self) -> float:
        """The median rate in bytes per second of the links that have one."""
        return median(cell.bytes_per_s for cell in self.cells.values() if cell.bytes_per_s is not None)

    def first(self, most: int) -> list[tuple[Link, Cell]]:
        return list(self.cells.items())[:most]


class Mesh(Struct, frozen=True):
    """The cells between one rank of each host, by link (rank from, rank to), within groups that were measured together.

    `inside` are links between containers of one machine, if there are several machines: no network is as fast. `cut`
    are links that worked at first, and failed at the end of the run.
    """

    groups: tuple[tuple[int, ...], ...]
    cells: dict[Link, Cell]
    names: dict[int, str]
    inside: frozenset[Link] = frozenset()
    cut: frozenset[Link] = frozenset()

    def link_text(self, link: Link) -> str:
        return f"{self.names[link[0]]} -> {self.names[link[1]]}"

    def links(self, fits: Callable[[Cell], bool]) -> frozenset[Link]:
        return frozenset(link for link, cell in self.cells.items() if fits(cell))

    def subjects(self, bad: Set[Link], good: Set[Link]) -> Iterator[Subject]:
        """The hosts or links to name for the bad links; links that are neither bad nor good are ignored."""
        for group in self.groups:
            members = frozenset(group)
            own = {link for link in bad if link[0] in members}
            pattern = explain(own, {link for link in good - bad if link[0] in members})
            for found, hosts, explained in links_of(pattern, own) if pattern is not None else ():
                kind = found if len(group) > 2 else "pair"
                cells = {link: self.cells[link] for link in sorted(explained)}
                links = tuple(map(self.link_text, cells))
                nodes = tuple(self.names[host] for host in hosts)
                where = _WHERE[kind].format(
                    host=nodes[0] if nodes else "",
                    links=names_text(links, _SHOWN_LINKS),
                    group=names_text([self.names[rank] for rank in group]),
                )
                yield Subject(kind, where, nodes, links if kind in ("links", "pair") else (), cells)


def mesh_of(seen: Seen[Data]) -> Mesh:
    """The mesh of all trials, without the links to a host that gave no answer: its failure explains them."""
    answered = {row.place.rank for row in seen.rows}
    merged: dict[Link, Cell] = {}
    cut = set[Link]()
    for row in seen.rows:
        for cell in row.data.cells:
            link = (row.place.rank, cell.peer)
            if cell.peer not in answered:
                continue
            if row.trial.params.get(AT_END) and failure(cell) is not None:
                cut.update({link} if link in merged and failure(merged[link]) is None else ())
                merged[link] = cell
            else:
                merged[link] = better(merged[link], cell) if link in merged else cell
    groups = tuple(dict.fromkeys(group for trial in seen.trials for group in trial.groups))
    machines = {rank: arrival.host_id for rank, arrival in seen.world.arrivals.items() if arrival.host_id}
    inside = {(a, b) for a, b in merged if machines.get(a, a) == machines.get(b, b)}
    if len(set(machines.values())) < 2:
        inside.clear()
    names = {rank: seen.world.host_of(rank) for rank in answered}
    return Mesh(groups, merged, names, frozenset(inside), frozenset(cut))


def failure(cell: Cell) -> str | None:
    """The finding's word for a link on which nothing, or nothing large, passes ("dropped", "black-hole"); else None."""
    if cell.reach is not Reach.ACCEPTED:
        return "unreachable" if cell.reach in _NO_HOST else str(cell.reach.value)
    if cell.stalled_bytes is None:
        return None
    return "black-hole" if cell.stalled_bytes and not cell.broken else "silent"


def better(one: Cell, other: Cell) -> Cell:
    """Merge two measurements of one link: the better one, with the higher rate and the smaller loss of the two."""

    def rank(cell: Cell) -> tuple[int, bool, int, float]:
        reach = -list(Reach).index(cell.reach)  # `Reach` is in order, the best first
        return reach, failure(cell) is None, cell.passed_bytes, cell.bytes_per_s or 0.0

    best, rest = sorted((one, other), key=rank, reverse=True)
    cleaner = min((best, rest), key=lambda cell: (cell.segments is None, lost_share(cell)))
    return structs.replace(
        best,
        missed=None if None in (one.missed, other.missed) else best.missed,
        bytes_per_s=max((cell.bytes_per_s for cell in (one, other) if cell.bytes_per_s is not None), default=None),
        segments=cleaner.segments,
        retransmitted=cleaner.retransmitted,
    )


def lost_share(cell: Cell) -> float:
    """Share of the segments that had to be sent again; 0 if the kernel does not report it."""
    return (cell.retransmitted or 0) / cell.segments if cell.segments else 0.0


def usual_rate(cells: Mapping[Link, Cell]) -> float | None:
    """The rate that more than half of the hosts reach on their best link, or None if no link has a rate.

    The median of all links does not show it: of three hosts, a single slow one takes part in four of six links.
    """
    best: dict[int, float] = {}
    for link, cell in cells.items():
        for end in link:
            if cell.bytes_per_s is not None:
                best[end] = max(best.get(end, 0.0), cell.bytes_per_s)
    ordered = sorted(best.values())
    return ordered[(len(ordered) - 1) // 2] if ordered else None


class Offer(NamedTuple):
    """The address that a rank offered, or None, and whether the others reached it (None: some did, or not known)."""

    address: str | None
    is_reached: bool | None


def offers(met: Seen[Data]) -> dict[int, Offer]:
    """The offer of each rank. If a link was tried twice, the better result counts.

    A rank that reached another address of the host only did not reach the offer. A rank that reached none is ignored.
    """
    addresses = {rank: data.offered for rank, data in met.by_rank.items()}
    links: dict[int, dict[int, bool]] = {}
    for row in met.rows:
        for cell in row.data.cells:
            if cell.reach is Reach.ACCEPTED:
                others = links.setdefault(cell.peer, {})
                got = cell.missed is None and cell.address == addresses.get(cell.peer)
                others[row.place.rank] = got or others.get(row.place.rank, False)
    answers = {rank: set(own.values()) for rank, own in links.items()}
    return {
        rank: Offer(address, answers[rank].pop() if len(answers.get(rank, ())) == 1 else None)
        for rank, address in addresses.items()
    }
