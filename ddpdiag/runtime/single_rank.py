"""A run of one rank alone: no launcher, no control server, no fork server, no record, and no port.

This process is both rank 0 and its supervisor. It forks its workers itself and passes the coordinator's messages on to
them: it has no threads, no torch and no CUDA, so that a fork is safe and costs milliseconds. The whole run may be in a
child process, which is ended when its time is over (`call_with_deadline`).
"""

import contextlib
import itertools
import os
import select
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from ddpdiag.checks.api import Check
from ddpdiag.errors import ExitCode, RunLost
from ddpdiag.model import IMPORT_STEP, Arrival, Header, Kind, Outcome
from ddpdiag.model.news import Listener
from ddpdiag.model.recording import Line
from ddpdiag.runtime.control import messages
from ddpdiag.runtime.coordinator.coordinator import Coordinator
from ddpdiag.runtime.deadlines import DEADLINES
from ddpdiag.runtime.supervisor.fork_server import import_torch
from ddpdiag.runtime.supervisor.ipc import StepPage
from ddpdiag.runtime.supervisor.processes import (
    Child,
    ForkedChildren,
    Log,
    Signals,
    die_with_parent,
    dump_stacks_to,
    flush_output,
    how_it_ended,
    leave_terminal,
)
from ddpdiag.runtime.supervisor.trial_runner import TrialRunner
from ddpdiag.runtime.supervisor.worker import serve
from ddpdiag.runtime.supervisor.workers import WorkerProcess

_IDENTITY = b"0"
# Checks of a single host write no files, because the disk may be full or read-only when a Prolog runs them.
_NO_SCRATCH = os.devnull


def run_alone(
    arrival: Arrival, header: Header, checks: Sequence[Check[Any]], listener: Listener, signals: Signals
) -> tuple[Line, ...]:
    """Run the checks on this one rank within the budget of the header's options; return all lines of the recording."""
    with_torch = any(check.kind is Kind.TORCH and check.measure is not None for check in checks)
    rank = OwnRank(arrival, with_torch=with_torch)
    coordinator = Coordinator(rank, header, checks, listener, lambda: signals.received)
    try:
        coordinator.run(DEADLINES.own_hello)
        return coordinator.lines()
    finally:
        rank.close()


class OwnRank(TrialRunner):
    """The only rank, as the coordinator's channel. `with_torch`: a worker starts to import torch at once."""

    def __init__(self, arrival: Arrival, *, with_torch: bool) -> None:
        super().__init__(arrival.place, _NO_SCRATCH)
        self._messages: list[messages.Upward] = [messages.Hello(arrival)]
        self._log = Log()
        if with_torch:  # the import takes more than a second, and runs beside the plain trials
            self.workers[Kind.TORCH] = self.start_worker(Kind.TORCH, {})

    def send(self, _identity: bytes, message: messages.Downward) -> None:
        """Handle a message of the coordinator at once."""
        match message:
            case messages.Start(place, options):
                self.place, self.options = place, options
            case messages.RunTrial() | messages.BarrierOpen() | messages.Stop():
                self.obey(message)
            case messages.Ping() | messages.Shutdown():
                self._messages.append(messages.Pong())
            case _:
                pass

    def receive(self, seconds: float) -> Iterator[tuple[bytes, messages.Upward]]:
        """Messages of the worker that arrive within so many seconds. A deadline that passes ends the trial."""
        if not self._messages:
            self._wait(seconds)
        pending, self._messages = self._messages, []
        yield from ((_IDENTITY, message) for message in pending)

    def close(self) -> None:
        """End the workers."""
        self.kill_workers()

    def _wait(self, seconds: float) -> None:
        running_trial = self.running_trial
        if running_trial is None:
            select.select([], [], [], seconds)
            return
        left = max(0.0, running_trial.deadline - time.monotonic())
        if select.select([running_trial.worker.channel], [], [], min(seconds, left))[0]:
            self.read(running_trial)
        else:
            self.watch(running_trial)

    def report(self, message: messages.BarrierReached | messages.Partial | Outcome) -> None:
        """Keep a message for the coordinator, which is in this process."""
        self._messages.append(message)

    def start_worker(self, kind: Kind, overrides: Mapping[str, str | None]) -> WorkerProcess:
        """Fork this process as a worker."""
        worker = OwnFork(kind, overrides, self._log)
        flush_output()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_worker(parent, worker, self._log)
        worker.started(pid)
        return worker


class OwnFork(WorkerProcess):
    """A forked worker of a single rank, which imports torch itself if its trials need torch."""

    @property
    def start_step(self) -> str | None:
        """`IMPORT_STEP` until a worker with torch announces its first step, else None."""
        return IMPORT_STEP if self.kind is Kind.TORCH and self.page.read()[0] == 0 else None


