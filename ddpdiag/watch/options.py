"""The options of `ddpdiag watch`. The body imports what it needs."""

from typing import Annotated

import typer

from ddpdiag.cli import options

# What follows the command's name is the command's own.
SETTINGS = {"allow_interspersed_args": False}

EPILOG = options.examples(
    "ddpdiag watch -- torchrun --nproc-per-node 8 train.py",
    "ddpdiag watch --stall 120 --kill -- torchrun --nproc-per-node 8 train.py",
    "srun --ntasks-per-node 1 ddpdiag watch --bundle . -- torchrun ... train.py",
    "srun ddpdiag watch -- python train.py   (one report a host)",
    "ddpdiag watch --output 'logs/**/*.log' -- torchrun --log-dir logs --redirects 3 train.py",
    "ddpdiag watch --read watch-*.jsonl   (of all hosts together)",
    "kill -USR1 PID   (look now)",
)


def watch(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="The training, as you would start it without us.")
    ],
    stall: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Look when nothing new was heard for so long."),
    ] = 300.0,
    kill: Annotated[
        bool,
        typer.Option(
            "--kill",
            help="Then end the command (default: report, and let it go on). Only if it was ever heard; on hosts "
            "without rank 0, which mostly prints alone, only with --output or --flight-recorder.",
        ),
    ] = False,
    output: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="A file that the ranks write, or a pattern (*, **), beside their output (repeatable)."
        ),
    ] = None,
    bundle: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Keep all that was seen: one file, a line a look.", rich_help_panel=options.OUT
        ),
    ] = None,
    read: Annotated[
        bool,
        typer.Option(
            "--read",
            help="Start nothing: judge the files that --bundle kept (in place of COMMAND), of all hosts together, as "
            "far as they looked at the newest silence.",
            rich_help_panel=options.OUT,
        ),
    ] = False,
    flight_recorder: Annotated[
        bool,
        typer.Option(
            "--flight-recorder",
            help="Set torch's variables with which NCCL tells its last collectives (default: the command's "
            "environment stays as it is). For ranks of this host only: where srun, mpirun and such start them, start "
            "us behind those (refused as far as the command or a shell script shows it, else told when it is seen).",
        ),
    ] = False,
    alone: Annotated[
        bool,
        typer.Option(
            "--alone",
            help="Tell of this command only (default: the `ddpdiag watch` of one job on a host make one report).",
        ),
    ] = False,
) -> None:
    """Start a training unchanged, and when it goes silent say which rank holds it up.

    Silent means: no output, and no new collective where NCCL's flight recorder can be asked. The report goes to
    standard error; SIGUSR1 asks for one at once. Stacks need py-spy (`pip install 'ddpdiag\\[watch]'`).

    Exit code: the command's own, and its signal; 126 and 127 if it cannot be started; after --kill 1 (a rank was
    named) or 3 (nobody can be).
    """
    from ddpdiag.cli.edge import guarded, leave
    from ddpdiag.watch import command as watched

    def start() -> int:
        return watched.run(
            command,
            stall=stall,
            kill=kill,
            output=output or (),
            bundle=bundle,
            flight_recorder=flight_recorder,
            alone=alone,
        )

    leave(guarded((lambda: watched.read(command)) if read else start))
