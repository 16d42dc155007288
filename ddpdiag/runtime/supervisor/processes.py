"""A child that does not outlive its parent, and descriptors that a child does not share by accident."""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from ddpdiag.foreign import without_secrets
from ddpdiag.probes.procfs import cpu_ticks, process_state
from ddpdiag.runtime.supervisor.ipc import nameless_file

# Has a worker or nursery write its Python stack to a file; the handler is in C and needs no GIL (faulthandler).
DUMP_SIGNAL = signal.SIGUSR1

_PR_SET_PDEATHSIG = 1
_OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)  # before the control server raises it
# Ten clock ticks: who computes uses one of them, even beside many others.
_BUSY_SECONDS = 0.1


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


class Log:
    """A child's standard output and error, in a file without a name: a pipe would hang whoever reads it."""

    def __init__(self) -> None:
        self._descriptor = nameless_file("ddpdiag-log")

    def fileno(self) -> int:
        """Descriptor for the child."""
        return self._descriptor

    def close(self) -> None:
        """Give back the descriptor."""
        os.close(self._descriptor)

    def tail(self, size: int = 4000, since: int = 0) -> str:
        """Its last `size` bytes written after offset `since`, as text without secrets."""
        end = self.size()
        start = max(since, end - size)
        return without_secrets(os.pread(self._descriptor, max(0, end - start), start).decode(errors="replace")).strip()

    def size(self) -> int:
        """Bytes written so far."""
        return os.fstat(self._descriptor).st_size


def start_python(module: str, arguments: list[str], passed: tuple[int, ...], env: Mapping[str, str], log: Log) -> int:
    """Start `python -m module` with these descriptors; returns its pid at once."""
    process = subprocess.Popen(
        # -P: a module in the user's current directory must not take the place of one of the standard library.
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log.fileno(),
        stderr=log.fileno(),
        pass_fds=passed,
        env=with_home(env),
    )
    process.returncode = 0  # we reap it ourselves, by pid
    with contextlib.suppress(
        OSError, AttributeError
    ):  # rank 0 raised its own limit for the control server; checks look at the user's
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, _OPEN_FILES)
    return process.pid


def with_home(env: Mapping[str, str]) -> dict[str, str]:
    """The environment in which `-P` finds this package, too, where it runs from a source tree and is not installed."""
    home = str(Path(__file__).parents[3])
    if home in sys.path[1:] or sys.path[0] not in ("", home) or os.getcwd() != home:
        return dict(env)
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, (env.get("PYTHONPATH"), home)))}


def reap(pid: int) -> int | None:
    """Exit code of our own child if it ended, negative for a signal; None while it lives."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if done else None


def signal_process(pid: int, signum: int) -> None:
    """Send a signal; a process that is gone is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def is_alive(pid: int) -> bool:
    """Is there such a process that is not a zombie?"""
    state, _ = process_state(pid)
    return state is not None and state not in "ZX"


def is_busy(pid: int) -> bool:
    """Does a process use a core right now? Looks for 0.1 s."""
    before = cpu_ticks(pid)
    time.sleep(_BUSY_SECONDS)
    after = cpu_ticks(pid)
    return before is not None and after is not None and after > before


def how_it_ended(code: int | None) -> str:
    """An exit code in words."""
    match code:
        case None:
            return "the process vanished; its exit code is unknown"
        case int() if code < 0:
            return f"killed by {signal_name(-code)}"
        case _:
            return f"left with exit code {code} before it answered"


def signal_name(number: int) -> str:
    """SIGSEGV for 11."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# Signals -------------------------------------------------------------------------------------------------------------

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
