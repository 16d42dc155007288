"""A run with a single rank, which needs no launcher, control server, fork server, record or port.

This process is both the coordinator and the supervisor of the rank. It forks its workers itself. A fork is safe and
takes milliseconds, because this process has no threads, no torch and no CUDA. `call_with_deadline` runs a function, for
example a run with a single rank, in a child process, which is killed if it takes too long.
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
    describe_end,
    detach_from_terminal,
    die_with_parent,
    dump_stacks_to,
    flush_output,
)
from ddpdiag.runtime.supervisor.trial_runner import TrialRunner
from ddpdiag.runtime.supervisor.worker import serve_trials
from ddpdiag.runtime.supervisor.workers import WorkerProcess

_IDENTITY = b"0"
# Checks of a single host write no files, because the disk may be full or read-only when a Prolog runs them.
_NO_SCRATCH = os.devnull


def run_alone(
    arrival: Arrival, header: Header, checks: Sequence[Check[Any]], listener: Listener, signals: Signals
) -> tuple[Line, ...]:
    """Run the checks on a single rank, within the budget in `header.options`. Returns the lines of the recording."""
    with_torch = any(check.kind is Kind.TORCH and check.measure is not None for check in checks)
    rank = SingleRank(arrival, with_torch=with_torch)
    coordinator = Coordinator(rank, header, checks, listener, lambda: signals.received)
    try:
        coordinator.run(DEADLINES.single_rank_hello)
        return coordinator.lines()
    finally:
        rank.close()


class SingleRank(TrialRunner):
    """The supervisor of the only rank, and the coordinator's channel to it. `with_torch`: import torch at once."""

    def __init__(self, arrival: Arrival, *, with_torch: bool) -> None:
        super().__init__(arrival.place, _NO_SCRATCH)
        self._messages: list[messages.MessageToRank0] = [messages.Hello(arrival)]
        self._log = Log()
        if with_torch:  # the import takes more than a second, and runs while the plain trials run
            self.workers[Kind.TORCH] = self.start_worker(Kind.TORCH, {})

    def send(self, _identity: bytes, message: messages.MessageToRank) -> None:
        """Handle a message of the coordinator at once."""
        match message:
            case messages.Start(place, options):
                self.place, self.options = place, options
            case messages.RunTrial() | messages.BarrierOpen() | messages.Stop():
                self.handle_order(message)
            case messages.Ping() | messages.Shutdown():
                self._messages.append(messages.Pong())
            case _:
                pass

    def receive(self, seconds: float) -> Iterator[tuple[bytes, messages.MessageToRank0]]:
        """Yield messages that the worker sends within so many seconds. Ends the trial if its deadline has passed."""
        if not self._messages:
            self._wait(seconds)
        pending, self._messages = self._messages, []
        yield from ((_IDENTITY, message) for message in pending)

    def close(self) -> None:
        self.kill_workers()

    def _wait(self, seconds: float) -> None:
        running_trial = self.running_trial
        if running_trial is None:
            select.select([], [], [], seconds)
            return
        left_seconds = max(0.0, running_trial.deadline - time.monotonic())
        if select.select([running_trial.worker.channel], [], [], min(seconds, left_seconds))[0]:
            self.read_message(running_trial)
        else:
            self.check_limits(running_trial)

    def report(self, message: messages.BarrierReached | messages.PartialData | Outcome) -> None:
        """Keep a message for the coordinator until the next `receive`."""
        self._messages.append(message)

    def start_worker(self, kind: Kind, overrides: Mapping[str, str | None]) -> WorkerProcess:
        worker = SingleRankWorker(kind, overrides, self._log)
        flush_output()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_worker(parent, worker, self._log)
        worker.set_pid(pid)
        return worker


class SingleRankWorker(WorkerProcess):
    """A forked worker of the only rank. It imports torch itself if its trials need torch."""

    @property
    def start_step(self) -> str | None:
        """`IMPORT_STEP` until a worker with torch announces its first step, else None."""
        return IMPORT_STEP if self.kind is Kind.TORCH and self.page.read()[0] == 0 else None


def _become_worker(parent: int, worker: WorkerProcess, log: Log) -> NoReturn:
    try:
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)  # the inherited descriptor would wake the parent
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        detach_from_terminal()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        worker.channel.close()
        channel, page, stack_file, recorder_channel = worker.descriptors()
        if worker.kind is Kind.TORCH:
            # The stacks are read if the import hangs.
            dump_stacks_to(stack_file)
            import_torch()
        serve_trials(channel, page, stack_file, recorder_channel)
    finally:
        # Never return into the parent's code. The log and the exit code say what ended this worker.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


