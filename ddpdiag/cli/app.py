"""The commands of ddpdiag. Each body imports the modules that it needs, so that `--help` is fast."""

import sys
from collections.abc import Callable
from inspect import getdoc
from typing import Annotated, TypeVar

import typer

from ddpdiag import __version__
from ddpdiag.bench.options import BenchOutputs
from ddpdiag.cli.edge import exit_at_once, guarded
from ddpdiag.cli.exit_codes import translated
from ddpdiag.cli.options import CheckArgs, ExplainArgs, HostArgs, codes_and_names, completion
from ddpdiag.cli.outputs import CompareOutputs, JudgeOutputs, LintArgs, Outputs, show
from ddpdiag.cli.parsing import command, declared_name, examples
from ddpdiag.history import HistoryArgs
from ddpdiag.model.bench import BenchRequest
from ddpdiag.model.launch import LaunchArgs
from ddpdiag.model.train import TrainRequest
from ddpdiag.simulate import SimulateArgs
from ddpdiag.ticket import Kind, TicketArgs
from ddpdiag.watch import WatchArgs

_SETTINGS = {"token_normalize_func": declared_name, "help_option_names": ["-h", "--help"]}

# Options of reports that several commands have.
_FILES = ("json", "html", "markdown", "record")
_HOSTS = ("write_failing_hosts", "write_slow_hosts", "write_healthy_hosts")
_LIMITS = ("strict", "max_slowdown")
_DISPLAY = ("details", "quiet", "color")

# click's exception for a mistake on the command line. Newer releases of Typer have a copy of click with its own class.
CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]

Body = TypeVar("Body", bound=Callable[..., None])

