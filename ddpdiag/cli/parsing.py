"""Turn dataclasses of options into parameters of Typer's commands, and a command line into these dataclasses."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from functools import wraps
from inspect import Parameter, Signature, get_annotations, signature
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from ddpdiag.cli.edge import complain
from ddpdiag.cli.options import option_name, variable_of
from ddpdiag.errors import UsageError, did_you_mean

R = TypeVar("R")

# The command that `ddpdiag watch` starts may have empty arguments.
_MAY_BE_EMPTY = "command"
# Options of torchrun, accelerate, deepspeed, mpirun and srun, with the option of ddpdiag of the same meaning.
_RANKS_OF_A_HOST = "--nproc-per-node"
_EQUIVALENTS = {
    **dict.fromkeys(("-n", "--np", "--nproc", "--nprocs", "--num-procs", "--num-processes"), _RANKS_OF_A_HOST),
    **dict.fromkeys(("--ntasks", "--ntasks-per-node"), _RANKS_OF_A_HOST),
    **dict.fromkeys(("--gpus", "--ngpus", "--num-gpus", "--gpus-per-node"), _RANKS_OF_A_HOST),
    **dict.fromkeys(("--timeout", "--time"), "--budget"),
}
# Flags of nccl-tests that `allreduce-bench` does not have, with a text on its own behaviour.
_UNSUPPORTED_FLAGS = {
    **dict.fromkeys(("-g", "-t", "--ngpus", "--nthreads"), f"one process drives one GPU; use {_RANKS_OF_A_HOST}"),
    **dict.fromkeys(("-z", "--blocking"), "calls are pipelined on GPUs and waited for on CPUs"),
    **dict.fromkeys(("-a", "--average"), "a row shows the slowest rank"),
    **dict.fromkeys(("-m", "--agg-iters"), "calls are issued one by one"),
    **dict.fromkeys(("-N", "--run-cycles"), "each size is measured once; use -n for more calls"),
    **dict.fromkeys(("-I", "--per-iter-timing"), "the recording has shortest, median and mean of the calls"),
    **dict.fromkeys(
        ("-p", "-y", "-G", "-C", "-S", "-R", "-x", "-D", "-V", "-M", "-u"), "use nccl-tests to measure with it"
    ),
    "-o": "reductions are sums",
    "-r": "rank 0 is the root",
    "-i": "sizes grow by a factor; use -f",
}


def declared_name(name: str | Enum) -> str:
    """The declared name of an option or command, such as --local-rank for --local_rank, which launchers write."""
    # click before 8.2 also passes defaults.
    name = (str(name.value) if isinstance(name, Enum) else name).replace("_", "-")
    return "allreduce-bench" if name == "bench" else name


def show_all(context: typer.Context, wanted: bool) -> None:
    """Print the help of a command with its advanced options and exit. Does nothing unless `wanted`."""
    if wanted:
        for parameter in context.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        typer.echo(context.get_help())
        raise typer.Exit


_HELP_ALL = typer.Option("--help-all", help="Show all options and exit.", callback=show_all, is_eager=True)


def command(body: Callable[..., R]) -> Callable[..., R]:
    """Return `body` with a signature for Typer: each parameter that is a dataclass becomes one option per field.

    Of `Annotated[Outputs, "json", "record"]` only these fields become options, in this order. An option that is not
    given after the command has the value that was given before it (from the context's object), or its default. The
    returned function raises UsageError for an empty text.
    """
    hints = get_type_hints(body, include_extras=True)
    groups = {name: _Group(hint) for name, hint in hints.items() if is_dataclass(_without_annotation(hint))}
    defaults = {name: each.default for name, each in signature(body).parameters.items()}
    arguments = {name: hints[name] for name in defaults if name not in groups}
    has_advanced = any(each.metadata["typer"]["hidden"] for group in groups.values() for each in group.fields)
    parameters = [
        *([_keyword_only("help_all", Annotated[bool, _HELP_ALL], False)] if has_advanced else ()),
        _keyword_only("context", typer.Context),
        *(_keyword_only(name, hint, defaults[name]) for name, hint in arguments.items() if name != "context"),
        *(_parameter(each) for group in groups.values() for each in group.fields),
    ]

    @wraps(body)
    def call_body(context: typer.Context, help_all: bool = False, **values: object) -> R:
        for name, value in values.items():
            if name != _MAY_BE_EMPTY and "" in (value if isinstance(value, list) else (value,)):
                # Users know an argument by its metavar, such as "FILE".
                metavar = get_args(arguments[name])[1].metavar.removesuffix("...") if name in arguments else None
                subject = metavar or option_name(name)
                raise UsageError(f"{subject}: the value is empty; is a variable not set?")
        for sentence in () if values.get("quiet") else unknown_variables(context.find_root().command, os.environ):
            complain(sentence)
        values |= {name: group.make(values, context.obj or {}) for name, group in groups.items()}
        if "context" in arguments:
            values["context"] = context
        return body(**values)

    call_body.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return call_body


# Variables that are no options: a secret, folders for containers, those of ddpdiag's own processes, recipes and tests.
_OTHER_VARIABLES = re.compile(
    r"DDPDIAG_(TOKEN|PROCFS|SYSFS|KMSG|LAUNCHED|INTERPRETER|RUN_NONCE|NOT_FORKED|IMPORT_.*"
    r"|HOST|SKIP|(TEST|REQUIRE)_.*|CUDA_TORCH|GPU_SECONDS)"
)
# The rank of a process, as launchers set it. Only rank 0 prints what is equal on all ranks.
_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


def unknown_variables(program: Any, environment: Mapping[str, str]) -> Iterator[str]:  # noqa: ANN401 - a click group
    """Sentences on variables DDPDIAG_* that set no option of any command; none if this is not rank 0."""
    if any(environment.get(name, "0") != "0" for name in _RANK_VARIABLES):
        return
    commands = getattr(program, "commands", {}).values()
    known = {str(parameter.envvar) for each in commands for parameter in each.params if parameter.envvar}
    for name in sorted(environment):
        if name.startswith("DDPDIAG_") and name not in known and not _OTHER_VARIABLES.fullmatch(name):
            yield f"{name}: no option has this variable, so it has no effect{did_you_mean(name, known)}"


class _Group:
    """The type of a dataclass parameter, and those of its fields that are options of the command."""

    def __init__(self, hint: object) -> None:
        self._type = _without_annotation(hint)
        known = {each.name: each for each in fields(self._type)}
        # Fields of base classes are last, so that options on the display follow those on the content of a report.
        names = dict.fromkeys(name for kind in self._type.__mro__ for name in get_annotations(kind))
        self.fields = [known[name] for name in get_args(hint)[1:] or names]

    def make(self, values: dict[str, object], given_before: Mapping[str, object]) -> object:
        """Make the dataclass from its fields in `values`, and remove these fields from `values`."""
        return self._type(**{each.name: _value(each, values.pop(each.name), given_before) for each in self.fields})


def _without_annotation(hint: object) -> Any:  # noqa: ANN401 - a dataclass, or the type of an argument
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _keyword_only(name: str, hint: object, default: object = Parameter.empty) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _parameter(declared: "Field[Any]") -> Parameter:
    typer_option = typer.Option(
        ...,
        option_name(declared.name),
        *declared.metadata["names"],
        **declared.metadata["typer"],
        envvar=variable_of(declared),
        show_envvar=False,
    )
    if get_origin(declared.type) is tuple:
        return _keyword_only(declared.name, Annotated[list[str] | None, typer_option], None)
    kind: Any = declared.type if declared.metadata["parse"] is None else str | None
    return _keyword_only(declared.name, Annotated[kind, typer_option], declared.default)


def _value(declared: "Field[Any]", value: object, given_before: Mapping[str, object]) -> object:
    """The parsed value of an option. An option that was not given has the value in `given_before`, else its default."""
    if value is None or value == []:
        return given_before.get(declared.name, declared.default)
    typed = tuple(value) if isinstance(value, list) else value
    if (parse := declared.metadata["parse"]) is None:
        return typed
    try:
        return parse(typed)
    except UsageError as error:
        name = next(iter(declared.metadata["names"]), option_name(declared.name))
        raise UsageError(f"{name} {','.join(typed) if isinstance(typed, tuple) else typed}: {error}") from None


def examples(*lines: str) -> str:
    """The epilog of a help text, with one example on each line."""
    return "\n\n".join(["Examples:", *lines])


def usage_sentence(error: Exception, program: str) -> str:
    """Describe click's exception for a mistake on the command line in one sentence.

    `program` is the command, for exceptions that do not name it.
    """
    message = " ".join(error.format_message().rstrip(".").split())  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    if context is not None and (command := re.match(r"No such command '(.*?)'", message)) is not None:
        message = f"no such command: {command[1]}{did_you_mean(command[1], context.command.list_commands(context))}"
    unknown = getattr(error, "option_name", None)
    if unknown in _UNSUPPORTED_FLAGS and context and any("--minbytes" in p.opts for p in context.command.params):
        return f"{unknown}: ddpdiag does not have this flag of nccl-tests: {_UNSUPPORTED_FLAGS[unknown]}"
    if unknown and context and hasattr(error, "possibilities"):  # click sorts the possibilities, the nearest first
        known_options = {name for parameter in context.command.params for name in parameter.opts}
        similar = [name for name in (_EQUIVALENTS.get(unknown), *(error.possibilities or ())) if name in known_options]
        message = f"no such option: {unknown}" + (f"; did you mean {similar[0]}?" if similar else "")
    path = context.command_path if context is not None else program
    message = re.sub(r"^Invalid value for '(-[\w-]+)'", r"\1", message)
    link = " See" if message.endswith("?") else "; see"
    return f"{message[:1].lower()}{message[1:]}{link} `{path} --help`"
