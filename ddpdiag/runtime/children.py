"""The supervisor's children as it sees them: nursery and workers. Nothing here waits without a time-out."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from ddpdiag.foreign import without_secrets
from ddpdiag.model import Collective, Kind, ProcessState
from ddpdiag.probes.host.procfs import cpu_ticks, process_state
from ddpdiag.runtime.control.messages import MAX_MESSAGE_BYTES
from ddpdiag.runtime.messages import (
    Enough,
    Exited,
    Fork,
    Forked,
    Imported,
    More,
    Posted,
    Ras,
    WorkerOrder,
    WorkerWord,
    decode_nursery_word,
    decode_worker_word,
)
from ddpdiag.runtime.page import StepPage, nameless_file
from ddpdiag.runtime.parcel import Parcel
from ddpdiag.runtime.stacks import Stacks, read_stacks
from ddpdiag.runtime.tether import DUMP_SIGNAL
from ddpdiag.runtime.witness import RAS_SECONDS, ask, wait_answer

_SOCKET_BUFFER = 1 << 20
_OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)  # before the control server raises it
_DUMP_SECONDS = 0.5
_POLL_SECONDS = 0.02
_KILL_SECONDS = 2.0
# Ten clock ticks: who computes uses one of them, even beside many others.
_BUSY_SECONDS = 0.1


class Log:
    """A child's standard output and error, in a file without a name: a pipe would hang whoever reads it."""

    def __init__(self) -> None:
        self._descriptor = nameless_file("ddpdiag-log")

    def fileno(self) -> int:
        """Descriptor for the child."""
        return self._descriptor

    def close(self) -> None:
        """Give back the descriptor."""
        os.close(self._descriptor)

    def tail(self, size: int = 4000, since: int = 0) -> str:
        """Its last `size` bytes written after offset `since`, as text without secrets."""
        end = self.size()
        start = max(since, end - size)
        return without_secrets(os.pread(self._descriptor, max(0, end - start), start).decode(errors="replace")).strip()

    def size(self) -> int:
        """Bytes written so far."""
        return os.fstat(self._descriptor).st_size


def _pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
    return ours, theirs


def start_python(module: str, arguments: list[str], passed: tuple[int, ...], env: Mapping[str, str], log: Log) -> int:
    """Start `python -m module` with these descriptors; returns its pid at once."""
    process = subprocess.Popen(
        # -P: a module in the user's current directory must not take the place of one of the standard library.
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log.fileno(),
        stderr=log.fileno(),
        pass_fds=passed,
        env=with_home(env),
    )
    process.returncode = 0  # we reap it ourselves, by pid
    with contextlib.suppress(
        OSError, AttributeError
    ):  # rank 0 raised its own limit for the control server; checks look at the user's
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, _OPEN_FILES)
    return process.pid


def with_home(env: Mapping[str, str]) -> dict[str, str]:
    """The environment in which `-P` finds this package, too, where it runs from a source tree and is not installed."""
    home = str(Path(__file__).parents[2])
    if home in sys.path[1:] or sys.path[0] not in ("", home) or os.getcwd() != home:
        return dict(env)
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, (env.get("PYTHONPATH"), home)))}


def reap(pid: int) -> int | None:
    """Exit code of our own child if it ended, negative for a signal; None while it lives."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if done else None


def signal_process(pid: int, signum: int) -> None:
    """Send a signal; a process that is gone is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def is_alive(pid: int) -> bool:
    """Is there such a process that is not a zombie?"""
    state, _ = process_state(pid)
    return state is not None and state not in "ZX"


class Testimony(NamedTuple):
    """What a process that did not end in time says of itself: its stacks and its last collectives, if it can.

    `ras` is what NCCL's own service says of the job, if it was asked.
    """

    stacks: Stacks = Stacks()
    flight: tuple[Collective, ...] | None = None
    ras: str = ""


