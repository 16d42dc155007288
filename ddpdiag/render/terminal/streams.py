"""What a stream can take: a display that is drawn again and again, lines, or nothing; and which letters."""

import io
import os
import select
from collections.abc import Mapping
from enum import Enum
from typing import TextIO


class Display(Enum):
    """How a run may be shown on a stream."""

    LIVE = "live"
    LINES = "lines"
    NONE = "none"


def display_of(stream: TextIO | None, environ: Mapping[str, str]) -> Display:
    """Live on a terminal; lines in a log, and where a terminal is a log all the same.

    CI services (they set CI) keep all that was drawn over, and `TERM=dumb` cannot draw over anything.
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
    """Has the stream's encoding these letters?"""
    try:
        text.encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def put(stream: TextIO, text: str) -> bool:
    """Write `text` at once if that can be done without waiting; False where nobody can read any more.

    A terminal that was stopped (Ctrl-S) and a pipe that nobody empties hold a writer up for ever. Progress is not worth
    that, so what does not fit is dropped.
    """
    try:
        if takes(stream):
            stream.write(text)
            stream.flush()
    except (OSError, ValueError):
        return False
    return True


def takes(stream: TextIO) -> bool:
    """Can a little be written without waiting?"""
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    # A pipe is ready if PIPE_BUF bytes fit into it, which no line of ours exceeds.
    return bool(poll.poll(0))


def columns(stream: TextIO) -> int:
    """Width of the terminal behind the stream; 80 where there is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
