"""Commands from declared options: a field of a dataclass, with its help, is an option of each command that takes it."""

from collections.abc import Callable, Mapping
from dataclasses import Field, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from ddpdiag.errors import UsageError

R = TypeVar("R")
T = TypeVar("T")

# What is watched may have empty arguments of its own.
_FREE = "command"


def option(
    default: T,
    help: str,
    *more_names: str,
    metavar: str | None = None,
    panel: str | None = None,
    min: float | None = None,
    max: float | None = None,
    **metadata: object,
) -> T:
    """A field that is an option under its own name (`set_`: --set), and under `more_names`.

    A tuple may be given several times; --help does not show its default.
    """
    shown = {"help": help, "metavar": metavar, "rich_help_panel": panel, "min": min, "max": max}
    return field(default=default, metadata={"names": more_names, "shown": shown, **metadata})


def spelled(name: str) -> str:
    """The option of the field `name`."""
    return "--" + name.rstrip("_").replace("_", "-")


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
    parameters = [
        *(_keyword(name, hint) for name, hint in ({"context": typer.Context} | arguments).items()),
        *(_parameter(each) for group in groups.values() for each in group.fields),
    ]

    @wraps(body)
    def called(context: typer.Context, **values: object) -> R:
        for name, value in values.items():
            if name != _FREE and "" in (value if isinstance(value, list) else (value,)):
                subject = _metavar(arguments[name]) if name in arguments else spelled(name)
                raise UsageError(f"{subject}: it is empty; is a variable not set?")
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
        return self._kind(**{each.name: _value(each, values.pop(each.name), before) for each in self.fields})


def _plain(hint: object) -> Any:  # noqa: ANN401 - a dataclass, or the type of an argument
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _metavar(hint: object) -> str:
    """An argument as users know it: "FILE"."""
    metavar: str = get_args(hint)[1].metavar
    return metavar.removesuffix("...")


def _keyword(name: str, hint: object, default: object = Parameter.empty) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _parameter(declared: "Field[Any]") -> Parameter:
    shown = typer.Option(..., spelled(declared.name), *declared.metadata["names"], **declared.metadata["shown"])
    if get_origin(declared.type) is tuple:
        return _keyword(declared.name, Annotated[list[str] | None, shown], None)
    return _keyword(declared.name, Annotated[declared.type, shown], declared.default)


def _value(declared: "Field[Any]", value: object, before: Mapping[str, object]) -> object:
    """What was given, made a tuple where it may be repeated."""
    if value is None or value == []:
        return before.get(declared.name, declared.default)
    return tuple(value) if isinstance(value, list) else value
