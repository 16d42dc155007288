"""Start the command of `ddpdiag watch` as if it were not watched, pass signals on to it, and exit as it does.

The command stays in the process group and session of `ddpdiag watch`, as under `env` and `nice`, so that a signal to
the group reaches it directly, SIGKILL included. In a group of its own the command would need the terminal, and would
outlive `kill -9 -- -PGID`. A signal to `ddpdiag watch` alone is passed on. A signal to the group is not, because a
second SIGTERM keeps torchrun from ending its ranks. A probe process shows whether the group received a signal.
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

# SIGUSR1 is not passed on to the command, because it requests a look at the ranks.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
FORWARDED_SIGNALS = (*ENDING_SIGNALS, signal.SIGUSR2, signal.SIGCONT, signal.SIGTSTP)
BLOCKED_SIGNALS = frozenset({*FORWARDED_SIGNALS, signal.SIGUSR1, signal.SIGCHLD})
_SI_KERNEL = 0x80  # include/uapi/asm-generic/siginfo.h
# The exit codes of env, nohup and timeout (coreutils: EXIT_CANNOT_INVOKE, EXIT_ENOENT).
_CANNOT_INVOKE, _NOT_FOUND = 126, 127
# Python ignores these signals; the command shall not inherit that.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
# Time limits for the probe process to receive a signal (slurmstepd is slow), and to notice that its parent has ended.
_PROBE_SECONDS, _PARENT_SECONDS = 0.1, 1.0


class NotStarted(UserError):
    """Error: the command could not be started. Its exit code is that of env and nohup."""

    def __init__(self, command: str, error: OSError) -> None:
        hint = f"; --pid {command} looks at a job that runs already" if command.isdecimal() else ""
        super().__init__(f"{command}: {error.strerror or error}{hint}")
        self.exit_code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _CANNOT_INVOKE


class Signal(NamedTuple):
    """A signal that this process received. `reached_command`: the command received the signal, too."""

    signum: int
    reached_command: bool


class Child:
    """The watched command. `status` is its wait status, or None while it runs."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], descriptors: Mapping[int, int]) -> None:
        """Block BLOCKED_SIGNALS, and start the command. `descriptors`: {descriptor in the command: in this process}."""
        # A parent may have left SIGCHLD ignored. Then no child could be waited for.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
        self._probe = SignalProbe()
        actions = [(os.POSIX_SPAWN_DUP2, descriptor, number) for number, descriptor in descriptors.items()]
        try:
            self.pid = os.posix_spawnp(
                command[0], list(command), env, file_actions=actions, setsigmask=mask, setsigdef=_IGNORED_BY_PYTHON
            )
        except OSError as error:
            self._probe.end()
            raise NotStarted(command[0], error) from error
        self.status: int | None = None

    def next_signal(self, seconds: float) -> Signal | None:
        """Wait at most `seconds` for the next signal, and return it, or None if there was none."""
        info = signal.sigtimedwait(BLOCKED_SIGNALS, max(0.0, seconds))
        if info is None:
            return None
        if info.si_signo not in FORWARDED_SIGNALS or self.has_ended() or os.getpgid(self.pid) != os.getpgrp():
            return Signal(info.si_signo, reached_command=False)
        reached_group = self._probe.wait_for(info.si_signo)
        if reached_group:
            signal.sigtimedwait({info.si_signo}, 0)  # timeout(1) signals this process first, then its group
        return Signal(info.si_signo, reached_group or (info.si_code == _SI_KERNEL and not self._probe.is_running))

    def has_ended(self) -> bool:
        """Whether the command has ended. If so, reap it and end the probe process. Its children may still run."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
            if pid:
                self._probe.end()
        return self.status is not None

    def send(self, signum: int) -> str:
        """Send a signal to the command unless it has ended. Returns a sentence if the kernel refuses, else ""."""
        if not self.has_ended():
            try:
                os.kill(self.pid, signum)  # not reaped yet, so the pid cannot belong to another process
            except PermissionError:  # sudo started it
                process = read_process(self.pid)
                name = f"pid {self.pid}" + (f" ({readable(process.name)})" if process is not None else "")
                reason = f"user {os.geteuid()} is not permitted to signal {name}."
                return f"{signal.Signals(signum).name} is not passed on: {reason}"
        return ""


class SignalProbe:
    """A child in the same process group, which shows whether a signal was sent to this process alone or to the group.

    A signal tells its sender, not its target: `kill -- -PGID` looks like `kill PID`. `timeout` signals this process and
    the group. slurmstepd signals the group (proctrack/pgid), its own children only (proctrack/cgroup), or every process
    of the step (SignalChildrenProcesses). systemd and `docker stop` do as configured. So the probe process waits for
    signals, writes each into a pipe, and ends soon after this process has ended.
    """

    def __init__(self) -> None:
        """Fork the probe process. The caller must have blocked FORWARDED_SIGNALS."""
        self._pipe, writer = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _run_probe(writer, parent)
        os.close(writer)
        self._signals: set[int] = set()  # received by the probe process, but not reported by `wait_for` yet
        self.is_running = True

    def wait_for(self, signum: int) -> bool:
        """Wait up to _PROBE_SECONDS for the probe process to receive the signal, and return whether it did."""
        while signum not in self._signals and select.select([self._pipe], [], [], _PROBE_SECONDS)[0]:
            received = os.read(self._pipe, len(FORWARDED_SIGNALS))
            if not received:
                self.is_running = False
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
        self.is_running = False


def _run_probe(pipe: int, parent: int) -> None:
    """Write signals into `pipe` until `parent` has ended, and exit. No other descriptor stays open for a reader."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        os.closerange(3, pipe)
        os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX"))
        with open("/proc/self/comm", "w") as name:
            name.write("watch-signals")  # `pkill ddpdiag` must not match it
        while os.getppid() == parent:
            if (info := signal.sigtimedwait(FORWARDED_SIGNALS, _PARENT_SECONDS)) is not None:
                os.write(pipe, bytes((info.si_signo,)))
    finally:
        os._exit(0)


def exit_like(status: int) -> int:
    """Return the exit code in a wait status of the command. If a signal killed it, end this process by that signal."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a second core dump must not overwrite the command's
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os.kill(os.getpid(), -code)
    return 128 - code
