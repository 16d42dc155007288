"""Write texts: to a file, completely or not at all, or to a terminal or pipe.

A file is written under another name in the same folder and then renamed, so that readers never see a partial file and
a full disk leaves the old one. A pipe or a device is written to directly: it must not be replaced.
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
_MOST_LINKS = 40  # as the kernel (MAXSYMLINKS)
# For streams that cannot encode the other characters of our tables and of rich's bars: ASCII characters of the same
# width, which keep columns aligned.
_PLAIN = str.maketrans(
    dict.fromkeys("\u2013\u2014\u2212\u2500", "-")
    | dict.fromkeys("\u2588\u2589\u258a\u258b\u258c\u2590", "#")
    | dict.fromkeys("\u258d\u258e\u258f\u2595", " ")
)


def write(path: str, content: str | bytes) -> None:
    """Write `content` to `path` ("-" is standard output); UsageError, with the reason, if that cannot be done."""
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    try:
        if path == STANDARD_OUTPUT:
            _write_to_stream(without_commands(content if isinstance(content, str) else content.decode()), sys.stdout)
        elif _is_special(target := _target(path)):
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
        raise _unwritable(path, error) from error


def check_writable(path: str) -> None:
    """Raise UsageError if `write` could not write to `path`. No file is changed, and no new file stays behind."""
    if path == STANDARD_OUTPUT:
        return
    try:
        if (target := _target(path)).exists():
            _refuse_other_users(target, target.stat())
        if _is_special(target):
            if os.path.isdir(target):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not os.access(target, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        temporary, descriptor = _open_beside(target)
        os.close(descriptor)
        temporary.unlink()
        # In a folder like /tmp everybody may make files, but only its owner may replace one.
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
    """Write a text for people to a stream of this process, which is None if it was closed before the start.

    Raises OSError or ValueError if that fails. Tables keep their form if the stream's encoding has few characters.
    """
    if stream is not None and not can_show(stream, text):
        text = text.translate(_PLAIN)
    _write_to_stream(without_commands(text), stream)


def _write_to_stream(text: str, stream: TextIO | None) -> None:
    if stream is None:
        raise OSError(errno.EBADF, "it is closed")
    # A log's encoding may be ASCII; a report with an escaped letter is better than none.
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def _target(path: str) -> Path:
    """The file to which `path` leads through links: a link stays a link, and its target is replaced."""
    if not path:
        raise ValueError("the name is empty")
    return _followed(Path.cwd(), Path(path), _MOST_LINKS)


def _followed(folder: Path, path: Path, left: int) -> Path:
    """Follow the links of `path`, which is relative to `folder`; at most `left` links.

    Raises PermissionError for a link that another user made in a folder like /tmp, as kernels do that have
    fs.protected_symlinks (proc(5)) switched on.
    """
    for part in path.parts:
        step = folder.parent if part == os.pardir else folder / part
        # Links below /proc lead to open files and have no target of their own: /dev/stdout ends there.
        if part == os.pardir or step.is_relative_to("/proc") or not step.is_symlink():
            folder = step
            continue
        above, link = folder.stat(), step.lstat()
        if above.st_mode & stat.S_ISVTX and link.st_uid not in (os.geteuid(), above.st_uid):
            raise PermissionError(errno.EACCES, f"{step} is a link that user {link.st_uid} made")
        if left == 0:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        folder = _followed(folder, step.readlink(), left - 1)
    return folder


def _refuse_other_users(target: Path, file: os.stat_result) -> None:
    """Raise PermissionError for a file or named pipe that another user made in a folder like /tmp."""
    folder = target.parent.stat()
    if folder.st_mode & stat.S_ISVTX and file.st_uid not in (os.geteuid(), folder.st_uid):
        kind = "a file" if stat.S_ISREG(file.st_mode) else "no plain file, but one"
        raise PermissionError(errno.EACCES, f"{target} is {kind} that user {file.st_uid} made")


def _is_special(path: Path) -> bool:
    """Whether `path` exists and is no plain file."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


def _open_beside(target: Path) -> tuple[Path, int]:
    """Create a file in the folder of `target`; not by tempfile, whose files no other user may read."""
    temporary = target.parent / f".ddpdiag-{os.urandom(8).hex()}"
    return temporary, os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _replace(target: Path, data: bytes) -> None:
    temporary, descriptor = _open_beside(target)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


class Display(Enum):
    """The ways to show a run on a stream."""

    LIVE = "live"
    LINES = "lines"
    NONE = "none"


def display_of(stream: TextIO | None, environ: Mapping[str, str]) -> Display:
    """LIVE on a terminal, LINES in a log, NONE for a closed stream.

    A terminal counts as a log if CI is set, since CI services keep every redrawn line, or if TERM is "dumb".
    """
    try:
        if stream is None or stream.closed:
            return Display.NONE
        tty = stream.isatty()
    except ValueError:  # closed meanwhile
        return Display.NONE
    logged = environ.get("CI", "").lower() not in ("", "0", "false") or environ.get("TERM") == "dumb"
    return Display.LIVE if tty and not logged else Display.LINES


def can_show(stream: TextIO, text: str) -> bool:
    """Whether the encoding of the stream has all characters of `text`."""
    try:
        text.encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def put(stream: TextIO, text: str) -> bool:
    """Write `text` if that is possible without waiting, else drop it. Returns False if the reader is gone.

    A terminal that was stopped (Ctrl-S), or a full pipe that nobody reads, blocks its writer for ever. Progress is
    not worth that.
    """
    try:
        if takes(stream):
            stream.write(without_commands(text))
            stream.flush()
    except (OSError, ValueError):
        return False
    return True


def takes(stream: TextIO) -> bool:
    """Whether a short line can be written without waiting."""
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    # A pipe is ready if PIPE_BUF bytes fit into it, which no line of ours exceeds.
    return bool(poll.poll(0))


def size(stream: TextIO) -> tuple[int, int]:
    """Columns and lines of the terminal behind the stream. 80 and 25 if it is no terminal."""
    try:
        columns, lines = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return 80, 25
    return columns or 80, lines or 25
