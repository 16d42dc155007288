"""The comparison of launchers: what each rank measured, a row for each launcher, and the report with its verdict.

Times are in seconds. A time that was not measured is None.
"""

from collections.abc import Mapping, Sequence
from enum import Enum

from msgspec import Struct

from ddpdiag.errors import ExitCode
from ddpdiag.model.train import StrategyStatus
from ddpdiag.text import count


class LaunchMethod(Enum):
    """A way to start the ranks of one host, under the name that users know. The first, torchrun, is the reference."""

    TORCHRUN = "torchrun"
    RUN = "torch.distributed.run"
    LAUNCH = "torch.distributed.launch"
    LAUNCH_USE_ENV = "launch --use-env"
    SPAWN = "mp.spawn"
    BY_HAND = "by hand"


class Training(Struct, frozen=True, kw_only=True):
    """The training that every launcher starts. `batch_size` is the number of images of a step, over all ranks."""

    ranks: int
    steps: int
    batch_size: int
    backend: str


class RankTimes(Struct, frozen=True, kw_only=True):
    """The measurements of one rank in a training.

    `group_ready_at` is the end of the first all-reduce, when all ranks have joined the group; all processes of a host
    share its clock, time.monotonic(). `step_seconds` is the median timed step, `threads` is torch.get_num_threads().
    """

    rank: int
    world_size: int
    threads: int
    backend: str
    device: str
    torch_version: str
    group_ready_at: float
    step_seconds: float


class LauncherRow(Struct, frozen=True, kw_only=True):
    """A row of the table: the training as started by one launcher. `reason` says why it did not work.

    `start_seconds` is the time from the start of the command until the last rank has joined the group. `step_seconds`
    is the median step of the slowest rank. `threads` has the number of threads of each rank, in the order of ranks.
    """

    method: LaunchMethod
    status: StrategyStatus
    reason: str = ""
    threads: tuple[int, ...] = ()
    start_seconds: float | None = None
    step_seconds: float | None = None


class LaunchersReport(Struct, frozen=True, kw_only=True):
    """The rows and the verdict. `setting` names backend, device and version of torch; empty if no launcher works."""

    training: Training
    host: str
    cores: int
    seconds: float
    rows: tuple[LauncherRow, ...]
    sentence: str
    exit_code: int
    setting: str = ""
    schema: str = "ddpdiag.launchers/1"


def judge(
    training: Training,
    rows_by_method: Mapping[LaunchMethod, LauncherRow],
    *,
    host: str,
    cores: int,
    seconds: float,
    setting: str,
    stop_signal: int | None,
) -> LaunchersReport:
    """Make the report. A launcher without a row was not started. `stop_signal` is the signal that ended the run."""
    not_started = "no time was left; give more --budget"
    if stop_signal is not None:
        not_started = "the run was interrupted before its turn"
    defaults = {
        each: LauncherRow(method=each, status=StrategyStatus.UNFINISHED, reason=not_started) for each in LaunchMethod
    }
    rows = tuple((defaults | dict(rows_by_method)).values())
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
    """The verdict and the exit code: UNFIT if a row fails or hangs, else UNKNOWN if a row is unfinished, else FIT."""
    failed = [row.method.value for row in rows if row.status in (StrategyStatus.FAILS, StrategyStatus.HANGS)]
    unfinished = [row.method.value for row in rows if row.status is StrategyStatus.UNFINISHED]
    working = len(rows) - len(failed) - len(unfinished)
    ranks, verb = count(training.ranks, "rank"), "works" if working == 1 else "work"
    parts = [f"{working or 'none'} of {len(rows)} launch methods {verb} for {ranks}"]
    if failed and len(failed) < len(rows):
        parts.append(f"{', '.join(failed)} {'does' if len(failed) == 1 else 'do'} not")
    if unfinished:
        parts.append(f"not finished: {', '.join(unfinished)}")
    return "; ".join(parts), ExitCode.UNFIT if failed else ExitCode.UNKNOWN if unfinished else ExitCode.FIT
