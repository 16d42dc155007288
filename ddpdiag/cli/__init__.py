"""The command line of ddpdiag: its commands and options, the outputs of reports, and exit codes."""

import sys
import traceback

from ddpdiag.cli.edge import complain, guarded, open_standard_streams
from ddpdiag.cli.exit_codes import requested_codes, translated
from ddpdiag.errors import ExitCode, UsageError

_NAME = "ddpdiag"


def main() -> None:
    """Run the command line, and exit with one of the codes in `ExitCode`, or in those that `--exit-codes` selects."""
    open_standard_streams()
    sys.exit(translated(guarded(_command_line), requested_codes(sys.argv[1:])))


def _command_line() -> int | None:
    # Imported within `guarded`: after a failed import Python would exit with 1, which means UNFIT and drains hosts.
    try:
        from ddpdiag.cli.app import CommandLineError, app
        from ddpdiag.cli.parsing import usage_sentence
    except ImportError:
        complain("the installation is broken:\n" + traceback.format_exc())
        return ExitCode.BUG
    words = sys.argv[1:]
    try:
        code: int | None = app(words or ["--help"], prog_name=_NAME, standalone_mode=False)
    except CommandLineError as error:
        raise UsageError(usage_sentence(error, f"{_NAME} {words[0]}")) from error
    except SystemExit as error:
        # If the reader of a pipe has ended, Typer exits with 1, which means UNFIT.
        if isinstance(error.__context__, BrokenPipeError):
            raise error.__context__ from None
        raise
    return code if words else ExitCode.USAGE
