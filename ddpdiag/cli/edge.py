"""The edge of the command line: a UserError becomes a sentence, any other error a bug report; both an exit code."""

import contextlib
import errno
import os
import re
import resource
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO, NoReturn

from ddpdiag.errors import ExitCode, UsageError, UserError
from ddpdiag.render.files import terminal_size
from ddpdiag.sanitize import printable, without_commands

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_FILES = (errno.EMFILE, errno.ENFILE)
_LEAST_FILES = 256  # a run of two ranks needs 40
_LEAST_COLUMNS = 20  # below this, a word stands on each line


def guarded(call: Callable[[], int | None]) -> int:
    """Run `call`, and return its exit code. Raises nothing: an exception becomes a sentence and an exit code."""
    try:
        code = call()
        _flush()
    except UserError as error:
        complain(located(str(error), sys.argv[1:], os.environ))
        return error.exit_code
    except SystemExit as leaving:
        if isinstance(leaving.code, int | None):
            return leaving.code or 0
        complain(str(leaving.code))  # of a module in the current directory that is imported in the place of Python's
        return ExitCode.BUG
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # `ddpdiag ... | head`: as a program that SIGPIPE ended
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:  # noqa: BLE001 - the other edge: no traceback but this one reaches a user
        if isinstance(error, OSError) and error.errno in _FULL:
            complain(f"cannot write {error.filename or 'the output'}: {error.strerror}")
            return ExitCode.USAGE
        if (sentence := too_many_files(error)) is not None:
            complain(sentence)
            return ExitCode.UNKNOWN
        complain("this is a bug in ddpdiag; please report it with the following traceback:\n" + traceback.format_exc())
        return ExitCode.BUG
    return int(code or 0)


def located(sentence: str, words: Sequence[str], environment: Mapping[str, str]) -> str:
    """A sentence that begins with an option, with the environment variable before it that set the option, if any."""
    option = re.match(r"--[a-z-]+", sentence)
    variable = f"DDPDIAG_{option[0][2:].replace('-', '_').upper()}" if option is not None else ""
    if option is None or variable not in environment:
        return sentence
    is_typed = any(word.partition("=")[0].replace("_", "-") == option[0] for word in words)
    return sentence if is_typed else f"{variable}: {sentence}"


def too_many_files(error: Exception) -> str | None:
    """A sentence if an error, of Python or of ZeroMQ, means that no more files can be opened; None for any other."""
    if getattr(error, "errno", None) not in _NO_FILES:
        return None
    most, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"too many open files: this process may open {most} (ulimit -n), expected {_LEAST_FILES} or more"


def complain(sentence: str) -> None:
    """Print a sentence on standard error: on one line in a log, wrapped to the width on a terminal."""
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError, ValueError):  # the reader may be gone
        text = without_commands(printable(f"ddpdiag: {sentence}"))
        if sys.stderr.isatty():
            # A traceback behind the first line stays as it is.
            first, *others = text.split("\n")
            width = max(terminal_size(sys.stderr)[0], _LEAST_COLUMNS)
            text = "\n".join([*textwrap.wrap(first, width, break_long_words=False, break_on_hyphens=False), *others])
        print(text, file=sys.stderr, flush=True)  # noqa: T201


def standard_input(kind: str, *, quiet: bool) -> BinaryIO:
    """Standard input, for reading a `kind` of file. Prints a hint if it is a terminal; UsageError if it is closed."""
    if sys.stdin is None:
        raise UsageError(f"standard input is closed; give the {kind}'s name, or pipe the {kind} in")
    if sys.stdin.isatty() and not quiet:
        complain(f"reading the {kind} from the terminal; end it with Ctrl-D")
    return sys.stdin.buffer


def open_standard_streams() -> None:
    """Open /dev/null for closed streams (`>&-`), or the next socket would be descriptor 1, to which libraries print."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor, so this one


def leave(code: int) -> NoReturn:
    """End this process at once, whatever threads are stuck in a name look-up, and whatever cannot be flushed."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    os._exit(code)


def _flush() -> None:
    """Flush standard output. Raises BrokenPipeError if the reader left; other errors were reported before."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except (OSError, ValueError):
        return
