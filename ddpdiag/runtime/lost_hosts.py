"""Ask the hosts of lost ranks for an answer: if a host answers, only its processes ended."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from msgspec import structs

from ddpdiag.model import Arrival, Event, EventKind
from ddpdiag.model.recording import Line
from ddpdiag.probes.net.tcp_connect import answers, is_loopback, resolve
from ddpdiag.runtime.deadlines import DEADLINES

# A host answers for a closed port, too. If a firewall lets only some ports through, ssh's is the likeliest of them.
_SSH_PORT = 22
_MOST_HOSTS = 64  # if more are lost at once, this many answers are enough
_MOST_ADDRESSES = 2


def with_host_answers(lines: Sequence[Line], port: int) -> list[Line]:
    """Rank 0's lines, in which each loss of a rank on another host records whether that host answers.

    `port` is the job's. Asks at most 64 hosts, for a second or two, if a rank was lost.
    """
    arrivals = {line.place.rank: line for line in lines if isinstance(line, Arrival)}
    lost = {line.rank for line in lines if isinstance(line, Event) and line.kind is EventKind.LOST}
    hosts = {arrivals[rank].host: arrivals[rank].address for rank in lost if rank in arrivals}
    if 0 in arrivals:
        hosts.pop(arrivals[0].host, None)
    if not hosts:
        return list(lines)
    chosen = dict(islice(hosts.items(), _MOST_HOSTS))
    with ThreadPoolExecutor(len(chosen)) as pool:
        replies = dict(zip(chosen, pool.map(lambda address: _answers((address,), port), chosen.values()), strict=True))
    return [_with_answer(line, arrivals, replies) for line in lines]


def rank_0_answers(host: str, port: int) -> bool | None:
    """Whether rank 0's host answers under the name `host`; None if the name has no address to try."""
    return _answers(resolve(host, port, DEADLINES.host_answer) or (), port)


def _with_answer(line: Line, arrivals: Mapping[int, Arrival], replies: Mapping[tuple[str, str], bool | None]) -> Line:
    if not isinstance(line, Event) or line.kind is not EventKind.LOST or line.rank is None:
        return line
    arrival = arrivals.get(line.rank)
    return line if arrival is None else structs.replace(line, answers=replies.get(arrival.host))


def _answers(addresses: Sequence[str], port: int) -> bool | None:
    """Whether an address answers; None without an address, since an unresolved name proves nothing."""
    remote = [address for address in addresses[:_MOST_ADDRESSES] if address and not is_loopback(address)]
    return any(answers(address, (port, _SSH_PORT), DEADLINES.host_answer) for address in remote) if remote else None
