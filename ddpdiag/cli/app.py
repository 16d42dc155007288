"""The commands and their options. Bodies import what they need, so that `--help` is there at once."""

import sys
from inspect import getdoc
from typing import Annotated

import typer

from ddpdiag.cli import (
    bench_options,
    check_options,
    host_options,
    options,
    reading_options,
    train_options,
    watch_options,
)
from ddpdiag.cli.command import with_names

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


app.command(epilog=check_options.EPILOG)(check_options.check)
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
    color: options.ColorWhen = options.Color.AUTO,
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
        color=color,
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
    quiet: options.Quiet = False,
    color: options.ColorWhen = options.Color.AUTO,
) -> None:
    """See what a failure among many hosts looks like: a simulated fleet, planned and judged as a real one."""
    from ddpdiag.cli.outputs import Outputs
    from ddpdiag.simulate import command

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
        quiet=quiet,
        color=color,
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
    from ddpdiag.lint import command

    raise typer.Exit(command.run(files, json, details=details))


app.command(epilog=reading_options.EXPLAIN)(reading_options.explain)
app.command(epilog=reading_options.MANUAL)(reading_options.manual)


@app.command()
def checks() -> None:
    """List all checks, and the rules of `ddpdiag lint`."""
    from ddpdiag.cli.manual import rows
    from ddpdiag.cli.outputs import is_terminal, show, terminal
    from ddpdiag.render.manual import checks_table

    width, color = terminal(sys.stdout)
    show(checks_table(rows(), tty=is_terminal(sys.stdout), width=width, color=color), sys.stdout)


def _in_paragraphs(text: str) -> str:
    """Without the line ends inside of paragraphs: rich keeps them, and breaks lines at the terminal's width, too."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


for registered in app.registered_commands:
    registered.callback = with_names(registered.callback) if registered.callback else None
    registered.help = _in_paragraphs(getdoc(registered.callback) or "")
