"""The command as a child of `ddpdiag watch`, started as if it were not watched; its exit code is that of the watch.

It stays in the process group and session of the watch, as under `env` and `nice`: a signal of a terminal or a batch
system to the group reaches it directly, SIGKILL included. In a group of its own (tini, dumb-init) it would have to be
given the terminal, and would outlive `kill -9 -- -PGID`. A signal to the watch alone is passed on, one to its group
not, because a second SIGTERM keeps torchrun from ending its ranks. A probe process shows which one it was.
"""

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ddpdiag.codec import readable
from ddpdiag.errors import UserError
from ddpdiag.probes.host.kernel import PROC, read_pairs
from ddpdiag.watch.processes import read_process

# Passed on to the command. SIGUSR1 requests a look.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED = (*ENDING, signal.SIGUSR2, signal.SIGCONT, signal.SIGTSTP)
AWAITED = frozenset({*PASSED, signal.SIGUSR1, signal.SIGCHLD})
_SI_KERNEL = 0x80  # include/uapi/asm-generic/siginfo.h
_POLL_SECONDS = 0.1
# The exit codes of env, nohup and timeout (coreutils: EXIT_CANNOT_INVOKE, EXIT_ENOENT).
_CANNOT_INVOKE, _NOT_FOUND = 126, 127
# Python ignores these in itself; the command shall not.
_PYTHONS_OWN = (signal.SIGPIPE, signal.SIGXFSZ)
# slurmstepd reads a file of each process before it signals the next one.
_PROBE_SECONDS, _PROBE_POLL_SECONDS = 0.1, 0.005
_PROBE_PROGRAM = "cat"  # a program of its own, for `pkill ddpdiag` shall not meet it


class NotStarted(UserError):
    """The command could not be started."""

    def __init__(self, command: str, error: OSError) -> None:
        super().__init__(f"{command}: {error.strerror or error}")
        self.exit_code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _CANNOT_INVOKE


class Signal(NamedTuple):
    """A signal that this process received, and whether the command received it, too."""

    signum: int
    shared: bool


class Child:
    """The running command."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], descriptors: Mapping[int, int]) -> None:
        """Start it; `descriptors` replaces some of its standard descriptors. Signals wait until `next_signal`."""
        # Ignored, as a parent may have left it, no child could be waited for.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
        self._probe = SignalProbe()
        actions = [(os.POSIX_SPAWN_DUP2, ours, number) for number, ours in descriptors.items()]
        try:
            self.pid = os.posix_spawnp(
                command[0], list(command), env, file_actions=actions, setsigmask=mask, setsigdef=_PYTHONS_OWN
            )
        except OSError as error:
            self._probe.end()
            raise NotStarted(command[0], error) from error
        self.status: int | None = None

    def next_signal(self, seconds: float) -> Signal | None:
        """The next signal within so many seconds, or None."""
        info = signal.sigtimedwait(AWAITED, max(0.0, seconds))
        if info is None:
            self._probe.forget()
            return None
        if info.si_signo not in PASSED or self.is_over() or os.getpgid(self.pid) != os.getpgrp():
            return Signal(info.si_signo, shared=False)
        seen = self._probe.received(info.si_signo)
        if seen:
            signal.sigtimedwait({info.si_signo}, 0)  # timeout(1) signals this process first, then its group
        return Signal(info.si_signo, info.si_code == _SI_KERNEL if seen is None else seen)

    def is_over(self) -> bool:
        """Whether it has ended; its children may still run."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
            if pid:
                self._probe.end()
        return self.status is not None

    def send(self, signum: int) -> str:
        """A signal for it; it was not waited for yet, so its number is still its own. A sentence if it is refused."""
        if self.is_over() or _kill(self.pid, signum):
            return ""
        return f"{signal.Signals(signum).name} is not passed on: {_refused([self.pid])}"


