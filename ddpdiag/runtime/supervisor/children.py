"""The supervisor's children as it sees them: fork server and workers. Nothing here waits without a time-out."""

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Mapping
from functools import partial

import msgspec

from ddpdiag.model import IMPORT_STEP, Kind
from ddpdiag.runtime.control.messages import MAX_MESSAGE_BYTES
from ddpdiag.runtime.deadlines import DEADLINES
from ddpdiag.runtime.supervisor import ipc
from ddpdiag.runtime.supervisor.hang_evidence import HangEvidence, ask_for_collectives, read_stacks, wait_for_answer
from ddpdiag.runtime.supervisor.processes import DUMP_SIGNAL, Child, Log, is_alive, start_python

_MODULE = "ddpdiag.runtime.supervisor.worker"
_SOCKET_BUFFER = 1 << 20
_POLL_SECONDS = 0.02


class WorkerProcess(Child):
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
    def waits_for(self) -> "WorkerProcess | ForkServer":
        """The process that must act before its trial goes on."""
        return self

    @property
    def start_step(self) -> str | None:
        """The step of its start, as long as it cannot take up a trial."""
        return None

    @property
    def cannot_start(self) -> bool:
        """Is what would start it gone?"""
        return False

    def descriptors(self) -> tuple[int, int, int, int]:
        """What the worker needs: its end of the channel, page, stack file, and its end of the recorder's channel."""
        return self._child_end.fileno(), self.page.descriptor, self._stack, self._recorder_child_end.fileno()

    def started(self, pid: int | None) -> None:
        """The other ends of the channels belong to the worker now."""
        self.pid = pid
        self._child_end.close()
        self._recorder_child_end.close()

    def start_by_exec(self, env: Mapping[str, str]) -> None:
        """Start as a new interpreter, with its environment in place before anything is imported."""
        passed = self.descriptors()
        self.started(start_python(_MODULE, ["worker", str(os.getpid()), *map(str, passed)], passed, env, self.log))

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

    def gather_evidence(self, state: str | None, *, nccl: bool = False) -> HangEvidence:
        """Its stacks and its last collectives; waits at most 0.5 s for both together.

        `nccl`: a service of NCCL that runs in it is asked as well: up to a second for a greeting, 2 s for its report.

        It may wake the worker up (a signal ends a sleep in C, SIGCONT a stop): whatever is to be known must be fixed
        before. `state` is how it was then: what a stopped worker posts once it is woken is no evidence.
        """
        if self.pid is None:
            return HangEvidence()
        begin = time.monotonic()
        end = begin + DEADLINES.dump
        asked = self.kind is Kind.TORCH and (state is None or state not in "Tt")
        if asked:
            ask_for_collectives(self._recorder, nccl=nccl)
        _dump(self)
        stacks = read_stacks(_read_settled(self._stack, 0, end))
        alive = partial(is_alive, self.pid)
        answer = wait_for_answer(self._recorder, end, alive) if asked else None
        if not isinstance(answer, ipc.PostedCollectives):
            return HangEvidence(stacks)
        of_nccl = wait_for_answer(self._recorder, begin + DEADLINES.ras, alive) if nccl else None
        ras = of_nccl.text if isinstance(of_nccl, ipc.RasReport) else ""
        return HangEvidence(stacks, answer.collectives, answer.no_collectives, ras)

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


class ForkServer(Child):
    """The process that imports torch once and forks workers."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.log = Log()
        self.import_seconds: float | None = None
        self.closed = False
        self.killed = False
        self._requested: list[ForkedWorker] = []  # in the order in which their pids will arrive
        self._workers: list[ForkedWorker] = []
        self.channel, child_end = _socket_pair()
        passed = (child_end.fileno(),)
        arguments = ["fork-server", str(os.getpid()), str(passed[0])]
        super().__init__(start_python(_MODULE, arguments, passed, env, self.log))
        child_end.close()

    def fork(self, overrides: Mapping[str, str | None]) -> "ForkedWorker":
        """Ask for a worker; it starts as soon as the server is free, and can be sent its task before that."""
        worker = ForkedWorker(self, overrides)
        try:
            descriptors = list(worker.descriptors())
            socket.send_fds(self.channel, [msgspec.json.encode(ipc.Fork())], descriptors, socket.MSG_DONTWAIT)
        except OSError:
            self.closed = True  # seen as a dead server by whoever waits for the worker
        self._requested.append(worker)
        worker.started(None)
        return worker

    def skip_lazy_imports(self) -> None:
        """Nothing will be trained: what DDP loads lazily (1.7 s of a core with torch 2.13) need not be there."""
        with contextlib.suppress(OSError):
            self.channel.send(msgspec.json.encode(ipc.SkipLazyImports()), socket.MSG_DONTWAIT)

    def receive(self) -> None:
        """Take in what the server has sent, if anything; does not wait."""
        if self.closed or self.channel.fileno() < 0 or not select.select([self.channel], [], [], 0)[0]:
            return
        try:
            data = self.channel.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return
        match ipc.decode_fork_server_message.decode(data):
            case ipc.Imported(seconds):
                self.import_seconds = seconds
            case ipc.Forked(pid):
                worker = self._requested.pop(0)
                worker.pid = pid
                self._workers.append(worker)
            case ipc.Exited(pid, code):
                for worker in self._workers:
                    if worker.pid == pid:
                        worker.exit_code = code

    def gather_evidence(self, _state: str | None, *, nccl: bool = False) -> HangEvidence:
        """Its stacks: where an import hangs. It posts nothing, and has no NCCL."""
        start = self.log.size()
        _dump(self)
        return HangEvidence(read_stacks(_read_settled(self.log.fileno(), start, time.monotonic() + DEADLINES.dump)))

    def kill(self) -> bool:
        """Kill it; its workers go with it. True if it is gone within 2 s."""
        self.channel.close()
        self.closed = self.killed = True
        return super().kill()


class ForkedWorker(WorkerProcess):
    """A worker that the fork server forks; its exit code arrives through the server."""

    def __init__(self, server: ForkServer, overrides: Mapping[str, str | None]) -> None:
        super().__init__(Kind.TORCH, overrides, server.log)
        self.server = server

    @property
    def waits_for(self) -> WorkerProcess | ForkServer:
        """The server, as long as it has not forked this worker."""
        return self.server if self.pid is None else self

    @property
    def start_step(self) -> str | None:
        """What the server does first."""
        if self.pid is not None:
            return None
        return IMPORT_STEP if self.server.import_seconds is None else "start the worker"

    @property
    def cannot_start(self) -> bool:
        """Did the server end before it forked this worker?"""
        return self.pid is None and self.server.closed

    def poll(self) -> int | None:
        """Its exit code once the server has sent it."""
        self.server.receive()
        return self.exit_code


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
    return pair


def _dump(child: Child) -> None:
    """Have a process write its stacks, even if it is stopped."""
    child.signal(DUMP_SIGNAL)
    child.signal(signal.SIGCONT)


def _read_settled(descriptor: int, start: int, end: float) -> str:
    """What is written to a file after `start`, once it stops growing; waits until `end` of the monotonic clock."""
    text = before = b""
    while time.monotonic() < end and not (text and text == before):
        time.sleep(_POLL_SECONDS)
        before, text = text, os.pread(descriptor, os.fstat(descriptor).st_size - start, start)
    return text.decode(errors="replace")
