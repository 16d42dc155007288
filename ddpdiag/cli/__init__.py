"""The command line: options, commands, outputs, exit codes."""

import sys
import traceback

from ddpdiag.cli.edge import complain, guarded, open_standard_streams
from ddpdiag.errors import ExitCode, UsageError

_NAME = "ddpdiag"


def main() -> None:
    """Run the command line, and exit with one of the codes in `ExitCode`."""
    open_standard_streams()
    sys.exit(guarded(_command_line))


def _command_line() -> int | None:
    # Imported inside of `guarded`: after a failed import Python would exit with 1, which is UNFIT, and drains nodes.
    try:
        from ddpdiag.cli.app import Refused, app
        from ddpdiag.cli.parsing import sentence_of
    except ImportError:
        complain("the installation is broken:\n" + traceback.format_exc())
        return ExitCode.BUG
    if not sys.argv[1:]:
        app(["--help"], prog_name=_NAME, standalone_mode=False)
        return ExitCode.USAGE
    try:
        code: int | None = app(prog_name=_NAME, standalone_mode=False)
    except Refused as error:
        raise UsageError(sentence_of(error, _NAME)) from error
    return code
