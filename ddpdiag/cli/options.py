"""Options that several commands share, and those of `check` and `host`; `ddpdiag.cli.outputs` has those of reports."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from ddpdiag.errors import UsageError

R = TypeVar("R")
T = TypeVar("T")

# What is watched may have empty arguments of its own.
_FREE = "command"
# Options and commands by the names that they had, or have elsewhere; these work and are not in --help.
FORMER_NAMES = {
    "env-file": "write-workaround",
    "exclude-file": "write-failing-hosts",
    "good-hosts": "write-healthy-hosts",
    "board-wait": "join-timeout",
    "board-port": "control-port",
    "bench": "allreduce-bench",
}


def normalized(name: str) -> str:
    """The name of an option or command as it is declared: people and launchers also write --local_rank."""
    name = name.replace("_", "-")
    return FORMER_NAMES.get(name, name)


def option(
    default: T,
    help: str,
    *more_names: str,
    metavar: str | None = None,
    panel: str | None = None,
    min: float | None = None,
    max: float | None = None,
    advanced: bool = False,
    variable: bool = True,
    **metadata: object,
) -> T:
    """A field that is an option under its own name (`set_`: --set), and under `more_names`.

    A tuple may be given several times; --help does not show its default. An `advanced` option is shown by --help-all
    only. With `variable` it is also read from DDPDIAG_<OPTION>; the command line wins.
    """
    shown = {"help": help, "metavar": metavar, "rich_help_panel": panel, "min": min, "max": max, "hidden": advanced}
    return field(default=default, metadata={"names": more_names, "shown": shown, "variable": variable, **metadata})


def spelled(name: str) -> str:
    """The option of the field `name`."""
    return "--" + name.rstrip("_").replace("_", "-")


def variable_of(declared: "Field[Any]") -> str | None:
    """The variable of the environment that an option is read from, such as DDPDIAG_BUDGET; None if there is none."""
    return f"DDPDIAG_{declared.name.rstrip('_').upper()}" if declared.metadata["variable"] else None


def show_all(context: typer.Context, wanted: bool) -> None:
    """Print the help of a command with its advanced options, and exit."""
    if wanted:
        for parameter in context.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        typer.echo(context.get_help())
        raise typer.Exit


_HELP_ALL = typer.Option("--help-all", help="Show all options and exit.", callback=show_all, is_eager=True)


def typed(context: typer.Context) -> list[str]:
    """The options on the command line, by the names of their fields."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def command(body: Callable[..., R]) -> Callable[..., R]:
    """`body` as Typer wants it: a parameter that is a dataclass gives way to an option for each of its fields.

    Of `Annotated[Outputs, "json", "record"]` these fields alone are options, in this order. What stands before the
    command (the context's object) is taken where an option is not given. UsageError for a text that is empty.
    """
    hints = get_type_hints(body, include_extras=True)
    groups = {name: _Group(hint) for name, hint in hints.items() if is_dataclass(_plain(hint))}
    arguments = {name: hints[name] for name in signature(body).parameters if name not in groups}
    has_advanced = any(each.metadata["shown"]["hidden"] for group in groups.values() for each in group.fields)
    parameters = [
        *([_keyword("help_all", Annotated[bool, _HELP_ALL], False)] if has_advanced else ()),
        *(_keyword(name, hint) for name, hint in ({"context": typer.Context} | arguments).items()),
        *(_parameter(each) for group in groups.values() for each in group.fields),
    ]

    @wraps(body)
    def called(context: typer.Context, help_all: bool = False, **values: object) -> R:
        for name, value in values.items():
            if name != _FREE and "" in (value if isinstance(value, list) else (value,)):
                # An argument goes by the name under which users know it: "FILE".
                metavar = get_args(arguments[name])[1].metavar.removesuffix("...") if name in arguments else None
                subject = metavar or spelled(name)
                raise UsageError(f"{subject}: the value is empty; is a variable not set?")
        values |= {name: group.made(values, context.obj or {}) for name, group in groups.items()}
        if "context" in arguments:
            values["context"] = context
        return body(**values)

    called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return called


