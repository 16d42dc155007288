"""`python -m ddpdiag.child PID FOLDER ...`: the command line, for a call of the Python API in the process PID.

Launchers may kill a training process alone. The kernel then sends SIGTERM to this process, which ends the command. It
also removes FOLDER, the temporary folder of the call. Ray kills the whole process group of a training process. Then a
child of this process, which is in a group of its own, does the same for the command, which it runs in a child.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable

from ddpdiag.cli import main
from ddpdiag.runtime.supervisor.processes import ForkedChildren, Signals, die_with_parent


def _run_command_line() -> int:
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _run_and_clean(parent: int, folder: str, call: Callable[[], int]) -> int:
    """Run `call` in a forked process, and return its exit code. Remove `folder` if `parent` ends before that process.

    It is forked, because `ddpdiag check` ends its process with os._exit.
    """
    children, code = ForkedChildren(Signals(children=True)), 0
    die_with_parent(os.getppid(), signal.SIGTERM)
    if os.getppid() == parent:  # else it has ended before this process asked for the signal
        children.fork(call)
        while children.running:
            children.wait(0.5)
        code = children.exit_codes[0]
    if os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _run_in_own_group(parent: int, folder: str) -> int:
    os.setpgid(0, 0)
    return _run_and_clean(parent, folder, _run_command_line)


if __name__ == "__main__":
    training, folder, own = int(sys.argv.pop(1)), sys.argv.pop(1), os.getpid()
    sys.exit(_run_and_clean(training, folder, lambda: _run_in_own_group(own, folder)))
