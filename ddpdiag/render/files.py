"""Write text to a file (completely or not at all), a terminal or a pipe.

The text is written to a temporary file in the same folder, which is then renamed. So readers never see a partial file,
and the old file remains if the disk is full. Pipes and devices are never replaced, but written directly.
"""

import errno
import io
import os
import select
import stat
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TextIO

from ddpdiag.errors import UsageError
from ddpdiag.sanitize import without_commands

STANDARD_OUTPUT = "-"
_MAX_LINKS = 40  # as the kernel (MAXSYMLINKS)
# Characters of tables and of rich's progress bars, with ASCII characters of the same width for streams that cannot
# encode them. Columns stay aligned.
_ASCII_LOOKALIKES = str.maketrans(
    dict.fromkeys("\u2013\u2014\u2212\u2500", "-")
    | dict.fromkeys("\u2588\u2589\u258a\u258b\u258c\u2590", "#")
    | dict.fromkeys("\u258d\u258e\u258f\u2595", " ")
    | dict(zip("\u2581\u2582\u2583\u2584\u2585\u2586\u2587", "1234567", strict=True))  # of sparklines
)


def write(path: str, content: str | bytes) -> None:
    """Write `content` to `path` ("-" is standard output). Raises UsageError with the reason if that fails.

    Raises BrokenPipeError if standard output is a pipe that its reader closed.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    try:
        if path == STANDARD_OUTPUT:
            _write_to_stream(without_commands(content if isinstance(content, str) else content.decode()), sys.stdout)
        elif _is_special(target := _resolve(path)):
            # Opening a named pipe without a reader would wait for ever; with O_NONBLOCK it fails.
            descriptor = os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
            with os.fdopen(descriptor, "wb") as file:
                _refuse_other_users(target, os.fstat(descriptor))
                os.set_blocking(descriptor, True)
                file.write(data)
        else:
            if target.exists():
                _refuse_other_users(target, target.stat())
            _replace(target, data)
    except (OSError, ValueError) as error:
        if path == STANDARD_OUTPUT and isinstance(error, BrokenPipeError):
            raise
        raise _unwritable(path, error) from error


def check_writable(path: str) -> None:
    """Raise UsageError if `write` could not write to `path`. Creates a temporary file and removes it."""
    if path == STANDARD_OUTPUT:
        return
    try:
        if (target := _resolve(path)).exists():
            _refuse_other_users(target, target.stat())
        if _is_special(target):
            if os.path.isdir(target):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not os.access(target, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        temporary, descriptor = _create_temporary(target)
        os.close(descriptor)
        temporary.unlink()
        # In a sticky folder such as /tmp every user may create files, but only the owner of a file may replace it.
        folder, user = target.parent.stat(), os.geteuid()
        if target.exists() and folder.st_mode & stat.S_ISVTX and user not in (0, folder.st_uid, target.stat().st_uid):
            raise PermissionError(errno.EPERM, f"only its owner may replace it in {target.parent}")
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error


def _unwritable(path: str, error: OSError | ValueError) -> UsageError:
    name = "standard output" if path == STANDARD_OUTPUT else path
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return UsageError(f"cannot write {name}: {reason}")


def show(text: str, stream: TextIO | None) -> None:
    """Write a text for people to standard output or error. `stream` is None if it was closed before the start.

    Raises OSError or ValueError if writing fails. Characters that the stream cannot encode are replaced by ASCII.
    """
    if stream is not None and not can_show(stream, text):
        text = text.translate(_ASCII_LOOKALIKES)
    _write_to_stream(without_commands(text), stream)


def _write_to_stream(text: str, stream: TextIO | None) -> None:
    if stream is None:
        raise OSError(errno.EBADF, "it is closed")
    # The encoding of a log may be ASCII. A report with an escaped letter is better than no report.
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def _resolve(path: str) -> Path:
    """Follow all links of `path` to the file, so that `write` replaces the file and keeps the link."""
    if not path:
        raise ValueError("the name is empty")
    return _follow_links(Path.cwd(), Path(path), _MAX_LINKS)


def _follow_links(folder: Path, path: Path, links_left: int) -> Path:
    """Resolve `path`, relative to `folder`, through at most `links_left` links.

    Raises PermissionError for a link of another user in a sticky folder such as /tmp, like a kernel with
    fs.protected_symlinks (proc(5)).
    """
    for part in path.parts:
        step = folder.parent if part == os.pardir else folder / part
        # Links below /proc, to which /dev/stdout leads, are open files, and have no path as their target.
        if part == os.pardir or step.is_relative_to("/proc") or not step.is_symlink():
            folder = step
            continue
        above, link = folder.stat(), step.lstat()
        if above.st_mode & stat.S_ISVTX and link.st_uid not in (os.geteuid(), above.st_uid):
            raise PermissionError(errno.EACCES, f"{step} is a link that user {link.st_uid} made")
        if links_left == 0:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        folder = _follow_links(folder, step.readlink(), links_left - 1)
    return folder


def _refuse_other_users(target: Path, file: os.stat_result) -> None:
    """Raise PermissionError if another user made the file or named pipe, in a sticky folder such as /tmp."""
    folder = target.parent.stat()
    if folder.st_mode & stat.S_ISVTX and file.st_uid not in (os.geteuid(), folder.st_uid):
        kind = "a file" if stat.S_ISREG(file.st_mode) else "no plain file, but one"
        raise PermissionError(errno.EACCES, f"{target} is {kind} that user {file.st_uid} made")


def _is_special(path: Path) -> bool:
    """Whether `path` exists and is not a plain file."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


