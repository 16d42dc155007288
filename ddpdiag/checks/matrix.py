"""The hosts, directions or single links that explain the bad links between hosts; and the rates of links as a table.

A link is (from, to). A host is blamed if the links from it and the links to it are bad. If only one of the two is bad,
it is blamed as a sender or receiver. Other bad links are blamed singly. If all links are bad, no host is blamed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from msgspec import Struct

from ddpdiag.model import Matrix

Link = tuple[int, int]

# A host is blamed if more than this share of its links is bad. In a world of up to four hosts this means all of them.
_MOST = 0.7
# The number of cells for which a page has room in a row.
MOST_ROWS = 48


class Pattern(Struct, frozen=True, kw_only=True):
    """The cause of the bad links. In a world of two hosts only `links` is set, because either end may be the cause.

    `everywhere`: (nearly) all links are bad, or most hosts would have to be blamed. `islands`: groups of hosts whose
    links are good inside the group, and bad to all other groups.
    """

    hosts: tuple[int, ...] = ()
    senders: tuple[int, ...] = ()
    receivers: tuple[int, ...] = ()
    links: tuple[Link, ...] = ()
    islands: tuple[tuple[int, ...], ...] = ()
    everywhere: bool = False


def explain(bad: Set[Link], good: Set[Link]) -> Pattern | None:
    """The cause of the bad links, or None if there are none. Links in neither set were not measured."""
    members = sorted({end for link in bad | good for end in link})
    if not bad:
        return None
    if len(members) == 2:
        return Pattern(links=tuple(sorted(bad)))
    if not good:
        return Pattern(everywhere=True)
    if islands := _islands(members, bad, good):
        return Pattern(islands=islands)
    senders, receivers = _guilty(bad, good)
    blamed = senders | receivers
    unexplained = {(a, b) for a, b in bad if a not in senders and b not in receivers}
    if 2 * len(blamed) > len(members) or (not blamed and _most(len(bad), len(bad) + len(good))):
        return Pattern(everywhere=True)
    return Pattern(
        hosts=tuple(sorted(senders & receivers)),
        senders=tuple(sorted(senders - receivers)),
        receivers=tuple(sorted(receivers - senders)),
        links=tuple(sorted(unexplained)),
    )


def links_of(pattern: Pattern, bad: Iterable[Link]) -> Iterator[tuple[str, tuple[int, ...], frozenset[Link]]]:
    """Each subject to blame as (kind, hosts, the bad links that it explains). All single links are one subject."""
    known = frozenset(bad)
    for host in pattern.hosts:
        yield "host", (host,), frozenset(link for link in known if host in link)
    for host in pattern.senders:
        yield "sender", (host,), frozenset(link for link in known if link[0] == host)
    for host in pattern.receivers:
        yield "receiver", (host,), frozenset(link for link in known if link[1] == host)
    if pattern.links:
        yield "links", (), frozenset(pattern.links)
    if pattern.islands or pattern.everywhere:
        yield "islands" if pattern.islands else "everywhere", (), known


def _most(count: int, total: int) -> bool:
    return count >= 2 and count > _MOST * total


def _guilty(bad: Set[Link], good: Set[Link]) -> tuple[set[int], set[int]]:
    """The hosts to blame as senders, and the hosts to blame as receivers.

    A bad link to a host that receives badly from most hosts says nothing about its sender, and vice versa.
    """
    lines: dict[tuple[int, int], list[Link]] = {}  # rows (side 0) and columns (side 1)
    for link in bad | good:
        for side in (0, 1):
            lines.setdefault((side, link[side]), []).append(link)
    suspects = {key for key, links in lines.items() if _most(sum(link in bad for link in links), len(links))}

    def is_guilty(side: int, host: int) -> bool:
        counted = [link for link in lines[side, host] if (1 - side, link[1 - side]) not in suspects]
        return _most(sum(link in bad for link in counted), len(counted))

    guilty = {key for key in suspects if is_guilty(*key)}
    return {host for side, host in guilty if side == 0}, {host for side, host in guilty if side == 1}


def _islands(members: Iterable[int], bad: Set[Link], good: Set[Link]) -> tuple[tuple[int, ...], ...]:
    """Groups of two or more hosts with only good links inside and no good link between them; empty if no such split."""
    home = {member: {member} for member in members}
    for a, b in good:
        if home[a] is not home[b]:
            home[a] |= home[b]
            for member in home[b]:
                home[member] = home[a]
    islands = sorted({tuple(sorted(group)) for group in home.values()})
    inside = any(home[a] is home[b] for a, b in bad)
    return () if inside or len(islands) < 2 or min(map(len, islands)) < 2 else tuple(islands)


def pair_matrix(name: str, title: str, hosts: Sequence[str], rates: Mapping[Link, float]) -> Matrix | None:
    """The rates of links as a matrix, or None without rates. A link has indices of `hosts`; a failed link has rate 0.

    More than `MOST_ROWS` hosts are grouped with their neighbours. A cell is then the lowest rate between two groups,
    because a mean would hide a slow link.
    """
    if not rates or len(hosts) < 2:
        return None
    step = -(-len(hosts) // MOST_ROWS)
    parts = [hosts[first : first + step] for first in range(0, len(hosts), step)]
    labels = tuple(part[0] if len(part) == 1 else f"{part[0]}..{part[-1]}" for part in parts)
    lowest: dict[Link, float] = {}
    for (a, b), rate in rates.items():
        cell = (a // step, b // step)
        lowest[cell] = min(rate, lowest.get(cell, rate))
    cells = tuple(tuple(lowest.get((a, b)) for b in range(len(labels))) for a in range(len(labels)))
    groups = f", the lowest between groups of {step}" if step > 1 else ""
    return Matrix(name=name, title=f"{title}{groups}", rows=labels, columns=labels, cells=cells, unit="bytes_per_s")
