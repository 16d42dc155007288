"""Does the host of a lost rank still answer? Then its process is gone, and neither the host nor the way to it."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from msgspec import structs

from ddpdiag.model import Arrival, Event, EventKind
from ddpdiag.model.recording import Line
from ddpdiag.probes.net.tcp_connect import answers, is_loopback, resolve

# A kernel answers for closed ports, too; behind a firewall that lets only some ports through, ssh's is the likeliest.
_SSH_PORT = 22
_ASK_SECONDS = 1.0
_MOST_HOSTS = 64  # where more are lost at once, these say enough


def with_answers(lines: Sequence[Line], me: int, coordinator: str, port: int) -> list[Line]:
    """The lines, in which lost ranks on other hosts than that of rank `me` say whether their host answers.

    Rank 0's host is looked for under the name `coordinator`. Takes a second or two when somebody was lost.
    """
    arrivals = {line.place.rank: line for line in lines if isinstance(line, Arrival)}
    lost = {line.rank for line in lines if isinstance(line, Event) and line.kind is EventKind.LOST}
    hosts = {arrivals[rank].host: rank for rank in lost if rank in arrivals}
    if me in arrivals:
        hosts.pop(arrivals[me].host, None)
    if not hosts:
        return list(lines)
    some = dict(islice(hosts.items(), _MOST_HOSTS))
    with ThreadPoolExecutor(len(some)) as pool:
        said = pool.map(lambda rank: _answers(arrivals, rank, coordinator, port), some.values())
        heard = dict(zip(some, said, strict=True))
    return [_told(line, arrivals, heard) for line in lines]


def _answers(arrivals: Mapping[int, Arrival], rank: int, coordinator: str, port: int) -> bool | None:
    """None where no address of it is known: a name that cannot be resolved says nothing of the host."""
    own = arrivals[rank]
    addresses: tuple[str, ...] = (own.address,)
    if 0 in arrivals and own.host == arrivals[0].host:  # rank 0 reached itself over loopback
        addresses = resolve(coordinator, port, _ASK_SECONDS) or ()
    asked = [address for address in addresses[:2] if address and not is_loopback(address)]
    return any(answers(address, (port, _SSH_PORT), _ASK_SECONDS) for address in asked) if asked else None


def _told(line: Line, arrivals: Mapping[int, Arrival], heard: Mapping[tuple[str, str], bool | None]) -> Line:
    if not isinstance(line, Event) or line.kind is not EventKind.LOST or line.rank is None:
        return line
    own = arrivals.get(line.rank)
    return structs.replace(line, answers=heard.get(own.host)) if own is not None else line
