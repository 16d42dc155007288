"""Workers and the fork server, as their supervisor sees them. Nothing here waits without a time-out."""

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
# Where faulthandler's dump of the main thread, its last, ends: at `python -m`, at a script, or at its 100 frames.
_MAIN_THREAD_ENDS = (b" in _run_module_as_main\n", b" in <module>\n", b"...\n")


class PythonChild(Child, ABC):
    """A child with a log, which can be asked for evidence of a hang."""

    log: Log

    @abstractmethod
    def gather_evidence(self, state: str | None) -> HangEvidence:
        """Its stacks and its last collectives, if it has any; `state` is how it was before it is disturbed."""


class WorkerProcess(PythonChild):
    """One worker: a channel for messages, a page to read its steps, a file for its stack, a channel to its recorder."""

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
        """The process that must act before its trial goes on."""
        return self

    @property
    def start_step(self) -> str | None:
        """The step of its start, as long as it cannot take up a trial."""
        return None

    @property
    def cannot_start(self) -> bool:
        """Whether the process that would start it has ended."""
        return False

    @property
    def ended_with_server(self) -> bool:
        """Whether it was ended because the process that forked it has ended."""
        return False

    def descriptors(self) -> tuple[int, int, int, int]:
        """The worker's end of the channel, its page, its stack file, and its end of the recorder's channel."""
        return self._child_end.fileno(), self.page.descriptor, self._stack, self._recorder_child_end.fileno()

    def started(self, pid: int | None) -> None:
        """The other ends of the channels belong to the worker now."""
        self.pid = pid
        self._child_end.close()
        self._recorder_child_end.close()

    def start_by_exec(self, env: Mapping[str, str]) -> None:
        """Start as a new interpreter, with its environment in place before anything is imported."""
        passed = self.descriptors()
        self.started(start_python(_WORKER_MODULE, [str(os.getpid()), *map(str, passed)], passed, env, self.log))

    def send(self, command: ipc.WorkerCommand) -> bool:
        """Send without waiting; False if the worker is gone or reads nothing."""
        try:
            self.channel.send(msgspec.json.encode(command), socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def receive(self) -> ipc.WorkerMessage | ipc.Incomplete | None:
        """Its next message, or None when it closed the channel. Call only when the channel is readable."""
        data = self._frames.receive(self.channel)
        if data is None:
            return ipc.Incomplete()
        return ipc.decode_worker_message.decode(data) if data else None

    def gather_evidence(self, state: str | None) -> HangEvidence:
        """Its stacks and its last collectives; waits at most 0.5 s for both together.

        It may wake the worker up (a signal ends a sleep in C, SIGCONT a stop): whatever is to be known must be fixed
        before. `state` is how it was then: what a stopped worker posts once it is woken is no evidence.
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
        """Kill it; True if it is gone within 2 s."""
        self.channel.close()
        return super().kill()

    def close(self) -> None:
        """Give back the descriptors."""
        for end in (self.channel, self._child_end, self._recorder, self._recorder_child_end):
            end.close()
        self.page.close()
        os.close(self._stack)


class ForkServer(PythonChild):
    """The process that imports torch once and forks workers; the first rank at `address` starts it for all there.

    The address is a socket in the run's folder; without one the server is this rank's alone. `env` is what a worker of
    this rank has.
    """

    def __init__(self, rank: int, env: Mapping[str, str], address: Path | None = None) -> None:
        super().__init__()
        self.log = Log()
        self.import_seconds: float | None = None
        self.closed = False
        self.killed = False
        self.is_shared = address is not None
        self._address = address
        self.failed = False  # torch cannot be imported
        self.has_refused = False  # this rank, as another server like it would
        self._is_own = False
        self._rank = rank
        self._environment = ipc.environment_file(env)
        self._life: int | None = None
        self._requested: list[ForkedWorker] = []  # in the order in which their pids will arrive
        self._requested_at = 0.0
        self._workers: list[ForkedWorker] = []
        channel, listener = (None, None) if address is None else meet(address)
        self.channel = channel or self._start(env, listener)
        if channel is not None:
            self._follow(_server_of(channel))

    def _start(self, env: Mapping[str, str], listener: socket.socket | None) -> socket.socket:
        channel, child_end = _socket_pair()
        life_end, self._life = os.pipe()
        passed = (life_end, child_end.fileno(), *([] if listener is None else [listener.fileno()]))
        self.pid = start_python(_FORK_SERVER_MODULE, [*map(str, passed)], passed, env, self.log)
        self._is_own, self.is_shared = True, listener is not None
        os.close(life_end)
        for end in filter(None, (child_end, listener)):
            end.close()
        return channel

    def _follow(self, pid: int | None) -> None:
        """Read the output of a server that another rank started."""
        if pid is not None and pid != self.pid:
            self.pid = pid
            with contextlib.suppress(OSError):
                written = os.open(f"/proc/{pid}/fd/2", os.O_RDONLY)
                self.log.close()
                self.log = Log(written)

    def fork(self, overrides: Mapping[str, str | None], log: Log) -> "ForkedWorker":
        """Ask for a worker; it starts as soon as the server is free, and can be sent its task before that."""
        worker = ForkedWorker(self, overrides, log)
        self.request(worker)
        return worker

    def request(self, worker: "ForkedWorker") -> None:
        """Ask for this worker, which another server may have been asked for before."""
        worker.server = self
        try:
            descriptors = [*worker.fresh_descriptors(), self._environment]
            message = msgspec.json.encode(ipc.Fork(self._rank))
            socket.send_fds(self.channel, [message], descriptors, socket.MSG_DONTWAIT)
        except OSError:
            self.closed = True  # the wait for the worker then ends as with a dead server
        self._requested.append(worker)
        self._requested_at = time.monotonic()

    @property
    def is_lost(self) -> bool:
        """Whether this rank needs another server: this one has died, does not take this rank, or is stopped."""
        if not self.is_shared or self.killed or self.failed:
            return False
        if self.closed or self.has_refused or not self._requested:
            return self.closed or self.has_refused
        late = time.monotonic() > self._requested_at + DEADLINES.fork
        return late and (self.state().state or "") in ("T", "t")

    def unserved(self) -> "list[ForkedWorker]":
        """The workers that were asked for, have not started and are still wanted."""
        return [worker for worker in self._requested if worker.channel.fileno() >= 0]

    def skip_lazy_imports(self) -> None:
        """Nothing will be trained: what DDP loads lazily (1.7 s of a core with torch 2.13) need not be there."""
        with contextlib.suppress(OSError):
            self.channel.send(msgspec.json.encode(ipc.SkipLazyImports()), socket.MSG_DONTWAIT)

    def receive(self) -> None:
        """Take in what the server has sent, if anything; does not wait."""
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
        self._take_in(ipc.decode_fork_server_message.decode(data))

    def _take_in(self, message: ipc.ForkServerMessage) -> None:
        match message:
            case ipc.Accepted(pid, life):
                self._follow(pid)
                self._hold(pid, life)
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

    def _hold(self, pid: int, life: int) -> None:
        """Keep the server alive as long as this process lives, and no longer than the last that does so."""
        try:
            self._life = os.open(f"/proc/{pid}/fd/{life}", os.O_WRONLY)
        except OSError:
            self.closed = True

    def gather_evidence(self, state: str | None) -> HangEvidence:
        """Its stacks: where an import hangs. It posts nothing."""
        start = self.log.size()
        _dump(self)
        return HangEvidence(read_stacks(_read_dump(self.log.fileno(), start, time.monotonic() + DEADLINES.dump)))

    def kill(self) -> bool:
        """Kill it, and its workers with it; True if it is gone within 2 s. One that others use is left to them."""
        self.channel.close()
        self.closed = self.killed = True
        if self._address is not None:
            with contextlib.suppress(OSError):  # a rank that starts later has a server of its own
                self._address.unlink()
        if self._life is not None:
            os.close(self._life)  # the kernel kills it if this was the last one
            self._life = None
        if not self.is_shared:
            return super().kill()
        end = time.monotonic() + (DEADLINES.reap if self._is_own else 0.0)
        while time.monotonic() < end and not self.is_gone():
            time.sleep(_POLL_SECONDS)
        return self.is_gone() or self.state().state != "D"


class ForkedWorker(WorkerProcess):
    """A worker that the fork server forks; its exit code arrives through the server."""

    def __init__(self, server: ForkServer, overrides: Mapping[str, str | None], log: Log) -> None:
        super().__init__(Kind.TORCH, overrides, log)
        self.server = server
        self._life: int | None = None
        self._life_end: int | None = None
        self._handle: int | None = None

    @property
    def waits_for(self) -> PythonChild:
        """The server, as long as it has not forked this worker."""
        return self.server if self.pid is None else self

    @property
    def start_step(self) -> str | None:
        """The step of the server before it forks this worker."""
        if self.pid is not None:
            return None
        return IMPORT_STEP if self.server.import_seconds is None else FORK_STEP

    @property
    def cannot_start(self) -> bool:
        """Whether the server ended before it forked this worker."""
        return self.pid is None and self.server.closed

    @property
    def ended_with_server(self) -> bool:
        """Whether the server that forked it has ended, so that the kernel ended it."""
        return self.pid is not None and self.exit_code is None and self.server.closed

    def fresh_descriptors(self) -> tuple[int, ...]:
        """Descriptors for a server; a process that an earlier server starts all the same ends at once."""
        self._close_life()
        self._life_end, self._life = os.pipe()
        return *self.descriptors(), self._life_end, self.log.fileno()

    def started(self, pid: int | None) -> None:
        """The other ends belong to the worker now. By a handle of it no signal reaches a later process of its pid."""
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
        """Its exit code once the server has sent it."""
        self.server.receive()
        return self.exit_code

    def close(self) -> None:
        """Give back the descriptors; the worker ends."""
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
    """A channel to the fork server at an address, or the socket for one that is to be started; neither if it fails."""
    listener, channel = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    channel.setblocking(False)
    with contextlib.suppress(OSError), alone_in(address.parent) as folder:
        # By the folder's descriptor: the path of a socket has at most 107 characters (unix(7)).
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
    """The server's pid: the kernel shows it, or the supervisor that opened the socket and then started it."""
    pid, _ = sharing.peer(channel)
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for own in (pid, *map(int, children)):
            if _FORK_SERVER_MODULE.encode() in Path(f"/proc/{own}/cmdline").read_bytes():
                return own
    return None


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that keep messages apart."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
    return pair


def _dump(child: PythonChild) -> None:
    """Make a process write its stacks, even if it is stopped."""
    child.signal(DUMP_SIGNAL)
    child.signal(signal.SIGCONT)


def _read_dump(descriptor: int, start: int, end: float) -> str:
    """The stacks in a file after `start`, once the main thread's are whole; waits until `end` of the monotonic clock.

    It is not enough that the file stops growing: on a busy host a process can rest in the middle of its dump.
    """
    text = b""
    while time.monotonic() < end and not text.endswith(_MAIN_THREAD_ENDS):
        time.sleep(_POLL_SECONDS)
        text = os.pread(descriptor, os.fstat(descriptor).st_size - start, start)
    return text.decode(errors="replace")
