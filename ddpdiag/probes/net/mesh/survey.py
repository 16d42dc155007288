"""The ways from this host to all others of its group, measured while they do the same."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ddpdiag.probes.net.mesh.connection import Cell, Connection, Peer
from ddpdiag.probes.net.mesh.listener import Listener
from ddpdiag.probes.net.mesh.protocol import CONNECT_SECONDS, LARGE, STALL_SECONDS

# Beyond their time for connecting: all pass the gate together, but on busy hosts.
_LATE_SECONDS = 1.0
# On a link of 100 Mbit/s these are 6 MB, enough to know the rate.
_RATE_SECONDS = 0.5
# Of the time that is left, the share for sending: others wait for their turn meanwhile.
_SENDING_SHARE = 0.4


def survey(
    peers: Sequence[Peer],
    own_number: int,
    listener: Listener,
    turn: threading.Lock,
    end: float,
    step: Callable[[str], None],
    *,
    addresses: int,
) -> tuple[Cell, ...]:
    """One cell for each peer. Done by `end` (monotonic), whatever the others do, and not before they need us no more.
    `addresses` is how many of ours a caller tries; whoever has not come after that will not come any more.

    First all ways at once with little data, so that blocked ones wait together; then the rates one by one.
    """
    late = time.monotonic() + addresses * CONNECT_SECONDS + _LATE_SECONDS
    step("connect to the other hosts")
    connections = _connected(peers, own_number)
    step("send to the other hosts")
    _transfer(connections, own_number, turn, end)
    for connection in connections:
        connection.close()
    step("wait for the other hosts")
    listener.wait(len(peers), late)
    listener.close()
    return tuple(connection.cell for connection in connections)


def _connected(peers: Sequence[Peer], own_number: int) -> list[Connection]:
    def connected(peer: Peer) -> Connection:
        connection = Connection(peer)
        connection.try_sizes(own_number)
        return connection

    with ThreadPoolExecutor(len(peers), "call") as pool:
        return list(pool.map(connected, peers))


def _transfer(connections: Sequence[Connection], own_number: int, turn: threading.Lock, end: float) -> None:
    """The rates, in an order in which all hosts are busy in pairs; who finds a peer busy comes back later."""
    load = memoryview(os.urandom(LARGE // 256) * 256)
    left = end - time.monotonic()
    seconds = min(_RATE_SECONDS, _SENDING_SHARE * left / (2 * len(connections)))
    # Numbers that differ by the same bits form pairs: in round r, i meets i ^ r, who meets i.
    waiting = deque(sorted((c for c in connections if c.is_open), key=lambda c: c.peer.number ^ own_number))
    while waiting and time.monotonic() < end - seconds - STALL_SECONDS:
        connection = waiting.popleft()
        if connection.transfer(load, turn, first=own_number < connection.peer.number, seconds=seconds):
            connection.close()
        else:
            waiting.append(connection)
