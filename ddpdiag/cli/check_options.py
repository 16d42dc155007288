"""The options of `ddpdiag check`. The body imports what it needs."""

from typing import Annotated

import typer

from ddpdiag.cli import options

EPILOG = options.examples(
    "ddpdiag check --nproc-per-node 4",
    "ddpdiag check --stage rendezvous,collective",
    "ddpdiag check --json report.json --record run.jsonl",
    "ddpdiag check --env-file ways.env   (then `. ./ways.env` in the job)",
    "ddpdiag check --rank 0 --world-size 2 --master-addr 10.0.0.1   (and --rank 1 in another shell)",
)


def check(
    context: typer.Context,
    nproc_per_node: options.NprocPerNode = None,
    nnodes: options.Nnodes = None,
    node_rank: options.NodeRank = None,
    rank: options.Rank = None,
    world_size: options.WorldSize = None,
    local_rank: options.LocalRank = None,
    master_addr: options.MasterAddr = None,
    master_port: options.MasterPort = None,
    run_id: options.RunId = None,
    board_wait: options.BoardWait = 15.0,
    board_port: options.BoardPort = None,
    require_auth: options.RequireAuth = False,
    port_range: options.PortRange = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only these stages (a,b).", rich_help_panel=options.WHAT),
    ] = None,
    skip_stage: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Not these stages (a,b).", rich_help_panel=options.WHAT),
    ] = None,
    select: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CODE", help="Only checks with these codes or prefixes (a,b).", rich_help_panel=options.WHAT
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CODE", help="Not the checks with these codes or prefixes (a,b).", rich_help_panel=options.WHAT
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(metavar="NAME", help="auto, nccl, gloo or any that torch knows.", rich_help_panel=options.WHAT),
    ] = "auto",
    expect_gpus: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="GPUs that every host must show.", rich_help_panel=options.WHAT),
    ] = None,
    depth: Annotated[
        str, typer.Option(metavar="quick|standard|deep", help="How much is measured.", rich_help_panel=options.WHAT)
    ] = "quick",
    budget: Annotated[
        float | None,
        typer.Option(
            min=5.0,  # 3 s are kept for judgement and farewell; below this nothing could be measured
            metavar="SECONDS",
            help="The run ends within this time (default: 60 on one host, 120 on several, more with GPUs).",
            rich_help_panel=options.WHAT,
        ),
    ] = None,
    data_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="MNIST files of your own (IDX, plain or .gz) instead of those shipped.",
            rich_help_panel=options.WHAT,
        ),
    ] = None,
    shared_dir: options.SharedDir = None,
    topology: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The leaf switch of each host: HOST LEAF a line, or Slurm's topology.conf (default: what Slurm tells "
            "its tasks). Read on rank 0's host.",
            rich_help_panel=options.WHAT,
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A recording or JSON report of an earlier run to compare with (CMP001). Read on rank 0's host.",
            rich_help_panel=options.WHAT,
        ),
    ] = None,
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
    markdown: options.Markdown = None,
    record: options.Record = None,
    exclude_file: options.ExcludeFile = None,
    good_hosts: options.GoodHosts = None,
    env_file: options.EnvFile = None,
    need_nodes: options.NeedNodes = None,
    prometheus: options.Prometheus = None,
    junit: options.Junit = None,
    nagios: options.Nagios = False,
    strict: options.Strict = False,
    html: options.Html = None,
    details: options.Details = False,
    timings: options.Timings = False,
    quiet: options.Quiet = False,
    color: options.ColorWhen = options.Color.AUTO,
) -> None:
    """Test this allocation: started once (it starts the missing ranks), or once per rank by torchrun, srun, mpirun or
    hand.

    Exit code: 0 FIT, 1 UNFIT, 2 wrong usage, 3 UNKNOWN, 4 a bug of ours, 130 and 143 after a signal.
    """
    from ddpdiag.cli import check as command
    from ddpdiag.cli.edge import leave
    from ddpdiag.cli.plugin import guarded
    from ddpdiag.runtime.launchers.launch import Asked

    asked = Asked(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank if local_rank is not None else context.obj,
        nproc_per_node=nproc_per_node,
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        run_id=run_id,
    )
    wishes = command.Wishes(
        stages=tuple(stage or ()),
        skip_stages=tuple(skip_stage or ()),
        select=tuple(select or ()),
        ignore=tuple(ignore or ()),
        backend=backend,
        expect_gpus=expect_gpus,
        depth=depth,
        budget=budget,
        data_dir=data_dir,
        shared_dir=shared_dir,
        topology=topology,
        baseline=baseline,
        need_nodes=need_nodes,
        settings=tuple(set_ or ()),
        strict=strict,
        board_wait=board_wait,
        board_port=board_port,
        require_auth=require_auth,
        port_range=port_range,
        exports=env_file is not None,
    )
    outputs = command.Outputs(
        json=json,
        markdown=markdown,
        record=record,
        exclude_file=exclude_file,
        good_hosts=good_hosts,
        env_file=env_file,
        prometheus=prometheus,
        junit=junit,
        nagios=nagios,
        html=html,
        details=details,
        timings=timings,
        quiet=quiet,
        color=color,
    )
    leave(guarded(lambda: command.run(asked, wishes, outputs), nagios=nagios))
