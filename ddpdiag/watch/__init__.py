"""`ddpdiag watch` starts a training unchanged, and when it goes silent reports which rank holds it up; its options."""

from dataclasses import dataclass

from ddpdiag.cli.options import FILES, OUT, DisplayOptions, option


@dataclass(frozen=True, kw_only=True)
class WatchOptions(DisplayOptions):
    """The options of a watched command, as they were typed."""

    stall: float = option(300.0, "Look at the ranks when nothing new was written for so long.", metavar="SECONDS")
    kill: bool = option(
        False,
        "Then end the command (default: report, and let it continue), at the second look where a rank may validate or "
        "save. Set --stall above the longest silence of a healthy job: imports, validation, checkpoints. Only if it "
        "has ever written something; on hosts without rank 0, mostly the only rank that prints, only with --output or "
        "--flight-recorder.",
    )
    output: tuple[str, ...] = option(
        (), "A file that the ranks write besides their output, or a pattern (*, **) (repeatable).", metavar="FILE"
    )
    bundle: str | None = option(
        None, "Save all that was seen: one file, one line per look.", metavar="DIR", panel=FILES
    )
    read: bool = option(
        False,
        "Start nothing: judge the files that --bundle saved (given in place of COMMAND), all hosts together, as "
        "far as they contain a look at the newest silence.",
    )
    flight_recorder: bool = option(
        False,
        "Set the variables with which torch reports NCCL's last collectives (default: the command's "
        "environment stays as it is). With torch 2.15 it reports them at a time-out only, unless "
        "TORCH_DIST_USE_NCCL2=0. For ranks of this host only: where srun, mpirun and such start them, start "
        "`ddpdiag watch` behind those (refused if the command shows this, else reported once seen).",
    )
    quiet: bool = option(False, "Report without stacks, threads and GPUs (--bundle keeps them).", "-q", panel=OUT)