class Worker:
    """One worker: a link to talk, a page to read its steps, a file for its stack, a link to its witness."""

    def __init__(self, kind: Kind, overrides: Mapping[str, str | None], log: Log) -> None:
        self.kind = kind
        self.overrides = dict(overrides)
        self.log = log
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.forked = False
        self.link, self._theirs = _pair()
        self._parcel = Parcel()
        self.page = StepPage.create()
        self._stack = nameless_file("ddpdiag-stack")
        self._witness, self._their_witness = _pair()

    def descriptors(self) -> tuple[int, int, int, int]:
        """What the worker needs: its end of the link, the page, the stack file, its end of the witness's link."""
        return self._theirs.fileno(), self.page.descriptor, self._stack, self._their_witness.fileno()

    def started(self, pid: int | None) -> None:
        """The other end of the link belongs to the worker now."""
        self.pid = pid
        self._theirs.close()
        self._their_witness.close()

    def start_by_exec(self, env: Mapping[str, str]) -> None:
        """Start as a new interpreter, with its environment in place before anything is imported."""
        passed = self.descriptors()
        arguments = [str(os.getpid()), *map(str, passed)]
        self.started(start_python("ddpdiag.runtime.worker", arguments, passed, env, self.log))

    def send(self, order: WorkerOrder) -> bool:
        """Send without waiting; False if the worker is gone or reads nothing."""
        try:
            self.link.send(msgspec.json.encode(order), socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def receive(self) -> WorkerWord | More | None:
        """Its next word, or None when it closed the link. Call only when the link is readable."""
        data = self._parcel.receive(self.link)
        if data is None:
            return More()
        return decode_worker_word.decode(data) if data else None

    def poll_exit(self) -> int | None:
        """Its exit code once known; a forked worker's comes from the nursery."""
        if self.exit_code is None and self.pid is not None and not self.forked:
            self.exit_code = reap(self.pid)
        return self.exit_code

    def look(self) -> ProcessState:
        """How the process stands right now; touches nothing."""
        state, wchan = process_state(self.pid) if self.pid else (None, None)
        return ProcessState(pid=self.pid or 0, state=state, wchan=wchan)

    def testify(self, state: str | None, *, nccl: bool = False) -> Testimony:
        """Its stacks and its last collectives; waits at most 0.5 s for both together.

        `nccl`: a service of NCCL that runs in it is asked as well, and is waited for up to a second in all.

        It may wake the worker up (a signal ends a sleep in C, SIGCONT a stop): whatever is to be known must be fixed
        before. `state` is how it stood then: what a stopped worker posts once it is woken is no evidence.
        """
        if self.pid is None:
            return Testimony()
        begin = time.monotonic()
        end = begin + _DUMP_SECONDS
        asked = self.kind is Kind.TORCH and (state is None or state not in "Tt")
        if asked:
            ask(self._witness, nccl=nccl)
        _dump(self.pid)
        stacks = read_stacks(_settled(self._stack, 0, end))
        alive = partial(is_alive, self.pid)
        said = wait_answer(self._witness, end, alive) if asked else None
        if not isinstance(said, Posted):
            return Testimony(stacks)
        of_nccl = wait_answer(self._witness, begin + RAS_SECONDS, alive) if nccl else None
        return Testimony(stacks, said.flight, of_nccl.text if isinstance(of_nccl, Ras) else "")

    def end(self) -> bool:
        """Kill it; True if it is gone within 2 s."""
        self.link.close()
        if self.pid is None:
            return True
        signal_process(self.pid, signal.SIGKILL)
        end = time.monotonic() + _KILL_SECONDS
        while time.monotonic() < end:
            self.poll_exit()
            if not is_alive(self.pid):
                return True
            time.sleep(0.005)
        return False

    def close(self) -> None:
        """Give back the descriptors."""
        self.link.close()
        self._theirs.close()
        self._witness.close()
        self._their_witness.close()
        self.page.close()
        os.close(self._stack)


def is_busy(pid: int) -> bool:
    """Does a process use a core right now? Looks for 0.1 s."""
    before = cpu_ticks(pid)
    time.sleep(_BUSY_SECONDS)
    after = cpu_ticks(pid)
    return before is not None and after is not None and after > before


def _dump(pid: int) -> None:
    """Have a process write its stacks, even if it is stopped."""
    signal_process(pid, DUMP_SIGNAL)
    signal_process(pid, signal.SIGCONT)


def _settled(descriptor: int, start: int, end: float) -> str:
    """What is written to a file after `start`, once it stops growing; waits until `end` of the monotonic clock."""
    text = before = b""
    while time.monotonic() < end and not (text and text == before):
        time.sleep(_POLL_SECONDS)
        before, text = text, os.pread(descriptor, os.fstat(descriptor).st_size - start, start)
    return text.decode(errors="replace")


class Nursery:
    """The process that holds torch and forks workers."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.log = Log()
        self.import_seconds: float | None = None
        self.exit_code: int | None = None
        self.closed = False
        self.ended = False
        self._asked: list[Worker] = []  # in the order in which their pids will come
        self._workers: list[Worker] = []
        self.link, theirs = _pair()
        arguments = [str(os.getpid()), str(theirs.fileno())]
        self.pid = start_python("ddpdiag.runtime.nursery", arguments, (theirs.fileno(),), env, self.log)
        theirs.close()

    def fork(self, overrides: Mapping[str, str | None]) -> Worker:
        """Ask for a worker; it starts as soon as the nursery is free, and can be sent its task before that."""
        worker = Worker(Kind.TORCH, overrides, self.log)
        worker.forked = True
        try:
            socket.send_fds(self.link, [msgspec.json.encode(Fork())], list(worker.descriptors()), socket.MSG_DONTWAIT)
        except OSError:
            self.closed = True  # seen as a dead nursery by whoever waits for the worker
        self._asked.append(worker)
        worker.started(None)
        return worker

    def spare(self) -> None:
        """Nothing will be trained: what DDP loads lazily (1.7 s of a core with torch 2.13) need not be there."""
        with contextlib.suppress(OSError):
            self.link.send(msgspec.json.encode(Enough()), socket.MSG_DONTWAIT)

    def receive(self) -> None:
        """Take in what the nursery says. Call only when the link is readable."""
        try:
            data = self.link.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return
        match decode_nursery_word.decode(data):
            case Imported(seconds):
                self.import_seconds = seconds
            case Forked(pid):
                worker = self._asked.pop(0)
                worker.pid = pid
                self._workers.append(worker)
            case Exited(pid, code):
                for worker in self._workers:
                    if worker.pid == pid:
                        worker.exit_code = code

    def poll_exit(self) -> int | None:
        """Its exit code once it ended."""
        if self.exit_code is None:
            self.exit_code = reap(self.pid)
        return self.exit_code

    def look(self) -> ProcessState:
        """How the process stands right now."""
        state, wchan = process_state(self.pid)
        return ProcessState(pid=self.pid, state=state, wchan=wchan)

    def testify(self, _state: str | None, *, nccl: bool = False) -> Testimony:
        """Its stacks: where an import hangs. It posts nothing, and has no NCCL."""
        start = self.log.size()
        _dump(self.pid)
        return Testimony(read_stacks(_settled(self.log.fileno(), start, time.monotonic() + _DUMP_SECONDS)))

    def end(self) -> bool:
        """Kill it; its workers go with it. True if it is gone within 2 s."""
        self.ended = True
        self.link.close()
        signal_process(self.pid, signal.SIGKILL)
        end = time.monotonic() + _KILL_SECONDS
        while time.monotonic() < end:
            self.poll_exit()
            if not is_alive(self.pid):
                return True
            time.sleep(0.005)
        return False
