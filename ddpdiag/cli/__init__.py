"""The command line: parses, calls, renders, exits."""

import re
import sys
import traceback

from ddpdiag.cli.edge import NAGIOS, complain, guarded, open_standard_streams, unparsed
from ddpdiag.errors import ExitCode, UsageError

_NAME = "ddpdiag"


def main() -> None:
    """Entry of the console script; exits with the code of the contract."""
    open_standard_streams()
    code = guarded(_command_line)
    sys.exit(unparsed(code) if NAGIOS in sys.argv[1:] else code)


def _command_line() -> int | None:
    # Here, inside of `guarded`: for a failed import Python would leave with 1, which is UNFIT, and drains nodes.
    try:
        from ddpdiag.cli.app import Refused, app
    except ImportError:
        complain("the installation is broken:\n" + traceback.format_exc())
        return ExitCode.BUG
    if not sys.argv[1:]:
        app(["--help"], prog_name=_NAME, standalone_mode=False)
        return ExitCode.USAGE
    try:
        code: int | None = app(prog_name=_NAME, standalone_mode=False)
    except Refused as error:
        raise UsageError(_sentence(error)) from error
    return code


def _sentence(error: Exception) -> str:
    """A mistake on the command line as one sentence; `error` is one of click's."""
    message = error.format_message().rstrip(".").replace(". Did", "; did")  # type: ignore[attr-defined]
    message = re.sub(r"not a valid (int|float)\w*( range)?$", "not a number", message)
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else _NAME
    see = " See" if message.endswith("?") else "; see"
    return f"{message[:1].lower()}{message[1:]}{see} `{command} --help`"
