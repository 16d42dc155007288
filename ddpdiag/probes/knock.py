"""Which of several ports of a host answer, all tried at once: one after the other, dropped ones cost seconds each."""

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

from ddpdiag.probes.sockets import Reach, Reached, reach

# Two ports that accept do so within moments of each other, and the caller may prefer the other one.
_TOGETHER_SECONDS = 0.05


def knock(address: str, ports: Sequence[int], seconds: float) -> dict[int, Reached]:
    """What a connect to each port of a numeric address met, in the order of `ports`.

    Over when all have answered, or soon after one has accepted; a port that has said nothing by then counts as dropped.
    """
    if not ports:
        return {}
    pool = ThreadPoolExecutor(len(ports))
    tries = {pool.submit(reach, address, port, seconds): port for port in ports}
    pool.shutdown(wait=False)
    end = time.monotonic() + seconds + _TOGETHER_SECONDS
    waiting = set(tries)
    while waiting and time.monotonic() < end:
        done, waiting = wait(waiting, timeout=max(0.0, end - time.monotonic()), return_when=FIRST_COMPLETED)
        if any(tried.result().reach is Reach.ACCEPTED for tried in done):
            end = min(end, time.monotonic() + _TOGETHER_SECONDS)
    silent = Reached(reach=Reach.DROPPED, address=address, seconds=seconds)
    return {port: tried.result() if tried.done() else silent for tried, port in tries.items()}


def answers(address: str, ports: Sequence[int], seconds: float) -> bool:
    """Does that host's kernel say anything at all: that somebody listens there, or that nobody does?"""
    return any(met.reach in (Reach.ACCEPTED, Reach.REFUSED) for met in knock(address, ports, seconds).values())
