"""The supervisor: one per rank, started by the launcher. It owns deadlines, and outlives whatever its worker does.

It never imports torch, and waits only on local descriptors with a time-out.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping

import zmq

from ddpdiag.errors import ExitCode, RunLost
from ddpdiag.foreign import printable
from ddpdiag.model import IMPORT_STEP, Event, EventKind, Kind, Options, Outcome, Place, ProcessState, Status, Trial
from ddpdiag.runtime.control.client import ControlClient, refusal
from ddpdiag.runtime.control.liveness import crowded_silence_seconds, frozen_seconds, silence_seconds
from ddpdiag.runtime.control.messages import (
    Ack,
    BarrierOpen,
    Downward,
    HelloAck,
    Leaving,
    Partial,
    Ping,
    Pong,
    Ready,
    Refused,
    Result,
    RunTrial,
    Shutdown,
    Start,
    Stop,
)
from ddpdiag.runtime.launchers.environment import refused_override
from ddpdiag.runtime.record.record import Record
from ddpdiag.runtime.supervisor.children import Nursery, Worker
from ddpdiag.runtime.supervisor.hang_evidence import asks_nccl
from ddpdiag.runtime.supervisor.ipc import Answer, BarrierReached, More, Task, WorkerPartial
from ddpdiag.runtime.supervisor.processes import Signals
from ddpdiag.runtime.supervisor.running_trial import Running, expired

_LEAVE_SECONDS = 2.0
# Read when a process is exec'ed or when torch is imported: an override takes effect only in a worker of its own.
EXEC_TIME = ("OMP_", "MKL_", "LD_", "PYTHON", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL")


class Rank0Lost(RunLost):
    """Rank 0 fell silent; what this rank saw is in its record."""


class Supervisor:
    """Serves rank 0's orders until its farewell.

    `variables` gives the launcher variables that a job's process would see in a place; `signals` tells when this
    process was told to leave (None where the main thread takes care of that); `trains`, whether a run with these
    options trains a model.
    """

    def __init__(
        self,
        place: Place,
        variables: Callable[[Place], Mapping[str, str]],
        record: Record,
        *,
        signals: Signals | None = None,
        trains: Callable[[Options], bool] = lambda _options: True,
    ) -> None:
        self.place = place
        self._variables = variables
        self._record = record
        self._signals = signals
        self._trains = trains
        self._options = Options()
        # torch._dynamo makes inductor's cache folder when it is imported; ours goes with the scratch folder.
        self._own = {"TORCHINDUCTOR_CACHE_DIR": str(record.scratch)}
        self._nursery = Nursery({**self._own, **os.environ, **variables(place)})
        self._workers: dict[Kind, Worker] = {Kind.PLAIN: self._exec_worker(Kind.PLAIN, {})}
        self._workers[Kind.TORCH] = self._nursery.fork({})
        self._running: Running | None = None
        self._last_trial = 0
        self._unnoted: Result | None = None
        self._survivors: list[str] = []
        self._farewell: Shutdown | None = None
        self._told_to_leave: tuple[int, float] | None = None

    def run(self, link: ControlClient) -> Shutdown:
        """Serve until the farewell; RunLost when rank 0 falls silent."""
        self._link = link
        self._begin = link.heard = time.monotonic()
        if self._signals is not None and self._signals.told is not None:
            self._leave(self._signals.told)
        while self._farewell is None:
            before = time.monotonic()
            self._wait()
            frozen = frozen_seconds(before, time.monotonic())
            link.heard += frozen
            if self._running is not None:
                self._running.deadline += frozen
            for message in link.receive():
                self._obey(message)
            self._watch_running()
            self._watch_rank_0()
        self._survivors = self.end_children()  # told once more by whoever called us
        link.send(Pong())
        link.close()
        return self._farewell

    def _leave(self, signum: int) -> None:
        """The launcher told this process to leave: say so first, so that nobody blames us."""
        if self._told_to_leave is None:
            now = time.monotonic()
            self._told_to_leave = (signum, now)
            self._link.send(Leaving(signum))
            own = Event(kind=EventKind.LEAVING, rank=self.place.rank, seconds=now - self._begin, detail=str(signum))
            self._record.write(own)

    def end_children(self) -> list[str]:
        """Kill workers and nursery; a sentence for each process that cannot be killed."""
        survivors = self._survivors
        for worker in self._workers.values():
            if not worker.end():
                survivors.append(_survivor(worker.look()))
            worker.close()
        self._workers.clear()
        if not self._nursery.ended and not self._nursery.end():
            survivors.append(_survivor(self._nursery.look()))
        self._survivors = []
        return survivors

    # What comes in ---------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._link.socket, zmq.POLLIN)
        if not self._nursery.closed:
            poller.register(self._nursery.link, zmq.POLLIN)
        if self._signals is not None:
            poller.register(self._signals.woken, zmq.POLLIN)
        if self._running is not None:
            poller.register(self._running.worker.link, zmq.POLLIN)
        ready = dict(poller.poll(self._patience_ms()))
        if not self._nursery.closed and self._nursery.link.fileno() in ready:
            self._hear_nursery()
        if self._signals is not None and self._signals.woken.fileno() in ready:
            self._signals.drain()
            if self._signals.told is not None:
                self._leave(self._signals.told)
        if self._running is not None and self._running.worker.link.fileno() in ready:
            self._hear(self._running)

    def _hear_nursery(self) -> None:
        importing = self._nursery.import_seconds is None
        self._nursery.receive()
        running = self._running
        if importing and self._nursery.import_seconds is not None and running is not None and running.worker.forked:
            running.torch_came(time.monotonic())

    def _patience_ms(self) -> int:
        if self._running is None:
            return 500
        return round(1000 * min(0.5, max(0.0, self._running.deadline - time.monotonic()) + 0.001))

    def _obey(self, message: Downward) -> None:
        match message:
            case Start(place, options, nonce):
                self.place, self._options = place, options
                self._record.welcomed(nonce)
                if not self._trains(options):
                    self._nursery.spare()
            case Ack(number):
                if self._unnoted is not None and self._unnoted.outcome.trial == number:
                    self._unnoted = None
            case Ping():
                self._link.send(self._again())
            case Shutdown():
                self._farewell = message
            case Refused():
                raise refusal(message)
            case HelloAck():
                pass
            case RunTrial() | BarrierOpen() | Stop():
                self._obey_trial(message)

    def _obey_trial(self, message: RunTrial | BarrierOpen | Stop) -> None:
        """Orders and openings come again until something is heard of them, and count once."""
        running = self._running
        match message:
            case RunTrial(trial) if trial.number > self._last_trial:
                self._start(message.unpacked())
            case BarrierOpen(trial=number) if (
                running is not None and running.trial.number == number and not running.opened
            ):
                running.opened = running.worker.send(message)
            case Stop(number) if running is not None and running.trial.number == number:
                self._expire(running, told=True)
            case _:
                pass

    def _again(self) -> Pong | Ready | Result:
        """The answer to a ping: what rank 0 has not reacted to yet, else a sign of life."""
        if self._running is not None and self._running.ready is not None and not self._running.opened:
            return self._running.ready
        return self._unnoted or Pong()

    def _hear(self, running: Running) -> None:
        match running.worker.receive():
            case BarrierReached(offer, shares):
                running.reached_gate(time.monotonic())
                running.ready = Ready(running.trial.number, offer, shares)
                self._link.send(running.ready)
            case More():
                pass
            case WorkerPartial(data, text):
                running.so_far = data
                self._link.send(Partial(running.trial.number, data, text))
            case Answer() as answer:
                self._finish(running, running.answered(answer, time.monotonic()))
            case None:
                self._finish(running, self._dead(running))

    # Trials ----------------------------------------------------------------------------------------------------------

    def _start(self, trial: Trial) -> None:
        if (refused := refused_override(trial.env)) is not None:
            raise RunLost(f"rank 0 asked rank {self.place.rank} to set {printable(refused)}, which no check does")
        self._record.write(trial)
        self._last_trial = trial.number
        worker = self._worker_for(trial)
        running = Running(trial, self.place.rank, worker, time.monotonic())
        self._running = running
        env: dict[str, str | None] = {"TORCHELASTIC_USE_AGENT_STORE": None, **self._variables(self.place), **trial.env}
        worker.send(Task(self.place, trial, self._options, str(self._record.scratch), env, running.deadline))

    def _worker_for(self, trial: Trial) -> Worker:
        """The worker of the trials before, unless this one needs another."""
        worker = self._workers.get(trial.kind)
        if worker is not None and worker.overrides == trial.env and not trial.fresh:
            return worker
        if worker is not None:
            worker.end()
            worker.close()
        if trial.kind is Kind.PLAIN or any(name.startswith(EXEC_TIME) for name in trial.env):
            self._workers[trial.kind] = self._exec_worker(trial.kind, trial.env)
        else:
            self._workers[trial.kind] = self._nursery.fork(trial.env)
        return self._workers[trial.kind]

    def _exec_worker(self, kind: Kind, overrides: Mapping[str, str | None]) -> Worker:
        worker = Worker(kind, overrides, self._nursery.log)
        env: dict[str, str | None] = {**self._own, **os.environ, **self._variables(self.place), **overrides}
        worker.start_by_exec({name: value for name, value in env.items() if value is not None})
        return worker

    def _watch_running(self) -> None:
        running = self._running
        if running is None:
            return
        running.allow_first_use(time.monotonic())
        if running.worker.forked and running.worker.pid is None and self._nursery.closed:
            self._finish(running, self._nursery_dead(running))
        elif time.monotonic() >= running.deadline:
            self._expire(running)

    def _expire(self, running: Running, *, told: bool = False) -> None:
        """The deadline: first fix what is known, then wake, dump and kill."""
        forking = running.worker.forked and running.worker.pid is None
        importing = forking and self._nursery.import_seconds is None
        child = self._nursery if forking else running.worker
        step = None
        if forking:
            step = IMPORT_STEP if importing else "wait for the nursery"
        # A nursery that has imported torch is only slow to fork; without it no later trial could use torch.
        ends = importing or not forking
        outcome = expired(running, child, at=step, told=told, ends=ends, nccl=asks_nccl(self.place))
        self._finish(running, outcome)

    def _dead(self, running: Running) -> Outcome:
        """The worker closed its link without an answer: how did it end?"""
        end = time.monotonic() + 1.0
        while running.worker.poll_exit() is None and time.monotonic() < end:
            if running.worker.forked and self._nursery.link.fileno() >= 0 and not self._nursery.closed:
                if zmq.select([self._nursery.link], [], [], 0.05)[0]:
                    self._nursery.receive()
            else:
                time.sleep(0.01)
        return running.died(
            running.worker.exit_code, running.worker.log.tail(since=running.log_start), time.monotonic()
        )

    def _nursery_dead(self, running: Running) -> Outcome:
        """torch could not be imported, or the nursery was killed."""
        end = time.monotonic() + 1.0
        while self._nursery.poll_exit() is None and time.monotonic() < end:
            time.sleep(0.01)
        return running.without_torch(self._nursery.exit_code, self._nursery.log.tail(), time.monotonic())

    def _finish(self, running: Running, outcome: Outcome) -> None:
        """To our own file first, then to the control server. After anything but DONE the worker is replaced."""
        self._running = None
        self._record.write(outcome)
        self._unnoted = Result(outcome)
        self._link.send(self._unnoted)
        if outcome.status is not Status.DONE:
            worker = self._workers.pop(running.trial.kind)
            worker.end()
            worker.close()

    # Rank 0 ----------------------------------------------------------------------------------------------------------

    def _watch_rank_0(self) -> None:
        now = time.monotonic()
        silent = now - self._link.heard
        if self._told_to_leave is not None:
            signum, since = self._told_to_leave
            if now - since > _LEAVE_SECONDS + 1.0:
                code = ExitCode.of_signal(signum)
                sentence = f"rank {self.place.rank} was told to leave by {signal.Signals(signum).name}"
                if silent > _LEAVE_SECONDS + 0.5:
                    # Launchers that end a job because of rank 0 kill the witnesses next.
                    self._lose_rank_0(silent)
                    raise Rank0Lost(sentence, code)
                raise RunLost(sentence, code)
        # When the budget is spent rank 0 has only to write, and nobody has time to spare.
        patience = silence_seconds(self.place.world_size, late=now - self._begin >= self._options.budget_seconds)
        patience += crowded_silence_seconds(self.place.local_world_size)
        if silent > patience:
            self._lose_rank_0(silent)
            raise Rank0Lost(
                f"rank {self.place.rank} on {self.place.node} lost rank 0: nothing was heard of it for {patience:g} s"
            )

    def _lose_rank_0(self, silent_seconds: float) -> None:
        """Into our own record: that rank 0 is gone, and how far our trial had come."""
        self._record.sign("heir")  # at once: ending a hung trial takes seconds
        if self._running is not None:
            self._expire(self._running, told=True)
        detail = f"nothing was heard of it for {silent_seconds:.0f} s by rank {self.place.rank} on {self.place.node}"
        self._record.write(Event(kind=EventKind.LOST, rank=0, seconds=time.monotonic() - self._begin, detail=detail))


def _survivor(process: ProcessState) -> str:
    where = f", waiting in {process.wchan}" if process.wchan else ""
    return f"pid {process.pid} survived SIGKILL (state {process.state}{where}); it is stuck in the kernel"
