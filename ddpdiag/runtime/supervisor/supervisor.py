"""The supervisor of a rank, which enforces the deadlines of trials, and survives any failure of its workers.

The launcher starts one per rank. It never imports torch, and waits only on local descriptors, with a time-out.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping

import zmq
from msgspec import structs

from ddpdiag.errors import ExitCode, RunLost
from ddpdiag.model import Event, EventKind, Kind, Outcome, Place, RunOptions, Trial
from ddpdiag.model.trial import refused_override
from ddpdiag.probes.host.programs import with_package_path
from ddpdiag.runtime.control import messages
from ddpdiag.runtime.control.client import ControlClient
from ddpdiag.runtime.control.join import refusal_error
from ddpdiag.runtime.deadlines import DEADLINES, crowded_silence_seconds, frozen_seconds, silence_seconds
from ddpdiag.runtime.record import Record
from ddpdiag.runtime.supervisor import sharing
from ddpdiag.runtime.supervisor.processes import Child, Log, Signals
from ddpdiag.runtime.supervisor.trial_runner import TrialRunner
from ddpdiag.runtime.supervisor.workers import ForkedWorker, ForkServerProcess, WorkerProcess
from ddpdiag.sanitize import printable

# A lost shared fork server is replaced once by another shared one, so that the ranks of a large host do not all import
# torch at once. If that is lost as well, each rank starts a private server.
_MAX_SHARED_SERVERS = 2


class Supervisor(TrialRunner):
    """Runs the trials that rank 0 orders, until rank 0 ends the run.

    `variables(place)` returns the launcher's variables for a worker in that place. `signals` is None in rank 0, where
    the main thread handles signals to end. `trains_model(options)` says whether a run trains a model. After a loss of
    rank 0, `rank_0_answers()` says whether its host answers. Ranks find a shared fork server in the folder of `record`.
    """

    def __init__(
        self,
        place: Place,
        variables: Callable[[Place], Mapping[str, str]],
        record: Record,
        *,
        signals: Signals | None = None,
        trains_model: Callable[[RunOptions], bool] = lambda _options: True,
        rank_0_answers: Callable[[], bool | None] = lambda: None,
    ) -> None:
        super().__init__(place, str(record.scratch))
        self._launcher_variables = variables
        self._record = record
        self._signals = signals
        self._trains_model = trains_model
        self._rank_0_answers = rank_0_answers
        # torch._dynamo creates inductor's cache folder at its import. The scratch folder is removed at the end.
        self._environment = {"TORCHINDUCTOR_CACHE_DIR": str(record.scratch), **os.environ}
        self._log = Log()
        self._lost_servers = 0
        self._fork_server = self._start_fork_server()
        for kind in Kind:
            self.workers[kind] = self.start_worker(kind, {})
        self._unacknowledged: Outcome | None = None
        self._survivors: list[str] = []
        self._shutdown: messages.Shutdown | None = None
        self._signal_received: tuple[int, float] | None = None

    def _start_fork_server(self) -> ForkServerProcess:
        """Start or join the fork server that ranks of this host share. If they cannot share, start a private one."""
        extra = {sharing.INTERPRETER_VARIABLE: sharing.interpreter_digest()} if sharing.is_possible() else {}
        env = with_package_path({**self._environment, **self._launcher_variables(self.place), **extra})
        shares = (self.place.local_world_size or 1) > 1 and self._lost_servers < _MAX_SHARED_SERVERS
        name = sharing.socket_name(env, self._lost_servers) if shares else None
        return ForkServerProcess(self.place.rank, env, None if name is None else self._record.folder / name)

    def _replace_lost_fork_server(self) -> None:
        """If the fork server is lost, start or join another one, and request the unstarted workers again."""
        while (lost := self._fork_server).is_lost:
            self._lost_servers = _MAX_SHARED_SERVERS if lost.has_refused else self._lost_servers + 1
            self._fork_server = self._start_fork_server()
            for worker in lost.unstarted_workers():
                self._fork_server.request(worker)
            if not self._trains_model(self.options):
                self._fork_server.skip_lazy_imports()
            lost.kill()

    def run(self, client: ControlClient) -> messages.Shutdown:
        """Run trials until rank 0 sends `Shutdown`, and return it. RunLost if rank 0 is lost or refuses the rank."""
        self._client = client
        self._begin = client.last_message_at = time.monotonic()
        if self._signals is not None and self._signals.received is not None:
            self._report_signal(self._signals.received)
        while self._shutdown is None:
            before = time.monotonic()
            self._wait()
            frozen = frozen_seconds(before, time.monotonic())
            client.last_message_at += frozen
            if self.running_trial is not None:
                self.running_trial.deadline += frozen
            for message in client.receive():
                self._handle(message)
            self._replace_lost_fork_server()
            if self.running_trial is not None:
                self.check_limits(self.running_trial)
            self._check_rank_0()
        self._survivors = self.end_children()
        client.send(messages.Pong())
        client.close()
        return self._shutdown

    def _report_signal(self, signum: int) -> None:
        """Tell rank 0 which signal asked this rank to end (the first), so that the rank is not blamed for ending."""
        if self._signal_received is None:
            now = time.monotonic()
            self._signal_received = (signum, now)
            self._client.send(messages.Leaving(signum))
            event = Event(kind=EventKind.LEAVING, rank=self.place.rank, seconds=now - self._begin, detail=str(signum))
            self._record.write(event)

    def end_children(self) -> list[str]:
        """Kill workers and fork server. Returns a sentence for each process that survives."""
        survivors = [*self._survivors, *map(_describe_survivor, self.kill_workers())]
        if not self._fork_server.is_killed and not self._fork_server.kill():
            survivors.append(_describe_survivor(self._fork_server))
        self._survivors = []
        return survivors

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._client.socket, zmq.POLLIN)
        if not self._fork_server.is_closed:
            poller.register(self._fork_server.channel, zmq.POLLIN)
        if self._signals is not None:
            poller.register(self._signals.wake_socket, zmq.POLLIN)
        if self.running_trial is not None:
            poller.register(self.running_trial.worker.channel, zmq.POLLIN)
        left = 0.5 if self.running_trial is None else self.running_trial.deadline - time.monotonic() + 0.001
        ready = dict(poller.poll(round(1000 * min(0.5, max(0.001, left)))))
        if not self._fork_server.is_closed and self._fork_server.channel.fileno() in ready:
            self._fork_server.receive()
        if self._signals is not None and self._signals.wake_socket.fileno() in ready:
            self._signals.drain()
            if self._signals.received is not None:
                self._report_signal(self._signals.received)
        if self.running_trial is not None and self.running_trial.worker.channel.fileno() in ready:
            self.read_message(self.running_trial)

    def _handle(self, message: messages.MessageToRank) -> None:
        match message:
            case messages.Start(place, options, nonce):
                self.place, self.options = place, options
                self._record.set_rank_0_nonce(nonce)
                if not self._trains_model(options):
                    self._fork_server.skip_lazy_imports()
            case messages.Ack(number):
                if self._unacknowledged is not None and self._unacknowledged.trial == number:
                    self._unacknowledged = None
            case messages.Ping():
                self._client.send(self._answer_to_ping())
            case messages.Shutdown():
                self._shutdown = message
            case messages.Refused():
                raise refusal_error(message)
            case messages.HelloAck():
                pass
            case messages.RunTrial() | messages.BarrierOpen() | messages.Stop():
                self.handle_order(message)

    def _answer_to_ping(self) -> messages.Pong | messages.BarrierReached | Outcome:
        """The answer to a ping: the last message to which rank 0 has not reacted yet, else `Pong`."""
        if (
            self.running_trial is not None
            and self.running_trial.barrier_reached is not None
            and not self.running_trial.is_barrier_open
        ):
            return self.running_trial.barrier_reached
        return self._unacknowledged or messages.Pong()

    def start(self, trial: Trial) -> None:
        """Record the trial and send it to a worker. RunLost if the trial sets a variable that no check may set."""
        if (variable := refused_override(trial.env)) is not None:
            raise RunLost(f"rank 0 asked rank {self.place.rank} to set {printable(variable)}, which no check does")
        self._record.write(trial)
        super().start(trial)

    def variables(self, trial: Trial) -> dict[str, str | None]:
        """The variables that the worker sets, or unsets if None, for a trial: torchrun's and those of the trial."""
        return {"TORCHELASTIC_USE_AGENT_STORE": None, **self._launcher_variables(self.place), **trial.env}

    def start_worker(self, kind: Kind, overrides: Mapping[str, str | None]) -> WorkerProcess:
        """Start a worker: a new interpreter if it needs no torch or sets one of EXEC_TIME_VARIABLES, else a fork."""
        if kind is Kind.TORCH and not any(map(sharing.EXEC_TIME_VARIABLES.fullmatch, overrides)):
            forked_worker = ForkedWorker(self._fork_server, overrides, self._log)
            self._fork_server.request(forked_worker)
            return forked_worker
        worker = WorkerProcess(kind, overrides, self._log)
        env: dict[str, str | None] = {**self._environment, **self._launcher_variables(self.place), **overrides}
        worker.start_by_exec({name: value for name, value in env.items() if value is not None})
        return worker

    def report(self, message: messages.BarrierReached | messages.PartialData | Outcome) -> None:
        """Send a message to rank 0. An outcome is recorded first, and sent again until rank 0 acknowledges it."""
        if isinstance(message, Outcome):
            self._record.write(message)
            self._unacknowledged = message
        self._client.send(message)

    def _check_rank_0(self) -> None:
        now = time.monotonic()
        silent_seconds = now - self._client.last_message_at
        if self._signal_received is not None:
            signum, since = self._signal_received
            if now - since > DEADLINES.end_after_signal + 1.0:
                if silent_seconds > DEADLINES.end_after_signal + 0.5:
                    self._record_loss_of_rank_0(silent_seconds)
                sentence = f"rank {self.place.rank} received {signal.Signals(signum).name}"
                raise RunLost(sentence, ExitCode.of_signal(signum))
        # Once the budget is spent rank 0 only writes its report, and the launcher's time limit is near.
        patience = silence_seconds(self.place.world_size, budget_spent=now - self._begin >= self.options.budget_seconds)
        patience += crowded_silence_seconds(self.place.local_world_size)
        if silent_seconds > patience:
            self._record_loss_of_rank_0(silent_seconds)
            raise RunLost(
                f"rank {self.place.rank} on {self.place.host} lost rank 0: no message from it for {patience:g} s"
            )

    def _record_loss_of_rank_0(self, silent_seconds: float) -> None:
        """Record the loss of rank 0, the outcome of a running trial, and at last whether rank 0's host answers."""
        rank = self.place.rank
        detail = f"rank {rank} on {self.place.host} received no message from it for {silent_seconds:.0f} s"
        seconds = time.monotonic() - self._begin
        loss = Event(kind=EventKind.LOST, rank=0, seconds=seconds, detail=detail, reporter=rank)
        self._record.write(loss)
        if self.running_trial is not None:
            self.expire(self.running_trial, interrupted=True)
        self._record.write(structs.replace(loss, host_answered=self._rank_0_answers()))


def _describe_survivor(child: Child) -> str:
    process = child.state()
    where = f", waiting in {process.wchan}" if process.wchan else ""
    if child.may_still_end(time.monotonic()):
        return (
            f"pid {process.pid} was killed and has not ended yet (state {process.state}{where}); the driver may need "
            f"up to {DEADLINES.kill_gpu:g} s to take its GPU back"
        )
    return f"pid {process.pid} survived SIGKILL (state {process.state}{where}); it is stuck in the kernel"
