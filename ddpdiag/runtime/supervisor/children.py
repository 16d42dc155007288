"""A worker as its supervisor sees it. Nothing here waits without a time-out."""

import os
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial

import msgspec

from ddpdiag.model import Kind
from ddpdiag.runtime.deadlines import DEADLINES
from ddpdiag.runtime.supervisor import ipc
from ddpdiag.runtime.supervisor.hang_evidence import HangEvidence, ask_for_collectives, read_stacks, wait_for_answer
from ddpdiag.runtime.supervisor.processes import DUMP_SIGNAL, Child, Log, is_alive, start_python

_MODULE = "ddpdiag.runtime.supervisor.worker"
SOCKET_BUFFER = 1 << 20
POLL_SECONDS = 0.02


class PythonChild(Child, ABC):
    """A child with a log, which can be asked what it does."""

    log: Log

    @abstractmethod
    def gather_evidence(self, state: str | None, *, nccl: bool = False) -> HangEvidence:
        """Its stacks and its last collectives, if it has any; `state` is how it was before it is disturbed."""


class WorkerProcess(PythonChild):
    """One worker: a channel for messages, a page to read its steps, a file for its stack, a channel to its recorder."""

    def __init__(self, kind: Kind, overrides: Mapping[str, str | None], log: Log) -> None:
        super().__init__()
        self.kind = kind
        self.overrides = dict(overrides)
        self.log = log
        self.channel, self._child_end = socket_pair()
        self._frames = ipc.FrameReader()
        self.page = ipc.StepPage.create()
        self._stack = ipc.anonymous_file("ddpdiag-stack")
        self._recorder, self._recorder_child_end = socket_pair()

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
        """Is what would start it gone?"""
        return False

    @property
    def ended_with_server(self) -> bool:
        """Was it ended because the process that forked it has ended?"""
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
        self.started(start_python(_MODULE, [str(os.getpid()), *map(str, passed)], passed, env, self.log))

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
        begin, start = time.monotonic(), os.fstat(self._stack).st_size
        end = begin + DEADLINES.dump
        asked = self.kind is Kind.TORCH and (state is None or state not in "Tt")
        if asked:
            ask_for_collectives(self._recorder, nccl=nccl)
        dump(self)
        stacks = read_stacks(read_settled(self._stack, start, end))
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


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that keep messages apart."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
    return pair


def dump(child: PythonChild) -> None:
    """Have a process write its stacks, even if it is stopped."""
    child.signal(DUMP_SIGNAL)
    child.signal(signal.SIGCONT)


def read_settled(descriptor: int, start: int, end: float) -> str:
    """What is written to a file after `start`, once it stops growing; waits until `end` of the monotonic clock."""
    text = before = b""
    while time.monotonic() < end and not (text and text == before):
        time.sleep(POLL_SECONDS)
        before, text = text, os.pread(descriptor, os.fstat(descriptor).st_size - start, start)
    return text.decode(errors="replace")
