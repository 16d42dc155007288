"""Signals as something to wait for: a socket that becomes readable, and the last one that asked us to leave."""

import contextlib
import signal
import socket
from types import FrameType

LEAVE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """Catches SIGTERM, SIGINT and SIGHUP (and SIGCHLD, if asked) in the main thread."""

    def __init__(self, *, children: bool = False) -> None:
        self._told: int | None = None
        self.woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self.woken.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for signum in LEAVE:
            # nohup and batch systems start programs with SIGHUP ignored: leave it so.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._note)
        if children:
            signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, LEAVE)  # whoever forked us held them back until now

    @property
    def told(self) -> int | None:
        """The first that asked us to leave.

        Python calls handlers in the main thread, when that has a turn; before, another thread sees it in the socket.
        """
        if self._told is None:
            with contextlib.suppress(OSError):
                waiting = self.woken.recv(4096, socket.MSG_PEEK)
                self._told = next((number for number in waiting if number in LEAVE), None)
        return self._told

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        if self._told is None:
            self._told = signum

    def drain(self) -> None:
        """Forget what made the socket readable."""
        with contextlib.suppress(BlockingIOError):
            self.woken.recv(4096)
