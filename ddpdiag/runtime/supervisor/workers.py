"""Workers and the fork server, as their supervisor sees them. Each wait has a time-out."""

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
from ddpdiag.runtime.record import alone_in
from ddpdiag.runtime.supervisor import ipc, sharing
from ddpdiag.runtime.supervisor.hang_evidence import HangEvidence, ask_for_collectives, read_stacks, wait_for_answer
from ddpdiag.runtime.supervisor.processes import DUMP_SIGNAL, Child, Log, is_alive, start_python

_WORKER_MODULE = "ddpdiag.runtime.supervisor.worker"
_FORK_SERVER_MODULE = "ddpdiag.runtime.supervisor.fork_server"
_SOCKET_BUFFER = 1 << 20
_POLL_SECONDS = 0.02
# The line at which faulthandler's dump of the main thread, its last one, ends: `python -m`, a script, or 100 frames.
_MAIN_THREAD_ENDS = (b" in _run_module_as_main\n", b" in <module>\n", b"...\n")


class PythonChild(Child, ABC):
    """A Python process with a log, from which the supervisor can gather evidence of a hang."""

    log: Log

    @abstractmethod
    def gather_evidence(self, state: str | None) -> HangEvidence:
        """The stacks and last collectives of the process, if any; `state` is its state before it is disturbed."""