def _create_temporary(target: Path) -> tuple[Path, int]:
    """Create a file beside `target` that others may read, unlike tempfile's. Returns its path and descriptor."""
    temporary = target.parent / f".ddpdiag-{os.urandom(8).hex()}"
    return temporary, os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _replace(target: Path, data: bytes) -> None:
    temporary, descriptor = _create_temporary(target)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


class Display(Enum):
    """How the progress of a run is shown: as a redrawn line, as lines of a log, or not at all."""

    LIVE = "live"
    LINES = "lines"
    NONE = "none"


def display_of(stream: TextIO | None, environ: Mapping[str, str]) -> Display:
    """LIVE for a terminal, LINES for a log, NONE for a closed stream.

    A terminal counts as a log if CI is set, because CI services keep every redrawn line, or if TERM is "dumb".
    """
    try:
        if stream is None or stream.closed:
            return Display.NONE
        is_terminal = stream.isatty()
    except ValueError:  # closed meanwhile
        return Display.NONE
    is_log = environ.get("CI", "").lower() not in ("", "0", "false") or environ.get("TERM") == "dumb"
    return Display.LIVE if is_terminal and not is_log else Display.LINES


def can_show(stream: TextIO, text: str) -> bool:
    """Whether the stream's encoding has all characters of `text`."""
    try:
        text.encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def write_if_ready(stream: TextIO, text: str) -> bool:
    """Write `text` if the stream takes it without waiting, else drop it. Returns False if the reader is gone.

    A stopped terminal (Ctrl-S) or a full pipe would block the run for ever. Progress is not worth that.
    """
    try:
        if is_ready(stream):
            stream.write(without_commands(text))
            stream.flush()
    except (OSError, ValueError):
        return False
    return True


def is_ready(stream: TextIO) -> bool:
    """Whether the stream takes a short line without waiting."""
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    # A pipe is ready if PIPE_BUF bytes fit into it, and no line of progress is longer.
    return bool(poll.poll(0))


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """The columns and lines of the terminal, or (80, 25) if the stream is not a terminal."""
    try:
        columns, lines = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return 80, 25
    return columns or 80, lines or 25
