"""The options of `ddpdiag train`. The body imports what it needs."""

from typing import Annotated

import typer

from ddpdiag.cli import options

_WHAT = "What is trained"

EPILOG = options.examples(
    "ddpdiag train",
    "ddpdiag train --strategy all --nproc-per-node 4",
    "torchrun --nproc-per-node 8 -m ddpdiag train --strategy single,dp,ddp,fsdp",
    "ddpdiag train --strategy ddp --scaling",
    "ddpdiag train --compare-launchers --nproc-per-node 4",
)


def _typed(context: typer.Context) -> list[str]:
    """The options that stand on the command line, in the order in which they are declared."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def train(
    context: typer.Context,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="single, dp, ddp, fsdp, tensor-parallel, pipeline, model-parallel, all (a,b; default: "
            "single,ddp,fsdp). single is always run: the others are held against it.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="N", help="Steps of each training; the first 3 are not timed.", rich_help_panel=_WHAT)
    ] = 30,
    batch_size: Annotated[
        int, typer.Option(metavar="N", help="Images of a step, over all ranks.", rich_help_panel=_WHAT)
    ] = 64,
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="float32, float64 or bfloat16.", rich_help_panel=_WHAT)
    ] = "float32",
    group_size: Annotated[
        int,
        typer.Option(
            metavar="N", help="Devices over which each rank of model-parallel cuts its network.", rich_help_panel=_WHAT
        ),
    ] = 2,
    scaling: Annotated[
        bool,
        typer.Option("--scaling", help="ddp on 1, 2, 4 ... ranks as well: does it scale?", rich_help_panel=_WHAT),
    ] = False,
    compare_launchers: Annotated[
        bool,
        typer.Option(
            "--compare-launchers",
            help="ddp on this host, started by mp.spawn, torchrun, torch.distributed.run, torch.distributed.launch "
            "(with --use-env, too) and by hand: do all work, and how long does each take to start, and for a step?",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    rounds: Annotated[
        int,
        typer.Option(
            metavar="N", help="With --compare-launchers: turns of each way, the best counts.", rich_help_panel=_WHAT
        ),
    ] = 2,
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="auto, nccl, gloo or any that torch knows.", rich_help_panel=_WHAT)
    ] = "auto",
    budget: Annotated[
        float,
        typer.Option(min=5.0, metavar="SECONDS", help="The run ends within this time.", rich_help_panel=_WHAT),
    ] = 120.0,
    data_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="MNIST files of your own (IDX, plain or .gz) instead of those shipped.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="CODE.NAME=VALUE",
            help="Such as TRN002.tolerance=0.01 (repeatable).",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    json: options.Json = None,
    markdown: options.Markdown = None,
    record: options.Record = None,
    prometheus: options.Prometheus = None,
    junit: options.Junit = None,
    strict: options.Strict = False,
    html: options.Html = None,
    details: options.Details = False,
    quiet: options.Quiet = False,
    color: options.ColorWhen = options.Color.AUTO,
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
) -> None:
    """Train by several strategies, and say which of them work here and which pay.

    Each trains the digits that we ship, with the same first weights and batches, so its loss must be that of one
    process alone. The code of each is a file to copy: ddpdiag/strategies/workloads.

    Exit code: 0 all work or are not possible here, 1 one is wrong, hangs or fails, 2 wrong usage, 3 UNKNOWN (such as
    none is possible), 4 a bug of ours.
    """
    from ddpdiag.cli import launching
    from ddpdiag.cli.check import Wishes
    from ddpdiag.cli.edge import guarded, leave
    from ddpdiag.cli.outputs import Outputs
    from ddpdiag.errors import UsageError
    from ddpdiag.model.launching import Compare
    from ddpdiag.runtime.launchers import Asked
    from ddpdiag.strategies import command

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
    if compare_launchers:
        compare = Compare(
            ranks=nproc_per_node or 0,
            steps=steps,
            batch_size=batch_size,
            rounds=rounds,
            backend=backend,
            data_dir=data_dir,
            budget_seconds=budget,
        )
        launching.refuse_others(_typed(context))
        leave(guarded(lambda: launching.run(asked, compare, json, quiet=quiet, color=color)))
    if "rounds" in _typed(context):
        raise UsageError("--rounds has no meaning without --compare-launchers")
    flags = command.Flags(
        strategy=tuple(strategy or ("single,ddp,fsdp",)),
        steps=steps,
        batch_size=batch_size,
        group_size=group_size,
        dtype=dtype,
        scaling=scaling,
    )
    wishes = Wishes(
        select=command.CODES,
        backend=backend,
        budget=budget,
        data_dir=data_dir,
        settings=tuple(set_ or ()),
        strict=strict,
        board_wait=board_wait,
        board_port=board_port,
        require_auth=require_auth,
        port_range=port_range,
    )
    outputs = Outputs(
        json=json,
        markdown=markdown,
        record=record,
        prometheus=prometheus,
        junit=junit,
        html=html,
        details=details,
        quiet=quiet,
        color=color,
    )
    leave(guarded(lambda: command.run(asked, wishes, flags, outputs)))
