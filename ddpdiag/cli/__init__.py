"""The command line: parses, calls, renders, exits."""

import sys


def main() -> None:
    """Entry of the console script; leaves with the exit code of the contract."""
    from ddpdiag.cli.app import app
    from ddpdiag.cli.edge import guarded, open_standard_streams
    from ddpdiag.cli.plugin import OPTION, unparsed

    open_standard_streams()
    code = guarded(app)
    sys.exit(unparsed(code) if OPTION in sys.argv[1:] else code)
