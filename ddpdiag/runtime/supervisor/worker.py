"""The worker: runs one measurement after another, until its supervisor closes the channel or kills it.

A worker is `python -m ddpdiag.runtime.supervisor.worker` (without torch, started at once) or a fork of the fork server
(with torch). It reports what happened, and judges nothing.
"""

import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn

import msgspec

from ddpdiag import codec
from ddpdiag.model import Kind, Options, Place, Status, Trial
from ddpdiag.model.trial import BARRIER_STEP, CONTEXT_STEP, NVML_STEP, Context, Opening, is_first_use
from ddpdiag.probes.gpu.nvml import is_exclusive
from ddpdiag.runtime.control.messages import MAX_MESSAGE_BYTES, BarrierOpen, BarrierReached, Partial
from ddpdiag.runtime.deadlines import DEADLINES
from ddpdiag.runtime.supervisor.hang_evidence import RecorderReader
from ddpdiag.runtime.supervisor.ipc import (
    PostedCollectives,
    StepPage,
    Task,
    TrialEnded,
    decode_worker_command,
    send_framed,
)
from ddpdiag.runtime.supervisor.processes import die_with_parent, dump_stacks_to, is_alive, leave_terminal
from ddpdiag.sanitize import without_secrets

_MAX_DETAIL = 8_000
_POLL_SECONDS = 0.02


class WorkerContext:
    """The world and the trial as a measurement sees them; see `ddpdiag.model.trial.Context`."""

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
        """Announce the next step. The time that a first use took extends `end`, as it extends the deadline."""
        now = time.monotonic()
        if is_first_use(self._at):
            more = min(now - self._since, self._first_use_left)
            self._first_use_left -= more
            self.end += more
        if self._at.startswith(NVML_STEP):
            self.timed(NVML_STEP, now - self._since)
        self._at, self._since = label, now
        self._steps += 1
        self._page.write(self._steps, label)

    def report(self, data: msgspec.Struct, text: str) -> None:
        """Send the data measured up to now to the supervisor."""
        partial = Partial(self.trial.number, msgspec.Raw(codec.encode(data)), text)
        send_framed(self._channel, msgspec.json.encode(partial))

    def timed(self, name: str, seconds: float) -> None:
        """Add seconds to one of the trial's timings."""
        self.timings[name] = self.timings.get(name, 0.0) + seconds

    def barrier(self, offer: str = "") -> Opening:
        """Wait for all ranks of the group; return the host and offer of its first rank."""
        barrier = self._wait_at_barrier(offer)
        return Opening(barrier.host, barrier.offer)

    def exchange(self, offer: str) -> tuple[Opening, ...]:
        """Wait for all ranks of the group; return host and offer of each of them."""
        return self._wait_at_barrier(offer, shares=True).peers

    def _wait_at_barrier(self, offer: str, *, shares: bool = False) -> BarrierOpen:
        self.step(BARRIER_STEP)
        begin = time.monotonic()
        send_framed(self._channel, msgspec.json.encode(BarrierReached(self.trial.number, offer, shares)))
        barrier = _receive(self._channel)
        if not isinstance(barrier, BarrierOpen):
            os._exit(0)  # the supervisor has ended, or has ended this trial
        self.timed("gate", time.monotonic() - begin)
        self.step("gate is open")
        return barrier


def _receive(channel: socket.socket) -> Task | BarrierOpen | None:
    data = channel.recv(MAX_MESSAGE_BYTES)
    return decode_worker_command.decode(data) if data else None


def apply(env: Mapping[str, str | None]) -> None:
    """Set variables of this process; a value of None unsets the variable."""
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _wait_for_gpus(ending: Sequence[int], context: Context) -> None:
    """Wait until killed workers (`ending`) are gone, if a GPU takes one process only: it would refuse this worker."""
    if not ending:
        return
    context.step(NVML_STEP)
    if is_exclusive():
        context.step(f"{CONTEXT_STEP}: wait until the driver has taken its GPU back from pid {ending[0]}")
        end = time.monotonic() + DEADLINES.kill_gpu
        while any(map(is_alive, ending)) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)


def _measure(task: Task, context: WorkerContext) -> TrialEnded:
    from ddpdiag.checks.registry import by_code

    _wait_for_gpus(task.ending, context)
    check = by_code(task.trial.code)
    if check.measure is None:
        raise LookupError(f"{task.trial.code} has nothing to measure")
    data = check.measure(context)
    return TrialEnded(Status.DONE, data=msgspec.Raw(codec.encode(data)), timings=context.timings)


def _answer(task: Task, context: WorkerContext, recorder: RecorderReader) -> TrialEnded:
    try:
        return _measure(task, context)
    except Exception as error:  # noqa: BLE001 - any error that a measurement raises is its outcome
        text = traceback.format_exc(limit=-8)
        sentence = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        posted = recorder.collectives() if task.trial.kind is Kind.TORCH else PostedCollectives(None)
        return TrialEnded(
            Status.RAISED,
            error=codec.readable(without_secrets(sentence)[:_MAX_DETAIL]),
            detail=codec.readable(without_secrets(text)[-_MAX_DETAIL:]),
            timings=context.timings,
            collectives=posted.collectives,
            no_collectives=posted.no_collectives,
        )


def serve(channel: int, page: int, stack_file: int, questions: int) -> NoReturn:
    """Run trials until the supervisor closes the channel, then exit. All four arguments are descriptors."""
    dump_stacks_to(stack_file)
    orders, steps, recorder = (
        socket.socket(fileno=channel),
        StepPage(page),
        RecorderReader(socket.socket(fileno=questions)),
    )
    while isinstance(task := _receive(orders), Task):
        apply(task.env)
        if task.trial.kind is Kind.TORCH:
            recorder.start_trial()
        answer = _answer(task, WorkerContext(task, orders, steps), recorder)
        sys.stdout.flush()
        sys.stderr.flush()
        send_framed(orders, msgspec.json.encode(answer))
    os._exit(0)


def main(parent: int, *descriptors: int) -> None:
    """Run a worker. Arguments: PARENT_PID CHANNEL PAGE STACK QUESTIONS."""
    die_with_parent(parent)
    leave_terminal()
    serve(*descriptors)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
