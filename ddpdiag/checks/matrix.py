"""Which hosts, directions or links explain the bad cells of a matrix of ways between hosts.

A way is (from, to). A host is to blame when the ways from it and those to it are bad; only one of both is a direction
of that host. What is left are links. Ways that are bad between everybody blame nobody.
"""

from collections.abc import Iterable, Iterator, Set

from msgspec import Struct

Way = tuple[int, int]

# A host of many is to blame even if some of its ways are better than the others; up to four hosts, all must be bad.
_MOST = 0.7


class Pattern(Struct, frozen=True, kw_only=True):
    """What explains the bad ways. Of two hosts only links can be named: either end may be the cause.

    `everywhere`: (nearly) all ways are bad, or most hosts would have to be blamed. `islands`: each of these groups is
    fine inside, and none reaches another.
    """

    hosts: tuple[int, ...] = ()
    senders: tuple[int, ...] = ()
    receivers: tuple[int, ...] = ()
    links: tuple[Way, ...] = ()
    islands: tuple[tuple[int, ...], ...] = ()
    everywhere: bool = False


def explain(bad: Set[Way], good: Set[Way]) -> Pattern | None:
    """The pattern in the bad ways, or None if there are none; ways in neither set were not measured."""
    members = sorted({end for way in bad | good for end in way})
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


def ways_of(pattern: Pattern, bad: Iterable[Way]) -> Iterator[tuple[str, tuple[int, ...], frozenset[Way]]]:
    """Each thing to blame (a kind, its hosts) with the bad ways that it explains; all links are one thing."""
    known = frozenset(bad)
    for host in pattern.hosts:
        yield "host", (host,), frozenset(way for way in known if host in way)
    for host in pattern.senders:
        yield "sender", (host,), frozenset(way for way in known if way[0] == host)
    for host in pattern.receivers:
        yield "receiver", (host,), frozenset(way for way in known if way[1] == host)
    if pattern.links:
        yield "links", (), frozenset(pattern.links)
    if pattern.islands or pattern.everywhere:
        yield "islands" if pattern.islands else "everywhere", (), known


def _most(count: int, total: int) -> bool:
    return count >= 2 and count > _MOST * total


def _guilty(bad: Set[Way], good: Set[Way]) -> tuple[set[int], set[int]]:
    """Hosts that are bad at sending, and at receiving, judged by what the other end does with other hosts.

    A way to somebody who receives badly from most says nothing about its sender, and vice versa.
    """
    lines: dict[tuple[int, int], list[Way]] = {}  # rows (side 0) and columns (side 1)
    for way in bad | good:
        for side in (0, 1):
            lines.setdefault((side, way[side]), []).append(way)
    suspects = {key for key, ways in lines.items() if _most(sum(way in bad for way in ways), len(ways))}

    def stands(side: int, host: int) -> bool:
        telling = [way for way in lines[side, host] if (1 - side, way[1 - side]) not in suspects]
        return _most(sum(way in bad for way in telling), len(telling))

    guilty = {key for key in suspects if stands(*key)}
    return {host for side, host in guilty if side == 0}, {host for side, host in guilty if side == 1}


def _islands(members: Iterable[int], bad: Set[Way], good: Set[Way]) -> tuple[tuple[int, ...], ...]:
    """Groups of at least two hosts that are fine inside, with nothing good between them; none if there is only one."""
    home = {member: {member} for member in members}
    for a, b in good:
        if home[a] is not home[b]:
            home[a] |= home[b]
            for member in home[b]:
                home[member] = home[a]
    islands = sorted({tuple(sorted(group)) for group in home.values()})
    inside = any(home[a] is home[b] for a, b in bad)
    return () if inside or len(islands) < 2 or min(map(len, islands)) < 2 else tuple(islands)