class WorkerProcess(PythonChild):
    """One worker: a channel for messages, a page with its steps, a file for its stacks, a channel to its recorder."""

    def __init__(self, kind: Kind, overrides: Mapping[str, str | None], log: Log) -> None:
        super().__init__()
        self.kind = kind
        self.overrides = dict(overrides)
        self.log = log
        self.channel, self._child_end = _socket_pair()
        self._frames = ipc.FrameReader()
        self.page = ipc.StepPage.create()
        self._stack = ipc.anonymous_file("ddpdiag-stack")
        self._recorder, self._recorder_child_end = _socket_pair()

    @property
    def waits_for(self) -> PythonChild:
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
        return self._child_end.fileno(), self.page.descriptor, self._stack, self._recorder_child_end.fileno()

    def started(self, pid: int | None) -> None:
        """Set the pid, and close this process's copies of the worker's ends."""
        self.pid = pid
        self._child_end.close()
        self._recorder_child_end.close()

    def start_by_exec(self, env: Mapping[str, str]) -> None:
        """Start the worker as a new interpreter, in which `env` is set before any import."""
        passed = self.descriptors()
        self.started(start_python(_WORKER_MODULE, [str(os.getpid()), *map(str, passed)], passed, env, self.log))

    def send(self, command: ipc.WorkerCommand) -> bool:
        """Send without waiting; return False if the worker has ended or does not read."""
        try:
            self.channel.send(msgspec.json.encode(command), socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def receive(self) -> ipc.WorkerMessage | ipc.Incomplete | None:
        """The next message, `Incomplete`, or None if the channel is closed. Call it only if the channel is readable."""
        data = self._frames.receive(self.channel)
        if data is None:
            return ipc.Incomplete()
        return ipc.decode_worker_message.decode(data) if data else None

    def gather_evidence(self, state: str | None) -> HangEvidence:
        """Dump the stacks, ask for the last collectives, and return both; waits at most 0.5 s in all.

        The signals may wake the worker up (the dump ends a sleep in C, SIGCONT a stop), so call this after all else is
        read. `state` is the worker's state before: what a stopped worker posts after its wake-up is no evidence.
        """
        if self.pid is None:
            return HangEvidence()
        end, start = time.monotonic() + DEADLINES.dump, os.fstat(self._stack).st_size
        asked = self.kind is Kind.TORCH and (state is None or state not in "Tt")
        if asked:
            ask_for_collectives(self._recorder)
        _dump(self)
        stacks = read_stacks(_read_dump(self._stack, start, end))
        answer = wait_for_answer(self._recorder, end, partial(is_alive, self.pid)) if asked else None
        return HangEvidence(stacks, answer.collectives, answer.no_collectives) if answer else HangEvidence(stacks)

    def kill(self) -> bool:
        """Kill the worker; return whether it is gone within 2 s."""
        self.channel.close()
        return super().kill()

    def close(self) -> None:
        for end in (self.channel, self._child_end, self._recorder, self._recorder_child_end):
            end.close()
        self.page.close()
        os.close(self._stack)


class ForkServer(PythonChild):
    """A fork server, as a rank sees it. The first rank at `address` starts it for all ranks that use this address.

    The address is a socket in the run's folder; without one the server is for this rank alone. `env` is the environment
    of this rank's workers.
    """

    def __init__(self, rank: int, env: Mapping[str, str], address: Path | None = None) -> None:
        super().__init__()
        self.log = Log()
        self.import_seconds: float | None = None
        self.closed = False
        self.killed = False
        self.is_shared = address is not None
        self._address = address
        self.failed = False  # whether torch cannot be imported
        self.has_refused = False  # whether it refused this rank; another server at this address would, too
        self._is_started_here = False
        self._rank = rank
        self._environment = ipc.environment_file(env)
        self._life: int | None = None
        self._requested: list[ForkedWorker] = []  # workers without a pid; their pids arrive in this order
        self._requested_at = 0.0
        self._workers: list[ForkedWorker] = []
        channel, listener = (None, None) if address is None else meet(address)
        self.channel = channel or self._start(env, listener)
        if channel is not None:
            self._read_log_of(_server_of(channel))

    def _start(self, env: Mapping[str, str], listener: socket.socket | None) -> socket.socket:
        channel, child_end = _socket_pair()
        life_end, self._life = os.pipe()
        passed = (life_end, child_end.fileno(), *([] if listener is None else [listener.fileno()]))
        self.pid = start_python(_FORK_SERVER_MODULE, [*map(str, passed)], passed, env, self.log)
        self._is_started_here, self.is_shared = True, listener is not None
        os.close(life_end)
        for end in filter(None, (child_end, listener)):
            end.close()
        return channel

    def _read_log_of(self, pid: int | None) -> None:
        """Set the pid of a server that another rank started, and read its output."""
        if pid is not None and pid != self.pid:
            self.pid = pid
            with contextlib.suppress(OSError):
                written = os.open(f"/proc/{pid}/fd/2", os.O_RDONLY)
                self.log.close()
                self.log = Log(written)

    def fork(self, overrides: Mapping[str, str | None], log: Log) -> "ForkedWorker":
        """Request a worker, and return it: it can be sent its task now, and starts as soon as the server is free."""
        worker = ForkedWorker(self, overrides, log)
        self.request(worker)
        return worker

    def request(self, worker: "ForkedWorker") -> None:
        """Request this worker, even if an earlier server was asked for it."""
        worker.server = self
        try:
            descriptors = [*worker.fresh_descriptors(), self._environment]
            message = msgspec.json.encode(ipc.Fork(self._rank))
            socket.send_fds(self.channel, [message], descriptors, socket.MSG_DONTWAIT)
        except OSError:
            self.closed = True  # the wait for the worker then ends as if the server had ended
        self._requested.append(worker)
        self._requested_at = time.monotonic()

    @property
    def is_lost(self) -> bool:
        """Whether this rank needs another server, because this one has ended, has refused the rank or is stopped."""
        if not self.is_shared or self.killed or self.failed:
            return False
        if self.closed or self.has_refused or not self._requested:
            return self.closed or self.has_refused
        late = time.monotonic() > self._requested_at + DEADLINES.fork
        return late and (self.state().state or "") in ("T", "t")

    def unserved(self) -> "list[ForkedWorker]":
        """The requested workers that have not started and are still needed."""
        return [worker for worker in self._requested if worker.channel.fileno() >= 0]

    def skip_lazy_imports(self) -> None:
        """Make the server skip imports that only DDP needs (1.7 s of a core with torch 2.13): no model is trained."""
        with contextlib.suppress(OSError):
            self.channel.send(msgspec.json.encode(ipc.SkipLazyImports()), socket.MSG_DONTWAIT)

    def receive(self) -> None:
        """Read and handle a message of the server, if one has arrived; does not wait."""
        if self.closed:
            return
        try:
            data = self.channel.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return
        self._handle_message(ipc.decode_fork_server_message.decode(data))

    def _handle_message(self, message: ipc.ForkServerMessage) -> None:
        match message:
            case ipc.Accepted(pid, life):
                self._read_log_of(pid)
                self._keep_alive(pid, life)
            case ipc.Unlike():
                self.has_refused = True
            case ipc.Imported(seconds):
                self.import_seconds = seconds
            case ipc.Forked(pid):
                worker = self._requested.pop(0)
                worker.started(pid)
                self._workers.append(worker)
            case ipc.Exited(pid, code) if pid == self.pid:
                self.failed, self.exit_code = True, code
            case ipc.Exited(pid, code):
                for worker in self._workers:
                    if worker.pid == pid:
                        worker.exit_code = code

    def _keep_alive(self, pid: int, life: int) -> None:
        """Hold the server's pipe open: the server lives until the last process that holds the pipe has ended."""
        try:
            self._life = os.open(f"/proc/{pid}/fd/{life}", os.O_WRONLY)
        except OSError:
            self.closed = True

    def gather_evidence(self, state: str | None) -> HangEvidence:
        """The stacks of the server, which show a hang of the import. The server posts no collectives."""
        start = self.log.size()
        _dump(self)
        return HangEvidence(read_stacks(_read_dump(self.log.fileno(), start, time.monotonic() + DEADLINES.dump)))

    def kill(self) -> bool:
        """Kill the server with its workers; return whether it has ended. A server that other ranks use goes on."""
        self.channel.close()
        self.closed = self.killed = True
        if self._address is not None:
            with contextlib.suppress(OSError):  # a rank that starts later then starts another server
                self._address.unlink()
        if self._life is not None:
            os.close(self._life)  # the kernel kills the server if no other process holds the pipe
            self._life = None
        if not self.is_shared:
            return super().kill()
        end = time.monotonic() + (DEADLINES.reap if self._is_started_here else 0.0)
        while time.monotonic() < end and not self.is_gone():
            time.sleep(_POLL_SECONDS)
        return self.is_gone() or self.state().state != "D"


class ForkedWorker(WorkerProcess):
    """A worker that the fork server forks; the server sends its exit code."""

    def __init__(self, server: ForkServer, overrides: Mapping[str, str | None], log: Log) -> None:
        super().__init__(Kind.TORCH, overrides, log)
        self.server = server
        self._life: int | None = None
        self._life_end: int | None = None
        self._handle: int | None = None

    @property
    def waits_for(self) -> PythonChild:
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
        """Whether the server ended before it forked this worker."""
        return self.pid is None and self.server.closed

    @property
    def ended_with_server(self) -> bool:
        """Whether the kernel ended this worker because the server that forked it has ended."""
        return self.pid is not None and self.exit_code is None and self.server.closed

    def fresh_descriptors(self) -> tuple[int, ...]:
        """New descriptors for a server; a process that an earlier server still forks for this worker ends at once."""
        self._close_life()
        self._life_end, self._life = os.pipe()
        return *self.descriptors(), self._life_end, self.log.fileno()

    def started(self, pid: int | None) -> None:
        """Set the pid, and close the worker's ends. With a handle no signal reaches a later process of this pid."""
        super().started(pid)
        if self._life_end is not None:
            os.close(self._life_end)
            self._life_end = None
        if pid is not None and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # Linux before 5.3
                self._handle = os.pidfd_open(pid)

    def signal(self, signum: int) -> None:
        if self._handle is None:
            super().signal(signum)
        else:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signum)

    def poll(self) -> int | None:
        """The exit code once the server has sent it, else None."""
        self.server.receive()
        return self.exit_code

    def close(self) -> None:
        """Close all descriptors, which ends the worker."""
        super().close()
        self._close_life()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _close_life(self) -> None:
        for end in (self._life, self._life_end):
            if end is not None:
                os.close(end)
        self._life = self._life_end = None


