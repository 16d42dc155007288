"""A command that is started as if we were not there, and whose end becomes ours.

It stays in our process group and session, as under `env` and `nice`: what a terminal or a batch system sends to the
group reaches it without us, SIGKILL among it. In a group of its own (tini, dumb-init) it would have to be handed the
terminal, and would outlive `kill -9 -- -PGID`. A signal that was sent to us alone is passed on; one that the group has
got is not, for a second SIGTERM keeps torchrun from ending its ranks. Which one it was, a bystander tells.
"""

import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ddpdiag.codec import readable
from ddpdiag.errors import Explained
from ddpdiag.watch.processes import read_task
from ddpdiag.watch.signal_probe import Bystander

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
_POLL_SECONDS = 0.1
# As env, nohup and timeout leave (coreutils: EXIT_CANNOT_INVOKE, EXIT_ENOENT).
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
        self._bystander = Bystander()
        actions = [(os.POSIX_SPAWN_DUP2, own, number) for number, own in descriptors.items()]
        try:
            self.pid = os.posix_spawnp(
                command[0], list(command), env, file_actions=actions, setsigmask=mask, setsigdef=_PYTHONS_OWN
            )
        except OSError as error:
            self._bystander.leave()
            raise NotStarted(command[0], error) from error
        self.status: int | None = None

    def hear(self, seconds: float) -> Heard | None:
        """The next signal within so many seconds, or None."""
        told = signal.sigtimedwait(HEARD, max(0.0, seconds))
        if told is None:
            self._bystander.forget()
            return None
        return Heard(told.si_signo, told.si_signo in PASSED and self._has(told))

    def _has(self, told: signal.struct_siginfo) -> bool:
        """Has the command got it without us?"""
        if self.is_over() or os.getpgid(self.pid) != os.getpgrp():
            return False
        seen = self._bystander.saw(told.si_signo)
        if seen:
            signal.sigtimedwait({told.si_signo}, 0)  # timeout(1) sends to us first, and then to the group, us among it
        return told.si_code == _SI_KERNEL if seen is None else seen

    def is_over(self) -> bool:
        """Has it ended? Its own children may live on."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
            if pid:
                self._bystander.leave()
        return self.status is not None

    def send(self, signum: int) -> str:
        """A signal for it; it was not waited for yet, so its number is still its own. A sentence if it is refused."""
        if self.is_over() or _kill(self.pid, signum):
            return ""
        return f"{signal.Signals(signum).name} is not passed on: {_refused([self.pid])}"


def stop_ourselves() -> None:
    """As SIGTSTP would have done, until somebody sends SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


def end_all(command: Wrapped, others: Sequence[int], living: Callable[[], Sequence[int]], grace_seconds: float) -> str:
    """SIGTERM to the command and its fellows on this host, which end their ranks; what is left after the grace is
    killed. A sentence if some may not be."""
    command.send(signal.SIGTERM)
    for pid in others:
        _kill(pid, signal.SIGTERM)
    refused: list[int] = []
    end = time.monotonic() + grace_seconds
    while time.monotonic() < end and not (command.is_over() and not living()):
        time.sleep(_POLL_SECONDS)
    while (left := living()) and time.monotonic() < end + grace_seconds:
        refused = [pid for pid in left if not _kill(pid, signal.SIGKILL)]
        command.is_over()
        time.sleep(_POLL_SECONDS)
    return f"Not ended: {_refused(refused)}" if refused else ""


def _kill(pid: int, signum: int) -> bool:
    """False if it may not be signalled by us, as what sudo starts."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass
    except PermissionError:
        return False
    return True


def _refused(pids: Sequence[int]) -> str:
    known = [f"pid {pid} ({readable(task.name)})" for pid in pids if (task := read_task(pid)) is not None]
    return f"{', '.join(known) or 'what was started'} may not be signalled by user {os.geteuid()}."


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
