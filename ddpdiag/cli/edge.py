"""The edge of the command line, which turns every exception into a message on standard error and an exit code."""

import contextlib
import errno
import os
import re
import resource
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO, NoReturn

from ddpdiag.errors import ExitCode, UsageError, UserError
from ddpdiag.render.files import terminal_size
from ddpdiag.sanitize import printable, without_commands

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
_EXPECTED_FILES = 256  # a run of two ranks opens 40
_MIN_COLUMNS = 20  # on a narrower terminal each line would have one word


def guarded(call: Callable[[], int | None]) -> int:
    """Run `call` and return its exit code. Every exception is printed as a message and becomes an exit code."""
    try:
        code = call()
        _flush()
    except UserError as error:
        complain(with_variable(str(error), sys.argv[1:], os.environ))
        return error.exit_code
    except SystemExit as exit_error:
        if isinstance(exit_error.code, int | None):
            return exit_error.code or 0
        complain(str(exit_error.code))  # from a script in this directory that has the name of a module of Python
        return ExitCode.BUG
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # `ddpdiag ... | head`: return the code of a program that SIGPIPE ended
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.CLOSED_PIPE
    except Exception as error:  # noqa: BLE001 - this is an edge: only here a traceback is shown to users
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            complain(f"cannot write {error.filename or 'the output'}: {error.strerror}")
            return ExitCode.USAGE
        if (sentence := too_many_files_text(error)) is not None:
            complain(sentence)
            return ExitCode.UNKNOWN
        complain("this is a bug in ddpdiag; please report it with the following traceback:\n" + traceback.format_exc())
        return ExitCode.BUG
    return int(code or 0)


def with_variable(sentence: str, words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Put the name of a variable before a sentence that begins with an option, if it set this option, not `words`."""
    option = re.match(r"--[a-z-]+", sentence)
    variable = f"DDPDIAG_{option[0][2:].replace('-', '_').upper()}" if option is not None else ""
    if option is None or variable not in environment:
        return sentence
    is_typed = any(word.partition("=")[0].replace("_", "-") == option[0] for word in words)
    return sentence if is_typed else f"{variable}: {sentence}"


def too_many_files_text(error: Exception) -> str | None:
    """A sentence if an error of Python or ZeroMQ means that the limit of open files is reached, else None."""
    if getattr(error, "errno", None) not in _TOO_MANY_FILES:
        return None
    soft_limit, _hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"too many open files: this process may open {soft_limit} (ulimit -n), expected {_EXPECTED_FILES} or more"


def complain(sentence: str) -> None:
    """Print a sentence on standard error. In a log it is one line, and on a terminal it is wrapped to the width."""
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError, ValueError):  # the reader may have closed the stream
        text = without_commands(printable(f"ddpdiag: {sentence}"))
        if sys.stderr.isatty():
            # Only the first line is wrapped: a traceback may follow.
            first_line, *other_lines = text.split("\n")
            width = max(terminal_size(sys.stderr)[0], _MIN_COLUMNS)
            wrapped = textwrap.wrap(first_line, width, break_long_words=False, break_on_hyphens=False)
            text = "\n".join([*wrapped, *other_lines])
        print(text, file=sys.stderr, flush=True)  # noqa: T201


def standard_input(kind: str, *, quiet: bool) -> BinaryIO:
    """Return standard input, which has a `kind` such as "log". Prints a hint on a terminal. UsageError if closed."""
    if sys.stdin is None:
        raise UsageError(f"standard input is closed; give the {kind}'s name, or pipe the {kind} in")
    if sys.stdin.isatty() and not quiet:
        complain(f"reading the {kind} from the terminal; end it with Ctrl-D")
    return sys.stdin.buffer


def open_standard_streams() -> None:
    """Open /dev/null for closed standard streams: else a socket would get descriptor 1, to which libraries print."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # open(2) returns the lowest free descriptor, which is this one


def exit_at_once(code: int) -> NoReturn:
    """End this process at once, even if threads are stuck, such as in a name look-up, or a stream cannot be flushed."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    os._exit(code)


def _flush() -> None:
    """Flush standard output. BrokenPipeError if the reader closed the pipe. Other errors were reported by `show`."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except (OSError, ValueError):
        return