def meet(address: Path) -> tuple[socket.socket | None, socket.socket | None]:
    """A channel to the fork server at an address, or else the socket for a server to start; neither if that fails."""
    listener, channel = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    channel.setblocking(False)
    with contextlib.suppress(OSError), alone_in(address.parent) as folder:
        # Through the folder's descriptor, because the path of a socket has at most 107 characters (unix(7)).
        name = f"/proc/self/fd/{folder}/{address.name}"
        try:
            channel.connect(name)
        except (FileNotFoundError, ConnectionRefusedError):  # no server yet, or one that was killed
            address.unlink(missing_ok=True)
            listener.bind(name)
            listener.listen(ipc.MOST_CLIENTS)
            channel.close()
            return None, listener
        if sharing.is_alike(channel):
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
            listener.close()
            return channel, None
    channel.close()
    listener.close()
    return None, None


def _server_of(channel: socket.socket) -> int | None:
    """The server's pid: the kernel shows it, or the supervisor that opened the socket and then started the server."""
    pid, _ = sharing.peer(channel)
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


def _dump(child: PythonChild) -> None:
    """Make a process write its stacks, and let it run if it is stopped."""
    child.signal(DUMP_SIGNAL)
    child.signal(signal.SIGCONT)


def _read_dump(descriptor: int, start: int, end: float) -> str:
    """The stacks in a file after `start`; waits until the main thread's are complete, or until `end` (monotonic).

    A file that stops growing may be incomplete: on a busy host a process can pause in the middle of its dump.
    """
    text = b""
    while time.monotonic() < end and not text.endswith(_MAIN_THREAD_ENDS):
        time.sleep(_POLL_SECONDS)
        text = os.pread(descriptor, os.fstat(descriptor).st_size - start, start)
    return text.decode(errors="replace")
