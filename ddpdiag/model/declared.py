"""The declaration of an option: a dataclass field that is read from the command line and recorded as it is."""

from collections.abc import Callable, Iterable
from dataclasses import field
from typing import Any, TypeVar

T = TypeVar("T")


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
    words: Callable[[], Iterable[str]] | None = None,
    parse: Callable[[Any], T] | None = None,
    show_default: bool = True,
    **metadata: object,
) -> T:
    """Declare a dataclass field that is an option with the name of the field (`set_`: --set) and with `more_names`.

    An option whose value is a tuple may be given several times; --help does not show its default. Only --help-all shows
    an `advanced` option. With `variable` the option is also read from DDPDIAG_<OPTION>, unless the command line has it.
    A shell completes values from `words`. `parse` makes the field's value from the text, or the tuple of texts. Its
    UsageError ("expected ...") is shown after the option and the text.
    """
    shown = {
        "help": help,
        "metavar": metavar,
        "rich_help_panel": panel,
        "min": min,
        "max": max,
        "hidden": advanced,
        "show_default": show_default,
        "autocompletion": None if words is None else completion(words),
    }
    known = {"names": more_names, "shown": shown, "variable": variable, "parse": parse}
    return field(default=default, metadata={**known, **metadata})


def completion(words: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a function that completes a value, or the last part of a comma-separated value, to one of the words."""

    def completed(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{word}" for word in words() if word.startswith(last)]

    return completed
