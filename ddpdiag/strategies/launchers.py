"""The launchers of PyTorch training: the times of a training started by each, and the table with a verdict.

Times are in seconds; None is a time that was not measured.
"""

from collections.abc import Mapping, Sequence
from enum import Enum

from msgspec import Struct

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


class Training(Struct, frozen=True, kw_only=True):
    """The training that every launcher starts. `batch_size` is the number of images of a step over all ranks."""

    ranks: int
    steps: int
    batch_size: int
    backend: str


class RankTimes(Struct, frozen=True, kw_only=True):
    """One rank's record of a training.

    `group_at` is the end of the first all-reduce, when all ranks are in the group, by time.monotonic(), one clock for
    all processes of a host. `step_seconds` is the median of the timed steps, `threads` is torch.get_num_threads().
    """

    rank: int
    world_size: int
    threads: int
    backend: str
    device: str
    torch_version: str
    group_at: float
    step_seconds: float


class LauncherRow(Struct, frozen=True, kw_only=True):
    """A line of the table: one start of the training.

    `start_seconds` pass from the start of the command until the last rank is in the group. `step_seconds` is the median
    step of the slowest rank. `threads` has the number of threads of each rank, by rank.
    """

    method: LaunchMethod
    ended: Ended
    reason: str = ""
    threads: tuple[int, ...] = ()
    start_seconds: float | None = None
    step_seconds: float | None = None


class LaunchersReport(Struct, frozen=True, kw_only=True):
    """The table with its verdict. `setting` names the backend, the device and torch's version."""

    training: Training
    host: str
    cores: int
    seconds: float
    rows: tuple[LauncherRow, ...]
    sentence: str
    exit_code: int
    setting: str = ""
    schema: str = LAUNCHERS_SCHEMA


def judge(
    training: Training,
    starts: Mapping[LaunchMethod, LauncherRow],
    *,
    host: str,
    cores: int,
    seconds: float,
    setting: str,
    stop_signal: int | None,
) -> LaunchersReport:
    """The report of the starts on this host; `stop_signal` is the signal that ended the comparison early, or None."""
    no_start = "no time was left; give more --budget"
    if stop_signal is not None:
        no_start = "the run was interrupted before its turn"
    rows = tuple(
        starts.get(method) or LauncherRow(method=method, ended=Ended.UNFINISHED, reason=no_start)
        for method in LaunchMethod
    )
    sentence, code = _verdict(rows, training)
    return LaunchersReport(
        training=training,
        host=host,
        cores=cores,
        seconds=seconds,
        rows=rows,
        sentence=sentence,
        exit_code=int(code) if stop_signal is None else 128 + stop_signal,
        setting=setting,
    )


def _verdict(rows: Sequence[LauncherRow], training: Training) -> tuple[str, ExitCode]:
    """The sentence and the exit code: UNFIT if a start failed or hung, else UNKNOWN if one is unfinished, else FIT."""
    failed = [row.method.value for row in rows if row.ended in (Ended.FAILS, Ended.HANGS)]
    unfinished = [row.method.value for row in rows if row.ended is Ended.UNFINISHED]
    good = len(rows) - len(failed) - len(unfinished)
    ranks, work = count(training.ranks, "rank"), "works" if good == 1 else "work"
    parts = [f"{good or 'none'} of {len(rows)} launch methods {work} for {ranks}"]
    if failed and len(failed) < len(rows):
        parts.append(f"{', '.join(failed)} {'does' if len(failed) == 1 else 'do'} not")
    if unfinished:
        parts.append(f"not finished: {', '.join(unfinished)}")
    return "; ".join(parts), ExitCode.UNFIT if failed else ExitCode.UNKNOWN if unfinished else ExitCode.FIT
