"""A run of one rank that needs nobody: no launcher, no control server, no fork server, no record, and no port.

This process is rank 0 and its own supervisor in one. What the coordinator says goes to workers that are forked from
here: nothing in this process has threads, torch or CUDA, and a fork costs milliseconds.
"""

import faulthandler
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from ddpdiag.checks.api import Check
from ddpdiag.model import IMPORT_STEP, Arrival, Header, Kind
from ddpdiag.model.recording import Line
from ddpdiag.runtime.control import messages
from ddpdiag.runtime.coordinator.coordinator import Coordinator
from ddpdiag.runtime.coordinator.progress import Listener
from ddpdiag.runtime.deadlines import DEADLINES
from ddpdiag.runtime.supervisor.children import WorkerProcess
from ddpdiag.runtime.supervisor.fork_server import import_torch
from ddpdiag.runtime.supervisor.processes import (
    DUMP_SIGNAL,
    Log,
    Signals,
    die_with_parent,
    flush_output,
    leave_terminal,
)
from ddpdiag.runtime.supervisor.trial_runner import TrialRunner
from ddpdiag.runtime.supervisor.worker import serve

_IDENTITY = b"0"
# What can be asked of a host alone writes no files, and a Prolog may meet a disk that is full, or read-only.
_NO_SCRATCH = os.devnull


def run_alone(
    arrival: Arrival, header: Header, checks: Sequence[Check[Any]], listener: Listener, signals: Signals
) -> tuple[Line, ...]:
    """All lines of a run with this one rank; ends within the budget of the header's options."""
    with_torch = any(check.kind is Kind.TORCH and check.measure is not None for check in checks)
    rank = OwnRank(arrival, with_torch=with_torch)
    coordinator = Coordinator(rank, header, checks, listener, lambda: signals.told)
    try:
        coordinator.run(DEADLINES.own_hello)
        return coordinator.lines()
    finally:
        rank.close()


class OwnRank(TrialRunner):
    """The only rank, as the coordinator's channel. `with_torch` starts the import of torch at once, in a worker."""

    def __init__(self, arrival: Arrival, *, with_torch: bool) -> None:
        super().__init__(arrival.place, _NO_SCRATCH)
        self._messages: list[messages.Upward] = [messages.Hello(arrival)]
        self._log = Log()
        if with_torch:  # the import takes more than a second, and plain trials are first
            self.workers[Kind.TORCH] = self.start_worker(Kind.TORCH, {})

    # The channel -----------------------------------------------------------------------------------------------------

    def send(self, _identity: bytes, message: messages.Downward) -> None:
        """Obey at once."""
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
        """What the worker sends within so many seconds; a deadline that passes ends its trial."""
        if not self._messages:
            self._wait(seconds)
        taken, self._messages = self._messages, []
        yield from ((_IDENTITY, message) for message in taken)

    def close_door(self) -> None:
        """No other rank can join."""

    def close(self) -> None:
        """End the workers."""
        self.kill_workers()

    def _wait(self, seconds: float) -> None:
        running = self.running
        if running is None:
            select.select([], [], [], seconds)
            return
        left = max(0.0, running.deadline - time.monotonic())
        if select.select([running.worker.channel], [], [], min(seconds, left))[0]:
            self.read(running)
        else:
            self.watch(running)

    # Trials ----------------------------------------------------------------------------------------------------------

    def report(self, message: messages.Ready | messages.Partial | messages.Result) -> None:
        """To the coordinator, in this process."""
        self._messages.append(message)

    def start_worker(self, kind: Kind, overrides: Mapping[str, str | None]) -> WorkerProcess:
        """A fork of this process."""
        worker = OwnFork(kind, overrides, self._log)
        flush_output()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_worker(parent, worker, self._log)
        worker.started(pid)
        return worker


class OwnFork(WorkerProcess):
    """A worker that imports torch itself, where it needs it."""

    @property
    def start_step(self) -> str | None:
        """The import, until a worker with torch has taken up a trial; it announces a step as soon as it does."""
        return IMPORT_STEP if self.kind is Kind.TORCH and self.page.read()[0] == 0 else None


def _become_worker(parent: int, worker: WorkerProcess, log: Log) -> NoReturn:
    try:
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)  # ours would wake the parent
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        leave_terminal()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        worker.channel.close()
        channel, page, stack_file, questions = worker.descriptors()
        if worker.kind is Kind.TORCH:
            # Where an import hangs, its stacks can be had.
            faulthandler.register(DUMP_SIGNAL, file=stack_file, all_threads=True)
            import_torch()
        serve(channel, page, stack_file, questions)
    finally:
        # Never back into the parent's code: whatever ended this worker is told in its log and by its exit code.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
