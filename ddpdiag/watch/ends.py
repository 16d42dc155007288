"""`EndOrder`: the order in which ranks end, and how.

A launcher finds several ranks dead at once: torchrun looks every 0.1 s, and gloo ends the other ranks within
milliseconds. The kernel tells of each end at its moment.
"""

import errno
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from ddpdiag.probes.host.kernel import PROC, stat_of
from ddpdiag.watch.processes import Process


class End(NamedTuple):
    """The end of a rank: its time (time.monotonic), and its exit code (negative: a signal; None: not known)."""

    at: float
    code: int | None


def exit_code_of(pid: int, root: Path = PROC) -> int | None:
    """Read the exit code of an ended process (field 52 of proc_pid_stat(5)); None if its parent has reaped it."""
    _, fields = stat_of(root / str(pid))
    return os.waitstatus_to_exitcode(int(fields[49])) if len(fields) > 49 and fields[0] == "Z" else None


class EndOrder:
    """Waits for the ends of ranks in a thread of its own, which calls `notify` after each end.

    `ends` has the ranks that have ended, the first one first. `all_ended`: they are all that were followed.
    `are_missing`: nothing tells when a process ends, because the kernel is older than 5.3, or Python was built for such
    a kernel, as conda's is.
    """

    def __init__(self, notify: Callable[[], object] = lambda: None) -> None:
        self._notify = notify
        self._processes: dict[int, tuple[int, int]] = {}  # rank and pid by the descriptor of the process
        self._pids: dict[int, int] = {}  # by rank
        self._poll = select.epoll()
        self.ends: dict[int, End] = {}
        self.are_missing = False
        threading.Thread(target=self._wait, daemon=True).start()

    @property
    def all_ended(self) -> bool:
        return bool(self.ends) and not self._processes

    def follow(self, ranks: Mapping[int, Process]) -> None:
        """Wait for the ends of these ranks, too. Forget earlier ends of ranks that were started anew."""
        for rank, process in ranks.items():
            if self._pids.get(rank) == process.pid or process.state in "ZX":
                continue
            if not hasattr(os, "pidfd_open"):
                self.are_missing = True
                return
            try:
                descriptor = os.pidfd_open(process.pid)
            except OSError as error:  # it has ended, or the kernel is too old
                self.are_missing |= error.errno != errno.ESRCH
                continue
            self.ends.pop(rank, None)
            self._pids[rank] = process.pid
            self._processes[descriptor] = rank, process.pid
            self._poll.register(descriptor, select.EPOLLIN)

    def _wait(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():  # in the order in which they ended
                rank, pid = self._processes[descriptor]
                self.ends[rank] = End(time.monotonic(), exit_code_of(pid))
                self._poll.unregister(descriptor)
                del self._processes[descriptor]
                os.close(descriptor)
                self._notify()
