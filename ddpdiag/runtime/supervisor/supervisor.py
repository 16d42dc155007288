"""The supervisor: the launcher starts one per rank. It enforces the deadlines, and survives any failure of its worker.

It never imports torch, and waits only on local descriptors, with a time-out.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping

import zmq
from msgspec import structs

from ddpdiag.errors import ExitCode, RunLost
from ddpdiag.model import Event, EventKind, Kind, Options, Outcome, Place, Trial
from ddpdiag.model.trial import refused_override
from ddpdiag.probes.host.programs import with_home
from ddpdiag.runtime.control import messages
from ddpdiag.runtime.control.client import ControlClient
from ddpdiag.runtime.control.join import refusal
from ddpdiag.runtime.deadlines import DEADLINES, crowded_silence_seconds, frozen_seconds, silence_seconds
from ddpdiag.runtime.record import Record
from ddpdiag.runtime.supervisor import sharing
from ddpdiag.runtime.supervisor.processes import Child, Log, Signals
from ddpdiag.runtime.supervisor.trial_runner import TrialRunner
from ddpdiag.runtime.supervisor.workers import ForkServer, WorkerProcess
from ddpdiag.sanitize import printable

# The first lost fork server is replaced by another shared one, so that the ranks of a large host do not all import
# torch at once. After that each rank starts a server of its own.
_SHARED_SERVERS = 2


class Supervisor(TrialRunner):
    """Runs the trials that rank 0 orders, until rank 0 ends the run.

    `variables` returns the launcher's variables for a process in a place. `signals` holds a signal to end this process;
    it is None if the main thread handles signals. `trains` returns whether a run with these options trains a model, and
    `rank_0_answers`, called after the loss of rank 0, whether its host answers. Ranks of one host whose records are in
    one folder share a fork server if they can.
    """

    def __init__(
        self,
        place: Place,
        variables: Callable[[Place], Mapping[str, str]],
        record: Record,
        *,
        signals: Signals | None = None,
        trains: Callable[[Options], bool] = lambda _options: True,
        rank_0_answers: Callable[[], bool | None] = lambda: None,
    ) -> None:
        super().__init__(place, str(record.scratch))
        self._launcher_variables = variables
        self._record = record
        self._signals = signals
        self._trains = trains
        self._rank_0_answers = rank_0_answers
        # torch._dynamo makes inductor's cache folder at its import; in the scratch folder it is removed at the end.
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

    def _start_fork_server(self) -> ForkServer:
        """Start or join the server for the ranks of this host that are like this one; else start one for this rank."""
        extra = {sharing.INTERPRETER: sharing.interpreter()} if sharing.is_possible() else {}
        env = with_home({**self._environment, **self._launcher_variables(self.place), **extra})
        shares = (self.place.local_world_size or 1) > 1 and self._lost_servers < _SHARED_SERVERS
        name = sharing.socket_name(env, self._lost_servers) if shares else None
        return ForkServer(self.place.rank, env, None if name is None else self._record.folder / name)

    def _replace_lost_fork_server(self) -> None:
        """Replace a lost fork server, and request its unstarted workers again. Its other trials have an outcome."""
        while (lost := self._fork_server).is_lost:
            self._lost_servers = _SHARED_SERVERS if lost.has_refused else self._lost_servers + 1
            self._fork_server = self._start_fork_server()
            for worker in lost.unserved():
                self._fork_server.request(worker)
            if not self._trains(self.options):
                self._fork_server.skip_lazy_imports()
            lost.kill()

    def run(self, client: ControlClient) -> messages.Shutdown:
        """Serve until rank 0 ends the run, and return its last message; RunLost if rank 0 falls silent."""
        self._client = client
        self._begin = client.heard = time.monotonic()
        if self._signals is not None and self._signals.received is not None:
            self._report_signal(self._signals.received)
        while self._shutdown is None:
            before = time.monotonic()
            self._wait()
            frozen = frozen_seconds(before, time.monotonic())
            client.heard += frozen
            if self.running_trial is not None:
                self.running_trial.deadline += frozen
            for message in client.receive():
                self._handle(message)
            self._replace_lost_fork_server()
            if self.running_trial is not None:
                self.watch(self.running_trial)
            self._watch_rank_0()
        self._survivors = self.end_children()
        client.send(messages.Pong())
        client.close()
        return self._shutdown

    def _report_signal(self, signum: int) -> None:
        """Report the first signal to end to rank 0, so that this rank is not blamed for its end."""
        if self._signal_received is None:
            now = time.monotonic()
            self._signal_received = (signum, now)
            self._client.send(messages.Leaving(signum))
            event = Event(kind=EventKind.LEAVING, rank=self.place.rank, seconds=now - self._begin, detail=str(signum))
            self._record.write(event)

    def end_children(self) -> list[str]:
        """Kill workers and fork server; return a sentence for each process that survives."""
        survivors = [*self._survivors, *map(_survivor, self.kill_workers())]
        if not self._fork_server.killed and not self._fork_server.kill():
            survivors.append(_survivor(self._fork_server))
        self._survivors = []
        return survivors

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._client.socket, zmq.POLLIN)
        if not self._fork_server.closed:
            poller.register(self._fork_server.channel, zmq.POLLIN)
        if self._signals is not None:
            poller.register(self._signals.woken, zmq.POLLIN)
        if self.running_trial is not None:
            poller.register(self.running_trial.worker.channel, zmq.POLLIN)
        ready = dict(poller.poll(self._patience_ms()))
        if not self._fork_server.closed and self._fork_server.channel.fileno() in ready:
            self._fork_server.receive()
        if self._signals is not None and self._signals.woken.fileno() in ready:
            self._signals.drain()
            if self._signals.received is not None:
                self._report_signal(self._signals.received)
        if self.running_trial is not None and self.running_trial.worker.channel.fileno() in ready:
            self.read(self.running_trial)

    def _patience_ms(self) -> int:
        if self.running_trial is None:
            return 500
        return round(1000 * min(0.5, max(0.0, self.running_trial.deadline - time.monotonic()) + 0.001))

    def _handle(self, message: messages.Downward) -> None:
        match message:
            case messages.Start(place, options, nonce):
                self.place, self.options = place, options
                self._record.set_nonce(nonce)
                if not self._trains(options):
                    self._fork_server.skip_lazy_imports()
            case messages.Ack(number):
                if self._unacknowledged is not None and self._unacknowledged.trial == number:
                    self._unacknowledged = None
            case messages.Ping():
                self._client.send(self._pong())
            case messages.Shutdown():
                self._shutdown = message
            case messages.Refused():
                raise refusal(message)
            case messages.HelloAck():
                pass
            case messages.RunTrial() | messages.BarrierOpen() | messages.Stop():
                self.obey(message)

    def _pong(self) -> messages.Pong | messages.BarrierReached | Outcome:
        """The answer to a ping: the last message to which rank 0 has not reacted yet, else `Pong`."""
        if self.running_trial is not None and self.running_trial.reached is not None and not self.running_trial.opened:
            return self.running_trial.reached
        return self._unacknowledged or messages.Pong()

    def start(self, trial: Trial) -> None:
        """Record the trial and send it to a worker; RunLost if it sets a variable that no check sets."""
        if (variable := refused_override(trial.env)) is not None:
            raise RunLost(f"rank 0 asked rank {self.place.rank} to set {printable(variable)}, which no check does")
        self._record.write(trial)
        super().start(trial)

    def variables(self, trial: Trial) -> dict[str, str | None]:
        """Variables that the worker sets or unsets for a trial: torchrun's and the trial's."""
        return {"TORCHELASTIC_USE_AGENT_STORE": None, **self._launcher_variables(self.place), **trial.env}

    def start_worker(self, kind: Kind, overrides: Mapping[str, str | None]) -> WorkerProcess:
        """A fork of the fork server; a new interpreter for trials without torch, or with an `EXEC_TIME` variable."""
        if kind is Kind.TORCH and not any(map(sharing.EXEC_TIME.fullmatch, overrides)):
            return self._fork_server.fork(overrides, self._log)
        worker = WorkerProcess(kind, overrides, self._log)
        env: dict[str, str | None] = {**self._environment, **self._launcher_variables(self.place), **overrides}
        worker.start_by_exec({name: value for name, value in env.items() if value is not None})
        return worker

    def report(self, message: messages.BarrierReached | messages.Partial | Outcome) -> None:
        """Send a message to rank 0. An outcome is recorded first, and sent again until rank 0 acknowledges it."""
        if isinstance(message, Outcome):
            self._record.write(message)
            self._unacknowledged = message
        self._client.send(message)

    def _watch_rank_0(self) -> None:
        now = time.monotonic()
        silent = now - self._client.heard
        if self._signal_received is not None:
            signum, since = self._signal_received
            if now - since > DEADLINES.leave + 1.0:
                if silent > DEADLINES.leave + 0.5:
                    self._lose_rank_0(silent)
                sentence = f"rank {self.place.rank} received {signal.Signals(signum).name}"
                raise RunLost(sentence, ExitCode.of_signal(signum))
        # Once the budget is spent rank 0 only writes its report, and the launcher's time limit is near.
        patience = silence_seconds(self.place.world_size, late=now - self._begin >= self.options.budget_seconds)
        patience += crowded_silence_seconds(self.place.local_world_size)
        if silent > patience:
            self._lose_rank_0(silent)
            raise RunLost(
                f"rank {self.place.rank} on {self.place.host} lost rank 0: no message from it for {patience:g} s"
            )

    def _lose_rank_0(self, silent_seconds: float) -> None:
        """Record the loss of rank 0 at once, as launchers end the others next, and the state of a running trial."""
        rank = self.place.rank
        detail = f"rank {rank} on {self.place.host} received no message from it for {silent_seconds:.0f} s"
        seconds = time.monotonic() - self._begin
        loss = Event(kind=EventKind.LOST, rank=0, seconds=seconds, detail=detail, reporter=rank)
        self._record.write(loss)
        if self.running_trial is not None:
            self.expire(self.running_trial, told=True)
        self._record.write(structs.replace(loss, answers=self._rank_0_answers()))


def _survivor(child: Child) -> str:
    process = child.state()
    where = f", waiting in {process.wchan}" if process.wchan else ""
    if child.may_still_end(time.monotonic()):
        return (
            f"pid {process.pid} was killed and has not ended yet (state {process.state}{where}); the driver may need "
            f"up to {DEADLINES.kill_gpu:g} s to take its GPU back"
        )
    return f"pid {process.pid} survived SIGKILL (state {process.state}{where}); it is stuck in the kernel"
