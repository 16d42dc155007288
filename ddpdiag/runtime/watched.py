"""A call in a process of its own, which is ended when its time is over.

Whatever holds the call up (a file server that does not answer, a driver), the process that watches over it waits on
local descriptors only, says where the call stood, and leaves in time. Who reads what we write is not held up either by
a call that nothing ends.
"""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence

from ddpdiag.errors import ExitCode, RunLost
from ddpdiag.model import ProcessState
from ddpdiag.probes.host.procfs import process_state
from ddpdiag.runtime.page import StepPage
from ddpdiag.runtime.passage import Passage, open_passages
from ddpdiag.runtime.running import how_it_ended
from ddpdiag.runtime.signals import LEAVE, Signals
from ddpdiag.runtime.tether import die_with_parent

# TERM, then KILL: the first half may still say something.
_TERM_SECONDS = 0.25
# A process that survives SIGKILL is stuck in the kernel; nobody waits for it any longer.
_KILL_SECONDS = 0.25
_LOOK_SECONDS = 0.1
# A reader that is only slow is given so much, also at the end of the time.
_READ_SECONDS = 0.25

Stand = Callable[[str], None]


def watched(call: Callable[[Stand], int], seconds: float) -> int:
    """The exit code of `call`, which runs in a child and tells by its argument what it is about to do.

    RunLost where it did not end within `seconds`, or was killed; that takes half a second more at most.
    """
    page = StepPage.create()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # a child must not write what we hold in a buffer once more
            stream.flush()
    end = time.monotonic() + seconds
    signals = Signals(children=True)
    passages = open_passages()
    parent = os.getpid()
    # Held back until the child has handlers of its own: what comes in between would be lost in ours.
    signal.pthread_sigmask(signal.SIG_BLOCK, LEAVE)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent(parent, signal.SIGTERM)
        for passage in passages:
            passage.enter()
        os._exit(call(_Steps(page).stand))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEAVE)
    for passage in passages:
        passage.begin()
    try:
        code = _Watch(pid, page, signals).wait(seconds)
    except RunLost:
        with contextlib.suppress(OSError, RunLost):  # what became of the call says more
            _hand_over(passages, end)
        raise
    finally:
        page.close()
    _hand_over(passages, end)
    return code


def _hand_over(passages: Sequence[Passage], end: float) -> None:
    """All that was said is passed on before we say anything; RunLost where nobody takes it."""
    end = max(end, time.monotonic() + _READ_SECONDS)
    for passage in passages:
        if not passage.end(end - time.monotonic()):
            raise RunLost("the reader of the report did not take it in time")


class _Steps:
    """The child's side: what it is about to do, and how many things came before."""

    def __init__(self, page: StepPage) -> None:
        self._page = page
        self._number = 0

    def stand(self, label: str) -> None:
        self._number += 1
        self._page.write(self._number, label)


class _Watch:
    def __init__(self, pid: int, page: StepPage, signals: Signals) -> None:
        self._pid = pid
        self._page = page
        self._signals = signals
        self._told = False

    def wait(self, seconds: float) -> int:
        """Its exit code; RunLost, once it is ended, when its time is over."""
        code = self._until(seconds - _TERM_SECONDS)
        if code is None:
            told = f"{self._where()} when its {seconds:g} s were over"  # fixed before anything disturbs it
            code = self._ended(signal.SIGTERM, _TERM_SECONDS)
            if code == ExitCode.TERMINATED and self._signals.told is None:
                return ExitCode.UNKNOWN  # the time was over; no user or scheduler ended the run
            if code is None:
                survived = self._ended(signal.SIGKILL, _KILL_SECONDS) is None
                raise RunLost(f"{told}; {'it survived SIGKILL' if survived else 'it was killed'}, nothing was judged")
        if code < 0:
            raise RunLost(f"{self._where()} when it was {how_it_ended(code)}; nothing was judged")
        return code

    def _ended(self, signum: int, seconds: float) -> int | None:
        os.kill(self._pid, signum)
        return self._until(seconds)

    def _until(self, seconds: float) -> int | None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            done, status = os.waitpid(self._pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            select.select([self._signals.woken], [], [], min(left, _LOOK_SECONDS))
            self._signals.drain()
            if self._signals.told is not None and not self._told:
                self._told = True
                os.kill(self._pid, self._signals.told)
        return None

    def _where(self) -> str:
        """Such as "pid 77 (state D, waiting in nfs_wait_bit_killable) stood at 'write the report' for 4.1 s"."""
        letter, wchan = process_state(self._pid)
        state = ProcessState(pid=self._pid, state=letter, wchan=wchan)
        how = ", waiting in ".join(filter(None, (f"state {state.state}" if state.state else "", state.wchan)))
        _, label = self._page.read()
        at = f"'{label}' for {self._page.seconds():.1f} s" if label else "its start"
        return f"pid {state.pid}{f' ({how})' if how else ''} stood at {at}"
