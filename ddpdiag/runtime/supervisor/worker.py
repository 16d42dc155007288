"""The worker: runs one measurement after another until its supervisor has no more, or ends it.

There are two ways to start one: `python -m ddpdiag.runtime.supervisor.worker` (plain, started at once) and a fork of
the fork server (with torch). It says only what happened; it judges nothing.
"""

import faulthandler
import os
import socket
import sys
import time
import traceback

import msgspec

from ddpdiag import codec
from ddpdiag.foreign import without_secrets
from ddpdiag.model import Kind, Options, Place, Status, Trial
from ddpdiag.model.trial import BARRIER_STEP, Opening, is_first_use
from ddpdiag.runtime.control.messages import MAX_MESSAGE_BYTES, BarrierOpen
from ddpdiag.runtime.supervisor.hang_evidence import RecorderReader
from ddpdiag.runtime.supervisor.ipc import (
    BarrierReached,
    StepPage,
    Task,
    TrialEnded,
    WorkerPartial,
    decode_worker_command,
    send_framed,
)
from ddpdiag.runtime.supervisor.processes import DUMP_SIGNAL, die_with_parent, leave_terminal

_MAX_DETAIL = 8_000


class WorkerContext:
    """What a measurement sees of the world; see `ddpdiag.model.trial.Context`."""

    def __init__(self, task: Task, channel: socket.socket, page: StepPage) -> None:
        self.place: Place = task.place
        self.trial: Trial = task.trial
        self.options: Options = task.options
        self.group = task.trial.group_of(task.place.rank)
        self.scratch = task.scratch
        self.end = task.end
        self.timings: dict[str, float] = {}
        self._channel = channel
        self._page = page
        self._steps = 0
        self._at, self._since = "", time.monotonic()
        self._first_use_left = task.trial.first_use_seconds
        self.step("start")

    @property
    def group_rank(self) -> int:
        """This rank's position in its group."""
        return self.group.index(self.place.rank)

    def step(self, label: str) -> None:
        """Announce the next step. What a first use took moves the end on, as it does for the supervisor."""
        now = time.monotonic()
        if is_first_use(self._at):
            more = min(now - self._since, self._first_use_left)
            self._first_use_left -= more
            self.end += more
        self._at, self._since = label, now
        self._steps += 1
        self._page.write(self._steps, label)

    def report(self, data: msgspec.Struct, text: str) -> None:
        """Hand over what is known so far."""
        send_framed(self._channel, msgspec.json.encode(WorkerPartial(msgspec.Raw(codec.encode(data)), text)))

    def timed(self, name: str, seconds: float) -> None:
        """Add to one of the trial's timings."""
        self.timings[name] = self.timings.get(name, 0.0) + seconds

    def barrier(self, offer: str = "") -> Opening:
        """Wait for all ranks of the group."""
        barrier = self._wait_at_barrier(BarrierReached(offer))
        return Opening(barrier.host, barrier.offer)

    def exchange(self, offer: str) -> tuple[Opening, ...]:
        """The same gate, but everybody learns everybody's offer."""
        return tuple(
            Opening(host, own) for host, own in self._wait_at_barrier(BarrierReached(offer, shares=True)).peers
        )

    def _wait_at_barrier(self, message: BarrierReached) -> BarrierOpen:
        self.step(BARRIER_STEP)
        begin = time.monotonic()
        send_framed(self._channel, msgspec.json.encode(message))
        barrier = _receive(self._channel)
        if not isinstance(barrier, BarrierOpen):
            os._exit(0)  # the supervisor is gone, or moved on without this worker
        self.timed("gate", time.monotonic() - begin)
        self.step("gate is open")
        return barrier


def _receive(channel: socket.socket) -> Task | BarrierOpen | None:
    data = channel.recv(MAX_MESSAGE_BYTES)
    return decode_worker_command.decode(data) if data else None


def _apply(env: dict[str, str | None]) -> None:
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _measure(task: Task, context: WorkerContext) -> TrialEnded:
    from ddpdiag.checks.registry import by_code

    check = by_code(task.trial.code)
    if check.measure is None:
        raise LookupError(f"{task.trial.code} has nothing to measure")
    data = check.measure(context)
    return TrialEnded(Status.DONE, data=msgspec.Raw(codec.encode(data)), timings=context.timings)


def _answer(task: Task, context: WorkerContext, recorder: RecorderReader) -> TrialEnded:
    begin = time.monotonic()
    try:
        answer = _measure(task, context)
    except Exception as error:  # noqa: BLE001 - one of the two edges: whatever a measurement raises is an outcome
        text = traceback.format_exc(limit=-8)
        sentence = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        answer = TrialEnded(
            Status.RAISED,
            error=codec.readable(without_secrets(sentence)[:_MAX_DETAIL]),
            detail=codec.readable(without_secrets(text)[-_MAX_DETAIL:]),
            timings=context.timings,
            collectives=recorder.collectives() if task.trial.kind is Kind.TORCH else None,
        )
    context.timed("total", time.monotonic() - begin)
    return answer


def serve(channel: int, page: int, stack_file: int, questions: int) -> None:
    """Do what the supervisor sends until it closes the channel; never returns. All four are descriptors."""
    faulthandler.register(DUMP_SIGNAL, file=stack_file, all_threads=True)
    orders, steps, recorder = (
        socket.socket(fileno=channel),
        StepPage(page),
        RecorderReader(socket.socket(fileno=questions)),
    )
    while isinstance(task := _receive(orders), Task):
        _apply(task.env)
        if task.trial.kind is Kind.TORCH:
            recorder.start_trial()
        answer = _answer(task, WorkerContext(task, orders, steps), recorder)
        sys.stdout.flush()
        sys.stderr.flush()
        send_framed(orders, msgspec.json.encode(answer))
    os._exit(0)


def main(arguments: list[str]) -> None:
    """Entry of a worker of its own: PARENT_PID CHANNEL PAGE STACK QUESTIONS, the last four descriptors."""
    parent, *descriptors = (int(argument) for argument in arguments)
    die_with_parent(parent)
    leave_terminal()
    serve(*descriptors)


if __name__ == "__main__":
    main(sys.argv[1:])
