"""A trial on one rank, from order to outcome. Only words and numbers: no waiting, no killing."""

import time

from msgspec import structs

from ddpdiag.model import IMPORT_STEP, Outcome, ProcessState, Status, Trial
from ddpdiag.model.trial import NOTHING, is_first_use
from ddpdiag.runtime.control.messages import Ready
from ddpdiag.runtime.supervisor.children import Nursery, Worker
from ddpdiag.runtime.supervisor.ipc import Answer
from ddpdiag.runtime.supervisor.processes import how_it_ended, is_busy


class Running:
    """What the supervisor knows of the trial in progress; times are of the monotonic clock."""

    def __init__(self, trial: Trial, rank: int, worker: Worker, now: float) -> None:
        self.trial = trial
        self.worker = worker
        self.begin = now
        self.deadline = now + trial.deadline_seconds
        self._seen_at = now
        self._first_use_left = trial.first_use_seconds
        self.log_start = worker.log.size()
        self.opened = False
        self.ready: Ready | None = None
        self.so_far = NOTHING
        worker.page.write(0, "")  # the worker is idle: what stands there is the trial before
        self._rank = rank
        self._times: dict[str, float] = {}

    def allow_first_use(self, now: float) -> None:
        """Move the deadline on by what passed while the worker was in its first use, as far as the trial allows."""
        passed, self._seen_at = now - self._seen_at, now
        if self._first_use_left > 0 and is_first_use(self.worker.page.read()[1]):
            more = min(passed, self._first_use_left)
            self._first_use_left -= more
            self.deadline += more

    def reached_gate(self, now: float) -> None:
        """The worker waits for its group."""
        self._times["arrive"] = now - self.begin

    def torch_came(self, now: float) -> None:
        """torch is imported, for which the trial had to wait so long."""
        self._times["import"] = now - self.begin

    def answered(self, answer: Answer, now: float) -> Outcome:
        """The worker ended the trial by itself."""
        return structs.replace(
            self._outcome(answer.status, now),
            data=answer.data,
            so_far=NOTHING if answer.status is Status.DONE else self.so_far,
            error=answer.error,
            detail=answer.detail,
            timings={**self._times, **answer.timings},
            flight=answer.flight,
        )

    def hung(self, process: ProcessState, now: float, *, at: str | None, told: bool) -> Outcome:
        """The deadline has passed, or rank 0 ended our part; `at` says where we stood before there was a worker."""
        outcome = structs.replace(self._outcome(Status.HUNG, now), process=process, told=told)
        return outcome if at is None else structs.replace(outcome, step=0, at=at)

    def died(self, code: int | None, log: str, now: float) -> Outcome:
        """The worker's process ended without an answer."""
        return structs.replace(self._outcome(Status.DIED, now), error=how_it_ended(code), detail=log)

    def without_torch(self, code: int | None, log: str, now: float) -> Outcome:
        """The nursery ended: torch cannot be imported here."""
        last = log.splitlines()[-1] if log else ""
        status, error = (Status.RAISED, last) if code == 1 and last else (Status.DIED, how_it_ended(code))
        return structs.replace(self._outcome(status, now), step=0, at=IMPORT_STEP, error=error, detail=log)

    def _outcome(self, status: Status, now: float) -> Outcome:
        step, at = self.worker.page.read()
        return Outcome(
            trial=self.trial.number,
            code=self.trial.code,
            rank=self._rank,
            status=status,
            step=step,
            at=at,
            so_far=self.so_far,
            seconds=now - self.begin,
            timings=dict(self._times),
        )


def expired(
    running: Running, child: Worker | Nursery, *, at: str | None, told: bool, ends: bool, nccl: bool
) -> Outcome:
    """The outcome of a trial that did not end in time; takes up to 3.5 s.

    `child` is the process that holds the trial up, and is ended if `ends`. `at` says where it stands as long as there
    is no worker. `told`: rank 0 ended it because of somebody else. `nccl`: NCCL's own service is asked, too.
    """
    process = child.look()
    outcome = running.hung(process, time.monotonic(), at=at, told=told)
    if not told:
        since = None if at is not None else running.worker.page.seconds()
        process = structs.replace(process, busy=is_busy(process.pid), step_seconds=since)
    stacks, flight, ras = child.testify(process.state, nccl=nccl and not told)
    survived = ends and not child.end()
    process = structs.replace(process, stack=stacks.main, threads=stacks.others, survived=survived)
    return structs.replace(outcome, process=process, flight=flight, ras=ras)
