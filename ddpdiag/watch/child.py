"""The command as a child of `ddpdiag watch`, started as if it were not watched; its exit code is that of the watch.

It stays in the process group and session of the watch, as under `env` and `nice`: a signal of a terminal or a batch
system to the group reaches it directly, SIGKILL included. In a group of its own (tini, dumb-init) it would have to be
given the terminal, and would outlive `kill -9 -- -PGID`. A signal to the watch alone is passed on, one to its group
not, because a second SIGTERM keeps torchrun from ending its ranks. A probe process shows which one it was.
"""

import contextlib
import os
import resource
import select
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ddpdiag.codec import readable
from ddpdiag.errors import UserError
from ddpdiag.watch.processes import read_process

# Passed on to the command. SIGUSR1 requests a look.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED = (*ENDING, signal.SIGUSR2, signal.SIGCONT, signal.SIGTSTP)
AWAITED = frozenset({*PASSED, signal.SIGUSR1, signal.SIGCHLD})
_SI_KERNEL = 0x80  # include/uapi/asm-generic/siginfo.h
# The exit codes of env, nohup and timeout (coreutils: EXIT_CANNOT_INVOKE, EXIT_ENOENT).
_CANNOT_INVOKE, _NOT_FOUND = 126, 127
# Python ignores these in itself; the command shall not.
_PYTHONS_OWN = (signal.SIGPIPE, signal.SIGXFSZ)
# slurmstepd reads a file of each process before it signals the next one.
_PROBE_SECONDS, _PARENT_SECONDS = 0.1, 1.0
_PROBE_NAME = "watch-signals"  # `pkill ddpdiag` shall not match it


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
            return None
        if info.si_signo not in PASSED or self.is_over() or os.getpgid(self.pid) != os.getpgrp():
            return Signal(info.si_signo, shared=False)
        shared = self._probe.received(info.si_signo)
        if shared:
            signal.sigtimedwait({info.si_signo}, 0)  # timeout(1) signals this process first, then its group
        return Signal(info.si_signo, shared or (info.si_code == _SI_KERNEL and not self._probe.runs))

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
        if not self.is_over():
            try:
                os.kill(self.pid, signum)
            except PermissionError:  # sudo started it
                process = read_process(self.pid)
                name = f"pid {self.pid}" + (f" ({readable(process.name)})" if process is not None else "")
                refused = f"user {os.geteuid()} is not permitted to signal {name}."
                return f"{signal.Signals(signum).name} is not passed on: {refused}"
        return ""


class SignalProbe:
    """A process of the same group that shows whether a signal was sent to this process alone, or to the whole group.

    A signal carries its sender, not its target: `kill -- -PGID` of a shell looks like `kill PID`; `timeout` sends to
    this process and to the group; slurmstepd to the group (proctrack/pgid), to its own children only (proctrack/cgroup)
    or to every process of the step (SignalChildrenProcesses); systemd and `docker stop` as configured. So a child in
    the group waits for signals, writes each into a pipe, and ends soon after this process has ended.
    """

    def __init__(self) -> None:
        """Start it; the signals are blocked already."""
        self._pipe, writer = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _report_signals(writer, parent)
        os.close(writer)
        self._signals: set[int] = set()  # received, and not asked for yet
        self.runs = True

    def received(self, signum: int) -> bool:
        """Whether it received the signal as well as this process."""
        while signum not in self._signals and select.select([self._pipe], [], [], _PROBE_SECONDS)[0]:
            received = os.read(self._pipe, len(PASSED))
            if not received:
                self.runs = False
                break
            self._signals.update(received)
        shared = signum in self._signals
        self._signals.discard(signum)
        return shared

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)  # it was not waited for yet, so its number is still its own
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        os.close(self._pipe)
        self.runs = False


def _report_signals(pipe: int, parent: int) -> None:
    """The probe's process. It must hold no descriptor that a reader waits for, and never return."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        os.closerange(3, pipe)
        os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX"))
        with open("/proc/self/comm", "w") as name:
            name.write(_PROBE_NAME)
        while os.getppid() == parent:
            if (info := signal.sigtimedwait(PASSED, _PARENT_SECONDS)) is not None:
                os.write(pipe, bytes((info.si_signo,)))
    finally:
        os._exit(0)


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
