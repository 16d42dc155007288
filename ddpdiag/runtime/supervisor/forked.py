"""The fork server and its workers, as a supervisor sees them. Nothing here waits without a time-out."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ddpdiag.model import FORK_STEP, IMPORT_STEP, Kind
from ddpdiag.runtime.control.messages import MAX_MESSAGE_BYTES
from ddpdiag.runtime.deadlines import DEADLINES
from ddpdiag.runtime.record import alone_in
from ddpdiag.runtime.supervisor import ipc, sharing
from ddpdiag.runtime.supervisor.children import (
    POLL_SECONDS,
    SOCKET_BUFFER,
    PythonChild,
    WorkerProcess,
    dump,
    read_settled,
    socket_pair,
)
from ddpdiag.runtime.supervisor.hang_evidence import HangEvidence, read_stacks
from ddpdiag.runtime.supervisor.processes import Log, start_python

_MODULE = "ddpdiag.runtime.supervisor.fork_server"


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
        self._refused = False
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
        channel, child_end = socket_pair()
        life_end, self._life = os.pipe()
        passed = (life_end, child_end.fileno(), *([] if listener is None else [listener.fileno()]))
        self.pid = start_python(_MODULE, [*map(str, passed)], passed, env, self.log)
        self._is_own, self.is_shared = True, listener is not None
        os.close(life_end)
        for end in filter(None, (child_end, listener)):
            end.close()
        return channel

    def _follow(self, pid: int | None) -> None:
        """Another rank has started it: its output is read from where it is written."""
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
            self.closed = True  # seen as a dead server by whoever waits for the worker
        self._requested.append(worker)
        self._requested_at = time.monotonic()

    @property
    def is_lost(self) -> bool:
        """Is this rank better off with another one? It has died, does not take this rank, or is stopped."""
        if not self.is_shared or self.killed or self.failed:
            return False
        if self.closed or self._refused or not self._requested:
            return self.closed or self._refused
        late = time.monotonic() > self._requested_at + DEADLINES.fork
        return late and (self.state().state or "") in ("T", "t")

    @property
    def takes_no_rank(self) -> bool:
        """Has it refused this rank, as another one like it would?"""
        return self._refused

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
                self._refused = True
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

    def gather_evidence(self, state: str | None, *, nccl: bool = False) -> HangEvidence:
        """Its stacks: where an import hangs. It posts nothing, and has no NCCL."""
        start = self.log.size()
        dump(self)
        return HangEvidence(read_stacks(read_settled(self.log.fileno(), start, time.monotonic() + DEADLINES.dump)))

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
            time.sleep(POLL_SECONDS)
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
        """What the server does first."""
        if self.pid is not None:
            return None
        return IMPORT_STEP if self.server.import_seconds is None else FORK_STEP

    @property
    def cannot_start(self) -> bool:
        """Did the server end before it forked this worker?"""
        return self.pid is None and self.server.closed

    @property
    def ended_with_server(self) -> bool:
        """Has the server that forked it ended, so that the kernel ended it?"""
        return self.pid is not None and self.exit_code is None and self.server.closed

    def fresh_descriptors(self) -> tuple[int, ...]:
        """What a server needs to start it: where one that was asked before does so, too, that process ends at once."""
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
        """Send a signal to it."""
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
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
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
            if _MODULE.encode() in Path(f"/proc/{own}/cmdline").read_bytes():
                return own
    return None
