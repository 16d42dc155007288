"""Connect to the hosts of lost ranks. If a host answers, the host is alive, and only the rank's process has ended."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from msgspec import structs

from ddpdiag.model import Arrival, Event, EventKind
from ddpdiag.model.recording import Line
from ddpdiag.probes.net.tcp_connect import is_loopback, resolve, responds
from ddpdiag.runtime.deadlines import DEADLINES

# A host answers even for a closed port. If a firewall opens only some ports, that of ssh is the most likely one.
_SSH_PORT = 22
_MAX_HOSTS = 64  # if more are lost at once, this many answers are enough
_MAX_ADDRESSES = 2


def add_host_answers(lines: Sequence[Line], port: int) -> list[Line]:
    """The lines of rank 0's recording, in which each event of a lost rank says whether the rank's host answers.

    Connects at `port` (MASTER_PORT) to 64 hosts of lost ranks at most, but not to rank 0's host, for up to 2 s.
    """
    arrivals = {line.place.rank: line for line in lines if isinstance(line, Arrival)}
    lost = {line.rank for line in lines if isinstance(line, Event) and line.kind is EventKind.LOST}
    hosts = {arrivals[rank].host: arrivals[rank].address for rank in lost if rank in arrivals}
    if 0 in arrivals:
        hosts.pop(arrivals[0].host, None)
    if not hosts:
        return list(lines)
    asked_hosts = dict(islice(hosts.items(), _MAX_HOSTS))
    with ThreadPoolExecutor(len(asked_hosts)) as pool:
        replies = pool.map(lambda address: _any_address_answers((address,), port), asked_hosts.values())
        answer_of_host = dict(zip(asked_hosts, replies, strict=True))
    return [_add_answer(line, arrivals, answer_of_host) for line in lines]


def rank_0_answers(host: str, port: int) -> bool | None:
    """Whether rank 0's host answers under the name `host`, or None if the name has no address on another host."""
    return _any_address_answers(resolve(host, port, DEADLINES.host_answer) or (), port)


def _add_answer(line: Line, arrivals: Mapping[int, Arrival], replies: Mapping[tuple[str, str], bool | None]) -> Line:
    if not isinstance(line, Event) or line.kind is not EventKind.LOST or line.rank is None:
        return line
    arrival = arrivals.get(line.rank)
    return line if arrival is None else structs.replace(line, host_answered=replies.get(arrival.host))


def _any_address_answers(addresses: Sequence[str], port: int) -> bool | None:
    """Whether one of the first two addresses answers, or None if none of them is on another host."""
    remote = [address for address in addresses[:_MAX_ADDRESSES] if address and not is_loopback(address)]
    return any(responds(address, (port, _SSH_PORT), DEADLINES.host_answer) for address in remote) if remote else None
