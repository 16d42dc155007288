"""Was a signal sent to us alone, or to our whole process group as well? A process beside us that does nothing shows it.

A signal says who has sent it, and not to whom: `kill -- -PGID` of a shell looks like `kill PID`; `timeout` sends to us
and to the group; slurmstepd to the group (proctrack/pgid), to its own children only (proctrack/cgroup) or to every
process of the step (SignalChildrenProcesses); systemd and `docker stop` as they are set up. So nobody is judged by his
name: a `cat` of our group waits with all signals blocked for the end of a pipe that we hold, and so ends with us
however we end. What was sent to the group is pending there (ShdPnd of proc(5)), and does not go away by itself, so that
it is replaced each time. It is a program of its own, for `pkill ddpdiag` shall not meet it.
"""

import contextlib
import os
import signal
import time

from ddpdiag.probes.host.files import read_pairs
from ddpdiag.probes.host.procfs import PROC

# slurmstepd reads a file of each process before it signals the next one.
_PATIENCE_SECONDS = 0.1
_POLL_SECONDS = 0.005
_PROGRAM = "cat"


class Bystander:
    """In our process group from here on."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._line: int | None = None
        self._owed = 0
        self._stand()

    def saw(self, signum: int) -> bool | None:
        """Did a signal that we have just got reach it, too? None where there is nobody to ask."""
        bit, end = 1 << signum - 1, time.monotonic() + _PATIENCE_SECONDS
        while (pending := self._pending()) is not None and not pending & bit:
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_SECONDS)
        self._replace()
        if pending is None:
            return None
        self._owed = pending & ~bit  # they came at the same time, and we are told one after the other
        return True

    def forget(self) -> None:
        """We have heard of nothing: what is pending now was for it alone, as by `pkill cat`, and is no sign later."""
        if self._pending() and not signal.sigpending():
            self._replace()

    def leave(self) -> None:
        """End it."""
        if self._pid is None or self._line is None:
            return
        os.kill(self._pid, signal.SIGKILL)  # it was not waited for yet, so its number is still its own
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        os.close(self._line)
        self._pid = self._line = None

    def _replace(self) -> None:
        self._owed = 0
        if self._pid is not None:
            self.leave()
            self._stand()

    def _stand(self) -> None:
        held, line = os.pipe()
        actions = [
            (os.POSIX_SPAWN_DUP2, held, 0),
            *((os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_WRONLY, 0) for descriptor in (1, 2)),
        ]
        mask = signal.valid_signals()
        try:
            self._pid = os.posix_spawnp(_PROGRAM, [_PROGRAM], {}, file_actions=actions, setsigmask=mask)
            self._line = line
        except OSError:
            os.close(line)
        finally:
            os.close(held)

    def _pending(self) -> int | None:
        """Signals that wait for it, as a mask; None if it is not there."""
        if self._pid is None:
            return None
        status = read_pairs(PROC / str(self._pid) / "status", ":")
        if status.get("State", "Z")[0] in "ZX":
            return None
        return self._owed | int(status.get("ShdPnd", "0"), 16)
