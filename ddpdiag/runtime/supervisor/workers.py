"""The supervisor's handles of its workers and of its fork server. Each wait has a time-out."""

import contextlib
import os
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from ddpdiag.model import FORK_STEP, IMPORT_STEP, Kind
from ddpdiag.runtime.control.messages import MAX_MESSAGE_BYTES
from ddpdiag.runtime.deadlines import DEADLINES
from ddpdiag.runtime.record import lock_folder
from ddpdiag.runtime.supervisor import ipc, sharing
from ddpdiag.runtime.supervisor.hang_evidence import HangEvidence, ask_for_collectives, read_stacks, wait_for_answer
from ddpdiag.runtime.supervisor.processes import DUMP_SIGNAL, Child, Log, is_alive, start_python

_WORKER_MODULE = "ddpdiag.runtime.supervisor.worker"
_FORK_SERVER_MODULE = "ddpdiag.runtime.supervisor.fork_server"
_SOCKET_BUFFER = 1 << 20
_POLL_SECONDS = 0.02
# The possible last lines of faulthandler's dump, which ends with the main thread: `python -m`, a script, 100 frames.
_MAIN_THREAD_ENDS = (b" in _run_module_as_main\n", b" in <module>\n", b"...\n")


class PythonChild(Child, ABC):
    """A Python process with a log, from which the supervisor can gather evidence of a hang."""

    log: Log

    @abstractmethod
    def gather_evidence(self, state: str | None) -> HangEvidence:
        """The stacks and last collectives of the process, if any. `state` is its state, read before this call."""


