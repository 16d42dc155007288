"""Options of `ddpdiag watch`, which starts a training, and reports which rank holds up the training if it is silent."""

from dataclasses import dataclass

from ddpdiag.cli.options import DISPLAY, DisplayArgs, option


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
    quiet: bool = option(False, "Report without stacks and GPUs.", "-q", panel=DISPLAY)