class SignalProbe:
    """A process of the same group that shows whether a signal was sent to this process alone, or to the whole group.

    A signal carries its sender, not its target: `kill -- -PGID` of a shell looks like `kill PID`; `timeout` sends to
    this process and to the group; slurmstepd to the group (proctrack/pgid), to its own children only (proctrack/cgroup)
    or to every process of the step (SignalChildrenProcesses); systemd and `docker stop` as configured. So a `cat` in
    the group waits, with all signals blocked, for the end of a pipe that this process holds, and ends whenever this
    process ends. A signal to the group is pending there (ShdPnd of proc(5)), and stays so: the `cat` is replaced then.
    """

    def __init__(self) -> None:
        self._pid: int | None = None
        self._pipe: int | None = None
        self._simultaneous = 0
        self._start()

    def received(self, signum: int) -> bool | None:
        """Whether it also received a signal that this process has just received; None if it does not run."""
        bit, end = 1 << signum - 1, time.monotonic() + _PROBE_SECONDS
        while (pending := self._pending()) is not None and not pending & bit:
            if time.monotonic() > end:
                return False
            time.sleep(_PROBE_POLL_SECONDS)
        self._replace()
        if pending is None:
            return None
        self._simultaneous = pending & ~bit  # sent at the same time, received one after the other
        return True

    def forget(self) -> None:
        """This process received no signal: what is pending was for the probe alone (`pkill cat`), and means nothing."""
        if self._pending() and not signal.sigpending():
            self._replace()

    def end(self) -> None:
        """End it."""
        if self._pid is None or self._pipe is None:
            return
        os.kill(self._pid, signal.SIGKILL)  # it was not waited for yet, so its number is still its own
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        os.close(self._pipe)
        self._pid = self._pipe = None

    def _replace(self) -> None:
        self._simultaneous = 0
        if self._pid is not None:
            self.end()
            self._start()

    def _start(self) -> None:
        held, pipe = os.pipe()
        actions = [
            (os.POSIX_SPAWN_DUP2, held, 0),
            *((os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_WRONLY, 0) for descriptor in (1, 2)),
        ]
        mask = signal.valid_signals()
        try:
            self._pid = os.posix_spawnp(_PROBE_PROGRAM, [_PROBE_PROGRAM], {}, file_actions=actions, setsigmask=mask)
            self._pipe = pipe
        except OSError:
            os.close(pipe)
        finally:
            os.close(held)

    def _pending(self) -> int | None:
        """Signals that are pending there, as a mask; None if it does not run."""
        if self._pid is None:
            return None
        status = read_pairs(PROC / str(self._pid) / "status", ":")
        if status.get("State", "Z")[0] in "ZX":
            return None
        return self._simultaneous | int(status.get("ShdPnd", "0"), 16)


def end_all(command: Child, others: Sequence[int], living: Callable[[], Sequence[int]], grace_seconds: float) -> str:
    """SIGTERM to the command and to those of its peers on this host, which end their ranks; SIGKILL to what still runs
    after the grace. A sentence on these, and on processes that this user may not signal."""
    command.send(signal.SIGTERM)
    for pid in others:
        _kill(pid, signal.SIGTERM)
    killed: dict[int, str] = {}
    refused: list[int] = []
    end = time.monotonic() + grace_seconds
    while time.monotonic() < end and not (command.is_over() and not living()):
        time.sleep(_POLL_SECONDS)
    while (left := living()) and time.monotonic() < end + grace_seconds:
        names = dict(zip(left, _named(left), strict=True))
        refused = [pid for pid in left if not _kill(pid, signal.SIGKILL)]
        killed |= {pid: name for pid, name in names.items() if pid not in refused}
        command.is_over()
        time.sleep(_POLL_SECONDS)
    sentences = [f"--kill: SIGKILL to {', '.join(killed.values())}, still running {grace_seconds:g} s after SIGTERM."]
    return " ".join([*(sentences if killed else ()), *([f"Not ended: {_refused(refused)}"] if refused else ())])


def _kill(pid: int, signum: int) -> bool:
    """False if the signal is not permitted, as to a process that sudo started."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass
    except PermissionError:
        return False
    return True


def _refused(pids: Sequence[int]) -> str:
    known = ", ".join(name for name in _named(pids) if name.endswith(")"))
    return f"user {os.geteuid()} is not permitted to signal {known or 'its processes'}."


def _named(pids: Sequence[int]) -> list[str]:
    """Such as "pid 7 (python)"; "pid 7" where it has ended."""
    seen = [(pid, read_process(pid)) for pid in pids]
    return [f"pid {pid}" + (f" ({readable(process.name)})" if process is not None else "") for pid, process in seen]


def leave_as(status: int) -> int:
    """The exit code of a command that exited; if a signal killed it, this process ends by the same signal."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a second core dump must not overwrite the command's
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os.kill(os.getpid(), -code)
    return 128 - code
