"""The options of `ddpdiag host`."""

from typing import Annotated

import typer

from ddpdiag.cli import options

EPILOG = options.examples(
    "ddpdiag host",
    "ddpdiag host --expect-gpus 8 --strict",
    "ddpdiag host --torch --json host.json",
    "env -i /opt/ddpdiag/bin/ddpdiag host   (as a Slurm Prolog runs it; see recipes/)",
)


def host(
    torch: Annotated[
        bool,
        typer.Option(
            "--torch",
            help="Also import torch, compute on each GPU (or the CPU), and open a process group of one.",
            rich_help_panel=options.WHAT,
        ),
    ] = False,
    expect_gpus: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="GPUs that this host must show.", rich_help_panel=options.WHAT),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CODE", help="Not the checks with these codes or prefixes (a,b).", rich_help_panel=options.WHAT
        ),
    ] = None,
    budget: Annotated[
        float,
        typer.Option(
            min=8.0,  # 3 s are kept for ending what hangs and for the report, and a third for the kernel's log
            max=3600.0,
            metavar="SECONDS",
            help="It ends within this time, whatever hangs.",
            rich_help_panel=options.WHAT,
        ),
    ] = 10.0,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="CODE.NAME=VALUE",
            help="A threshold of a check (repeatable).",
            rich_help_panel=options.WHAT,
        ),
    ] = None,
    json: options.Json = None,
    record: options.Record = None,
    prometheus: options.Prometheus = None,
    junit: options.Junit = None,
    nagios: options.Nagios = False,
    strict: options.Strict = False,
    details: options.Details = False,
    timings: options.Timings = False,
    color: options.ColorWhen = options.Color.AUTO,
) -> None:
    """Look at this host alone, in a second or less: for a Prolog, a cron job, a monitor, an init container.

    It needs no torch, no launcher and no other host, and opens no connection.

    Exit code: 0 FIT, 1 UNFIT (drain the node), 2 wrong usage, 3 UNKNOWN, 4 a bug of ours, 130 and 143 after a signal.
    """
    from ddpdiag.cli import host as command
    from ddpdiag.cli.edge import leave
    from ddpdiag.cli.outputs import Outputs
    from ddpdiag.cli.plugin import guarded

    wishes = command.Wishes(
        torch=torch,
        expect_gpus=expect_gpus,
        ignore=tuple(ignore or ()),
        settings=tuple(set_ or ()),
        budget=budget,
        strict=strict,
    )
    outputs = Outputs(
        json=json,
        record=record,
        prometheus=prometheus,
        junit=junit,
        nagios=nagios,
        details=details,
        timings=timings,
        color=color,
    )
    leave(guarded(lambda: command.run(wishes, outputs), nagios=nagios))
