"""Turn dataclasses of options into parameters of Typer's commands, and the values given back into dataclasses."""

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, get_annotations, signature
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from ddpdiag.cli.options import spelled, variable_of
from ddpdiag.errors import UsageError, nearest

R = TypeVar("R")

# The command that `ddpdiag watch` starts may have empty arguments.
_MAY_BE_EMPTY = "command"
# Names that other programs (torchrun, accelerate, deepspeed, mpirun, srun) have for our options.
_RANKS_OF_A_HOST = "--nproc-per-node"
_ELSEWHERE = {
    **dict.fromkeys(("-n", "--np", "--nproc", "--nprocs", "--num-procs", "--num-processes"), _RANKS_OF_A_HOST),
    **dict.fromkeys(("--ntasks", "--ntasks-per-node"), _RANKS_OF_A_HOST),
    **dict.fromkeys(("--gpus", "--ngpus", "--num-gpus", "--gpus-per-node"), _RANKS_OF_A_HOST),
    **dict.fromkeys(("--timeout", "--time"), "--budget"),
}
# Flags of nccl-tests that `allreduce-bench` does not have, with what it does instead.
_NOT_OF_NCCL_TESTS = {
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


def normalized(name: str) -> str:
    """The name of an option or command as it is declared: people and launchers also write --local_rank."""
    name = name.replace("_", "-")
    return "allreduce-bench" if name == "bench" else name


def show_all(context: typer.Context, wanted: bool) -> None:
    """Print the help of a command with its advanced options, and exit."""
    if wanted:
        for parameter in context.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        typer.echo(context.get_help())
        raise typer.Exit


_HELP_ALL = typer.Option("--help-all", help="Show all options and exit.", callback=show_all, is_eager=True)


def command(body: Callable[..., R]) -> Callable[..., R]:
    """`body` as Typer needs it: each parameter that is a dataclass is replaced by an option for each of its fields.

    Of `Annotated[Outputs, "json", "record"]` only these fields become options, in this order. If an option is not
    given, one before the command counts (the context's object). The result raises UsageError for a text that is empty.
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
            if name != _MAY_BE_EMPTY and "" in (value if isinstance(value, list) else (value,)):
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
        # Fields of base classes come last: options on how to show a report follow those on its content.
        own_first = dict.fromkeys(name for kind in self._kind.__mro__ for name in get_annotations(kind))
        self.fields = [known[name] for name in get_args(hint)[1:] or own_first]

    def made(self, values: dict[str, object], before: Mapping[str, object]) -> object:
        """Make the dataclass from its fields in `values`, and remove them from `values`."""
        own = {each.name: values.pop(each.name) for each in self.fields}
        return self._kind(**{each.name: _value(each, own[each.name], before) for each in self.fields})


def _plain(hint: object) -> Any:  # noqa: ANN401 - a dataclass, or the type of an argument
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


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
    kind: Any = declared.type if declared.metadata["parse"] is None else str | None
    return _keyword(declared.name, Annotated[kind, shown], declared.default)


def _value(declared: "Field[Any]", value: object, before: Mapping[str, object]) -> object:
    """The value of an option; a tuple if the option may be repeated."""
    if value is None or value == []:
        return before.get(declared.name, declared.default)
    given = tuple(value) if isinstance(value, list) else value
    if (parse := declared.metadata["parse"]) is None:
        return given
    try:
        return parse(given)
    except UsageError as error:
        name = next(iter(declared.metadata["names"]), spelled(declared.name))
        raise UsageError(f"{name} {','.join(given) if isinstance(given, tuple) else given}: {error}") from None


def examples(*lines: str) -> str:
    """The epilog of a help text: one example on each line."""
    return "\n\n".join(["Examples:", *lines])


def sentence_of(error: Exception, program: str) -> str:
    """A mistake on the command line as one sentence; `error` is one of click's."""
    message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    if context is not None and (command := re.match(r"No such command '(.*?)'", message)) is not None:
        message = f"no such command: {command[1]}{nearest(command[1], context.command.list_commands(context))}"
    unknown = getattr(error, "option_name", None)
    if unknown in _NOT_OF_NCCL_TESTS and context and any("--minbytes" in p.opts for p in context.command.params):
        return f"{unknown}: ddpdiag does not have this flag of nccl-tests: {_NOT_OF_NCCL_TESTS[unknown]}"
    if unknown and context and hasattr(error, "possibilities"):  # click sorts these, the nearest first
        known = {name for parameter in context.command.params for name in parameter.opts}
        meant = [name for name in (_ELSEWHERE.get(unknown), *(error.possibilities or ())) if name in known]
        message = f"no such option: {unknown}" + (f"; did you mean {meant[0]}?" if meant else "")
    path = context.command_path if context is not None else program
    message = re.sub(r"^Invalid value for '(-[\w-]+)'", r"\1", message)
    see = " See" if message.endswith("?") else "; see"
    return f"{message[:1].lower()}{message[1:]}{see} `{path} --help`"
