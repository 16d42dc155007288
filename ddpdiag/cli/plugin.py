"""The edge as a Nagios plug-in has it (--nagios): whatever is no verdict is UNKNOWN, and says so in one line.

A plug-in's 2 is CRITICAL, so neither a mistyped option nor a full disk may end with it.
"""

import sys
from collections.abc import Callable

from ddpdiag.cli import edge
from ddpdiag.errors import ExitCode, Explained

OPTION = "--nagios"


def guarded(call: Callable[[], int | None], *, nagios: bool = False) -> int:
    """As `edge.guarded`; with `nagios` the code that `call` returns is a plug-in's, and any failure is UNKNOWN."""
    if not nagios:
        return edge.guarded(call)
    codes: list[int] = []
    sentences = ["it failed; standard error says why"]

    def noted() -> None:
        try:
            codes.append(int(call() or 0))
        except Explained as error:
            sentences.append(str(error))
            raise

    edge.guarded(noted)
    return codes[0] if codes else unknown(sentences[-1])


def unparsed(code: int) -> int:
    """The exit code of a process whose arguments could not be read: a command that could begin leaves by itself."""
    return unknown("wrong usage; standard error says what was expected") if code == ExitCode.USAGE else code


def unknown(sentence: str) -> int:
    """Print the plug-in's line; its exit code."""
    from ddpdiag.cli.outputs import show
    from ddpdiag.render.nagios import State, line

    edge.guarded(lambda: show(line(State.UNKNOWN, sentence), sys.stdout))
    return State.UNKNOWN