class _Group:
    """A dataclass with the fields of it that are options."""

    def __init__(self, hint: object) -> None:
        self._kind = _plain(hint)
        known = {each.name: each for each in fields(self._kind)}
        self.fields = [known[name] for name in get_args(hint)[1:] or known]

    def made(self, values: dict[str, object], before: Mapping[str, object]) -> object:
        """The dataclass, from its own `values`, which are taken away."""
        own = {each.name: values.pop(each.name) for each in self.fields}
        for each in self.fields:
            texts = own[each.name] if "formats" in each.metadata else None
            for text in texts if isinstance(texts, list) else ():
                name, file = _named_output(text, {k: v for k, v in each.metadata["formats"].items() if v in own})
                if own[name] is not None:
                    raise UsageError(f"--output {text}: {spelled(name)} {own[name]} is given as well")
                own[name] = file
        return self._kind(**{each.name: _value(each, own[each.name], before) for each in self.fields})


def _plain(hint: object) -> Any:  # noqa: ANN401 - a dataclass, or the type of an argument
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _named_output(text: str, formats: Mapping[str, str]) -> tuple[str, str]:
    """The field and the file of FORMAT=FILE; UsageError for anything else."""
    name, equals, file = text.partition("=")
    if name not in formats or not equals or not file:
        raise UsageError(f"--output {text}: expected FORMAT=FILE, with {', '.join(formats)} as FORMAT")
    return formats[name], file


def _keyword(name: str, hint: object, default: object = Parameter.empty) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _parameter(declared: "Field[Any]") -> Parameter:
    shown = typer.Option(
        ...,
        spelled(declared.name),
        *declared.metadata["names"],
        **declared.metadata["shown"],
        envvar=variable_of(declared),
        show_envvar=False,
    )
    if get_origin(declared.type) is tuple:
        return _keyword(declared.name, Annotated[list[str] | None, shown], None)
    return _keyword(declared.name, Annotated[declared.type, shown], declared.default)


def _value(declared: "Field[Any]", value: object, before: Mapping[str, object]) -> object:
    """What was given, made a tuple where it may be repeated."""
    if value is None or value == []:
        return before.get(declared.name, declared.default)
    return tuple(value) if isinstance(value, list) else value


LAUNCH, WHAT, VERDICT, FILES, OUT = "Launch", "What is checked", "Verdict", "Files to write", "Display"


class Color(Enum):
    """Whether the report has colours; `AUTO`: on a terminal, unless NO_COLOR or TERM=dumb says otherwise."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


def examples(*lines: str) -> str:
    """An epilog of one example a line."""
    return "\n\n".join(["Examples:", *lines])


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Who this process is, or how many ranks it starts, and how the ranks find each other."""

    nproc_per_node: str | None = option(
        None,
        "Ranks to start on this host (default: one per GPU, or 2).",
        metavar="N|auto|gpu|cpu",
        panel=LAUNCH,
    )
    nnodes: int | None = option(None, "Number of hosts, when started by hand on each.", metavar="N", panel=LAUNCH)
    node_rank: int | None = option(None, "This host's number, from 0.", metavar="I", panel=LAUNCH, variable=False)
    rank: int | None = option(
        None, "This process's rank, when started by hand.", metavar="R", panel=LAUNCH, variable=False
    )
    world_size: int | None = option(None, "Total number of ranks.", metavar="N", panel=LAUNCH)
    local_rank: int | None = option(
        None, "This process's rank on its host.", metavar="R", panel=LAUNCH, advanced=True, variable=False
    )
    master_addr: str | None = option(None, "Host name or address of rank 0.", metavar="HOST", panel=LAUNCH)
    master_port: int | None = option(None, "Port that the job would use.", metavar="PORT", panel=LAUNCH)
    run_id: str | None = option(
        None, "Name of this run, the same on all ranks.", metavar="NAME", panel=LAUNCH, advanced=True
    )
    join_timeout: float = option(
        15.0, "How long ranks wait for each other to join.", metavar="SECONDS", panel=LAUNCH, min=0.1, advanced=True
    )
    control_port: int | None = option(
        None, "Port of the control channel.", metavar="PORT", panel=LAUNCH, min=1, max=65535, advanced=True
    )
    require_auth: bool = option(
        False,
        "Do not run unless the ranks share a secret (see docs/security.md).",
        " /--no-require-auth",
        panel=LAUNCH,
        advanced=True,
    )
    port_range: str | None = option(
        None, "Ports that the firewall allows.", metavar="LOW-HIGH", panel=LAUNCH, advanced=True
    )


