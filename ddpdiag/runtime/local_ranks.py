"""All ranks on this host, started by one process that watches over them, so that nobody stays behind."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial

from ddpdiag.errors import RunLost
from ddpdiag.model import Place
from ddpdiag.runtime.deadlines import (
    DEADLINES,
    LOST_AFTER_SECONDS,
    crowded_silence_seconds,
    frozen_seconds,
)
from ddpdiag.runtime.launchers.launch import places
from ddpdiag.runtime.record import is_held, remove_scratch, run_folder
from ddpdiag.runtime.run import Run
from ddpdiag.runtime.supervisor.processes import ForkedChildren, Signals, how_it_ended


def start_ranks(run: Run, run_one: Callable[[Place], int]) -> int:
    """Fork one supervisor for each of the launch's ranks and wait for them; rank 0's exit code, or the worst.

    Nothing here has threads yet, so a fork without exec will do. Raises RunLost when rank 0 was killed, because then
    no other process says so.
    """
    if len(run.launch.ranks) > 1:
        # As torchrun does: else every rank starts a thread per core, and they fight for the cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    children = ForkedChildren(Signals(children=True))
    for place in places(run.launch):
        children.fork(partial(run_one, place), place.rank)
    codes = _wait(run, children)
    _tidy(run, codes)
    return combined(codes)


def _wait(run: Run, children: ForkedChildren) -> dict[int, int]:
    """Exit code by rank, negative for a signal; ranks that stay too long are ended."""
    end = time.monotonic() + run.options.budget_seconds + run.endpoint.wait_seconds + DEADLINES.beyond_budget
    while children.running:
        before, ended = time.monotonic(), len(children.exit_codes)
        children.wait(0.5)
        end += frozen_seconds(before, time.monotonic())
        if len(children.exit_codes) > ended:
            end = min(end, time.monotonic() + _patience(run, children))
        if time.monotonic() > end:
            children.send(signal.SIGKILL)
        if time.monotonic() > end + DEADLINES.kill:
            break  # stuck in the kernel: nobody can end it, and nobody shall wait for it
    return children.exit_codes | dict.fromkeys(children.running, -signal.SIGKILL)


def _patience(run: Run, children: ForkedChildren) -> float:
    """How long the others may stay, now that one has left."""
    slower = crowded_silence_seconds(len(run.launch.ranks))
    stragglers = DEADLINES.straggler + slower + (DEADLINES.tidy if run.options.shared_dir is not None else 0.0)
    if 0 in children.exit_codes:
        # If rank 0 was killed, they must notice its silence first, and say so.
        return stragglers + (LOST_AFTER_SECONDS + slower if children.exit_codes[0] < 0 else 0.0)
    return stragglers if set(children.running) == {0} else float("inf")


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
    """Rank 0's code, since it knows the verdict; where rank 0 is not here, the worst of the others."""
    if 0 not in codes:
        return max(abs(code) for code in codes.values())
    if codes[0] >= 0:
        return codes[0]
    raise RunLost(f"rank 0 was lost, and its report with it: its process was {how_it_ended(codes[0])}")
