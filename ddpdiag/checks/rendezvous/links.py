"""RDZ004's links between hosts as a matrix of cells, and the hosts or links to name in findings on bad links.

A link is (rank from, rank to), with one rank of each host. If a link was measured twice, the better result counts,
unless the link failed at the end of the run.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from statistics import median
from typing import NamedTuple

from msgspec import Struct, structs

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import names_text
from ddpdiag.checks.matrix import Link, blamed_subjects, find_pattern
from ddpdiag.probes.net.interfaces import Interface
from ddpdiag.probes.net.mesh import Cell
from ddpdiag.probes.net.tcp_connect import Reach

# The parameter of the trial that runs at the end of the run.
AT_END = "at end"
_NOT_FOUND = (Reach.UNREACHABLE, Reach.UNKNOWN_NAME, Reach.SLOW_NAME)
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
    """The measurement of one host. `offered_address` is the address that a job would offer to other hosts (None: it has
    no usable address). `interfaces` are those that its connections used. `ephemeral_ports` are the first and the last
    port that the kernel gives to connections. `cells` has the measurement of the link to each other host."""

    offered_address: str | None
    listener_port: int
    interfaces: tuple[Interface, ...]
    ephemeral_ports: tuple[int, int] | None
    cells: tuple[Cell, ...]


class Subject(NamedTuple):
    """The hosts or links to name in a finding, with the `cells` of the bad links that they explain. `kind` is a key of
    _WHERE, and `where` says in words which links are bad ("from h1 to the other hosts")."""

    kind: str
    where: str
    hosts: tuple[str, ...]
    links: tuple[str, ...]
    cells: Mapping[Link, Cell]

    @property
    def doubt(self) -> str:
        """The sentence that either end may be at fault, if only two hosts were measured; else empty."""
        text = "With two hosts it cannot be decided which side is at fault; add a third one to find out."
        return text if self.kind == "pair" else ""

    @property
    def lost_share(self) -> float:
        """The median of the links' shares of lost segments."""
        return median(map(lost_share, self.cells.values()))

    @property
    def rate(self) -> float:
        """The median of the links' rates in bytes per second; at least one link must have a rate."""
        return median(cell.bytes_per_s for cell in self.cells.values() if cell.bytes_per_s is not None)


class Mesh(Struct, frozen=True):
    """The cells of all links, by link. Only hosts of the same group were measured with each other. `names` are the
    hosts' names by rank. `within_machines` are links between containers of one machine, which are faster than any
    network; empty if there is only one machine. `cut_links` worked at the start of the run, and failed at its end."""

    groups: tuple[tuple[int, ...], ...]
    cells: dict[Link, Cell]
    names: dict[int, str]
    within_machines: frozenset[Link] = frozenset()
    cut_links: frozenset[Link] = frozenset()

    def link_text(self, link: Link) -> str:
        return f"{self.names[link[0]]} -> {self.names[link[1]]}"

    def links_with(self, condition: Callable[[Cell], bool]) -> frozenset[Link]:
        return frozenset(link for link, cell in self.cells.items() if condition(cell))

    def subjects(self, bad: Set[Link], good: Set[Link]) -> Iterator[Subject]:
        """Yield the hosts or links that explain the bad links. Links that are neither bad nor good are ignored."""
        for group in self.groups:
            members = frozenset(group)
            bad_links = {link for link in bad if link[0] in members}
            pattern = find_pattern(bad_links, {link for link in good - bad if link[0] in members})
            for pattern_kind, ranks, explained in blamed_subjects(pattern, bad_links) if pattern is not None else ():
                kind = pattern_kind if len(group) > 2 else "pair"
                cells = {link: self.cells[link] for link in sorted(explained)}
                links = tuple(map(self.link_text, cells))
                hosts = tuple(self.names[rank] for rank in ranks)
                where = _WHERE[kind].format(
                    host=hosts[0] if hosts else "",
                    links=names_text(links, _SHOWN_LINKS),
                    group=names_text([self.names[rank] for rank in group]),
                )
                yield Subject(kind, where, hosts, links if kind in ("links", "pair") else (), cells)