class WorkerProcess(PythonChild):
    """A worker, with a channel for messages, a page with its steps, a file for its stacks, and a recorder channel."""

    def __init__(self, kind: Kind, overrides: Mapping[str, str | None], log: Log) -> None:
        super().__init__()
        self.kind = kind
        self.overrides = dict(overrides)
        self.log = log
        self.channel, self._child_end = _socket_pair()
        self._frames = ipc.FrameReader()
        self.page = ipc.StepPage.create()
        self._stack_file = ipc.anonymous_file("ddpdiag-stack")
        self._recorder, self._recorder_child_end = _socket_pair()

    @property
    def active_process(self) -> PythonChild:
        """The process that must act next for the trial to go on."""
        return self

    @property
    def start_step(self) -> str | None:
        """The current step of the worker's start, or None once it can run a trial."""
        return None

    @property
    def cannot_start(self) -> bool:
        """Whether the process that must start this worker has ended."""
        return False

    @property
    def ended_with_server(self) -> bool:
        """Whether the worker ended because the process that forked it has ended."""
        return False

    def descriptors(self) -> tuple[int, int, int, int]:
        """The worker's end of the channel, its page, its stack file, and its end of the recorder's channel."""
        return self._child_end.fileno(), self.page.descriptor, self._stack_file, self._recorder_child_end.fileno()

    def set_pid(self, pid: int | None) -> None:
        """Set the pid of the worker, which has started, and close this process's copies of the worker's descriptors."""
        self.pid = pid
        self._child_end.close()
        self._recorder_child_end.close()

    def start_by_exec(self, env: Mapping[str, str]) -> None:
        passed = self.descriptors()
        self.set_pid(start_python(_WORKER_MODULE, [str(os.getpid()), *map(str, passed)], passed, env, self.log))

    def send(self, command: ipc.WorkerCommand) -> bool:
        """Send without waiting. Returns False if the worker has ended or does not read."""
        try:
            self.channel.send(msgspec.json.encode(command), socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def receive(self) -> ipc.WorkerMessage | ipc.IncompleteMessage | None:
        """Receive a message, or None if the channel is closed. Call it only if the channel is readable."""
        data = self._frames.receive(self.channel)
        if data is None:
            return ipc.IncompleteMessage()
        return ipc.decode_worker_message.decode(data) if data else None

    def gather_evidence(self, state: str | None) -> HangEvidence:
        """Make the worker dump its stacks and send its last collectives. Waits at most 0.5 s.

        Call it last, because the signals may wake the worker up: the dump ends a sleep in C, and SIGCONT a stop.
        `state` is the worker's state before this call. A stopped worker is not asked for its collectives, since those
        that it posts after its wake-up are no evidence.
        """
        if self.pid is None:
            return HangEvidence()
        end, start = time.monotonic() + DEADLINES.dump_stacks, os.fstat(self._stack_file).st_size
        asks_recorder = self.kind is Kind.TORCH and (state is None or state not in "Tt")
        if asks_recorder:
            ask_for_collectives(self._recorder)
        _request_dump(self)
        stacks = read_stacks(_read_dump(self._stack_file, start, end))
        answer = wait_for_answer(self._recorder, end, partial(is_alive, self.pid)) if asks_recorder else None
        return HangEvidence(stacks, answer or ipc.PostedCollectives())

    def kill(self) -> bool:
        """Close the channel and kill the worker. Returns whether it ends within 2 s."""
        self.channel.close()
        return super().kill()

    def close(self) -> None:
        for end in (self.channel, self._child_end, self._recorder, self._recorder_child_end):
            end.close()
        self.page.close()
        os.close(self._stack_file)


class ForkServerProcess(PythonChild):
    """A supervisor's handle of its fork server. Without `address` the server is private to this rank.

    `address` is the path of a socket in the run's folder. The first rank that uses the address starts the server, and
    other ranks connect to it. `env` is the environment of this rank's workers.
    """

    def __init__(self, rank: int, env: Mapping[str, str], address: Path | None = None) -> None:
        super().__init__()
        self.log = Log()
        self.import_seconds: float | None = None
        self.is_closed = False
        self.is_killed = False
        self.is_shared = address is not None
        self._address = address
        self.has_failed = False  # whether torch cannot be imported
        self.has_refused = False  # whether the server refused this rank, as another shared server would
        self._is_started_here = False
        self._rank = rank
        self._environment = ipc.environment_file(env)
        self._life_pipe: int | None = None
        self._requested_workers: list[ForkedWorker] = []  # workers without a pid; their pids arrive in this order
        self._requested_at = 0.0
        self._workers: list[ForkedWorker] = []
        channel, listener = (None, None) if address is None else connect_or_listen(address)
        self.channel = channel or self._start(env, listener)
        if channel is not None:
            self._read_log_of(_server_pid(channel))

    def _start(self, env: Mapping[str, str], listener: socket.socket | None) -> socket.socket:
        channel, child_end = _socket_pair()
        life_pipe_end, self._life_pipe = os.pipe()
        passed = (life_pipe_end, child_end.fileno(), *([] if listener is None else [listener.fileno()]))
        self.pid = start_python(_FORK_SERVER_MODULE, [*map(str, passed)], passed, env, self.log)
        self._is_started_here, self.is_shared = True, listener is not None
        os.close(life_pipe_end)
        for end in filter(None, (child_end, listener)):
            end.close()
        return channel

    def _read_log_of(self, pid: int | None) -> None:
        """Set the pid of a server that another rank started, and open its output as `log`. Ignores None."""
        if pid is not None and pid != self.pid:
            self.pid = pid
            with contextlib.suppress(OSError):
                output = os.open(f"/proc/{pid}/fd/2", os.O_RDONLY)
                self.log.close()
                self.log = Log(output)

    def request(self, worker: "ForkedWorker") -> None:
        """Request this worker from the server, even if it was requested from an earlier server. Does not wait.

        The worker's task can be sent at once. The worker starts when the server is ready.
        """
        worker.server = self
        try:
            descriptors = [*worker.new_descriptors(), self._environment]
            message = msgspec.json.encode(ipc.Fork(self._rank))
            socket.send_fds(self.channel, [message], descriptors, socket.MSG_DONTWAIT)
        except OSError:
            self.is_closed = True  # the wait for the worker then ends, as if the server had ended
        self._requested_workers.append(worker)
        self._requested_at = time.monotonic()

    @property
    def is_lost(self) -> bool:
        """Whether this rank needs another server, because this shared one has ended, refuses the rank or is stopped."""
        if not self.is_shared or self.is_killed or self.has_failed:
            return False
        if self.is_closed or self.has_refused or not self._requested_workers:
            return self.is_closed or self.has_refused
        late = time.monotonic() > self._requested_at + DEADLINES.fork
        return late and (self.state().state or "") in ("T", "t")

    def unstarted_workers(self) -> "list[ForkedWorker]":
        """The requested workers that have no pid yet and are still needed."""
        return [worker for worker in self._requested_workers if worker.channel.fileno() >= 0]

    def skip_lazy_imports(self) -> None:
        """Make the server skip the imports that only training with DDP needs (1.7 s of a core with torch 2.13)."""
        with contextlib.suppress(OSError):
            self.channel.send(msgspec.json.encode(ipc.SkipLazyImports()), socket.MSG_DONTWAIT)

    def receive(self) -> None:
        """Receive and handle a message of the server, if one has arrived. Does not wait."""
        if self.is_closed:
            return
        try:
            data = self.channel.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.is_closed = True
            return
        self._handle_message(ipc.decode_fork_server_message.decode(data))

    def _handle_message(self, message: ipc.ForkServerMessage) -> None:
        match message:
            case ipc.Accepted(pid, life_pipe):
                self._read_log_of(pid)
                self._keep_alive(pid, life_pipe)
            case ipc.ForkRefused():
                self.has_refused = True
            case ipc.Imported(seconds):
                self.import_seconds = seconds
            case ipc.Forked(pid):
                worker = self._requested_workers.pop(0)
                worker.set_pid(pid)
                self._workers.append(worker)
            case ipc.Exited(pid, code) if pid == self.pid:
                self.has_failed, self.exit_code = True, code
            case ipc.Exited(pid, code):
                for worker in self._workers:
                    if worker.pid == pid:
                        worker.exit_code = code

    def _keep_alive(self, pid: int, life_pipe: int) -> None:
        """Open the server's pipe for writing. The server lives until the last process that holds it open has ended."""
        try:
            self._life_pipe = os.open(f"/proc/{pid}/fd/{life_pipe}", os.O_WRONLY)
        except OSError:
            self.is_closed = True

    def gather_evidence(self, state: str | None) -> HangEvidence:
        """Make the server dump its stacks, which show where its import hangs. A server posts no collectives."""
        start = self.log.size()
        _request_dump(self)
        return HangEvidence(read_stacks(_read_dump(self.log.fileno(), start, time.monotonic() + DEADLINES.dump_stacks)))

    def kill(self) -> bool:
        """Leave the server, which ends unless other ranks use it. Returns False if it survives, stuck in the kernel."""
        self.channel.close()
        self.is_closed = self.is_killed = True
        if self._address is not None:
            with contextlib.suppress(OSError):  # a rank that starts later then starts another server
                self._address.unlink()
        if self._life_pipe is not None:
            os.close(self._life_pipe)  # the kernel kills the server if no other process holds the pipe
            self._life_pipe = None
        if not self.is_shared:
            return super().kill()
        return self.wait_until_gone(DEADLINES.reap if self._is_started_here else 0.0) or self.state().state != "D"


class ForkedWorker(WorkerProcess):
    """A worker that the fork server forks. The server sends its exit code."""

    def __init__(self, server: ForkServerProcess, overrides: Mapping[str, str | None], log: Log) -> None:
        super().__init__(Kind.TORCH, overrides, log)
        self.server = server
        self._life_pipe: int | None = None
        self._life_pipe_end: int | None = None
        self._pidfd: int | None = None

    @property
    def active_process(self) -> PythonChild:
        """The server until it has forked this worker, then the worker."""
        return self.server if self.pid is None else self

    @property
    def start_step(self) -> str | None:
        """The step of the server until it has forked this worker, then None."""
        if self.pid is not None:
            return None
        return IMPORT_STEP if self.server.import_seconds is None else FORK_STEP

    @property
    def cannot_start(self) -> bool:
        return self.pid is None and self.server.is_closed

    @property
    def ended_with_server(self) -> bool:
        return self.pid is not None and self.exit_code is None and self.server.is_closed

    def new_descriptors(self) -> tuple[int, ...]:
        """The descriptors for a fork request, with a new pipe. A process forked for an earlier request then ends."""
        self._close_life_pipe()
        self._life_pipe_end, self._life_pipe = os.pipe()
        return *self.descriptors(), self._life_pipe_end, self.log.fileno()

    def set_pid(self, pid: int | None) -> None:
        """Set the pid and open a pidfd, so that no signal reaches a later process with the same pid."""
        super().set_pid(pid)
        if self._life_pipe_end is not None:
            os.close(self._life_pipe_end)
            self._life_pipe_end = None
        if pid is not None and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # Linux before 5.3
                self._pidfd = os.pidfd_open(pid)

    def signal(self, signum: int) -> None:
        if self._pidfd is None:
            super().signal(signum)
        else:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signum)

    def poll(self) -> int | None:
        """The exit code once the server has sent it, else None."""
        self.server.receive()
        return self.exit_code

    def close(self) -> None:
        super().close()
        self._close_life_pipe()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _close_life_pipe(self) -> None:
        for end in (self._life_pipe, self._life_pipe_end):
            if end is not None:
                os.close(end)
        self._life_pipe = self._life_pipe_end = None


