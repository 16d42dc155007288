"""The command line: parses, calls, renders, exits."""

import sys
import traceback

from ddpdiag.cli.edge import NAGIOS, complain, guarded, open_standard_streams, unparsed
from ddpdiag.errors import ExitCode


def main() -> None:
    """Entry of the console script; leaves with the exit code of the contract."""
    open_standard_streams()
    code = guarded(_command_line)
    sys.exit(unparsed(code) if NAGIOS in sys.argv[1:] else code)


def _command_line() -> int | None:
    # Here, inside of `guarded`: for a failed import Python would leave with 1, which is UNFIT, and drains nodes.
    try:
        from ddpdiag.cli.app import app
    except ImportError:
        complain("the installation is broken:\n" + traceback.format_exc())
        return ExitCode.BUG
    code: int | None = app()
    return code
