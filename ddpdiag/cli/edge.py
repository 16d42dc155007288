"""The edge: what can be explained becomes a sentence, everything else is our bug. Both become an exit code."""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable

from ddpdiag.errors import ExitCode, Explained


def guarded(call: Callable[[], int | None]) -> int:
    """The exit code of `call`; never an exception."""
    try:
        code = call()
        sys.stdout.flush()
    except Explained as error:
        complain(str(error))
        return error.exit_code
    except SystemExit as leave:
        return _code(leave)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        return _reader_left()
    except Exception:  # noqa: BLE001 - the other edge: no traceback but this one reaches a user
        complain("this is a bug in ddpdiag, please report it with what follows:\n" + traceback.format_exc())
        return ExitCode.BUG
    return int(code or 0)


def complain(sentence: str) -> None:
    """One sentence on standard error."""
    with contextlib.suppress(OSError):  # nobody may be left to read it
        print(f"ddpdiag: {sentence}", file=sys.stderr, flush=True)  # noqa: T201


def _code(leave: SystemExit) -> int:
    return leave.code if isinstance(leave.code, int) else int(leave.code is not None)


def _reader_left() -> int:
    """`ddpdiag ... | head`: as a program that SIGPIPE ended."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
