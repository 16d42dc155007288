"""The declaration of an option as a field of a dataclass, which the command line fills in."""

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
    """Declare a dataclass field as an option, named after the field (`set_`: --set). `more_names` are other names.

    An option whose type is a tuple may be typed several times, and --help does not show its default. `panel` is the
    heading in --help, `metavar` the word for the value. Only --help-all shows an `advanced` option. With `variable` the
    variable DDPDIAG_<OPTION> sets the option if the command line does not. A shell completes values from `words`.
    `parse` makes the field's value from the typed text (for a tuple, from all texts). If it raises UsageError
    ("expected ..."), the message follows the option and the text. `metadata` is added to the field's metadata.
    """
    typer_settings = {
        "help": help,
        "metavar": metavar,
        "rich_help_panel": panel,
        "min": min,
        "max": max,
        "hidden": advanced,
        "show_default": show_default,
        "autocompletion": None if words is None else completion(words),
    }
    common = {"names": more_names, "typer": typer_settings, "variable": variable, "parse": parse}
    return field(default=default, metadata={**common, **metadata})


def completion(words: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a function that completes a typed text, or its part after the last comma, to the words."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{word}" for word in words() if word.startswith(last)]

    return complete
