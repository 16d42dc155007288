"""A child that does not outlive its parent, and descriptors that a child does not share by accident."""

import ctypes
import os
import signal

# Has a worker or nursery write its Python stack to a file; the handler is in C and needs no GIL (faulthandler).
DUMP_SIGNAL = signal.SIGUSR1

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send `signum` to this process when the thread that started it ends (prctl(2), Linux).

    If `parent` is gone already, the signal would never come, so this process ends at once.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def leave_terminal() -> None:
    """Own session, deaf to SIGINT and SIGTERM: only supervisors act on them."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
