"""The launchers of PyTorch training: the data of each start, and the result of each launcher.

Times are seconds; `None` is a time that was not measured. The better start counts, for each figure by itself: other
load on the host only adds time.
"""

import statistics
from collections.abc import Callable, Sequence
from enum import Enum

from msgspec import Struct

from ddpdiag.checks.known_errors import with_meaning
from ddpdiag.errors import ExitCode
from ddpdiag.model.train import Ended
from ddpdiag.text import count

LAUNCHERS_SCHEMA = "ddpdiag.launchers/1"


class LaunchMethod(Enum):
    """The ways to start the ranks of one host, under the names that users know; torchrun, first, is the reference."""

    TORCHRUN = "torchrun"
    RUN = "torch.distributed.run"
    LAUNCH = "torch.distributed.launch"
    LAUNCH_USE_ENV = "launch --use-env"
    SPAWN = "mp.spawn"
    BY_HAND = "by hand"


# How the commands of torch's launchers begin (torch/distributed/run.py and launch.py).
HEADS = {
    LaunchMethod.TORCHRUN: ("torchrun",),
    LaunchMethod.RUN: ("python", "-m", "torch.distributed.run"),
    LaunchMethod.LAUNCH: ("python", "-m", "torch.distributed.launch"),
    LaunchMethod.LAUNCH_USE_ENV: ("python", "-m", "torch.distributed.launch", "--use-env"),
}


class Compare(Struct, frozen=True, kw_only=True):
    """The training that every launcher starts. `batch_size` counts images of a step over all ranks."""

    ranks: int
    steps: int = 30
    batch_size: int = 64
    backend: str = "auto"
    budget_seconds: float = 120.0


class RankTimes(Struct, frozen=True, kw_only=True):
    """One rank's record of a training. Moments are of time.monotonic(), one clock for all processes of a host.

    At `began_at` the rank ran its first line; at `group_at` all ranks had answered in the process group.
    `step_seconds` holds the timed steps, in their order. `threads` is torch.get_num_threads().
    """

    rank: int
    world_size: int
    threads: int
    backend: str
    device: str
    torch_version: str
    began_at: float
    group_at: float
    step_seconds: tuple[float, ...]


class Start(Struct, frozen=True, kw_only=True):
    """One training, started by one method: how it ended, and what its ranks wrote.

    `begun_at` is just before the first command was started. `reason` is empty if all of it worked.
    """

    method: LaunchMethod
    begun_at: float
    seconds: float
    ended: Ended
    reason: str = ""
    ranks: tuple[RankTimes, ...] = ()


class LauncherRow(Struct, frozen=True, kw_only=True):
    """One line of the table.

    `start_seconds` pass from the command's start until the slowest rank is in the group; `launcher_seconds` of them
    until the last rank runs its first line. `step_seconds` is the median over the timed steps, of the slowest rank.
    `threads` are those of each rank, by rank.
    """

    method: LaunchMethod
    ended: Ended
    reason: str = ""
    threads: tuple[int, ...] = ()
    start_seconds: float | None = None
    launcher_seconds: float | None = None
    step_seconds: float | None = None


class LaunchersReport(Struct, frozen=True, kw_only=True):
    """The table, judged."""

    asked: Compare
    host: str
    cores: int
    seconds: float
    rows: tuple[LauncherRow, ...]
    sentence: str
    exit_code: int
    device: str | None = None
    backend: str | None = None
    torch_version: str | None = None
    schema: str = LAUNCHERS_SCHEMA


def judge(
    asked: Compare, starts: Sequence[Start], *, host: str, cores: int, seconds: float, stop_signal: int | None
) -> LaunchersReport:
    """The table of all starts on this host; `stop_signal` is the signal that ended them early."""
    no_start = "no time was left; give more --budget"
    if stop_signal is not None:
        no_start = "the run was interrupted before its turn"
    rows = tuple(_row([s for s in starts if s.method is method], method, no_start) for method in LaunchMethod)
    first = next((rank for start in starts for rank in start.ranks), None)
    sentence, code = _verdict(rows, asked)
    return LaunchersReport(
        asked=asked,
        host=host,
        cores=cores,
        seconds=seconds,
        rows=rows,
        sentence=sentence,
        exit_code=int(code) if stop_signal is None else 128 + stop_signal,
        device=first.device if first else None,
        backend=first.backend if first else None,
        torch_version=first.torch_version if first else None,
    )


def _row(starts: Sequence[Start], method: LaunchMethod, no_start: str) -> LauncherRow:
    if not starts:
        return LauncherRow(method=method, ended=Ended.UNFINISHED, reason=no_start)
    worked = [start for start in starts if start.ended is Ended.WORKS]
    bad = next((start for start in starts if start.ended is not Ended.WORKS), None)
    which = "in the second start: " if bad and len(starts) > 1 else ""

    def best(figure: Callable[[Start, RankTimes], float]) -> float | None:
        """The figure of the slowest rank, in the better start."""
        return min((max(figure(start, rank) for rank in start.ranks) for start in worked), default=None)

    return LauncherRow(
        method=method,
        ended=bad.ended if bad else Ended.WORKS,
        reason=f"{which}{with_meaning(bad.reason)}" if bad else "",
        threads=tuple(rank.threads for rank in worked[0].ranks) if worked else (),
        start_seconds=best(lambda start, rank: rank.group_at - start.begun_at),
        launcher_seconds=best(lambda start, rank: rank.began_at - start.begun_at),
        step_seconds=best(lambda _start, rank: statistics.median(rank.step_seconds)),
    )


def _verdict(rows: Sequence[LauncherRow], asked: Compare) -> tuple[str, ExitCode]:
    """The sentence and the exit code: UNFIT if one fails or hangs, else UNKNOWN if one was not started."""
    failed = [row.method.value for row in rows if row.ended in (Ended.FAILS, Ended.HANGS)]
    unfinished = [row.method.value for row in rows if row.ended is Ended.UNFINISHED]
    good = len(rows) - len(failed) - len(unfinished)
    ranks, work = count(asked.ranks, "rank"), "works" if good == 1 else "work"
    parts = [f"{good or 'none'} of {len(rows)} launch methods {work} for {ranks}"]
    if failed and len(failed) < len(rows):
        parts.append(f"{', '.join(failed)} {'does' if len(failed) == 1 else 'do'} not")
    if unfinished:
        parts.append(f"not finished: {', '.join(unfinished)}")
    return "; ".join(parts), ExitCode.UNFIT if failed else ExitCode.UNKNOWN if unfinished else ExitCode.FIT