def mesh_of(seen: Seen[Data]) -> Mesh:
    """Merge the measurements of all trials. Links to a host without a result are left out: its failure explains them. A
    failure at the end of the run replaces an earlier result; otherwise the better result counts."""
    answered = {row.place.rank for row in seen.rows}
    merged: dict[Link, Cell] = {}
    cut_links = set[Link]()
    for row in seen.rows:
        for cell in row.data.cells:
            link = (row.place.rank, cell.peer)
            if cell.peer not in answered:
                continue
            if row.trial.params.get(AT_END) and failure_word(cell) is not None:
                cut_links.update({link} if link in merged and failure_word(merged[link]) is None else ())
                merged[link] = cell
            else:
                merged[link] = merge_cells(merged[link], cell) if link in merged else cell
    groups = tuple(dict.fromkeys(group for trial in seen.trials for group in trial.groups))
    machines = {rank: arrival.host_id for rank, arrival in seen.world.arrivals.items() if arrival.host_id}
    within_machines = {(a, b) for a, b in merged if machines.get(a, a) == machines.get(b, b)}
    if len(set(machines.values())) < 2:
        within_machines.clear()
    names = {rank: seen.world.host_name(rank) for rank in answered}
    return Mesh(groups, merged, names, frozenset(within_machines), frozenset(cut_links))


def failure_word(cell: Cell) -> str | None:
    """The word of the finding on a link that passes no data ("dropped") or no large packets ("black-hole"), or None."""
    if cell.reach is not Reach.ACCEPTED:
        return "unreachable" if cell.reach in _NOT_FOUND else str(cell.reach.value)
    if cell.stalled_bytes is None:
        return None
    return "black-hole" if cell.stalled_bytes and not cell.broken else "silent"


def merge_cells(one: Cell, other: Cell) -> Cell:
    """Merge two measurements of one link into the better one, with the higher rate and the smaller loss of the two."""

    def quality(cell: Cell) -> tuple[int, bool, int, float]:
        reach = -list(Reach).index(cell.reach)  # `Reach` is in order, the best first
        return reach, failure_word(cell) is None, cell.passed_bytes, cell.bytes_per_s or 0.0

    best, worse = sorted((one, other), key=quality, reverse=True)
    cleaner = min((best, worse), key=lambda cell: (cell.segments is None, lost_share(cell)))
    return structs.replace(
        best,
        offered_reach=None if None in (one.offered_reach, other.offered_reach) else best.offered_reach,
        bytes_per_s=max((cell.bytes_per_s for cell in (one, other) if cell.bytes_per_s is not None), default=None),
        segments=cleaner.segments,
        retransmitted=cleaner.retransmitted,
    )


def lost_share(cell: Cell) -> float:
    """The share of segments that had to be sent again; 0 if the kernel does not report it."""
    return (cell.retransmitted or 0) / cell.segments if cell.segments else 0.0


def usual_rate(cells: Mapping[Link, Cell]) -> float | None:
    """The rate that more than half of the hosts reach on their best link, or None if no link has a rate. The median of
    all links would be too low: with one slow host of three, four of the six links are slow."""
    best: dict[int, float] = {}
    for link, cell in cells.items():
        for end in link:
            if cell.bytes_per_s is not None:
                best[end] = max(best.get(end, 0.0), cell.bytes_per_s)
    ordered = sorted(best.values())
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def reached_offers(mesh_seen: Seen[Data]) -> dict[tuple[int, str], bool]:
    """Whether other hosts reached the address that a rank offered, by rank and address. Offers that only some hosts
    reached, or that no host tried, are left out. A connection to another address of the offering host does not
    count. A host that reached no address is ignored. If a link was measured twice, the better result counts.
    """
    offers = {rank: data.offered_address for rank, data in mesh_seen.by_rank.items()}
    # By the rank that offers, and the rank that connects: whether the offer was reached.
    answers_by_rank: dict[int, dict[int, bool]] = defaultdict(dict)
    for row in mesh_seen.rows:
        for cell in row.data.cells:
            if cell.reach is Reach.ACCEPTED:
                is_reached = cell.offered_reach is None and cell.address == offers.get(cell.peer)
                answers = answers_by_rank[cell.peer]
                answers[row.place.rank] = is_reached or answers.get(row.place.rank, False)
    agreed_ranks = {rank for rank, answers in answers_by_rank.items() if len({*answers.values()}) == 1}
    return {(r, offer): any(answers_by_rank[r].values()) for r, offer in offers.items() if offer and r in agreed_ranks}
