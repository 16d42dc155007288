"""The options of `ddpdiag allreduce-bench`: those of nccl-tests, and ours. The body imports what it needs."""

from typing import Annotated

import typer

from ddpdiag.cli import options

_SIZES, _CALLS, _WHAT, _VERDICT = "Sizes", "Calls", "What is measured", "Verdict"

EPILOG = options.examples(
    "ddpdiag allreduce-bench",
    "torchrun --nproc-per-node 8 -m ddpdiag allreduce-bench -b 8 -e 1G",
    "ddpdiag allreduce-bench --collective all_gather,reduce_scatter -d bf16",
    "ddpdiag allreduce-bench --backend gloo,nccl --plot busbw.svg",
    "ddpdiag allreduce-bench -b 64M -e 64M --min-busbw 300",
    "ddpdiag allreduce-bench --save-baseline base.json   (and later --baseline base.json)",
)


def allreduce_bench(
    context: typer.Context,
    minbytes: Annotated[
        str, typer.Option("--minbytes", "-b", metavar="SIZE", help="Smallest size.", rich_help_panel=_SIZES)
    ] = "8",
    maxbytes: Annotated[
        str, typer.Option("--maxbytes", "-e", metavar="SIZE", help="Largest size.", rich_help_panel=_SIZES)
    ] = "128M",
    stepfactor: Annotated[
        float | None,
        typer.Option(
            "--stepfactor", "-f", metavar="X", help="Factor between sizes (default: 2).", rich_help_panel=_SIZES
        ),
    ] = None,
    stepbytes: Annotated[
        str | None,
        typer.Option(
            "--stepbytes", "-i", metavar="SIZE", help="Step between sizes instead of a factor.", rich_help_panel=_SIZES
        ),
    ] = None,
    iters: Annotated[
        int, typer.Option("--iters", "-n", metavar="N", help="Timed calls of each size.", rich_help_panel=_CALLS)
    ] = 20,
    warmup_iters: Annotated[
        int, typer.Option("--warmup-iters", "-w", metavar="N", help="Calls before them.", rich_help_panel=_CALLS)
    ] = 5,
    agg_iters: Annotated[
        int, typer.Option("--agg-iters", "-m", metavar="N", help="Calls issued at once.", rich_help_panel=_CALLS)
    ] = 1,
    run_cycles: Annotated[
        int,
        typer.Option(
            "--run-cycles", "-N", metavar="N", help="All of it N times (0: until time is over).", rich_help_panel=_CALLS
        ),
    ] = 1,
    check: Annotated[
        int,
        typer.Option(
            "--check", "-c", metavar="N", help="Calls whose values are checked (0: none).", rich_help_panel=_CALLS
        ),
    ] = 1,
    blocking: Annotated[
        int | None,
        typer.Option(
            "--blocking",
            "-z",
            metavar="0-3",
            help="0: a call is issued before the last is over; 1: wait, and a barrier; 2: wait; 3: wait, and a barrier "
            "that does not count (default: 0 on GPUs, 2 on CPUs).",
            rich_help_panel=_CALLS,
        ),
    ] = None,
    average: Annotated[
        int,
        typer.Option(
            "--average",
            "-a",
            metavar="0-3",
            help="Time of a row: 0 of rank 0, 1 of the average, 2 of the fastest, 3 of the slowest rank.",
            rich_help_panel=_CALLS,
        ),
    ] = 3,
    per_iter_timing: Annotated[
        int,
        typer.Option(
            "--per-iter-timing", "-I", min=0, max=1, metavar="0-1", help="1: keep every call.", rich_help_panel=_CALLS
        ),
    ] = 0,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            "-T",
            "--budget",
            min=5.0,
            metavar="SECONDS",
            help="The run ends within this time, with fewer calls or sizes if need be.",
            rich_help_panel=_CALLS,
        ),
    ] = 120.0,
    collective: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all, send_recv (a,b; default: "
            "all_reduce).",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    datatype: Annotated[
        list[str] | None,
        typer.Option(
            "--datatype",
            "-d",
            metavar="TYPE",
            help="int8, uint8, int32, int64, half, float, double, bfloat16, all (a,b; default: float).",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    op: Annotated[
        list[str] | None,
        typer.Option(
            "--op", "-o", metavar="OP", help="sum, prod, min, max, avg, all (a,b; default: sum).", rich_help_panel=_WHAT
        ),
    ] = None,
    root: Annotated[
        str,
        typer.Option(
            "--root", "-r", metavar="RANK", help="Root of broadcast and reduce, or all.", rich_help_panel=_WHAT
        ),
    ] = "0",
    backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="gloo, nccl or any that torch knows; several are measured in one run (a,b; default: the job's own).",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    min_busbw: Annotated[
        float | None,
        typer.Option(metavar="GB/s", help="Exit with 1 if the best bus bandwidth is less.", rich_help_panel=_VERDICT),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Compare with an earlier run of this world.", rich_help_panel=_VERDICT),
    ] = None,
    save_baseline: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Keep this run there, beside others.", rich_help_panel=_VERDICT),
    ] = None,
    strict: options.Strict = False,
    json: Annotated[
        str | None,
        typer.Option(
            "--json",
            "-J",
            "--output-file",
            metavar="FILE",
            help="Write JSON after nccl-tests' version 3 ('-': standard output).",
            rich_help_panel=options.OUT,
        ),
    ] = None,
    markdown: options.Markdown = None,
    csv: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write all rows as CSV.", rich_help_panel=options.OUT)
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Draw bandwidth and latency over size (.svg or .png).", rich_help_panel=options.OUT
        ),
    ] = None,
    record: options.Record = None,
    prometheus: options.Prometheus = None,
    junit: options.Junit = None,
    html: options.Html = None,
    details: options.Details = False,
    timings: options.Timings = False,
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
    """Measure collectives as nccl-tests does, over gloo and nccl, without MPI and without a build; say what it means.

    Started once (it starts the missing ranks), or once per rank by torchrun, srun, mpirun or hand. K, M and G are
    powers of 1024, GB/s is 1e9 bytes per second. Ctrl-C prints what was measured so far.

    Exit code: 0 FIT, 1 UNFIT (wrong values, below --min-busbw), 2 wrong usage, 3 UNKNOWN, 4 a bug of ours.
    """
    from ddpdiag.bench import command
    from ddpdiag.cli.check import Wishes
    from ddpdiag.cli.edge import guarded, leave
    from ddpdiag.runtime.launchers import Asked

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
    flags = command.Flags(
        minbytes=minbytes,
        maxbytes=maxbytes,
        stepbytes=stepbytes,
        stepfactor=stepfactor,
        iters=iters,
        warmup_iters=warmup_iters,
        run_cycles=run_cycles,
        agg_iters=agg_iters,
        op=tuple(op or ("sum",)),
        datatype=tuple(datatype or ("float",)),
        root=root,
        average=average,
        check=check,
        blocking=blocking,
        per_iter_timing=per_iter_timing,
        collective=tuple(collective or ("all_reduce",)),
        backend=tuple(backend or ("auto",)),
        min_busbw=min_busbw,
        baseline=baseline,
        save_baseline=save_baseline,
    )
    wishes = Wishes(
        select=command.CODES,
        budget=timeout,
        strict=strict,
        board_wait=board_wait,
        board_port=board_port,
        require_auth=require_auth,
        port_range=port_range,
    )
    outputs = command.BenchOutputs(
        json=json,
        markdown=markdown,
        record=record,
        csv=csv,
        plot=plot,
        save_baseline=save_baseline,
        prometheus=prometheus,
        junit=junit,
        html=html,
        details=details,
        timings=timings,
        quiet=quiet,
        color=color,
    )
    leave(guarded(lambda: command.run(asked, wishes, flags, outputs)))
