"""A run of one rank that needs nobody: no launcher, no control server, no nursery, no record, and no port.

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
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from ddpdiag.checks.api import Check
from ddpdiag.model import IMPORT_STEP, Arrival, Header, Kind, Options, Outcome, Place, Status, Trial
from ddpdiag.model.recording import Line
from ddpdiag.runtime.control.messages import (
    BarrierOpen,
    Downward,
    Hello,
    Partial,
    Ping,
    Pong,
    Ready,
    Result,
    RunTrial,
    Shutdown,
    Start,
    Stop,
    Upward,
)
from ddpdiag.runtime.coordinator.coordinator import Coordinator
from ddpdiag.runtime.coordinator.progress import Listener
from ddpdiag.runtime.supervisor.children import Worker
from ddpdiag.runtime.supervisor.fork_server import import_torch
from ddpdiag.runtime.supervisor.ipc import Answer, BarrierReached, More, Task, WorkerPartial
from ddpdiag.runtime.supervisor.processes import DUMP_SIGNAL, Log, Signals, die_with_parent, leave_terminal
from ddpdiag.runtime.supervisor.running_trial import Running, expired
from ddpdiag.runtime.supervisor.worker import serve

_IDENTITY = b"0"
_ARRIVE_SECONDS = 1.0  # it is here already
_REAP_SECONDS = 1.0
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
        coordinator.conduct(_ARRIVE_SECONDS)
        return coordinator.lines()
    finally:
        rank.close()


class OwnRank:
    """The only rank, as the coordinator's channel. `with_torch` starts the import of torch at once, in a worker."""

    def __init__(self, arrival: Arrival, *, with_torch: bool) -> None:
        self._place: Place = arrival.place
        self._options = Options()
        self._words: list[Upward] = [Hello(arrival)]
        self._log = Log()
        self._workers: dict[Kind, Worker] = {}
        self._running: Running | None = None
        self._last_trial = 0
        if with_torch:
            self._worker_for(Kind.TORCH)  # the import takes more than a second, and plain trials come first

    # The channel -----------------------------------------------------------------------------------------------------

    def send(self, _identity: bytes, message: Downward) -> None:
        """Obey at once."""
        running = self._running
        match message:
            case Start(place, options):
                self._place, self._options = place, options
            case RunTrial(trial) if trial.number > self._last_trial:
                self._start(message.unpacked())
            case BarrierOpen(trial=number) if (
                running is not None and running.trial.number == number and not running.opened
            ):
                running.opened = running.worker.send(message)
            case Stop(number) if running is not None and running.trial.number == number:
                self._expire(running, told=True)
            case Ping() | Shutdown():
                self._words.append(Pong())
            case _:
                pass

    def receive(self, seconds: float) -> Iterator[tuple[bytes, Upward]]:
        """What the worker says within so many seconds; a deadline that passes ends its trial."""
        if not self._words:
            self._attend(seconds)
        words, self._words = self._words, []
        yield from ((_IDENTITY, word) for word in words)

    def close_door(self) -> None:
        """Nobody else can come."""

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers.values():
            worker.end()
            worker.close()
        self._workers.clear()

    # Trials ----------------------------------------------------------------------------------------------------------

    def _start(self, trial: Trial) -> None:
        self._last_trial = trial.number
        worker = self._workers.get(trial.kind)
        if worker is not None and trial.fresh:
            self._drop(trial.kind)
        worker = self._worker_for(trial.kind)
        self._running = Running(trial, self._place.rank, worker, time.monotonic())
        task = Task(self._place, trial, self._options, _NO_SCRATCH, dict(trial.env), self._running.deadline)
        worker.send(task)

    def _attend(self, seconds: float) -> None:
        running = self._running
        if running is None:
            select.select([], [], [], seconds)
            return
        left = max(0.0, running.deadline - time.monotonic())
        if select.select([running.worker.link], [], [], min(seconds, left))[0]:
            self._hear(running)
        elif time.monotonic() >= running.deadline:
            self._expire(running)

    def _hear(self, running: Running) -> None:
        match running.worker.receive():
            case BarrierReached(offer, shares):
                running.reached_gate(time.monotonic())
                running.ready = Ready(running.trial.number, offer, shares)
                self._words.append(running.ready)
            case WorkerPartial(data, text):
                running.so_far = data
                self._words.append(Partial(running.trial.number, data, text))
            case Answer() as answer:
                self._finish(running, running.answered(answer, time.monotonic()))
            case More():
                pass
            case None:
                self._finish(running, self._dead(running))

    def _expire(self, running: Running, *, told: bool = False) -> None:
        at = IMPORT_STEP if _is_importing(running) else None
        self._finish(running, expired(running, running.worker, at=at, told=told, ends=True, nccl=False))

    def _dead(self, running: Running) -> Outcome:
        end = time.monotonic() + _REAP_SECONDS
        while running.worker.poll_exit() is None and time.monotonic() < end:
            time.sleep(0.005)
        code, now = running.worker.exit_code, time.monotonic()
        if _is_importing(running):
            return running.without_torch(code, self._log.tail(), now)
        return running.died(code, self._log.tail(since=running.log_start), now)

    def _finish(self, running: Running, outcome: Outcome) -> None:
        """After anything but DONE the worker is replaced."""
        self._running = None
        self._words.append(Result(outcome))
        if outcome.status is not Status.DONE:
            # Who survived SIGKILL is not waited for a second time.
            self._drop(running.trial.kind, ended=outcome.process is not None)

    # Workers ---------------------------------------------------------------------------------------------------------

    def _worker_for(self, kind: Kind) -> Worker:
        if kind not in self._workers:
            self._workers[kind] = worker = Worker(kind, {}, self._log)
            _fork(worker, self._log)
        return self._workers[kind]

    def _drop(self, kind: Kind, *, ended: bool = False) -> None:
        worker = self._workers.pop(kind)
        if not ended:
            worker.end()
        worker.close()


def _is_importing(running: Running) -> bool:
    """Has a worker with torch not taken up the trial yet? It announces a step as soon as it does."""
    return running.trial.kind is Kind.TORCH and running.worker.page.read()[0] == 0


def _fork(worker: Worker, log: Log) -> None:
    """Fork the worker's process; its output goes to the log."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # a child must not write what we hold in a buffer once more
            stream.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become_worker(parent, worker, log)
    worker.started(pid)


def _become_worker(parent: int, worker: Worker, log: Log) -> NoReturn:
    try:
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)  # ours would wake the parent
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        leave_terminal()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        worker.link.close()
        link, page, stack_file, questions = worker.descriptors()
        if worker.kind is Kind.TORCH:
            # Where an import hangs, its stacks can be had.
            faulthandler.register(DUMP_SIGNAL, file=stack_file, all_threads=True)
            import_torch()
        serve(link, page, stack_file, questions)
    finally:
        # Never back into the parent's code: whatever ended this worker is told in its log and by its exit code.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