app = typer.Typer(
    name="ddpdiag",
    help="Show before a PyTorch job starts whether an allocation can train with DistributedDataParallel, "
    "how fast, and if not, which rank, GPU, host or link is at fault.",
    epilog=examples("ddpdiag check", "torchrun --nproc-per-node 8 -m ddpdiag check", "srun ddpdiag check"),
    no_args_is_help=True,
    context_settings=_SETTINGS,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ddpdiag {__version__}")
        raise typer.Exit


@app.callback()
def ddpdiag(
    context: typer.Context,
    local_rank: Annotated[
        int | None, typer.Option("--local-rank", hidden=True, help="Passed by torch.distributed.launch.")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the command."""
    context.obj = {"local_rank": local_rank}


def _command(*lines: str, **settings: object) -> Callable[[Body], Body]:
    """Decorator: register a function as a command, with its docstring as the help text and `lines` as examples."""

    def register(body: Body) -> Body:
        # Rich breaks lines at the terminal's width, but keeps the line ends of paragraphs as well.
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in (getdoc(body) or "").split("\n\n"))
        app.command(help=text, epilog=examples(*lines) if lines else None, context_settings=settings)(command(body))
        return body

    return register


@_command(
    "ddpdiag check --nproc-per-node 4",
    "ddpdiag check --stage rendezvous,collective",
    "ddpdiag check --json report.json --record run.jsonl",
    "ddpdiag check --write-workaround nccl.env   (then `. ./nccl.env` in the job)",
    "ddpdiag check --rank 0 --world-size 2 --master-addr 10.0.0.1   (and --rank 1 in another shell)",
)
def check(launch: LaunchArgs, args: CheckArgs, outputs: Outputs) -> None:
    """Test this allocation. Started by hand, it starts the ranks of this host itself; torchrun, srun and mpirun start
    it once for each rank.

    Exit code: 0 FIT, 1 UNFIT, 2 wrong usage, 3 UNKNOWN, 4 a bug in ddpdiag, 130 and 143 after a signal. Options are
    also read from DDPDIAG_<OPTION>, such as DDPDIAG_BUDGET=30.
    """
    from ddpdiag.cli import check

    exit_at_once(translated(guarded(lambda: check.run(launch, args, outputs)), outputs.exit_codes))


@_command(
    "ddpdiag host",
    "ddpdiag host --expect-gpus 8 --strict",
    "ddpdiag host --torch --json host.json",
    "env -i /opt/ddpdiag/bin/ddpdiag host   (as a Slurm Prolog runs it; see recipes/)",
)
def host(
    args: HostArgs,
    outputs: Annotated[Outputs, "json", "record", "prometheus", "strict", "exit_codes", *_DISPLAY],
) -> None:
    """Test this host alone, in a second or less: for a Prolog, a cron job, a monitor, an init container.

    It needs no torch, no launcher and no other host, and opens no connection.

    Exit code: 0 FIT, 1 UNFIT (drain the host), 2 wrong usage, 3 UNKNOWN, 4 a bug in ddpdiag, 130 and 143 after a
    signal.
    """
    from ddpdiag.cli import host

    exit_at_once(translated(guarded(lambda: host.run(args, outputs)), outputs.exit_codes))


@_command(
    "ddpdiag allreduce-bench",
    "torchrun --nproc-per-node 8 -m ddpdiag allreduce-bench -b 8 -e 1G",
    "ddpdiag allreduce-bench --collective all_gather,reduce_scatter -d bf16",
    "ddpdiag allreduce-bench --backend gloo,nccl --csv rows.csv",
    "ddpdiag allreduce-bench -b 64M -e 64M --min-busbw 300",
    "ddpdiag allreduce-bench --json monday.json   (and later --baseline monday.json)",
)
def allreduce_bench(
    request: BenchRequest,
    check_args: Annotated[CheckArgs, "baseline"],
    outputs: Annotated[BenchOutputs, *_FILES, "csv", "prometheus", "strict", *_DISPLAY],
    launch: LaunchArgs,
) -> None:
    """Measure collectives as nccl-tests does, over gloo and nccl, without MPI and without a build; explain the result.

    Start it once (it starts the ranks of this host), or once per rank with torchrun, srun, mpirun or by hand. K, M and
    G are powers of 1024, GB/s is 1e9 bytes per second. Ctrl-C prints what was measured so far.

    Exit code: 0 FIT, 1 UNFIT (wrong values, below --min-busbw), 2 wrong usage, 3 UNKNOWN, 4 a bug in ddpdiag.
    """
    from ddpdiag.bench import command as bench

    exit_at_once(guarded(lambda: bench.run(launch, request, check_args.baseline, outputs)))


@_command(
    "ddpdiag train",
    "ddpdiag train --strategy all --nproc-per-node 4",
    "torchrun --nproc-per-node 8 -m ddpdiag train --strategy single,dp,ddp,fsdp",
    "ddpdiag train --compare-launchers --nproc-per-node 4",
)
def train(
    request: TrainRequest,
    check_args: Annotated[CheckArgs, "backend", "set_"],
    outputs: Annotated[Outputs, *_FILES, "prometheus", "strict", *_DISPLAY],
    launch: LaunchArgs,
) -> None:
    """Train by several strategies, and show which of them work here and which are worth using.

    Each trains on the images in ddpdiag, with the same initial weights and batches, so its loss must be that of one
    process alone. The code of each is a file to copy: ddpdiag/strategies/workloads.

    Exit code: 0 all work or are not possible here, 1 one is wrong, hangs or fails, 2 wrong usage, 3 UNKNOWN (for
    example if none is possible), 4 a bug in ddpdiag.
    """
    from ddpdiag.strategies import command as strategies

    if request.compare_launchers:
        exit_at_once(guarded(lambda: strategies.compare_launchers(launch, request, check_args, outputs)))
    exit_at_once(guarded(lambda: strategies.run(launch, request, check_args, outputs)))


@_command(
    "ddpdiag watch -- torchrun --nproc-per-node 8 train.py",
    "ddpdiag watch --stall 600 --kill -- torchrun --nproc-per-node 8 train.py   (end a job that hangs)",
    "srun --ntasks-per-node 1 ddpdiag watch --stall 120 -- torchrun ... train.py",
    "srun ddpdiag watch -- python train.py   (one report per host)",
    "ddpdiag watch --output 'logs/**/*.log' -- torchrun --log-dir logs --redirects 3 train.py",
    "kill -USR1 PID   (report now)",
    "ddpdiag watch --pid 4711   (a job that runs already: the pid of torchrun, or of a rank)",
    "srun --overlap --jobid 812 -N 4 -n 4 ddpdiag watch --attach   (all 4 hosts of a job of Slurm)",
    allow_interspersed_args=False,  # what follows the command's name is the command's own
)
def watch(
    args: WatchArgs,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COMMAND...]", help="The command that starts the training.", show_default=False),
    ] = None,
) -> None:
    """Start a training unchanged, or attach to one (--pid), and report which rank stops it when it stalls.

    Stalled means: no output, and no new collective if torch's flight recorder can be read. The report goes to standard
    error; SIGUSR1 requests one at once. Stacks need py-spy (`pip install py-spy`).

    Exit code: the command's own, or its signal; 126 and 127 if it cannot be started. If --kill ended the
    command: 1 if a rank is named, else 3. With --pid: 1 if a rank is named, 0 if the job makes progress, else 3.
    """
    from ddpdiag.watch import command as watch

    exit_at_once(guarded(lambda: watch.run(command or (), args)))


@_command(
    "ddpdiag compare before.jsonl after.jsonl", "ddpdiag compare report-monday.json run.jsonl --markdown changes.md"
)
def compare(
    old: Annotated[str, typer.Argument(metavar="OLD", help="A recording (--record) or a JSON report (--json).")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The same of a later run.")],
    outputs: Annotated[CompareOutputs, "json", "markdown", "quiet", "color"],
) -> None:
    """Show what changed between two runs by more than the noise of their repeated measurements, regressions first.

    Exit code: 0 no regression, 1 regression, 2 a file that holds no run, 3 no regression, but no figure was compared or
    the new run's verdict is UNKNOWN.
    """
    from ddpdiag.compare import command

    raise typer.Exit(command.run(old, new, json=outputs.json, markdown=outputs.markdown, color=outputs.color))


@_command(
    "ddpdiag judge run.jsonl", "ddpdiag judge rank-*.jsonl --json -", "ddpdiag judge report.json --html page.html"
)
def judge(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="A recording, the parts of it that ranks wrote, or a JSON report."),
    ],
    outputs: Annotated[JudgeOutputs, *_FILES, *_HOSTS, "write_workaround", "prometheus", *_LIMITS, *_DISPLAY],
) -> None:
    """Judge a recording again, on any machine, without torch and without a GPU.

    A JSON report has no measurements: it is shown again, with the verdict and the findings that it has.
    """
    from ddpdiag.cli import judge

    raise typer.Exit(judge.run(files, outputs))


@_command(
    "ddpdiag simulate --hosts 16384 --fault slow-host:164 --seed 7",
    "ddpdiag simulate --hosts 8 --fault slow-link --record run.jsonl",
)
def simulate(args: SimulateArgs, outputs: Annotated[Outputs, *_FILES, *_HOSTS, *_LIMITS, *_DISPLAY]) -> None:
    """Show the report of a failure among many hosts: a simulated fleet, planned and judged like a real one."""
    from ddpdiag.simulate import command

    raise typer.Exit(command.run(args, outputs))


@_command(
    "ddpdiag lint train.py",
    "ddpdiag lint src/ --details",
    "git show HEAD:train.py | ddpdiag lint -",
    "ddpdiag lint src/ --ignore LNT010 --json lint.json",
)
def lint(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...", help="Training scripts; of a directory, every *.py below it; '-': standard input."
        ),
    ],
    args: Annotated[LintArgs, "select", "ignore", "json", "github", "details", "quiet", "color"],
) -> None:
    """Find mistakes with DistributedDataParallel in the source of a training script, without running it.

    A comment `# ddpdiag: ignore[LNT010]` silences a rule on its line.

    Exit code: 0 nothing found, 1 errors or warnings, 2 a file that is not Python.
    """
    from ddpdiag.lint import command

    raise typer.Exit(command.run(files, args))


@_command(
    "ddpdiag explain COL001",
    "ddpdiag explain TRN001.diverged",
    'ddpdiag explain "NCCL WARN Duplicate GPU detected"',
    "ddpdiag explain slurm-123.out",
    "ddpdiag explain rank*.log   (the logs of one job)",
    "ddpdiag explain logs/   (torchrun --log-dir logs --redirects 3)",
    "kubectl logs JOB | ddpdiag explain -",
)
def explain(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="CODE|NAME|TEXT|FILE|DIR|-",
            help="The code of a check, finding or lint rule, the name of a check, an error text or words of it, the "
            "logs of a job (of a folder its text files; '-': standard input), the flight recorder's dumps of a job "
            "that hung, or a report or recording of ddpdiag.",
            autocompletion=completion(codes_and_names),
        ),
    ],
    args: Annotated[ExplainArgs, *_DISPLAY],
) -> None:
    """Print a manual page, explain an error text, or find the first cause in the logs of a job.

    Exit code: 0 explained, 2 no such code or file, 3 no known error in the text or the logs.
    """
    from ddpdiag.explain import command

    raise typer.Exit(command.run(words, args))


@_command(
    "ddpdiag ticket nccl report.json",
    "ddpdiag ticket nccl run.jsonl --log 'ncclDebug.*' --write-bundle ticket.tar.gz",
    "ddpdiag ticket pytorch report.json > issue.md",
    "ddpdiag ticket nccl   (without a report: from this host)",
)
def ticket(
    kind: Annotated[Kind, typer.Argument(metavar="nccl|pytorch", help="The project: NVIDIA/nccl or pytorch/pytorch.")],
    args: TicketArgs,
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE...", help="Reports (--json) and recordings (--record) of a job."),
    ] = None,
) -> None:
    """Fill in the issue form of NCCL or PyTorch from reports of a job, and print it as Markdown to paste.

    On a host of the job it also runs the commands that the form asks for, such as `nvidia-smi topo -m`. It names what
    is not available, with the command that gives it. It sends nothing.

    Exit code: 0 the form is printed, 2 a file that holds no run, or files of different jobs.
    """
    from ddpdiag.ticket import command

    raise typer.Exit(command.run(kind, files or (), args))


@_command(
    "ddpdiag history reports/",
    "ddpdiag history '/shared/reports/**/*.json' --index history.db --days 90",
    "ddpdiag history reports/ --host n17",
    "ddpdiag history reports/ -q --write-failing-hosts hosts.txt --html history.html",
)
def history(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="DIR|GLOB...",
            help="JSON reports (--json) and recordings (--record) of many runs; of a directory, every *.json and "
            "*.jsonl below it.",
        ),
    ],
    args: HistoryArgs,
) -> None:
    """Show which hosts, GPUs and pairs of hosts fail again and again, which hosts get slower, and which findings are
    new, from the reports of many runs.

    Exit code: 0 nothing recurs, 1 something does, 2 no report, 3 too few runs to judge any host.
    """
    from ddpdiag.history import command

    raise typer.Exit(command.run(words, args))


@_command("ddpdiag manual")
def manual() -> None:
    """Print all manual pages as one Markdown document: checks, then the rules of `ddpdiag lint`."""
    from ddpdiag.cli.manual import as_markdown, pages

    show(as_markdown(pages(), __version__), sys.stdout)


@_command("ddpdiag checks")
def checks() -> None:
    """List all checks, and the rules of `ddpdiag lint`."""
    from ddpdiag.cli.manual import checks_table, pages

    show(checks_table(pages()), sys.stdout)
