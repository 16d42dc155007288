"""Processes that this one starts: their output, their state, their end; and the signals that this process gets."""

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
from ddpdiag.probes.host.programs import python_command, with_home
from ddpdiag.runtime.deadlines import DEADLINES
from ddpdiag.runtime.supervisor.ipc import anonymous_file
from ddpdiag.sanitize import without_secrets

# Makes a worker or fork server write its Python stacks to a file; the handler is in C and needs no GIL (faulthandler).
DUMP_SIGNAL = signal.SIGUSR1
LEAVE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Signals by which a batch system warns a job (sbatch --signal=USR1@60); by default each ends the process (signal(7)).
IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)

_PR_SET_PDEATHSIG = 1
OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)  # before the control server raises it
_POLL_SECONDS = 0.005
_BLOCK_BYTES = 65536
_THREADS = 17  # index of num_threads of proc(5) in the fields of stat_of; it counts a zombie, too


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Make the kernel send `signum` to this process when the thread that started it ends (prctl(2), Linux).

    If `parent` has ended already, no signal would be sent, so this process exits at once.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def die_with_writers(pipe: int) -> None:
    """Make the kernel send SIGKILL to this process when the last writer of a pipe has closed it or ended.

    This works even if this process is stopped or holds the GIL: fcntl(2), F_SETSIG. No process ever writes to the pipe.
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    poller = select.poll()
    poller.register(pipe, 0)
    if poller.poll(0):  # the last writer has ended before
        os._exit(0)


def leave_terminal() -> None:
    """Start a new session, and ignore the signals of terminal and batch system: only a supervisor ends the process."""
    os.setsid()
    for signum in {*LEAVE, *IGNORED} - {signal.SIGHUP, DUMP_SIGNAL}:
        signal.signal(signum, signal.SIG_IGN)


def dump_stacks_to(file: int) -> None:
    """Make DUMP_SIGNAL write the stacks of all threads to a file; signals in IGNORED are no longer blocked."""
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)


class Log:
    """Standard output and error of a child, in a file without a name: to read a pipe could block."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = anonymous_file("ddpdiag-log") if descriptor is None else descriptor

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        os.close(self._descriptor)

    def tail(self, size: int = 4000, since: int = 0) -> str:
        """The last `size` bytes that were written after offset `since`, as text without secrets."""
        end = self.size()
        start = max(since, end - size)
        return without_secrets(os.pread(self._descriptor, max(0, end - start), start).decode(errors="replace")).strip()

    def copy_to(self, descriptor: int) -> None:
        """Write the whole log to a descriptor; waits as long as its reader does not read."""
        begin = 0
        while block := os.pread(self._descriptor, _BLOCK_BYTES, begin):
            try:
                begin += os.write(descriptor, block)
            except BlockingIOError:  # another process that shares the pipe made it non-blocking
                select.select([], [descriptor], [])

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size


class Child:
    """A process that this one started, or will start; each wait has a time-out."""

    def __init__(self, pid: int | None = None) -> None:
        self.pid = pid
        self.exit_code: int | None = None
        self.killed_at: float | None = None
        self.held_gpu = False

    def poll(self) -> int | None:
        """The exit code, negative for a signal as in subprocess; None while the process runs."""
        if self.exit_code is None and self.pid is not None:
            with contextlib.suppress(ChildProcessError):
                done, status = os.waitpid(self.pid, os.WNOHANG)
                self.exit_code = os.waitstatus_to_exitcode(status) if done else None
        return self.exit_code

    def wait(self, seconds: float) -> int | None:
        """Wait at most so long for the end; return the exit code, or None."""
        end = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        return self.exit_code

    def state(self) -> ProcessState:
        """The state of the process now; does not disturb it."""
        state, wchan = process_state(self.pid) if self.pid else (None, None)
        return ProcessState(pid=self.pid or 0, state=state, wchan=wchan)

    def signal(self, signum: int) -> None:
        if self.pid is not None:
            signal_process(self.pid, signum)

    def kill(self) -> bool:
        """Send SIGKILL; return whether it is gone within 2 s. A process with a GPU may need longer: `may_still_end`."""
        if self.pid is None or self.exit_code is not None:
            return True
        # Read before the signal: the kernel does not show open files of an ending process.
        self.held_gpu = bool(holds_gpu(self.pid))
        self.signal(signal.SIGKILL)
        self.killed_at = time.monotonic()
        while time.monotonic() < self.killed_at + DEADLINES.kill:
            if self.is_gone():
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def is_gone(self) -> bool:
        """Whether the process has ended; does not wait."""
        return self.pid is None or self.poll() is not None or not is_alive(self.pid)

    def may_still_end(self, now: float) -> bool:
        """Whether it was killed so recently that the driver may still be taking its GPU back."""
        return self.held_gpu and self.killed_at is not None and now < self.killed_at + DEADLINES.kill_gpu