def connect_or_listen(address: Path) -> tuple[socket.socket | None, socket.socket | None]:
    """A channel to the fork server at `address`, or a listening socket if there is none. Both None if neither works."""
    listener, channel = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    channel.setblocking(False)
    with contextlib.suppress(OSError), lock_folder(address.parent) as folder:
        # Through the folder's descriptor, because the path of a socket has at most 107 characters (unix(7)).
        name = f"/proc/self/fd/{folder}/{address.name}"
        try:
            channel.connect(name)
        except (FileNotFoundError, ConnectionRefusedError):  # no server yet, or one that was killed
            address.unlink(missing_ok=True)
            listener.bind(name)
            listener.listen(ipc.MAX_CLIENTS)
            channel.close()
            return None, listener
        if sharing.has_equal_traits(channel):
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
            listener.close()
            return channel, None
    channel.close()
    listener.close()
    return None, None


def _server_pid(channel: socket.socket) -> int | None:
    """The server's pid, or None. The kernel reports the process that called listen(): the server or its parent."""
    pid, _ = sharing.pid_and_uid_of_peer(channel)
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for candidate in (pid, *map(int, children)):
            if _FORK_SERVER_MODULE.encode() in Path(f"/proc/{candidate}/cmdline").read_bytes():
                return candidate
    return None


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that keep message boundaries."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
    return pair


def _request_dump(child: PythonChild) -> None:
    """Signal a process to write its stacks, and let it run if it is stopped."""
    child.signal(DUMP_SIGNAL)
    child.signal(signal.SIGCONT)


def _read_dump(descriptor: int, start: int, end: float) -> str:
    """Read a dump of stacks that begins at offset `start`. Waits until it is complete, or until `end` (monotonic).

    A file that has stopped growing may be incomplete, because on a busy host a process can pause within its dump.
    """
    text = b""
    while time.monotonic() < end and not text.endswith(_MAIN_THREAD_ENDS):
        time.sleep(_POLL_SECONDS)
        text = os.pread(descriptor, os.fstat(descriptor).st_size - start, start)
    return text.decode(errors="replace")
