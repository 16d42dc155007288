"""`EndOrder`: the order in which ranks end.

A launcher finds several ranks dead at once: torchrun looks every 0.1 s, and gloo ends the other ranks within
milliseconds. The kernel tells of each end at its moment.
"""

import os
import select
import threading
from collections.abc import Mapping
from contextlib import suppress

from ddpdiag.watch.processes import Process


class EndOrder:
    """Waits for the ends of ranks in a thread of its own. On kernels older than 5.3 it learns of none."""

    def __init__(self) -> None:
        self.ranks: list[int] = []  # those that have ended, the first one first
        self._ranks: dict[int, int] = {}  # by the descriptor of the process
        self._pids: set[int] = set()
        self._poll = select.epoll()
        threading.Thread(target=self._wait, daemon=True).start()

    def follow(self, ranks: Mapping[int, Process]) -> None:
        """Wait for the ends of these ranks, too. Forget earlier ends of ranks that were started anew."""
        for rank, process in ranks.items():
            if process.pid in self._pids:
                continue
            self._pids.add(process.pid)
            if rank in self.ranks:
                self.ranks.remove(rank)
            with suppress(OSError):  # it has ended, or the kernel is too old
                descriptor = os.pidfd_open(process.pid)
                self._ranks[descriptor] = rank
                self._poll.register(descriptor, select.EPOLLIN)

    def _wait(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():  # in the order in which they ended
                self._poll.unregister(descriptor)
                self.ranks.append(self._ranks.pop(descriptor))
                os.close(descriptor)