class ForkedChildren:
    """Children that run functions of this process, by number; each gets the signal to end that this process gets.

    `signals` must catch SIGCHLD, too. `exit_codes` holds those of the children that have ended.
    """

    def __init__(self, signals: "Signals") -> None:
        self.signals = signals
        self.running: dict[int, Child] = {}
        self.exit_codes: dict[int, int] = {}
        self._forwarded = False

    def fork(self, call: Callable[[], int], number: int = 0) -> Child:
        """Fork a child that exits with the result of `call`; without exec, which saves an interpreter's start."""
        flush_output()
        parent = os.getpid()
        # Blocked until the child has its handlers: the inherited handlers would lose a signal that arrives before.
        signal.pthread_sigmask(signal.SIG_BLOCK, LEAVE)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent(parent, signal.SIGTERM)
            os._exit(call())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, LEAVE)
        self.running[number] = Child(pid)
        return self.running[number]

    def wait(self, seconds: float) -> None:
        """Collect ended children; if there are none, sleep until something happens. Pass a signal to end on."""
        if not self._reap():
            select.select([self.signals.woken], [], [], seconds)
            self.signals.drain()
            self._reap()
        if self.signals.received is not None and not self._forwarded:
            self._forwarded = True
            self.send(self.signals.received)

    def _reap(self) -> bool:
        ended = [number for number, child in self.running.items() if child.poll() is not None]
        for number in ended:
            self.exit_codes[number] = self.running.pop(number).exit_code or 0
        return bool(ended)

    def send(self, signum: int) -> None:
        """Send a signal to all children that run."""
        for child in self.running.values():
            child.signal(signum)


def flush_output() -> None:
    """Flush standard output and error before a fork, or the child would write the buffered text again."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def start_python(module: str, arguments: list[str], passed: tuple[int, ...], env: Mapping[str, str], log: Log) -> int:
    """Start `python -m module`, which inherits the descriptors in `passed`; return its pid at once."""
    # Blocked until the process has its handlers; it then unblocks these signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    process = subprocess.Popen(
        python_command(module, *arguments),
        stdin=subprocess.DEVNULL,
        stdout=log.fileno(),
        stderr=log.fileno(),
        pass_fds=passed,
        env=with_home(env),
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    process.returncode = 0  # `Child` reaps it by pid, not Popen
    # Rank 0 raised its limit for the control server; checks must see the user's limit.
    with contextlib.suppress(OSError, AttributeError):
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, OPEN_FILES)
    return process.pid


def signal_process(pid: int, signum: int) -> None:
    """Send a signal; no error if the process has ended or is another user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def is_alive(pid: int) -> bool:
    """Whether a process with this pid runs, or is a zombie with a thread that runs and still has its files open."""
    _, fields = stat_of(PROC / str(pid))
    if not fields or fields[0] not in "ZX":
        return bool(fields)
    return len(fields) > _THREADS and int(fields[_THREADS]) > 1


def is_busy(pid: int) -> bool:
    """Whether a process uses a core now; measures for 0.1 s."""
    before = cpu_ticks(pid)
    time.sleep(DEADLINES.busy)
    after = cpu_ticks(pid)
    return before is not None and after is not None and after > before


def how_it_ended(code: int | None) -> str:
    """The end of a process in words, from its exit code."""
    match code:
        case None:
            return "the process vanished; its exit code is unknown"
        case int() if code < 0:
            return f"killed by {signal_name(-code)}"
        case _:
            return f"left with exit code {code} before it answered"


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGSEGV for 11."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Signals:
    """Catches SIGTERM, SIGINT and SIGHUP (`children`: SIGCHLD, too) in the main thread; those in IGNORED do nothing."""

    def __init__(self, *, children: bool = False) -> None:
        self._received: int | None = None
        self.woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self.woken.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for signum in LEAVE:
            # nohup and batch systems start programs with SIGHUP ignored, which must stay so.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._note)
        # An empty handler, because programs that this process starts would inherit SIG_IGN.
        for signum in (*IGNORED, *((signal.SIGCHLD,) if children else ())):
            signal.signal(signum, lambda _signum, _frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, LEAVE)  # the process that forked this one blocked them

    @property
    def received(self) -> int | None:
        """The first signal to end that this process got, or None.

        Python calls handlers only when the main thread runs. Before that, another thread sees the signal in the socket.
        """
        if self._received is None:
            with contextlib.suppress(OSError):
                waiting = self.woken.recv(4096, socket.MSG_PEEK)
                self._received = next((number for number in waiting if number in LEAVE), None)
        return self._received

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        if self._received is None:
            self._received = signum

    def drain(self) -> None:
        """Empty the socket, so that it is readable only after the next signal."""
        with contextlib.suppress(BlockingIOError):
            self.woken.recv(4096)
