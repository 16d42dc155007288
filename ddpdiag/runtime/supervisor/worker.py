"""The worker: runs one measurement after another until its supervisor has no more, or ends it.

There are two ways to start one: `python -m ddpdiag.runtime.supervisor.worker` (plain, started at once) and a fork of
the fork server (with torch), which is here, too. It says only what happened; it judges nothing.
"""

import array
import contextlib
import faulthandler
import gc
import importlib
import os
import re
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import msgspec

from ddpdiag import codec
from ddpdiag.foreign import without_secrets
from ddpdiag.model import Kind, Options, Place, Status, Trial
from ddpdiag.model.trial import BARRIER_STEP, Opening, is_first_use
from ddpdiag.probes.host.kernel import core_seconds
from ddpdiag.runtime.control.messages import MAX_MESSAGE_BYTES, BarrierOpen, BarrierReached, Partial
from ddpdiag.runtime.supervisor.hang_evidence import RecorderReader
from ddpdiag.runtime.supervisor.ipc import (
    Exited,
    Forked,
    ForkServerMessage,
    Imported,
    PostedCollectives,
    StepPage,
    Task,
    TrialEnded,
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
        partial = Partial(self.trial.number, msgspec.Raw(codec.encode(data)), text)
        send_framed(self._channel, msgspec.json.encode(partial))

    def timed(self, name: str, seconds: float) -> None:
        """Add to one of the trial's timings."""
        self.timings[name] = self.timings.get(name, 0.0) + seconds

    def barrier(self, offer: str = "") -> Opening:
        """Wait for all ranks of the group."""
        barrier = self._wait_at_barrier(offer)
        return Opening(barrier.host, barrier.offer)

    def exchange(self, offer: str) -> tuple[Opening, ...]:
        """The same barrier, but all ranks learn all offers."""
        return self._wait_at_barrier(offer, shares=True).peers

    def _wait_at_barrier(self, offer: str, *, shares: bool = False) -> BarrierOpen:
        self.step(BARRIER_STEP)
        begin = time.monotonic()
        send_framed(self._channel, msgspec.json.encode(BarrierReached(self.trial.number, offer, shares)))
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
        own = recorder.collectives() if task.trial.kind is Kind.TORCH else PostedCollectives(None)
        answer = TrialEnded(
            Status.RAISED,
            error=codec.readable(without_secrets(sentence)[:_MAX_DETAIL]),
            detail=codec.readable(without_secrets(text)[-_MAX_DETAIL:]),
            timings=context.timings,
            collectives=own.collectives,
            no_collectives=own.no_collectives,
        )
    context.timed("total", time.monotonic() - begin)
    return answer


def serve(channel: int, page: int, stack_file: int, questions: int) -> NoReturn:
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


# The fork server -----------------------------------------------------------------------------------------------------

# A fork from a process that has torch gives a worker in some 25 ms, where a new interpreter needs seconds. The order is
# this: import torch, serve what was asked for meanwhile (so the first worker starts at once), then import what DDP
# loads lazily, beside the first trials, unless the run trains nothing. Nothing here may touch CUDA: a context does not
# survive a fork.

# DDP and torch.optim import this at first use (some 800 modules, 1-2 s); paid here it is paid once, and off the clock
# of training.
LAZY_IMPORTS = ("torch._dynamo",)
# Why workers are new processes and no forks (`fork_hazard`), for LCH003.
NOT_FORKED = "DDPDIAG_NOT_FORKED"
DESCRIPTORS = 4  # the worker's channel, step page, stack file and the channel to its recorder


def import_torch() -> float:
    """Import torch and all checks; the seconds that it took, which LCH003 finds in the environment."""
    begin, used = time.monotonic(), core_seconds(os.getpid())
    # is_available() would create a CUDA context here if an imported module asked; through NVML it does not.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    importlib.import_module("torch")
    importlib.import_module("ddpdiag.checks")
    seconds = time.monotonic() - begin
    os.environ["DDPDIAG_IMPORT_SECONDS"] = f"{seconds:.3f}"
    now = core_seconds(os.getpid())
    if used is not None and now is not None:
        os.environ["DDPDIAG_IMPORT_CORE_SECONDS"] = f"{now - used:.3f}"
    return seconds


def _send(channel: socket.socket, message: ForkServerMessage) -> None:
    channel.send(msgspec.json.encode(message))


def _serve(channel: socket.socket) -> None:
    """Fork on request, report the dead, import in idle moments; ends when the supervisor closes the socket."""
    # In the handler, so that the supervisor learns of a death in the middle of an import, too.
    signal.signal(signal.SIGCHLD, lambda _signum, _frame: _reap(channel))
    waiting = list(LAZY_IMPORTS)
    while True:
        ready, _, _ = select.select([channel], [], [], 0 if waiting else None)
        if channel in ready and not _fork(channel):
            waiting.clear()
        if not ready and waiting:
            _import_lazily(waiting.pop(0))


def _import_lazily(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception:  # noqa: BLE001 - torch's own code: where it is needed (if ever) the trial says what is wrong
        traceback.print_exc()
    gc.freeze()  # forks then share these pages instead of copying them


def _reap(channel: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _send(channel, Exited(pid, os.waitstatus_to_exitcode(status)))


def _fork(channel: socket.socket) -> bool:
    """Do what the supervisor asks; False if that was SkipLazyImports, which has no descriptors."""
    data, ancillary, _, _ = channel.recvmsg(1024, socket.CMSG_SPACE(DESCRIPTORS * array.array("i").itemsize))
    if not data:
        os._exit(0)
    descriptors = array.array("i")
    for _level, _kind, payload in ancillary:
        descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    if not descriptors:
        return False
    parent, hazard = os.getpid(), fork_hazard()
    # Its end must not be told before its start.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    pid = os.fork()
    if pid == 0:
        _become_worker(parent, channel, descriptors, hazard)
    for descriptor in descriptors:
        os.close(descriptor)
    _send(channel, Forked(pid))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    return True


# Device files of NVIDIA's driver and of WSL2; the driver's own threads are cuda-EvtHandlr, cuda00001400006 and so on.
_GPU_DEVICE = re.compile(r"/dev/(nvidia|dxg)")


def fork_hazard(root: Path = Path("/proc/self")) -> str | None:
    """Why a fork of this process could not use CUDA, or None: CUDA was started here, and does not survive a fork.

    The process is at `root`. Threads of other libraries (OpenBLAS starts some at its import) are no hazard.
    """
    for link in (root / "fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            if _GPU_DEVICE.match(target := os.readlink(link)):
                return f"{target} is open after the imports"
    for thread in (root / "task").iterdir():
        with contextlib.suppress(OSError):
            if (name := (thread / "comm").read_text().strip()).startswith("cuda"):
                return f"CUDA's thread {name} runs after the imports"
    torch = sys.modules.get("torch")
    return "CUDA is initialized after the imports" if torch is not None and torch.cuda.is_initialized() else None


def _become_worker(parent: int, server: socket.socket, descriptors: "array.array[int]", hazard: str | None) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    if hazard is not None:
        for descriptor in descriptors:
            os.set_inheritable(descriptor, True)
        words = [sys.executable, "-P", "-m", __spec__.name, "worker", str(parent), *map(str, descriptors)]
        os.execve(sys.executable, words, {**os.environ, NOT_FORKED: hazard})
    die_with_parent(parent)
    leave_terminal()
    server.close()
    gc.enable()
    try:
        serve(*descriptors)
    finally:
        # Never back into the server's loop: whatever ended this worker is told in its log and by its exit code.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)


# Entries -------------------------------------------------------------------------------------------------------------


def main(role: str, parent: int, *descriptors: int) -> None:
    """Entry: "worker" PARENT_PID CHANNEL PAGE STACK QUESTIONS, or "fork-server" PARENT_PID CHANNEL."""
    die_with_parent(parent)
    leave_terminal()
    if role == "worker":
        serve(*descriptors)
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    channel = socket.socket(fileno=descriptors[0])
    gc.disable()  # a tenth of the import's time goes into collecting what nobody drops
    _send(channel, Imported(import_torch()))
    _serve(channel)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