_IGNORE = "Skip these codes or prefixes (a,b)."
_SET = "A threshold of a check (repeatable)."


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What `ddpdiag check` tests, as it was typed."""

    stage: tuple[str, ...] = option((), "Only these stages (a,b).", metavar="NAME", panel=WHAT)
    skip_stage: tuple[str, ...] = option((), "Skip these stages (a,b).", metavar="NAME", panel=WHAT)
    select: tuple[str, ...] = option((), "Only these codes or prefixes (a,b).", metavar="CODE", panel=WHAT)
    ignore: tuple[str, ...] = option((), _IGNORE, metavar="CODE", panel=WHAT)
    backend: str = option("auto", "nccl, gloo or another backend of torch.", metavar="NAME", panel=WHAT)
    expect_gpus: int | None = option(None, "Number of GPUs expected on every host.", metavar="N", panel=VERDICT, min=0)
    depth: str = option("quick", "How much is measured.", metavar="quick|standard|deep", panel=WHAT)
    budget: float | None = option(
        None,
        "End within this time (default: 60; 120 on several hosts; more with GPUs).",
        metavar="SECONDS",
        panel=WHAT,
        min=5.0,  # 3 s are kept for judgement and shutdown; below this nothing could be measured
    )
    data_dir: str | None = option(
        None,
        "MNIST files of your own (IDX, plain or .gz) instead of those in ddpdiag.",
        metavar="DIR",
        panel=WHAT,
        advanced=True,
    )
    shared_dir: str | None = option(
        None,
        "A directory that all hosts share: tests file://, and lets the run survive the loss of rank 0. "
        "The lowest living rank then reports, and writes the files on its own host.",
        metavar="DIR",
        panel=WHAT,
        advanced=True,
    )
    topology: str | None = option(
        None,
        "The leaf switch of each host: one HOST LEAF per line, or Slurm's topology.conf (default: from Slurm). "
        "Read on rank 0's host.",
        metavar="FILE",
        panel=WHAT,
        advanced=True,
    )
    baseline: str | None = option(
        None,
        "Compare with the recording or JSON report of an earlier run (CMP001). Read on rank 0's host.",
        metavar="FILE",
        panel=VERDICT,
    )
    set_: tuple[str, ...] = option((), _SET, metavar="CODE.NAME=VALUE", panel=VERDICT, advanced=True)


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """What `ddpdiag host` looks at, as it was typed."""

    torch: bool = option(
        False, "Also import torch, compute on each GPU (or the CPU), and open a process group of one.", panel=WHAT
    )
    expect_gpus: int | None = option(None, "Number of GPUs expected on this host.", metavar="N", panel=WHAT, min=0)
    ignore: tuple[str, ...] = option((), _IGNORE, metavar="CODE", panel=WHAT)
    budget: float = option(
        10.0,
        "End within this time, even if a driver hangs.",
        metavar="SECONDS",
        panel=WHAT,
        min=8.0,  # 3 s are kept for ending what hangs and for the report, and a third for the kernel's log
        max=3600.0,
    )
    set_: tuple[str, ...] = option((), _SET, metavar="CODE.NAME=VALUE", panel=WHAT)


def split(values: Sequence[str]) -> tuple[str, ...]:
    """Options that may be repeated take several values at once, too: `--stage gpu,collective`."""
    return tuple(part.strip() for value in values for part in value.split(","))


def thresholds(values: Sequence[str]) -> dict[str, str]:
    """`--set CODE.name=number`, by CODE.name; UsageError for anything else."""
    settings = {}
    for value in values:
        name, equals, number = value.partition("=")
        code, dot, _word = name.partition(".")
        if not equals or not dot or not _is_threshold(number):
            raise UsageError(f"--set {value}: expected CODE.name=number, 0 or more, such as COL001.deadline_seconds=60")
        settings[f"{code.upper()}{name[len(code) :]}"] = number
    return settings


def _is_threshold(text: str) -> bool:
    """A finite number that is not negative: with NaN no limit is ever passed, and no deadline."""
    try:
        return math.isfinite(number := float(text)) and number >= 0
    except ValueError:
        return False
