"""Options of `ddpdiag watch`, which starts a training or attaches to one, and reports which rank holds it up."""

from collections.abc import Sequence
from dataclasses import dataclass

from ddpdiag.cli.options import DISPLAY, DisplayArgs, option, split_at_commas
from ddpdiag.errors import UsageError

RUNNING = "A job that runs already"
_MAX_PID_DIGITS = 9


def _parse_pids(values: Sequence[str]) -> tuple[int, ...]:
    pids = split_at_commas(values)
    if not all(pid.isdecimal() and len(pid) <= _MAX_PID_DIGITS for pid in pids):
        raise UsageError("expected process ids, such as 4711")
    return tuple(map(int, pids))


@dataclass(frozen=True, kw_only=True)
class WatchArgs(DisplayArgs):
    """The options of `ddpdiag watch`, as they were typed."""

    stall: float = option(300.0, "Look at the ranks when nothing new was written for so long.", metavar="SECONDS")
    kill: bool = option(
        False,
        "End the command at the second report of one silence, after twice --stall, if every rank is where it was, or "
        "a rank is dead, stopped or stuck (default: let it continue). Set --stall above the longest silence of a "
        "healthy job: imports, validation, checkpoints.",
    )
    output: tuple[str, ...] = option(
        (), "A file that the ranks write besides their output, or a pattern (*, **) (repeatable).", metavar="FILE"
    )
    flight_recorder: bool = option(
        False,
        "Set the variables with which torch reports NCCL's last collectives (default: the command's "
        "environment stays as it is). Torch 2.15 needs TORCH_DIST_USE_NCCL2=0 for it. For ranks of this host only: "
        "where srun, mpirun and such start them, start `ddpdiag watch` behind those.",
    )
    pid: tuple[int, ...] = option(
        (),
        "Look at a job that runs already instead of starting a command: the pid of its launcher, or of a rank "
        "(repeatable).",
        metavar="PID",
        panel=RUNNING,
        variable=False,
        parse=_parse_pids,
    )
    attach: bool = option(
        False,
        "Look at the job of this user that runs on this host, or on all hosts of a job of Slurm: "
        "`srun --overlap --jobid JOB -N 4 -n 4 ddpdiag watch --attach`.",
        panel=RUNNING,
        variable=False,
    )
    every: float | None = option(
        None,
        "Look again after so long, until the job ends, and count for which ranks the others waited "
        "(default: one report).",
        metavar="SECONDS",
        panel=RUNNING,
        min=1.0,
        variable=False,
    )
    quiet: bool = option(
        False, "Report without stacks and GPUs, and omit the first line on requests.", "-q", panel=DISPLAY
    )
