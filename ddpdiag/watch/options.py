"""Options of `ddpdiag watch`."""

from dataclasses import dataclass

from ddpdiag.cli.options import OUT, option


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """How a command is watched, as it was typed."""

    stall: float = option(300.0, "Look when nothing new was heard for so long.", metavar="SECONDS")
    kill: bool = option(
        False,
        "Then end the command (default: report, and let it go on). Only if it was ever heard; on hosts "
        "without rank 0, which mostly prints alone, only with --output or --flight-recorder.",
    )
    output: tuple[str, ...] = option(
        (), "A file that the ranks write, or a pattern (*, **), beside their output (repeatable).", metavar="FILE"
    )
    bundle: str | None = option(None, "Keep all that was seen: one file, a line a look.", metavar="DIR", panel=OUT)
    read: bool = option(
        False,
        "Start nothing: judge the files that --bundle kept (in place of COMMAND), of all hosts together, as "
        "far as they looked at the newest silence.",
        panel=OUT,
    )
    flight_recorder: bool = option(
        False,
        "Set torch's variables with which NCCL tells its last collectives (default: the command's "
        "environment stays as it is). Its groups of torch 2.15 tell them at a time-out only, unless "
        "TORCH_DIST_USE_NCCL2=0. For ranks of this host only: where srun, mpirun and such start them, start "
        "us behind those (refused as far as the command or a shell script shows it, else told when it is seen).",
    )
    alone: bool = option(
        False, "Tell of this command only (default: the `ddpdiag watch` of one job on a host make one report)."
    )
