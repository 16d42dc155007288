"""The trials of one rank. Each runs in a worker process, which is killed if the trial does not end in time."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping

from msgspec import structs

from ddpdiag.model import IMPORT_STEP, Kind, Outcome, Place, ProcessState, RunOptions, Status, Trial
from ddpdiag.model.trial import NO_DATA, is_first_use
from ddpdiag.probes.host.kernel import runnable_seconds
from ddpdiag.runtime.control.messages import BarrierOpen, BarrierReached, PartialData, RunTrial, Stop
from ddpdiag.runtime.deadlines import DEADLINES, frozen_seconds
from ddpdiag.runtime.supervisor.ipc import IncompleteMessage, Task, TrialEnded
from ddpdiag.runtime.supervisor.processes import Child, describe_end, is_busy
from ddpdiag.runtime.supervisor.workers import WorkerProcess

# Every rank that shared the server reports the same sentence, because no rank is to blame for the server's end.
_SERVER_ENDED = "the process that imported torch for the ranks of this host was ended, and theirs with it"


class RunningTrial:
    """The trial that runs now, with its deadline and its state. All times are of the monotonic clock."""

    def __init__(self, trial: Trial, rank: int, worker: WorkerProcess, now: float) -> None:
        self.trial = trial
        self.worker = worker
        self.begin = now
        self.deadline = now + trial.deadline_seconds
        self._extended_at = now
        self._first_use_left = trial.first_use_seconds
        self._stuck_since = self._sampled_at = now
        self._last_sample: tuple[int, float | None] | None = None
        self.log_start = worker.log.size()
        self.is_barrier_open = False
        self.barrier_reached: BarrierReached | None = None
        self.partial_data = NO_DATA
        worker.page.write(0, "")  # the worker is idle, and the page still holds the last step of the previous trial
        self._rank = rank

    def allow_first_use(self, now: float) -> None:
        """Extend the deadline by the time in a first use of GPU or group, by `trial.first_use_seconds` at most."""
        passed, self._extended_at = now - self._extended_at, now
        if self._first_use_left > 0 and is_first_use(self.worker.page.read()[1]):
            more = min(passed, self._first_use_left)
            self._first_use_left -= more
            self.deadline += more

    def is_stuck(self, process: ProcessState, cpu_seconds: float | None, now: float) -> bool:
        """Whether for 10 s the worker has been stopped, or in uninterruptible sleep outside a first use.

        Each call takes a sample. In every sample of the 10 s the state, the step and `cpu_seconds`, the total time on
        cores, must be unchanged. A worker that reads from a slow disk uses a core for each page. Time in which this
        process was stopped does not count, because after a stop of all processes of the job (Ctrl-Z) the worker may be
        resumed a moment later than its supervisor.
        """
        step, label = self.worker.page.read()
        before, self._last_sample = self._last_sample, (step, cpu_seconds)
        is_still = (process.state or "?") in ("Tt" if is_first_use(label) else "TtD") and before == self._last_sample
        self._stuck_since = self._stuck_since + frozen_seconds(self._sampled_at, now) if is_still else now
        self._sampled_at = now
        return now - self._stuck_since >= DEADLINES.stuck_worker

    def ended_outcome(self, answer: TrialEnded) -> Outcome:
        return structs.replace(
            self.outcome(answer.status),
            data=answer.data,
            partial_data=NO_DATA if answer.status is Status.DONE else self.partial_data,
            error=answer.error,
            detail=answer.detail,
            timings=answer.timings,
            collectives=answer.posted.collectives,
            why_no_collectives=answer.posted.no_collectives,
        )

    def death_outcome(self) -> Outcome:
        """The outcome of a trial whose worker closed its channel without an answer, or cannot start."""
        worker = self.worker
        code = worker.active_process.wait(DEADLINES.reap)
        if worker.start_step is None:
            how = _SERVER_ENDED if worker.ended_with_server else describe_end(code)
            log = worker.log.tail(since=self.log_start)
            return structs.replace(self.outcome(Status.DIED), error=how, detail=log)
        # The process that imports torch has ended. After an error of the import, the last line of its log is the error.
        log = worker.active_process.log.tail()
        last_line = log.splitlines()[-1] if log else ""
        status, error = (Status.RAISED, last_line) if code == 1 and last_line else (Status.DIED, describe_end(code))
        return structs.replace(self.outcome(status), step_count=0, last_step=IMPORT_STEP, error=error, detail=log)

    def outcome(self, status: Status) -> Outcome:
        """The outcome if the trial ends now, with the step and the partial data that the worker reported last."""
        step_count, last_step = self.worker.page.read()
        return Outcome(
            trial=self.trial.number,
            code=self.trial.code,
            rank=self._rank,
            status=status,
            step_count=step_count,
            last_step=last_step,
            partial_data=self.partial_data,
            seconds=time.monotonic() - self.begin,
        )


class TrialRunner(ABC):
    """Runs trials one after another. Consecutive trials of a kind share a worker, unless a trial needs a new one."""

    def __init__(self, place: Place, scratch: str) -> None:
        self.place = place
        self.options = RunOptions()
        self.running_trial: RunningTrial | None = None
        self.workers: dict[Kind, WorkerProcess] = {}
        self._ending_processes: list[Child] = []  # killed processes that held a GPU and have not ended yet
        self._scratch = scratch  # a folder on this host for files of trials
        self._last_trial_number = 0

    @abstractmethod
    def start_worker(self, kind: Kind, overrides: Mapping[str, str | None]) -> WorkerProcess:
        """Start a worker in which `overrides` are set, or unset if None."""

    @abstractmethod
    def report(self, message: BarrierReached | PartialData | Outcome) -> None:
        """Send the progress or the outcome of the trial to rank 0."""

    def variables(self, trial: Trial) -> dict[str, str | None]:
        """The variables that the worker sets, or unsets if None, for a trial."""
        return dict(trial.env)

    def handle_order(self, message: RunTrial | BarrierOpen | Stop) -> None:
        """Do what a message of rank 0 orders. A repeated message has no effect."""
        running_trial = self.running_trial
        match message:
            case RunTrial(trial) if trial.number > self._last_trial_number:
                self.start(message.trial_for(self.place.rank))
            case BarrierOpen(trial=number) if (
                running_trial is not None and running_trial.trial.number == number and not running_trial.is_barrier_open
            ):
                running_trial.is_barrier_open = running_trial.worker.send(message)
            case Stop(number) if running_trial is not None and running_trial.trial.number == number:
                self.expire(running_trial, interrupted=True)
            case _:
                pass

    def start(self, trial: Trial) -> None:
        self._last_trial_number = trial.number
        worker = self.worker_for(trial)
        self.running_trial = running_trial = RunningTrial(trial, self.place.rank, worker, time.monotonic())
        task = Task(self.place, trial, self.options, self._scratch, self.variables(trial), running_trial.deadline)
        if trial.kind is Kind.TORCH:
            now = time.monotonic()
            ending = (child for child in self._ending_processes if child.may_still_end(now) and not child.is_gone())
            task = structs.replace(task, ending=tuple(child.pid or 0 for child in ending))
        worker.send(task)

    def worker_for(self, trial: Trial) -> WorkerProcess:
        """The worker of the previous trial, if its variables fit and the trial is not `fresh`; if not, a new worker."""
        worker = self.workers.get(trial.kind)
        if worker is not None:
            if worker.overrides == trial.env and not trial.fresh:
                return worker
            self._kill(worker)
            worker.close()
        self.workers[trial.kind] = worker = self.start_worker(trial.kind, trial.env)
        return worker

    def read_message(self, running_trial: RunningTrial) -> None:
        """Receive one message of the worker, and handle it: report progress, or the end of the trial."""
        match running_trial.worker.receive():
            case BarrierReached() as message:
                running_trial.barrier_reached = message
                self.report(message)
            case IncompleteMessage():
                pass
            case PartialData() as message:
                running_trial.partial_data = message.data
                self.report(message)
            case TrialEnded() as answer:
                self._finish(running_trial, running_trial.ended_outcome(answer))
            case None:
                self._finish(running_trial, running_trial.death_outcome())

    def check_limits(self, running_trial: RunningTrial) -> None:
        """End the trial if it cannot start, if it is past its deadline, or if its worker is stopped or stuck."""
        running_trial.allow_first_use(time.monotonic())
        worker, now = running_trial.worker, time.monotonic()
        if worker.cannot_start:
            self._finish(running_trial, running_trial.death_outcome())
        elif now >= running_trial.deadline:
            self.expire(running_trial)
        elif worker.pid is None or worker.start_step is not None:
            pass
        elif running_trial.is_stuck(worker.state(), runnable_seconds(worker.pid), now):
            self.expire(running_trial)

    def expire(self, running_trial: RunningTrial, *, interrupted: bool = False) -> None:
        """End the trial, which has not ended in time, and report its outcome. Takes up to 3 s.

        `interrupted`: the trial ends because of another rank, not because of its own time. First the process's state is
        read. Then its stacks are dumped, a stopped process is resumed, and at last it is killed.
        """
        child, step = running_trial.worker.active_process, running_trial.worker.start_step
        process = child.state()
        outcome = structs.replace(running_trial.outcome(Status.HUNG), interrupted=interrupted)
        if step is not None:  # the start of the worker hangs
            outcome = structs.replace(outcome, step_count=0, last_step=step)
        if not interrupted:
            step_seconds = None if step is not None else running_trial.worker.page.step_seconds()
            process = structs.replace(process, busy=is_busy(process.pid), step_seconds=step_seconds)
        evidence = child.gather_evidence(process.state)
        # A fork server that has imported torch is only slow to fork. It is kept, because later trials need it.
        survived = (child is running_trial.worker or step == IMPORT_STEP) and self._kill(child)
        (main, others), posted = evidence
        process = structs.replace(process, stack=main, threads=others, survived=survived)
        outcome = structs.replace(outcome, process=process, collectives=posted.collectives)
        self._finish(running_trial, structs.replace(outcome, why_no_collectives=posted.no_collectives))

    def _finish(self, running_trial: RunningTrial, outcome: Outcome) -> None:
        """Report the outcome. Kill the worker unless the outcome is DONE."""
        self.running_trial = None
        self.report(structs.replace(outcome, survivors=self._take_overdue()))
        if outcome.status is not Status.DONE:
            worker = self.workers.pop(running_trial.trial.kind)
            if outcome.process is None:  # else `expire` has killed it, and must not wait for a survivor again
                self._kill(worker)
            worker.close()

    def _kill(self, child: Child) -> bool:
        """Kill a process. Returns whether it survived; False if it has a GPU and may end later (`_take_overdue`)."""
        gone = child.kill()
        if not gone and child.held_gpu:
            self._ending_processes.append(child)
        return not gone and not child.held_gpu

    def _take_overdue(self) -> tuple[ProcessState, ...]:
        """Processes that held a GPU and have not ended in the time that the driver may need. Each is returned once."""
        now, running = time.monotonic(), [child for child in self._ending_processes if not child.is_gone()]
        self._ending_processes = [child for child in running if child.may_still_end(now)]
        overdue = [child for child in running if not child.may_still_end(now)]
        return tuple(structs.replace(child.state(), survived=True) for child in overdue)

    def kill_workers(self) -> list[Child]:
        """Kill all workers. Returns the processes that have not ended, including those killed earlier."""
        survivors: list[Child] = [child for child in self._ending_processes if not child.is_gone()]
        for worker in self.workers.values():
            if not worker.kill():
                survivors.append(worker)
            worker.close()
        self.workers.clear()
        self._ending_processes.clear()
        return survivors
