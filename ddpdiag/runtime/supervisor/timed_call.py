"""A call in a process of its own, which is ended when its time is over.

Whatever holds the call up (a file server that does not answer, a driver), the process that watches over it waits on
local descriptors only, says where the call stood, and leaves in time. The reader of its output is not held up either by
a call that cannot be ended.
"""

import contextlib
import itertools
import os
import select
import signal
import stat
import threading
import time
from collections.abc import Callable, Sequence

from ddpdiag.errors import ExitCode, RunLost
from ddpdiag.runtime.deadlines import DEADLINES
from ddpdiag.runtime.supervisor.ipc import StepPage
from ddpdiag.runtime.supervisor.processes import Child, ForkedChildren, Signals, how_it_ended

_LOOK_SECONDS = 0.1
_BLOCK_BYTES = 65536

Announce = Callable[[str], None]


# Standard output and error -------------------------------------------------------------------------------------------


class StdioPipe:
    """What is written to `outer` (the first of them is used) in another process reaches it by way of this one.

    bash's $( ) and subprocess.run read until the last process that has the pipe open has ended. One that survives
    SIGKILL, stuck in the kernel, would hold them up for ever; with a pipe of our own no reader waits for it.
    """

    def __init__(self, outer: tuple[int, ...]) -> None:
        self.outer = outer
        self._source, self._inner = os.pipe()
        self._stopped, self._stop = os.pipe()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def enter(self) -> None:
        """In the child: write to us."""
        for descriptor in self.outer:
            os.dup2(self._inner, descriptor)
        for descriptor in (self._source, self._inner, self._stopped, self._stop):
            os.close(descriptor)

    def begin(self) -> None:
        """In the parent, after the fork: pass on what comes."""
        os.close(self._inner)
        self._thread.start()

    def end(self, seconds: float) -> bool:
        """Pass on what is there by now; False where the reader did not take it in this time.

        OSError where standard output could not be written; BrokenPipeError: its reader left.
        """
        os.close(self._stop)
        self._thread.join(max(seconds, 0))
        if self._error is not None and self.outer[0] == 1:
            raise self._error
        return not self._thread.is_alive()

    def _carry(self) -> None:
        try:
            # Only once nothing is there any more does the end count.
            while self._source in select.select([self._source, self._stopped], [], [])[0]:
                if not (block := os.read(self._source, _BLOCK_BYTES)):
                    return
                self._write(block)
        except OSError as error:
            self._error = error
        finally:
            os.close(self._source)  # so the child learns, too, that the reader left

    def _write(self, block: bytes) -> None:
        while block:
            try:
                block = block[os.write(self.outer[0], block) :]
            except BlockingIOError:  # whoever shares the pipe with us made it so
                select.select([], [self.outer[0]], [])


def open_stdio_pipes() -> Sequence[StdioPipe]:
    """One for each pipe or socket that standard output and error are; one for both where they are the same."""
    pipes = {descriptor: os.fstat(descriptor) for descriptor in (1, 2) if _has_a_reader(descriptor)}
    if len(pipes) == 2 and os.path.samestat(pipes[1], pipes[2]):
        return (StdioPipe((1, 2)),)  # what is said stays in order
    return tuple(StdioPipe((descriptor,)) for descriptor in pipes)


def _has_a_reader(descriptor: int) -> bool:
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:  # closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


# The call ------------------------------------------------------------------------------------------------------------


def call_with_deadline(call: Callable[[Announce], int], seconds: float) -> int:
    """The exit code of `call`, which runs in a child and tells by its argument what it is about to do.

    RunLost where it did not end within `seconds`, or was killed; that takes half a second more at most.
    """
    page = StepPage.create()
    end = time.monotonic() + seconds
    children = ForkedChildren(Signals(children=True))
    pipes = open_stdio_pipes()

    def call_through_pipes() -> int:
        for pipe in pipes:
            pipe.enter()
        numbers = itertools.count(1)
        return call(lambda label: page.write(next(numbers), label))

    child = children.fork(call_through_pipes)
    for pipe in pipes:
        pipe.begin()
    try:
        code = _wait(children, child, page, seconds)
    except RunLost:
        with contextlib.suppress(OSError, RunLost):  # what became of the call says more
            _hand_over(pipes, end)
        raise
    finally:
        page.close()
    _hand_over(pipes, end)
    return code


def _hand_over(pipes: Sequence[StdioPipe], end: float) -> None:
    """All that was said is passed on before we say anything; RunLost where nobody takes it."""
    end = max(end, time.monotonic() + DEADLINES.call_read)
    for pipe in pipes:
        if not pipe.end(end - time.monotonic()):
            raise RunLost("the reader of the report did not take it in time")


def _wait(children: ForkedChildren, child: Child, page: StepPage, seconds: float) -> int:
    """The child's exit code; RunLost, once it is ended, when its time is over."""
    code = _exit_code(children, seconds - DEADLINES.call_term)
    if code is None:
        where = f"{_where(child, page)} when its {seconds:g} s were over"  # fixed before anything disturbs it
        children.send(signal.SIGTERM)
        code = _exit_code(children, DEADLINES.call_term)
        if code == ExitCode.TERMINATED and children.signals.told is None:
            return ExitCode.UNKNOWN  # the time was over; no user or scheduler ended the run
        if code is None:
            children.send(signal.SIGKILL)
            survived = _exit_code(children, DEADLINES.call_kill) is None
            raise RunLost(f"{where}; {'it survived SIGKILL' if survived else 'it was killed'}, nothing was judged")
    if code < 0:
        raise RunLost(f"{_where(child, page)} when it was {how_it_ended(code)}; nothing was judged")
    return code


def _exit_code(children: ForkedChildren, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while children.running and (left := end - time.monotonic()) > 0:
        children.wait(min(left, _LOOK_SECONDS))
    return children.exit_codes.get(0)


def _where(child: Child, page: StepPage) -> str:
    """Such as "pid 77 (state D, waiting in nfs_wait_bit_killable) stood at 'write the report' for 4.1 s"."""
    state = child.state()
    how = ", waiting in ".join(filter(None, (f"state {state.state}" if state.state else "", state.wchan)))
    _, label = page.read()
    at = f"'{label}' for {page.seconds():.1f} s" if label else "its start"
    return f"pid {state.pid}{f' ({how})' if how else ''} stood at {at}"
