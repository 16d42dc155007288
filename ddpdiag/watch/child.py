"""Start the command of `ddpdiag watch` as if it were not watched, pass signals on to it, and exit as it does.

The command stays in the process group and session of `ddpdiag watch`, as under `env` and `nice`: a signal of a terminal
or a batch system to the group reaches the command directly, SIGKILL included. In a group of its own (as under tini)
it would need the terminal, and would outlive `kill -9 -- -PGID`. A signal to `ddpdiag watch` alone is passed
on. One to the group is not: a second SIGTERM keeps torchrun from ending its ranks. A probe process tells which it is.
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

# Signals that are passed on to the command. SIGUSR1 is not: it requests a look at the ranks.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED = (*ENDING, signal.SIGUSR2, signal.SIGCONT, signal.SIGTSTP)
AWAITED = frozenset({*PASSED, signal.SIGUSR1, signal.SIGCHLD})
_SI_KERNEL = 0x80  # include/uapi/asm-generic/siginfo.h
# The exit codes of env, nohup and timeout (coreutils: EXIT_CANNOT_INVOKE, EXIT_ENOENT).
_CANNOT_INVOKE, _NOT_FOUND = 126, 127
# Python ignores these signals; the command shall not inherit that.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
# How long the probe waits for a signal: slurmstepd reads a file of each process before it signals the next one.
_PROBE_SECONDS, _PARENT_SECONDS = 0.1, 1.0
_PROBE_NAME = "watch-signals"  # `pkill ddpdiag` shall not match it


class NotStarted(UserError):
    """The command could not be started."""

    def __init__(self, command: str, error: OSError) -> None:
        super().__init__(f"{command}: {error.strerror or error}")
        self.exit_code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _CANNOT_INVOKE


class Signal(NamedTuple):
    """A signal that this process received, and whether the command received the signal, too."""

    signum: int
    shared: bool


class Child:
    """The watched command. `status` is its wait status, or None while it runs."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], descriptors: Mapping[int, int]) -> None:
        """Start the command; `descriptors` maps its standard descriptors to ours. Signals wait for `next_signal`."""
        # If it is ignored, as a parent may have left it, no child can be waited for.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
        self._probe = SignalProbe()
        actions = [(os.POSIX_SPAWN_DUP2, ours, number) for number, ours in descriptors.items()]
        try:
            self.pid = os.posix_spawnp(
                command[0], list(command), env, file_actions=actions, setsigmask=mask, setsigdef=_IGNORED_BY_PYTHON
            )
        except OSError as error:
            self._probe.end()
            raise NotStarted(command[0], error) from error
        self.status: int | None = None

    def next_signal(self, seconds: float) -> Signal | None:
        """Wait at most `seconds` for the next signal. Returns None if none comes."""
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
        """Reap the command if it has ended, and return whether it has. Its children may still run."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
            if pid:
                self._probe.end()
        return self.status is not None

    def send(self, signum: int) -> str:
        """Send a signal to the command unless it has ended. Returns a sentence if the kernel refuses, else ""."""
        if not self.is_over():
            try:
                os.kill(self.pid, signum)  # not reaped yet, so the pid cannot belong to another process
            except PermissionError:  # sudo started it
                process = read_process(self.pid)
                name = f"pid {self.pid}" + (f" ({readable(process.name)})" if process is not None else "")
                refused = f"user {os.geteuid()} is not permitted to signal {name}."
                return f"{signal.Signals(signum).name} is not passed on: {refused}"
        return ""


class SignalProbe:
    """A child in the same process group, which shows whether a signal was sent to this process alone or to the group.

    A signal carries its sender, not its target: `kill -- -PGID` of a shell looks like `kill PID`; `timeout` sends to
    this process and to the group; slurmstepd to the group (proctrack/pgid), to its own children only (proctrack/cgroup)
    or to every process of the step (SignalChildrenProcesses); systemd and `docker stop` as configured. So a child in
    the group waits for signals, writes each into a pipe, and ends soon after this process has ended.
    """

    def __init__(self) -> None:
        """Fork the probe process. The caller has blocked the signals already."""
        self._pipe, writer = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _report_signals(writer, parent)
        os.close(writer)
        self._signals: set[int] = set()  # that the probe received, and `received` has not returned yet
        self.runs = True

    def received(self, signum: int) -> bool:
        """Wait a moment for the probe to receive the signal, too, and return whether it did."""
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
        os.kill(self._pid, signal.SIGKILL)  # not reaped yet, so the pid cannot belong to another process
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        os.close(self._pipe)
        self.runs = False


def _report_signals(pipe: int, parent: int) -> None:
    """Run the probe process; never returns. It must hold no descriptor for whose end a reader waits."""
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
    """Return the exit code of a command that exited. If a signal killed it, end this process by the same signal."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a second core dump must not overwrite the command's
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os.kill(os.getpid(), -code)
    return 128 - code
