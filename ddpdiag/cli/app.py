"""The commands and their options. Bodies import what they need, so that `--help` is there at once."""

import sys
from typing import Annotated

import typer

from ddpdiag.cli import bench_options, host_options, options, reading_options, train_options, watch_options

# People and launchers write --local_rank, --nproc_per_node and --master_addr as often as with dashes.
_SETTINGS = {"token_normalize_func": lambda name: name.replace("_", "-"), "help_option_names": ["-h", "--help"]}


app = typer.Typer(
    name="ddpdiag",
    help="Says before a PyTorch job starts whether an allocation can train with DistributedDataParallel, "
    "how fast, and if not, which rank, GPU, host or link is to blame.",
    epilog=options.examples("ddpdiag check", "torchrun --nproc-per-node 8 -m ddpdiag check", "srun ddpdiag check"),
    no_args_is_help=True,
    add_completion=False,
    context_settings=_SETTINGS,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def ddpdiag(
    context: typer.Context,
    local_rank: Annotated[
        int | None, typer.Option("--local-rank", hidden=True, help="Passed by torch.distributed.launch.")
    ] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Options before the command."""
    context.obj = local_rank
    if version:
        from ddpdiag import __version__

        typer.echo(f"ddpdiag {__version__}")
        raise typer.Exit


@app.command(
    epilog=options.examples(
        "ddpdiag check --nproc-per-node 4",
        "ddpdiag check --stage rendezvous,collective",
        "ddpdiag check --json report.json --record run.jsonl",
        "ddpdiag check --env-file ways.env   (then `. ./ways.env` in the job)",
        "ddpdiag check --rank 0 --world-size 2 --master-addr 10.0.0.1   (and --rank 1 in another shell)",
    ),
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
            help="The run ends within this time (default: 60 on one host, 120 on several).",
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
) -> None:
    """Test this allocation: started once (it starts the missing ranks), or once per rank by torchrun, srun, mpirun or
    hand.

    Exit code: 0 FIT, 1 UNFIT, 2 wrong usage, 3 UNKNOWN, 4 a bug of ours, 130 and 143 after a signal.
    """
    from ddpdiag.cli import check as command
    from ddpdiag.cli.edge import leave
    from ddpdiag.cli.plugin import guarded
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
    )
    leave(guarded(lambda: command.run(asked, wishes, outputs), nagios=nagios))


app.command(epilog=host_options.EPILOG)(host_options.host)
app.command(name="allreduce-bench", epilog=bench_options.EPILOG)(bench_options.allreduce_bench)
app.command(epilog=train_options.EPILOG)(train_options.train)
app.command(epilog=watch_options.EPILOG, context_settings=watch_options.SETTINGS)(watch_options.watch)
app.command(epilog=reading_options.COMPARE)(reading_options.compare)


@app.command(epilog=options.examples("ddpdiag judge run.jsonl", "ddpdiag judge rank-*.jsonl --json -"))
def judge(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="A recording, or the parts that ranks left behind.")
    ],
    json: options.Json = None,
    markdown: options.Markdown = None,
    record: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the parts as one recording.", rich_help_panel=options.OUT),
    ] = None,
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
) -> None:
    """Judge a recording again, on any machine, without torch and without a GPU."""
    from ddpdiag.cli import judge as command
    from ddpdiag.cli.edge import leave
    from ddpdiag.cli.outputs import Outputs
    from ddpdiag.cli.plugin import guarded

    outputs = Outputs(
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
    )
    code = guarded(lambda: command.run(files, outputs, strict=strict, need_nodes=need_nodes), nagios=nagios)
    if nagios:
        leave(code)  # who comes back to the edge with a 2 is taken for wrong usage
    raise typer.Exit(code)


@app.command(
    epilog=options.examples(
        "ddpdiag simulate --hosts 16384 --fault slow-host:164 --seed 7",
        "ddpdiag simulate --hosts 8 --fault slow-link --record run.jsonl",
        "ddpdiag simulate --hosts 1024 --fault slow-host:10 --trials 100",
    )
)
def simulate(
    hosts: Annotated[int, typer.Option(min=2, max=131_072, metavar="N", help="Hosts of the fleet.")] = 16,
    ranks_per_host: Annotated[int, typer.Option(min=1, max=64, metavar="G", help="Ranks of each host.")] = 8,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND[:COUNT]",
            help="slow-host, slow-inside, dead-host, hang, slow-link, leaf, transient, systemic or none (repeatable).",
        ),
    ] = None,
    slower: Annotated[float, typer.Option(min=0.0, max=0.99, help="How much slower slow ones are, as a share.")] = 0.25,
    noise: Annotated[float, typer.Option(min=0.0, max=0.5, help="Deviation of a test, as a share.")] = 0.02,
    transients: Annotated[float, typer.Option(min=0.0, max=0.5, help="Share of tests that are slow by chance.")] = 0.01,
    congestion: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of leaves on which congestion begins in a round.")
    ] = 0.0,
    hosts_per_leaf: Annotated[int, typer.Option(min=1, metavar="N", help="Hosts on a leaf switch.")] = 32,
    seed: Annotated[int, typer.Option(help="The same seed gives the same run.")] = 0,
    trials: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="So many runs, and how often who was blamed.")
    ] = None,
    json: options.Json = None,
    markdown: options.Markdown = None,
    record: options.Record = None,
    exclude_file: options.ExcludeFile = None,
    good_hosts: options.GoodHosts = None,
    html: options.Html = None,
    details: options.Details = False,
    timings: options.Timings = False,
) -> None:
    """See what a failure among many hosts looks like: a simulated fleet, planned and judged as a real one."""
    from ddpdiag.cli import simulate as command
    from ddpdiag.cli.outputs import Outputs

    wanted = command.Wanted(
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        faults=tuple(fault or ()),
        slower=slower,
        noise=noise,
        transients=transients,
        congestion=congestion,
        hosts_per_leaf=hosts_per_leaf,
        seed=seed,
        trials=trials,
    )
    outputs = Outputs(
        json=json,
        markdown=markdown,
        record=record,
        exclude_file=exclude_file,
        good_hosts=good_hosts,
        html=html,
        details=details,
        timings=timings,
    )
    raise typer.Exit(command.run(wanted, outputs))


@app.command(
    epilog=options.examples("ddpdiag lint train.py", "ddpdiag lint src/ --details", "ddpdiag lint train.py --json -")
)
def lint(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Training scripts; of a directory, every *.py below it.")
    ],
    json: options.Json = None,
    details: Annotated[
        bool, typer.Option("--details", help="Show hints, and what was not judged.", rich_help_panel=options.OUT)
    ] = False,
) -> None:
    """Find pitfalls of DistributedDataParallel in the source of a training script, which is not run.

    A comment `# ddpdiag: ignore[LNT010]` on its line keeps a remark quiet. Each file is read by itself.

    Exit code: 0 nothing found, 1 errors or warnings, 2 a file that is no Python.
    """
    from ddpdiag.cli import lint as command

    raise typer.Exit(command.run(files, json, details=details))


app.command(epilog=reading_options.EXPLAIN)(reading_options.explain)
app.command(epilog=reading_options.MANUAL)(reading_options.manual)


@app.command()
def checks() -> None:
    """List all checks, and the rules of `ddpdiag lint`."""
    from ddpdiag.cli.manual import rows
    from ddpdiag.cli.outputs import show, terminal
    from ddpdiag.render.manual import checks_table

    width, color = terminal(sys.stdout)
    show(checks_table(rows(), width=width, color=color), sys.stdout)
