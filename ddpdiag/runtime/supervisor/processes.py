"""Child processes with their output, state and end, and the signals that this process receives."""

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType

from ddpdiag.model import ProcessState
from ddpdiag.probes.gpu.visibility import holds_gpu
from ddpdiag.probes.host.kernel import PROC, cpu_ticks, process_state, stat_of
from ddpdiag.probes.host.programs import python_command, with_package_path
from ddpdiag.runtime.deadlines import DEADLINES
from ddpdiag.runtime.supervisor.ipc import anonymous_file
from ddpdiag.sanitize import without_secrets

# Makes a worker or fork server write its Python stacks to a file. The handler is in C and needs no GIL (faulthandler).
DUMP_SIGNAL = signal.SIGUSR1
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Signals by which a batch system warns a job (sbatch --signal=USR1@60). By default each ends the process (signal(7)).
IGNORED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)

_PR_SET_PDEATHSIG = 1
OPEN_FILES_LIMITS = resource.getrlimit(resource.RLIMIT_NOFILE)  # read before the control server raises the soft limit
_POLL_SECONDS = 0.005
_BLOCK_BYTES = 65536
_THREAD_COUNT_FIELD = 17  # index of num_threads (proc(5)) in the fields of stat_of; it also counts a zombie thread


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Make the kernel send `signum` to this process when the thread that started it ends (prctl(2), Linux).

    If `parent` has already ended, the kernel would send no signal, so this process exits at once.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def die_with_writers(pipe: int) -> None:
    """Make the kernel send SIGKILL to this process when no process holds the writing end of `pipe` any more.

    This works even if this process is stopped or holds the GIL: fcntl(2), F_SETSIG. No process ever writes to the pipe.
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    poller = select.poll()
    poller.register(pipe, 0)
    if poller.poll(0):  # no process holds it now
        os._exit(0)


def detach_from_terminal() -> None:
    """Start a new session, and ignore signals of terminal and batch system. Only the supervisor ends this process."""
    os.setsid()
    for signum in {*END_SIGNALS, *IGNORED_SIGNALS} - {signal.SIGHUP, DUMP_SIGNAL}:
        signal.signal(signum, signal.SIG_IGN)


def dump_stacks_to(descriptor: int) -> None:
    """Make DUMP_SIGNAL write the stacks of all threads to a file. Also unblocks the signals in IGNORED_SIGNALS."""
    faulthandler.register(DUMP_SIGNAL, file=descriptor, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)


class Log:
    """The output of a child, in a file without a name. A file is used because reading a pipe could block."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = anonymous_file("ddpdiag-log") if descriptor is None else descriptor

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        os.close(self._descriptor)

    def tail(self, size: int = 4000, since: int = 0) -> str:
        """At most the last `size` bytes after offset `since`, as text without secrets."""
        end = self.size()
        start = max(since, end - size)
        return without_secrets(os.pread(self._descriptor, max(0, end - start), start).decode(errors="replace")).strip()

    def copy_to(self, descriptor: int) -> None:
        """Write the log to a descriptor. Waits as long as the reader of the descriptor does not read."""
        begin = 0
        while block := os.pread(self._descriptor, _BLOCK_BYTES, begin):
            try:
                begin += os.write(descriptor, block)
            except BlockingIOError:  # another process that shares the pipe made it non-blocking
                select.select([], [descriptor], [])

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size


class Child:
    """A child process; `pid` is None until it is started. Each wait has a time-out."""

    def __init__(self, pid: int | None = None) -> None:
        self.pid = pid
        self.exit_code: int | None = None
        self.killed_at: float | None = None
        self.held_gpu = False

    def poll(self) -> int | None:
        """The exit code, negative for a signal as in subprocess, or None while the process runs. Reaps the process."""
        if self.exit_code is None and self.pid is not None:
            with contextlib.suppress(ChildProcessError):
                done, status = os.waitpid(self.pid, os.WNOHANG)
                self.exit_code = os.waitstatus_to_exitcode(status) if done else None
        return self.exit_code

    def wait(self, seconds: float) -> int | None:
        end = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        return self.exit_code

    def state(self) -> ProcessState:
        state, wchan = process_state(self.pid) if self.pid else (None, None)
        return ProcessState(pid=self.pid or 0, state=state, wchan=wchan)

    def signal(self, signum: int) -> None:
        if self.pid is not None:
            signal_process(self.pid, signum)

    def kill(self) -> bool:
        """Send SIGKILL. Returns whether the process ends in 2 s. With a GPU it may need more (`may_still_end`)."""
        if self.pid is None or self.exit_code is not None:
            return True
        # Read before the signal: the kernel does not show open files of an ending process.
        self.held_gpu = bool(holds_gpu(self.pid))
        self.signal(signal.SIGKILL)
        self.killed_at = time.monotonic()
        return self.wait_until_gone(DEADLINES.kill)

    def wait_until_gone(self, seconds: float) -> bool:
        """Wait at most so long for the end of the process. Returns whether it has ended."""
        end = time.monotonic() + seconds
        while not (is_gone := self.is_gone()) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        return is_gone

    def is_gone(self) -> bool:
        return self.pid is None or self.poll() is not None or not is_alive(self.pid)

    def may_still_end(self, now: float) -> bool:
        """Whether the process held a GPU and was killed less than 20 s ago, so that the driver may still end it."""
        return self.held_gpu and self.killed_at is not None and now < self.killed_at + DEADLINES.kill_gpu


