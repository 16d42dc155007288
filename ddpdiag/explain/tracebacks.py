"""Python's tracebacks in a log: the line of the exception, the deepest frame in the user's code, what it followed.

A traceback is read from its first line on, over lines of the same origin only, since ranks write between each other's.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from ddpdiag.explain.lines import Origin, read_prefixes, window

_BEGIN = b"Traceback (most recent call last)"
# A log that has more of them repeats itself; a longer one is a recursion.
_MOST, _MOST_LINES = 500, 300
_LOOK_BACK = 400
_MESSAGE_LINES = 3
_FRAME = re.compile(r'\s+File "(?P<file>[^"]{1,400})", line (?P<line>\d{1,9})(?:, in (?P<function>.{1,200}))?')
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Za-z_]\w{0,80}(?::(?: |$)|$)")
_CHAINED = ("During handling of the above exception", "direct cause of the following exception")
# Printed while a process ends or frees memory, also in healthy jobs.
_IGNORED = "Exception ignored in"
_LIBRARY = re.compile(
    r"^<|/(?:site|dist)-packages/|/lib(?:64)?/python\d|/importlib/|/bin/(?:torchrun|accelerate|deepspeed)$"
)


class Traceback(NamedTuple):
    """One traceback: where its exception's line starts, what it says and where it was raised.

    `is_chained`: it was raised because of the one before it, or while that one was handled. `is_ignored`: Python
    reports it and continues.
    """

    start: int
    origin: Origin
    text: str
    frame: str
    is_chained: bool
    is_ignored: bool


def tracebacks(block: bytes, *, is_first: bool = False) -> Iterator[Traceback]:
    """The tracebacks that a block of lines holds to their end; the first block of a log may begin inside of one."""
    at = block.find(_BEGIN)
    frame = block.find(b'File "', 0, at if at >= 0 else len(block)) if is_first else -1
    if frame >= 0 and (found := _read(block, block.rfind(b"\n", 0, frame) + 1, frame)) is not None:
        yield found
    for _ in range(_MOST):
        if at < 0:
            return
        start = block.rfind(b"\n", max(0, at - 4096), at) + 1
        if (found := _read(block, start, at)) is not None:
            yield found
        at = block.find(_BEGIN, at + len(_BEGIN))


def message_after(block: bytes, end: int, origin: Origin) -> str:
    """The lines after one that ends with a colon: the message of an exception that begins on the next line."""
    texts = (text.strip() for _, text in _following(block, end, origin))
    return " ".join(islice(filter(None, texts), _MESSAGE_LINES))


def _read(block: bytes, start: int, at: int) -> Traceback | None:
    first = block[start : _end(block, at)]
    origin, text = read_prefixes(window(first, at - start))
    head, *inner = text[max(0, text.rfind("Traceback")) :].split("\n")
    last = _line_before(block, start, origin) if text.startswith("Traceback") else text.partition("Traceback")[0]
    # A message of several lines, or the lines that follow.
    lines = (
        [(start, read_prefixes(line)[1]) for line in inner] if inner else _following(block, start + len(first), origin)
    )
    ended = _ended(lines, len(text) - len(text.lstrip()))
    if ended is None or not head:
        return None
    place, exception, frame = ended
    return Traceback(
        start=place,
        origin=origin,
        text=exception,
        frame=frame,
        is_chained=any(marker in last for marker in _CHAINED),
        is_ignored=_IGNORED in last,
    )


def _end(block: bytes, at: int) -> int:
    end = block.find(b"\n", at)
    return len(block) if end < 0 else end


def _line_before(block: bytes, start: int, origin: Origin) -> str:
    """The last line of this origin that is not blank."""
    lines = block[max(0, start - _LOOK_BACK) : start].decode("utf-8", "replace").split("\n")
    texts = (text for other, text in map(read_prefixes, reversed(lines)) if other == origin and text)
    return next(texts, "")


def _following(block: bytes, at: int, origin: Origin) -> Iterator[tuple[int, str]]:
    """The next lines of this origin, each with its place."""
    for _ in range(_MOST_LINES):
        start = at + 1
        if start >= len(block):
            return
        at = _end(block, start)
        other, text = read_prefixes(window(block[start:at], 0))
        if other == origin:
            yield start, text


def _ended(lines: Iterable[tuple[int, str]], indent: int) -> tuple[int, str, str] | None:
    """Where the exception's line starts, the line, and the deepest frame; torchrun's table indents a traceback."""
    frames: list[str] = []
    own: list[str] = []
    for place, text in lines:
        if frame := _FRAME.match(text):
            function = f" in {frame['function']}" if frame["function"] else ""
            frames.append(f"{frame['file']}, line {frame['line']},{function}".rstrip(","))
            if not _LIBRARY.search(frame["file"]):
                own.append(frames[-1])
        elif len(text) - len(text.lstrip()) <= indent:
            text = text.strip()
            return (place, text, (own or frames or [""])[-1]) if _EXCEPTION.match(text) else None
    return None