# A file server or driver that does not answer may block the call. The parent process waits on local descriptors only,
# so that it can report the step of the call and exit in time. The call writes to logs, so that even a call that
# survives SIGKILL does not block the reader of the output.

_POLL_SECONDS = 0.1

AnnounceStep = Callable[[str], None]


def call_with_deadline(call: Callable[[AnnounceStep], int], seconds: float) -> int:
    """Run `call` in a child, and return its exit code. `call` gets a function that announces its next step.

    Shortly before `seconds` are over, the child gets SIGTERM. If it then exits, the result is UNKNOWN. RunLost if the
    child was killed, which takes half a second more at most. OSError if standard output cannot be written.
    """
    page = StepPage.create()
    end = time.monotonic() + seconds
    children = ForkedChildren(Signals(children=True))
    logs = _make_logs()

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
            _copy_logs(logs, end)
        raise
    finally:
        page.close()
    _copy_logs(logs, end)
    return code


def _make_logs() -> dict[tuple[int, ...], Log]:
    """Logs by the descriptors that they replace: standard output and error, if these are pipes or sockets.

    If both are the same pipe, they have one log. bash's $( ) and subprocess.run read until every process that holds the
    pipe has ended. A child that survives SIGKILL would block them for ever, so it does not get the pipe.
    """
    states = {descriptor: os.fstat(descriptor) for descriptor in (1, 2)}
    pipes = tuple(fd for fd, state in states.items() if stat.S_ISFIFO(state.st_mode) or stat.S_ISSOCK(state.st_mode))
    if len(pipes) == 2 and os.path.samestat(states[1], states[2]):
        return {pipes: Log()}  # one log keeps the order of the lines
    return {(descriptor,): Log() for descriptor in pipes}


def _copy_logs(logs: Mapping[tuple[int, ...], Log], end: float) -> None:
    """Copy each log to its descriptor. RunLost if the reader does not read in time."""

    def write() -> None:
        for (descriptor, *_), log in logs.items():
            with contextlib.nullcontext() if descriptor == 1 else contextlib.suppress(OSError):
                log.copy_to(descriptor)

    try:
        ThreadPoolExecutor(1).submit(write).result(max(end - time.monotonic(), DEADLINES.call_read))
    except TimeoutError:
        raise RunLost("the reader of the report did not take it in time") from None


def _wait_for_child(children: ForkedChildren, child: Child, page: StepPage, seconds: float) -> int:
    """Wait for the child. Returns its exit code, or UNKNOWN if its time was over. RunLost if it was killed."""
    code = _wait_for_exit(children, seconds - DEADLINES.call_term)
    if code is None:
        # Read before a signal changes it.
        position = f"{_describe_position(child, page)} when its {seconds:g} s were over"
        children.send(signal.SIGTERM)
        code = _wait_for_exit(children, DEADLINES.call_term)
        if code == ExitCode.TERMINATED and children.signals.received is None:
            return ExitCode.UNKNOWN  # the time was over; no user or scheduler ended the run
        if code is None:
            children.send(signal.SIGKILL)
            survived = _wait_for_exit(children, DEADLINES.call_kill) is None
            raise RunLost(f"{position}; {'it survived SIGKILL' if survived else 'it was killed'}, nothing was judged")
    if code < 0:
        raise RunLost(f"{_describe_position(child, page)} when it was {describe_end(code)}; nothing was judged")
    return code


def _wait_for_exit(children: ForkedChildren, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while children.running and (left_seconds := end - time.monotonic()) > 0:
        children.wait(min(left_seconds, _POLL_SECONDS))
    return children.exit_codes.get(0)


def _describe_position(child: Child, page: StepPage) -> str:
    """State and step of the child: "pid 77 (state D, waiting in nfs_wait) stood at 'write the report' for 4.1 s"."""
    state = child.state()
    shown_state = ", waiting in ".join(filter(None, (f"state {state.state}" if state.state else "", state.wchan)))
    _, label = page.read()
    shown_step = f"'{label}' for {page.step_seconds():.1f} s" if label else "its start"
    return f"pid {state.pid}{f' ({shown_state})' if shown_state else ''} stood at {shown_step}"
