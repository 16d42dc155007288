"""A command that is started as if we were not there, and whose end becomes ours.

It stays in our process group and session: what a terminal or a batch system sends to the group reaches it without us.
A signal that was sent to us alone is passed on; one that the terminal sent (si_code SI_KERNEL) is not, because the
command has it already, nor one of `timeout` or slurmstepd, which send it to the whole group or step. A second SIGTERM
would keep torchrun from ending its ranks. Whoever else signals the group reaches the command twice.
"""

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from ddpdiag.errors import Explained
from ddpdiag.probes.files import read_text
from ddpdiag.probes.tree import read_task

# Passed on to the command. SIGUSR1 is a question to us.
PASSED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR2,
    signal.SIGCONT,
    signal.SIGTSTP,
)
HEARD = frozenset({*PASSED, signal.SIGUSR1, signal.SIGCHLD})
_SI_KERNEL = 0x80  # include/uapi/asm-generic/siginfo.h
# As env, nohup and timeout leave (coreutils: EXIT_CANNOT_INVOKE, EXIT_ENOENT).
_POLL_SECONDS = 0.1
_CANNOT_INVOKE, _NOT_FOUND = 126, 127
# Python ignores these in itself; the command shall not.
_PYTHONS_OWN = (signal.SIGPIPE, signal.SIGXFSZ)


class NotStarted(Explained):
    """The command could not be started."""

    def __init__(self, command: str, error: OSError) -> None:
        super().__init__(f"{command}: {error.strerror or error}")
        self.exit_code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _CANNOT_INVOKE


class Heard(NamedTuple):
    """A signal that we got, and whether the command got it, too."""

    signum: int
    shared: bool


class Wrapped:
    """The running command."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], descriptors: Mapping[int, int]) -> None:
        """Start it; `descriptors` replaces some of its standard descriptors. Signals wait until `hear`."""
        signal.signal(
            signal.SIGCHLD, signal.SIG_DFL
        )  # ignored, as a parent may have left it, nobody could be waited for
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
        actions = [(os.POSIX_SPAWN_DUP2, own, number) for number, own in descriptors.items()]
        try:
            self.pid = os.posix_spawnp(
                command[0], list(command), env, file_actions=actions, setsigmask=mask, setsigdef=_PYTHONS_OWN
            )
        except OSError as error:
            raise NotStarted(command[0], error) from error
        self.status: int | None = None

    def hear(self, seconds: float) -> Heard | None:
        """The next signal within so many seconds, or None."""
        told = signal.sigtimedwait(HEARD, max(0.0, seconds))
        return None if told is None else Heard(told.si_signo, told.si_code == _SI_KERNEL or _is_to_all(told.si_pid))

    def is_over(self) -> bool:
        """Has it ended? Its own children may live on."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status is not None

    def send(self, signum: int) -> None:
        """A signal for it; it was not waited for yet, so its number is still its own."""
        if not self.is_over():
            _kill(self.pid, signum)  # sudo's may not be signalled by us


def _is_to_all(sender: int) -> bool:
    """Does this process send its signals to more than us?"""
    task = read_task(sender) if sender > 0 else None
    if task is None or task.name != "timeout":
        return task is not None and task.name == "slurmstepd"
    words = (read_text(Path("/proc") / str(sender) / "cmdline") or "").split("\0")
    options = list(takewhile(lambda word: word.startswith("-"), words[1:]))
    with contextlib.suppress(ProcessLookupError, PermissionError):
        return os.getpgid(sender) == os.getpgrp() and not {"--foreground", "-f"} & set(options)
    return False


def stop_ourselves() -> None:
    """As SIGTSTP would have done, until somebody sends SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


def end_all(command: Wrapped, others: Sequence[int], living: Callable[[], Sequence[int]], grace_seconds: float) -> None:
    """SIGTERM to the command and its fellows on this host, which end their ranks; what is left after the grace is
    killed."""
    command.send(signal.SIGTERM)
    for pid in others:
        _kill(pid, signal.SIGTERM)
    end = time.monotonic() + grace_seconds
    while time.monotonic() < end and not (command.is_over() and not living()):
        time.sleep(_POLL_SECONDS)
    while (left := living()) and time.monotonic() < end + grace_seconds:
        for pid in left:
            _kill(pid, signal.SIGKILL)
        command.is_over()
        time.sleep(_POLL_SECONDS)


def _kill(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def leave_as(status: int) -> int:
    """The exit code of a command that exited; one that a signal killed takes us along, by the same signal."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its core dump is not to be overwritten by ours
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os.kill(os.getpid(), -code)
    return 128 - code
