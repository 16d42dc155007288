"""Commands refuse empty names: `--json "$FILE"` with a FILE that is not set is told before anything is read."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, get_type_hints

from typer.models import ArgumentInfo

from ddpdiag.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

# What is watched may have empty arguments of its own.
_FREE = "command"


def with_names(callback: Callable[P, R]) -> Callable[P, R]:
    """The same command; UsageError where a text that was given is empty."""

    @wraps(callback)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in kwargs.items():
            if name != _FREE and "" in (value if isinstance(value, list | tuple) else (value,)):
                raise UsageError(f"{_typed(callback, name)}: it is empty; is a variable not set?")
        return callback(*args, **kwargs)

    return called


def _typed(callback: Callable[P, R], name: str) -> str:
    """A parameter as users know it: "--json", or "FILE" of an argument."""
    about = get_type_hints(callback, include_extras=True)[name].__metadata__[0]
    if isinstance(about, ArgumentInfo):
        return (about.metavar or name.upper()).removesuffix("...")
    # typer keeps the first of the names that `Annotated` gives as a default.
    words = (word for word in (about.default, *(about.param_decls or ())) if isinstance(word, str))
    return next((word for word in words if word.startswith("--")), f"--{name.replace('_', '-')}")
