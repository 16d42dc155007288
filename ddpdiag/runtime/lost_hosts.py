"""Whether the hosts of lost ranks still answer: then only their processes ended."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from msgspec import structs

from ddpdiag.model import Arrival, Event, EventKind
from ddpdiag.model.recording import Line
from ddpdiag.probes.net.tcp_connect import answers, is_loopback, resolve
from ddpdiag.runtime.deadlines import DEADLINES

# A kernel answers for closed ports, too; behind a firewall that lets only some ports through, ssh's is the likeliest.
_SSH_PORT = 22
_MOST_HOSTS = 64  # where more are lost at once, these say enough
_MOST_ADDRESSES = 2


def with_host_answers(lines: Sequence[Line], port: int) -> list[Line]:
    """Rank 0's lines, in which lost ranks of other hosts record whether their host answers.

    `port` is the job's. Takes a second or two when a rank was lost.
    """
    arrivals = {line.place.rank: line for line in lines if isinstance(line, Arrival)}
    lost = {line.rank for line in lines if isinstance(line, Event) and line.kind is EventKind.LOST}
    hosts = {arrivals[rank].host: arrivals[rank].address for rank in lost if rank in arrivals}
    if 0 in arrivals:
        hosts.pop(arrivals[0].host, None)
    if not hosts:
        return list(lines)
    asked = dict(islice(hosts.items(), _MOST_HOSTS))
    with ThreadPoolExecutor(len(asked)) as pool:
        replies = dict(zip(asked, pool.map(lambda address: _answers((address,), port), asked.values()), strict=True))
    return [_with_reply(line, arrivals, replies) for line in lines]


def rank_0_answers(host: str, port: int) -> bool | None:
    """Whether rank 0's host answers under the name `host`."""
    return _answers(resolve(host, port, DEADLINES.host_answer) or (), port)


def _with_reply(line: Line, arrivals: Mapping[int, Arrival], replies: Mapping[tuple[str, str], bool | None]) -> Line:
    if not isinstance(line, Event) or line.kind is not EventKind.LOST or line.rank is None:
        return line
    arrival = arrivals.get(line.rank)
    return line if arrival is None else structs.replace(line, answers=replies.get(arrival.host))


def _answers(addresses: Sequence[str], port: int) -> bool | None:
    """None where no address is known: a name that cannot be resolved proves nothing about the host."""
    asked = [address for address in addresses[:_MOST_ADDRESSES] if address and not is_loopback(address)]
    return any(answers(address, (port, _SSH_PORT), DEADLINES.host_answer) for address in asked) if asked else None
