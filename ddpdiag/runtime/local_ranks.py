"""All ranks on this host, started by one process that watches over them, so that nobody stays behind."""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping

from ddpdiag.errors import ExitCode, RunLost
from ddpdiag.model import Place
from ddpdiag.runtime.control.liveness import LOST_AFTER_SECONDS, crowded_silence_seconds, frozen_seconds
from ddpdiag.runtime.launchers.environment import places
from ddpdiag.runtime.record.failover import SHARED_END_SECONDS, TURNS
from ddpdiag.runtime.record.record import is_held, remove_scratch, run_folder
from ddpdiag.runtime.run import Run
from ddpdiag.runtime.supervisor.processes import LEAVE, Signals, die_with_parent, how_it_ended

# Rank 0 leaves last, within a second or two of the others; who stays longer is stopped or stuck, and is ended.
_STRAGGLER_SECONDS = 3.0
_KILL_SECONDS = 2.0
# Beyond budget and board wait: time to judge, to report and to leave.
_BEYOND_BUDGET_SECONDS = 30.0


def start_ranks(run: Run, run_one: Callable[[Place], int]) -> int:
    """Fork one supervisor for each of the launch's ranks and wait for them; rank 0's exit code, or the worst.

    A fork without exec: nothing here has threads yet, and an interpreter's start is saved for each rank.
    Raises RunLost when rank 0 was killed, because then nobody else says so.
    """
    if len(run.launch.ranks) > 1:
        # As torchrun does: else every rank starts a thread per core, and they fight for the cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    signals = Signals(children=True)
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # a child must not write what we hold in a buffer once more
            stream.flush()
    children: dict[int, int] = {}
    # Held back until a child has handlers of its own: what comes in between would be lost in ours.
    signal.pthread_sigmask(signal.SIG_BLOCK, LEAVE)
    for place in places(run.launch):
        pid = os.fork()
        if pid == 0:
            die_with_parent(parent, signal.SIGTERM)
            os._exit(run_one(place))
        children[pid] = place.rank
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEAVE)
    longest = run.options.budget_seconds + run.endpoint.wait_seconds + _BEYOND_BUDGET_SECONDS
    shares = run.options.shared_dir is not None
    slower = crowded_silence_seconds(len(run.launch.ranks))
    without_rank_0 = LOST_AFTER_SECONDS + slower + (TURNS.total if shares else 0.0)
    stragglers = _STRAGGLER_SECONDS + slower + (SHARED_END_SECONDS if shares else 0.0)
    watch = _Watch(children, signals, longest, stragglers, without_rank_0)
    codes = watch.wait()
    _tidy(run, codes)
    return combined(codes)


class _Watch:
    """The wait for all children. `seconds` is what nobody outlives.

    `stragglers` is what the last ones may take when the others have left, `without_rank_0` what is added when it died.
    """

    def __init__(
        self,
        children: Mapping[int, int],
        signals: Signals,
        seconds: float,
        stragglers: float,
        without_rank_0: float,
    ) -> None:
        self._waiting = dict(children)
        self._ranks = frozenset(children.values())
        self._signals = signals
        self._end = time.monotonic() + seconds
        self._stragglers = stragglers
        self._without_rank_0 = without_rank_0
        self._codes: dict[int, int] = {}

    def wait(self) -> dict[int, int]:
        """Exit code by rank, negative for a signal."""
        forwarded = False
        while self._waiting:
            before = time.monotonic()
            select.select([self._signals.woken], [], [], 0.5)
            self._end += frozen_seconds(before, time.monotonic())
            self._signals.drain()
            if self._signals.told is not None and not forwarded:
                forwarded = True
                self._kill_all(self._signals.told)
            self._reap()
            if time.monotonic() > self._end:
                self._kill_all(signal.SIGKILL)
            if time.monotonic() > self._end + _KILL_SECONDS:
                break  # stuck in the kernel: nobody can end it, and nobody shall wait for it
        return self._codes | dict.fromkeys(self._waiting.values(), -signal.SIGKILL)

    def _kill_all(self, signum: int) -> None:
        for pid in self._waiting:
            os.kill(pid, signum)

    def _reap(self) -> None:
        for pid, rank in list(self._waiting.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._waiting[pid]
                self._codes[rank] = os.waitstatus_to_exitcode(status)
                self._end = min(self._end, time.monotonic() + self._patience())

    def _patience(self) -> float:
        """How long the others may stay, now that somebody has left."""
        if self._ranks.isdisjoint({0}):
            return float("inf")
        if 0 not in self._codes:
            return self._stragglers if set(self._waiting.values()) == {0} else float("inf")
        # If rank 0 was killed, they must notice its silence first, and say so.
        return self._stragglers + (self._without_rank_0 if self._codes[0] < 0 else 0.0)


def _tidy(run: Run, codes: Mapping[int, int]) -> None:
    """Who was killed left its scratch folder; records stay, for whoever wants to know why."""
    killed = [rank for rank, code in codes.items() if code < 0]
    if not killed:
        return
    folder = run_folder(run.launch.run_id)
    for rank in killed:
        if not is_held(folder / f"rank-{rank}.jsonl"):  # another run's, with this run id
            remove_scratch(folder, rank)
    with contextlib.suppress(OSError):  # it is empty if we have just made it
        folder.rmdir()


def combined(codes: Mapping[int, int]) -> int:
    """Rank 0 knows the verdict; where it is not here, the worst of the others counts."""
    if 0 not in codes:
        return max(abs(code) for code in codes.values())
    if codes[0] >= 0:
        return codes[0]
    others = {code for rank, code in codes.items() if rank != 0 and code >= 0} - {ExitCode.UNKNOWN}
    if len(others) == 1:
        return others.pop()  # they made the report without it; who came too late for that left with UNKNOWN
    raise RunLost(f"rank 0 was lost, and its report with it: its process was {how_it_ended(codes[0])}")