class ForkedChildren:
    """Forked children, by number. The first signal to end that this process gets is sent on to all of them.

    `signals` must also catch SIGCHLD. `running` holds the children that run, and `exit_codes` the codes of the others.
    """

    def __init__(self, signals: "Signals") -> None:
        self.signals = signals
        self.running: dict[int, Child] = {}
        self.exit_codes: dict[int, int] = {}
        self._has_forwarded_signal = False

    def fork(self, call: Callable[[], int], number: int = 0) -> Child:
        """Fork a child that exits with the result of `call`. Without exec, no new interpreter has to start."""
        flush_output()
        parent = os.getpid()
        # Blocked until the child has its own handlers: the inherited ones would lose a signal that arrives earlier.
        signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent(parent, signal.SIGTERM)
            os._exit(call())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
        self.running[number] = Child(pid)
        return self.running[number]

    def wait(self, seconds: float) -> None:
        """Wait at most so long for the end of a child or a signal. Forwards the first signal to end to all children."""
        if not self._reap():
            select.select([self.signals.wake_socket], [], [], seconds)
            self.signals.drain()
            self._reap()
        if self.signals.received is not None and not self._has_forwarded_signal:
            self._has_forwarded_signal = True
            self.send(self.signals.received)

    def _reap(self) -> bool:
        ended = [number for number, child in self.running.items() if child.poll() is not None]
        for number in ended:
            self.exit_codes[number] = self.running.pop(number).exit_code or 0
        return bool(ended)

    def send(self, signum: int) -> None:
        for child in self.running.values():
            child.signal(signum)


def flush_output() -> None:
    """Flush standard output and error. Done before a fork, so that the child does not write buffered text again."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def start_python(module: str, words: list[str], descriptors: tuple[int, ...], env: Mapping[str, str], log: Log) -> int:
    """Start `python -m module` with the arguments `words`, and return its pid at once. It inherits `descriptors`."""
    # Blocked until the process has its handlers and unblocks these signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    process = subprocess.Popen(
        python_command(module, *words),
        stdin=subprocess.DEVNULL,
        stdout=log.fileno(),
        stderr=log.fileno(),
        pass_fds=descriptors,
        env=with_package_path(env),
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    process.returncode = 0  # `Child` reaps it by pid, not Popen
    # Rank 0 raised its limit for the control server; checks must see the user's limit.
    with contextlib.suppress(OSError, AttributeError):
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, OPEN_FILES_LIMITS)
    return process.pid


def signal_process(pid: int, signum: int) -> None:
    """Send a signal. Raises no error if the process has ended or belongs to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def is_alive(pid: int) -> bool:
    """Whether a process with this pid runs. A zombie runs if one of its threads does, and so keeps its files open."""
    _, fields = stat_of(PROC / str(pid))
    if not fields or fields[0] not in "ZX":
        return bool(fields)
    return len(fields) > _THREAD_COUNT_FIELD and int(fields[_THREAD_COUNT_FIELD]) > 1


def is_busy(pid: int) -> bool:
    """Whether a process uses a core, measured over 0.1 s."""
    before = cpu_ticks(pid)
    time.sleep(DEADLINES.busy_sample)
    after = cpu_ticks(pid)
    return before is not None and after is not None and after > before


def describe_end(code: int | None) -> str:
    """The end of a process in words. `code` is its exit code, or None if that is unknown."""
    if code is None:
        return "the process vanished; its exit code is unknown"
    return f"killed by {signal_name(-code)}" if code < 0 else f"left with exit code {code} before it answered"


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGSEGV for 11."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Signals:
    """Catches the signals to end (SIGTERM, SIGINT, SIGHUP). With `children`, also catches SIGCHLD.

    Each signal makes `wake_socket` readable. IGNORED_SIGNALS do nothing else. Create an instance in the main thread.
    """

    def __init__(self, *, children: bool = False) -> None:
        self._received: int | None = None
        self.wake_socket, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self.wake_socket.setblocking(False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        for signum in END_SIGNALS:
            # nohup and batch systems start programs with SIGHUP ignored, which must stay so.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._handle_signal)
        # An empty handler, because programs that this process starts would inherit SIG_IGN.
        for signum in (*IGNORED_SIGNALS, *((signal.SIGCHLD,) if children else ())):
            signal.signal(signum, lambda _signum, _frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)  # the process that forked this one blocked them

    @property
    def received(self) -> int | None:
        """The first signal to end that this process got, or None.

        Python calls handlers only in the main thread. Another thread may find the signal earlier, in the socket.
        """
        if self._received is None:
            with contextlib.suppress(OSError):
                waiting = self.wake_socket.recv(4096, socket.MSG_PEEK)
                self._received = next((number for number in waiting if number in END_SIGNALS), None)
        return self._received

    def _handle_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self._received is None:
            self._received = signum

    def drain(self) -> None:
        """Empty the socket, so that it is readable only after the next signal."""
        with contextlib.suppress(BlockingIOError):
            self.wake_socket.recv(4096)
