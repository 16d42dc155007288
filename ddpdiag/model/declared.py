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
    """A field that is an option under its own name (`set_`: --set), and under `more_names`.

    A tuple may be given several times; --help does not show its default. An `advanced` option is shown by --help-all
    only. With `variable` it is also read from DDPDIAG_<OPTION>; the command line wins. A shell completes its values
    from `words`. `parse` makes the field's value from the text, or from the tuple of texts; its UsageError ("expected
    ...") is shown behind the option and the text.
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
    """Complete a value to one of the words; of several with commas between them, the last one."""

    def completed(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{word}" for word in words() if word.startswith(last)]

    return completed
