"""The command line: parses, calls, renders, exits."""

import sys
import traceback


def main() -> None:
    """Entry of the console script; leaves with the exit code of the contract."""
    try:
        from ddpdiag.cli.app import app
        from ddpdiag.cli.edge import guarded, open_standard_streams
        from ddpdiag.cli.plugin import OPTION, unparsed
    except Exception:  # noqa: BLE001 - Python would leave with 1, which is UNFIT, and drains nodes
        print("ddpdiag: the installation is broken:\n" + traceback.format_exc(), file=sys.stderr)  # noqa: T201
        sys.exit(4)

    open_standard_streams()
    code = guarded(app)
    sys.exit(unparsed(code) if OPTION in sys.argv[1:] else code)
