"""The cause of bad links: hosts, one direction of a host, or single links. Also the rates of links as a table.

A link is (source, destination), two indices of hosts (or of GPUs). A host is blamed if most links from it and most
links to it are bad. If only the links from it are bad, the host is blamed as a sender; if only the links to it, as a
receiver. Other bad links are blamed singly. If all links are bad, no host is blamed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from msgspec import Struct

from ddpdiag.model import Matrix

Link = tuple[int, int]

# A host is blamed if more than this share of its links is bad. In a world of up to four hosts it means all links.
_BLAMED_SHARE = 0.7
# A page has room for so many rows and columns.
MAX_ROWS = 48


class Pattern(Struct, frozen=True, kw_only=True):
    """The cause of the bad links. In a world of two hosts only `links` is set, because either end may be the cause.

    `islands`: groups of hosts whose links are good inside the group, and bad to all other groups. `is_everywhere`:
    nearly all links are bad, or most hosts would have to be blamed, so no host is blamed.
    """

    hosts: tuple[int, ...] = ()
    senders: tuple[int, ...] = ()
    receivers: tuple[int, ...] = ()
    links: tuple[Link, ...] = ()
    islands: tuple[tuple[int, ...], ...] = ()
    is_everywhere: bool = False


def find_pattern(bad: Set[Link], good: Set[Link]) -> Pattern | None:
    """Return the cause of the bad links; None if no link is bad. Links in neither set were not measured."""
    members = sorted({end for link in bad | good for end in link})
    if not bad:
        return None
    if len(members) == 2:
        return Pattern(links=tuple(sorted(bad)))
    if not good:
        return Pattern(is_everywhere=True)
    if islands := _islands(members, bad, good):
        return Pattern(islands=islands)
    senders, receivers = _senders_and_receivers(bad, good)
    blamed = senders | receivers
    unexplained = {(a, b) for a, b in bad if a not in senders and b not in receivers}
    if 2 * len(blamed) > len(members) or (not blamed and _is_most(len(bad), len(bad) + len(good))):
        return Pattern(is_everywhere=True)
    return Pattern(
        hosts=tuple(sorted(senders & receivers)),
        senders=tuple(sorted(senders - receivers)),
        receivers=tuple(sorted(receivers - senders)),
        links=tuple(sorted(unexplained)),
    )


def blamed_subjects(pattern: Pattern, bad: Iterable[Link]) -> Iterator[tuple[str, tuple[int, ...], frozenset[Link]]]:
    """Yield each subject to blame as (kind, hosts, bad links that it explains). All single links are one subject."""
    bad_links = frozenset(bad)
    for host in pattern.hosts:
        yield "host", (host,), frozenset(link for link in bad_links if host in link)
    for host in pattern.senders:
        yield "sender", (host,), frozenset(link for link in bad_links if link[0] == host)
    for host in pattern.receivers:
        yield "receiver", (host,), frozenset(link for link in bad_links if link[1] == host)
    if pattern.links:
        yield "links", (), frozenset(pattern.links)
    if pattern.islands or pattern.is_everywhere:
        yield "islands" if pattern.islands else "everywhere", (), bad_links


def _is_most(count: int, total: int) -> bool:
    return count >= 2 and count > _BLAMED_SHARE * total


def _senders_and_receivers(bad: Set[Link], good: Set[Link]) -> tuple[set[int], set[int]]:
    """Return the hosts whose sending is bad, and the hosts whose receiving is bad.

    A bad link to a host that receives badly from most hosts says nothing about its sender, and vice versa.
    """
    links_of: dict[tuple[int, int], list[Link]] = {}  # by (side, host); side 0: links from the host, 1: to the host
    for link in bad | good:
        for side in (0, 1):
            links_of.setdefault((side, link[side]), []).append(link)
    suspects = {key for key, links in links_of.items() if _is_most(sum(link in bad for link in links), len(links))}

    def is_guilty(side: int, host: int) -> bool:
        counted = [link for link in links_of[side, host] if (1 - side, link[1 - side]) not in suspects]
        return _is_most(sum(link in bad for link in counted), len(counted))

    guilty = {key for key in suspects if is_guilty(*key)}
    return {host for side, host in guilty if side == 0}, {host for side, host in guilty if side == 1}


def _islands(members: Iterable[int], bad: Set[Link], good: Set[Link]) -> tuple[tuple[int, ...], ...]:
    """Split all hosts in groups of two or more, with only good links inside and none between groups; else empty."""
    group_of = {member: {member} for member in members}
    for a, b in good:
        if group_of[a] is not group_of[b]:
            group_of[a] |= group_of[b]
            for member in group_of[b]:
                group_of[member] = group_of[a]
    islands = sorted({tuple(sorted(group)) for group in group_of.values()})
    has_bad_inside = any(group_of[a] is group_of[b] for a, b in bad)
    return () if has_bad_inside or len(islands) < 2 or min(map(len, islands)) < 2 else tuple(islands)


def pair_matrix(name: str, title: str, hosts: Sequence[str], rates: Mapping[Link, float]) -> Matrix | None:
    """Return the rates of links, in bytes/s, as a matrix; None without rates or with one host.

    A link is two indices of `hosts`; the rate of a failed link is 0. More than `MAX_ROWS` hosts are grouped with their
    neighbours. A cell is then the lowest rate between two groups, because a mean would hide a slow link.
    """
    if not rates or len(hosts) < 2:
        return None
    step = -(-len(hosts) // MAX_ROWS)
    parts = [hosts[first : first + step] for first in range(0, len(hosts), step)]
    labels = tuple(part[0] if len(part) == 1 else f"{part[0]}..{part[-1]}" for part in parts)
    lowest: dict[Link, float] = {}
    for (a, b), rate in rates.items():
        cell = (a // step, b // step)
        lowest[cell] = min(rate, lowest.get(cell, rate))
    cells = tuple(tuple(lowest.get((a, b)) for b in range(len(labels))) for a in range(len(labels)))
    groups = f", the lowest between groups of {step}" if step > 1 else ""
    return Matrix(name=name, title=f"{title}{groups}", rows=labels, columns=labels, cells=cells, unit="bytes_per_s")
