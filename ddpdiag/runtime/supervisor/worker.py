"""The worker, which runs the trials that its supervisor sends, until the supervisor closes the channel or kills it.

A worker with torch is a fork of the fork server. A worker without torch, or that must not be forked, is
`python -m ddpdiag.runtime.supervisor.worker`. A worker reports the results of measurements, and judges nothing.
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
from ddpdiag.model import Kind, Place, RunOptions, Status, Trial
from ddpdiag.model.trial import BARRIER_STEP, CONTEXT_STEP, NVML_STEP, BarrierResult, Context, is_first_use
from ddpdiag.probes.gpu.nvml import is_exclusive
from ddpdiag.runtime.control.messages import MAX_MESSAGE_BYTES, BarrierOpen, BarrierReached, PartialData
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
from ddpdiag.runtime.supervisor.processes import detach_from_terminal, die_with_parent, dump_stacks_to, is_alive
from ddpdiag.sanitize import without_secrets

_MAX_DETAIL_CHARACTERS = 8_000
_POLL_SECONDS = 0.02


class WorkerContext:
    """The facts and functions that a measurement gets; see `ddpdiag.model.trial.Context`."""

    def __init__(self, task: Task, channel: socket.socket, page: StepPage) -> None:
        self.place: Place = task.place
        self.trial: Trial = task.trial
        self.options: RunOptions = task.options
        self.group = task.trial.group_of(task.place.rank)
        self.scratch = task.scratch
        self.end = task.end
        self.timings: dict[str, float] = {}
        self._channel = channel
        self._page = page
        self._step_count = 0
        self._step_label, self._step_began_at = "", time.monotonic()
        self._first_use_left = task.trial.first_use_seconds
        self.step("start")

    @property
    def group_rank(self) -> int:
        return self.group.index(self.place.rank)

    def step(self, label: str) -> None:
        """Announce the next step. If the last step was a first use, extend `end` by the time that it took."""
        now = time.monotonic()
        if is_first_use(self._step_label):
            more = min(now - self._step_began_at, self._first_use_left)
            self._first_use_left -= more
            self.end += more
        if self._step_label.startswith(NVML_STEP):
            self.add_timing(NVML_STEP, now - self._step_began_at)
        self._step_label, self._step_began_at = label, now
        self._step_count += 1
        self._page.write(self._step_count, label)

    def report(self, data: msgspec.Struct, text: str) -> None:
        partial = PartialData(self.trial.number, msgspec.Raw(codec.encode(data)), text)
        send_framed(self._channel, msgspec.json.encode(partial))

    def add_timing(self, name: str, seconds: float) -> None:
        self.timings[name] = self.timings.get(name, 0.0) + seconds

    def barrier(self, offer: str = "") -> BarrierResult:
        barrier = self._wait_at_barrier(offer)
        return BarrierResult(barrier.host, barrier.offer)

    def exchange(self, offer: str) -> tuple[BarrierResult, ...]:
        return self._wait_at_barrier(offer, is_exchange=True).peers

    def _wait_at_barrier(self, offer: str, *, is_exchange: bool = False) -> BarrierOpen:
        self.step(BARRIER_STEP)
        begin = time.monotonic()
        send_framed(self._channel, msgspec.json.encode(BarrierReached(self.trial.number, offer, is_exchange)))
        barrier = _receive(self._channel)
        if not isinstance(barrier, BarrierOpen):
            os._exit(0)  # the supervisor has closed the channel
        self.add_timing("gate", time.monotonic() - begin)
        self.step("gate is open")
        return barrier


def _receive(channel: socket.socket) -> Task | BarrierOpen | None:
    data = channel.recv(MAX_MESSAGE_BYTES)
    return decode_worker_command.decode(data) if data else None


def apply_variables(env: Mapping[str, str | None]) -> None:
    """Set environment variables of this process. A value of None unsets the variable."""
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _wait_for_gpus(ending: Sequence[int], context: Context) -> None:
    """If a GPU is exclusive, wait at most 20 s for the end of the killed workers in `ending`, which may hold it."""
    if not ending:
        return
    context.step(NVML_STEP)
    if is_exclusive():
        context.step(f"{CONTEXT_STEP}: wait until the driver has taken its GPU back from pid {ending[0]}")
        end = time.monotonic() + DEADLINES.kill_gpu
        while any(map(is_alive, ending)) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)


def _measure(task: Task, context: WorkerContext) -> TrialEnded:
    from ddpdiag.checks.registry import check_by_code

    _wait_for_gpus(task.ending, context)
    check = check_by_code(task.trial.code)
    if check.measure is None:
        raise LookupError(f"{task.trial.code} has nothing to measure")
    data = check.measure(context)
    return TrialEnded(Status.DONE, data=msgspec.Raw(codec.encode(data)), timings=context.timings)


def _run_trial(task: Task, context: WorkerContext, recorder: RecorderReader) -> TrialEnded:
    try:
        return _measure(task, context)
    except Exception as error:  # noqa: BLE001 - any error that a measurement raises is its outcome
        text = traceback.format_exc(limit=-8)
        sentence = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        posted = recorder.collectives() if task.trial.kind is Kind.TORCH else PostedCollectives(None)
        return TrialEnded(
            Status.RAISED,
            error=codec.readable(without_secrets(sentence)[:_MAX_DETAIL_CHARACTERS]),
            detail=codec.readable(without_secrets(text)[-_MAX_DETAIL_CHARACTERS:]),
            timings=context.timings,
            posted=posted,
        )


def serve_trials(channel: int, page: int, stack_file: int, recorder_channel: int) -> NoReturn:
    """Run trials until the supervisor closes the channel, then exit. The arguments are descriptors."""
    dump_stacks_to(stack_file)
    supervisor_channel, step_page = socket.socket(fileno=channel), StepPage(page)
    recorder = RecorderReader(socket.socket(fileno=recorder_channel))
    while isinstance(task := _receive(supervisor_channel), Task):
        apply_variables(task.env)
        if task.trial.kind is Kind.TORCH:
            recorder.start_trial()
        answer = _run_trial(task, WorkerContext(task, supervisor_channel, step_page), recorder)
        sys.stdout.flush()
        sys.stderr.flush()
        send_framed(supervisor_channel, msgspec.json.encode(answer))
    os._exit(0)


def main(parent: int, *descriptors: int) -> None:
    die_with_parent(parent)
    detach_from_terminal()
    serve_trials(*descriptors)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