def _become_worker(parent: int, worker: WorkerProcess, log: Log) -> NoReturn:
    try:
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)  # the inherited descriptor would wake the parent
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        leave_terminal()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        worker.channel.close()
        channel, page, stack_file, questions = worker.descriptors()
        if worker.kind is Kind.TORCH:
            # The stacks are read if the import hangs.
            dump_stacks_to(stack_file)
            import_torch()
        serve(channel, page, stack_file, questions)
    finally:
        # Never return into the parent's code: the log and the exit code say what ended this worker.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


# The call may be held up by a file server or a driver that does not answer. The process that watches the call waits on
# local descriptors only, so that it can report the step of the call and exit in time. The call writes to logs, so that
# a call that cannot be killed does not hold up the reader of the output, either.

_POLL_SECONDS = 0.1

Announce = Callable[[str], None]


def call_with_deadline(call: Callable[[Announce], int], seconds: float) -> int:
    """Run `call` in a child, and return its exit code. `call` gets a function to announce its next step.

    RunLost if the child was killed, or did not end within `seconds` (to end it takes half a second more at most).
    OSError if standard output cannot be written; BrokenPipeError if its reader has closed it.
    """
    page = StepPage.create()
    end = time.monotonic() + seconds
    children = ForkedChildren(Signals(children=True))
    logs = _logs()

    def call_with_logs() -> int:
        for descriptors, log in logs.items():
            for descriptor in descriptors:
                os.dup2(log.fileno(), descriptor)
        numbers = itertools.count(1)
        return call(lambda label: page.write(next(numbers), label))

    child = children.fork(call_with_logs)
    try:
        code = _wait_for_child(children, child, page, seconds)
    except RunLost:
        with contextlib.suppress(OSError, RunLost):  # the first error says more than one of the output
            _write_out(logs, end)
        raise
    finally:
        page.close()
    _write_out(logs, end)
    return code


def _logs() -> dict[tuple[int, ...], Log]:
    """Logs in place of standard output and error if these are pipes or sockets; one log for both if they are the same.

    bash's $( ) and subprocess.run read until every process that holds the pipe has ended. A child that survives SIGKILL
    would block them for ever; with logs it does not hold the pipe.
    """
    states = {descriptor: os.fstat(descriptor) for descriptor in (1, 2)}
    pipes = tuple(fd for fd, state in states.items() if stat.S_ISFIFO(state.st_mode) or stat.S_ISSOCK(state.st_mode))
    if len(pipes) == 2 and os.path.samestat(states[1], states[2]):
        return {pipes: Log()}  # one log keeps the order of the lines
    return {(descriptor,): Log() for descriptor in pipes}


def _write_out(logs: Mapping[tuple[int, ...], Log], end: float) -> None:
    """Copy each log to its descriptor; RunLost if the reader does not read it in time."""

    def write() -> None:
        for (descriptor, *_), log in logs.items():
            with contextlib.nullcontext() if descriptor == 1 else contextlib.suppress(OSError):
                log.copy_to(descriptor)

    try:
        ThreadPoolExecutor(1).submit(write).result(max(end - time.monotonic(), DEADLINES.call_read))
    except TimeoutError:
        raise RunLost("the reader of the report did not take it in time") from None


def _wait_for_child(children: ForkedChildren, child: Child, page: StepPage, seconds: float) -> int:
    """Wait for the child, and return its exit code. When the time is over, end it and raise RunLost."""
    code = _exit_code(children, seconds - DEADLINES.call_term)
    if code is None:
        where = f"{_position(child, page)} when its {seconds:g} s were over"  # read before a signal changes it
        children.send(signal.SIGTERM)
        code = _exit_code(children, DEADLINES.call_term)
        if code == ExitCode.TERMINATED and children.signals.received is None:
            return ExitCode.UNKNOWN  # the time was over; no user or scheduler ended the run
        if code is None:
            children.send(signal.SIGKILL)
            survived = _exit_code(children, DEADLINES.call_kill) is None
            raise RunLost(f"{where}; {'it survived SIGKILL' if survived else 'it was killed'}, nothing was judged")
    if code < 0:
        raise RunLost(f"{_position(child, page)} when it was {how_it_ended(code)}; nothing was judged")
    return code


def _exit_code(children: ForkedChildren, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while children.running and (left := end - time.monotonic()) > 0:
        children.wait(min(left, _POLL_SECONDS))
    return children.exit_codes.get(0)


def _position(child: Child, page: StepPage) -> str:
    """State and step: "pid 77 (state D, waiting in nfs_wait_bit_killable) stood at 'write the report' for 4.1 s"."""
    state = child.state()
    how = ", waiting in ".join(filter(None, (f"state {state.state}" if state.state else "", state.wchan)))
    _, label = page.read()
    at = f"'{label}' for {page.seconds():.1f} s" if label else "its start"
    return f"pid {state.pid}{f' ({how})' if how else ''} stood at {at}"
