"""Read lines of logs: the prefixes of launchers, containers and loggers, and the rank and host that they show.

Also read Python's tracebacks: the line of the exception, the deepest frame in the user's code, and what it followed. A
traceback is read from its first line on, over lines of the same origin only, because lines of several ranks may mix.
"""

import json
import re
import string
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

# Of longer lines (progress bars, dumps) only the head and the surroundings of a card's anchor are read.
_BEFORE, _AFTER, _HEAD = 1_000, 2_000, 200
# Names with a counter (gpu1, worker1) are no hosts; gpu01 and worker-01 are, since counters have no leading 0.
_NO_HOST = r"(?!python|(?:epoch|step|iter|iteration|batch|rank|line)[-_]?\d*: |(?:gpu|cuda|worker)[-_]?(?!0\d)\d*: )"
_DAY_AND_TIME = r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
_LETTERS = string.ascii_lowercase
# Patterns of prefixes, each with its possible first characters: most lines of a log begin with none of these.
_PREFIXES = tuple(
    (frozenset(first), re.compile(pattern))
    for first, pattern in (
        # `srun -l`, padded where there are ten tasks and more.
        (" " + string.digits, r" {0,5}(?P<task>\d{1,6}): "),
        # Open MPI's --tag-output; SageMaker names more than the rank there.
        ("[", r"\[(?:\d{1,6},)?(?:mpirank:)?(?P<rank>\d{1,6})(?:,[\w.-]{1,60})?\]<std(?:out|err|diag)>:\s?"),
        # Ray.
        ("(", r"\([A-Za-z]\w{0,60} pid=\d{1,9}(?:, ip=(?P<host>[0-9a-fA-F.:]{1,45}))?\) ?"),
        # torch's own; torchrun's --tee.
        ("[", r"\[rank[ ]?(?P<rank>\d{1,6})\]:\s?"),
        ("[", r"\[[a-z_]{1,40}(?P<local_rank>\d{1,6})\]:\s?"),
        # pdsh, clush; DeepSpeed's launcher, whose hosts are called worker-1; `kubectl logs --prefix`; docker compose.
        (_LETTERS, rf"{_NO_HOST}(?:slurmstepd-)?(?P<host>[a-z][a-z.-]{{0,60}}\d[a-z0-9.-]{{0,60}}): "),
        (string.digits, r"(?P<host>\d{1,3}(?:\.\d{1,3}){3}): "),
        ("w", r"worker-\d{1,6}: "),
        ("[", r"\[pod/(?P<host>[a-z0-9.-]{1,80})/[a-z0-9.-]{1,80}\] "),
        (_LETTERS, r"(?P<host>[a-z][\w.-]{0,60}[-_]\d[\w.-]{0,60}) {1,40}\| ?"),
        # containerd writes one line of a container so; loggers and CloudWatch write times; `aws logs` milliseconds.
        (string.digits, rf"{_DAY_AND_TIME} std(?:out|err) [FP] "),
        # Indentation remains, for the frames of tracebacks.
        ("[" + string.digits, rf"\[?{_DAY_AND_TIME}\]?[ \t](?:[ \t]{{1,3}}(?!File \"|[ \t]))?"),
        ("1", r"1\d{12}[ \t]"),
    )
)
# The times of a container and a logger, srun's task, and the ranks of torchrun and torch: no line has more.
_MOST_PREFIXES = 5
# The text of a line that is a JSON object; the brace may follow a time.
_JSON = re.compile(r'"(?:log|message|msg|textPayload|MESSAGE)"\s{0,4}:\s{0,4}"((?:[^"\\]|\\.)*)')
_ORIGINS = (
    ("Rank ", re.compile(r"\bRank (?P<rank>\d{1,6})\]")),
    (" [", re.compile(r"(?:^|\s)(?P<host>[A-Za-z][\w.-]{0,80}):\d{1,7}:\d{1,7} \[\d{1,3}\]")),
)
# torchrun's table of failures names a worker's rank and host in lines of their own, before its exit code.
_TABLE_RANK = re.compile(r"rank {6}: (\d{1,6}) ")
_TABLE_HOST = re.compile(r"host {6}: (\S{1,100})")


class Origin(NamedTuple):
    """The rank and host that printed a line, as far as the line shows them."""

    rank: int | None = None
    local_rank: int | None = None
    task: int | None = None
    host: str | None = None

    @property
    def is_process(self) -> bool:
        """Whether it names one process, rather than only a host or nothing."""
        return (self.rank, self.local_rank, self.task) != (None, None, None)


UNKNOWN_ORIGIN = Origin()


# Lines up to this length are read whole.
WHOLE = _HEAD + _BEFORE + _AFTER


def window(line: bytes, at: int) -> str:
    """The line as text. A long line is cut to its head and the surroundings of byte `at`."""
    if len(line) > WHOLE:
        line = line[:_HEAD] + line[max(_HEAD, at - _BEFORE) : at + _AFTER]
    return line.decode("utf-8", "replace")


def read_line(text: str) -> tuple[Origin, str]:
    """The line's origin, and the line without the prefixes of launchers and loggers.

    If the line is a JSON object, the text is its message, which may have several lines.
    """
    named, text = _read_prefixes(text)
    for words, pattern in _ORIGINS:
        if words in text and (match := pattern.search(text)):
            named = match.groupdict() | named
    return _origin(named), text


def read_prefixes(text: str) -> tuple[Origin, str]:
    """Like `read_line`, but the origin is what the prefixes show, whatever the text itself names."""
    named, text = _read_prefixes(text)
    return _origin(named), text


def _read_prefixes(text: str) -> tuple[dict[str, str], str]:
    named: dict[str, str] = {}
    for _ in range(_MOST_PREFIXES):
        if text.startswith("{") and (inner := _message(text)) is not None:
            text = inner
            continue
        first = text[:1]
        match = next((match for chars, prefix in _PREFIXES if first in chars and (match := prefix.match(text))), None)
        if match is None:
            break
        named |= {name: value for name, value in match.groupdict().items() if value is not None}
        text = text[match.end() :]
    return named, text.rstrip()


def _origin(named: dict[str, str]) -> Origin:
    host = named.pop("host", None)
    return Origin(host=host, **{name: int(number) for name, number in named.items()})


def _message(text: str) -> str | None:
    match = _JSON.search(text)
    if match is None:
        return None
    try:
        message = json.loads(f'"{match[1]}"', strict=False)
    except ValueError:
        return match[1]
    # JSON can escape half of a surrogate pair, which UTF-8 cannot encode.
    return str(message).encode("utf-8", "replace").decode()


def table_origin(before: str, origin: Origin) -> Origin:
    """The origin of a line in torchrun's table of failures: `origin`, with rank and host of the lines `before`."""
    ranks, hosts = _TABLE_RANK.findall(before), _TABLE_HOST.findall(before)
    return origin._replace(rank=int(ranks[-1]) if ranks else origin.rank, host=hosts[-1] if hosts else origin.host)


# Python's tracebacks --------------------------------------------------------------------------------------------------

_BEGIN = b"Traceback (most recent call last)"
# Limits of tracebacks and of their lines: a log with more repeats itself, and a longer traceback is a recursion.
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
    """One traceback: the `start` of its exception's line in the block, that line as `text`, and the raising `frame`.

    `is_chained`: the exception was raised because of the previous one, or while that one was handled. `is_ignored`:
    Python reports the exception and continues.
    """

    start: int
    origin: Origin
    text: str
    frame: str
    is_chained: bool
    is_ignored: bool


def tracebacks(block: bytes, *, is_first: bool = False) -> Iterator[Traceback]:
    """The complete tracebacks in a block of lines. The first block of a log may begin inside of a traceback."""
    at = block.find(_BEGIN)
    frame = block.find(b'File "', 0, at if at >= 0 else len(block)) if is_first else -1
    if frame >= 0 and (found := _read_traceback(block, block.rfind(b"\n", 0, frame) + 1, frame)) is not None:
        yield found
    for _ in range(_MOST):
        if at < 0:
            return
        start = block.rfind(b"\n", max(0, at - 4096), at) + 1
        if (found := _read_traceback(block, start, at)) is not None:
            yield found
        at = block.find(_BEGIN, at + len(_BEGIN))


def message_after(block: bytes, end: int, origin: Origin) -> str:
    """The message of an exception whose line ends with a colon: the lines of this origin that follow byte `end`."""
    texts = (text.strip() for _, text in _following(block, end, origin))
    return " ".join(islice(filter(None, texts), _MESSAGE_LINES))


def _read_traceback(block: bytes, start: int, at: int) -> Traceback | None:
    first = block[start : _end(block, at)]
    origin, text = read_prefixes(window(first, at - start))
    head, *inner = text[max(0, text.rfind("Traceback")) :].split("\n")
    # The last line of this origin that is not blank.
    earlier = block[max(0, start - _LOOK_BACK) : start].decode("utf-8", "replace").split("\n")
    before = (words for other, words in map(read_prefixes, reversed(earlier)) if other == origin and words)
    last = next(before, "") if text.startswith("Traceback") else text.partition("Traceback")[0]
    # The other lines of a message with several lines, or the lines that follow in the block.
    lines = (
        [(start, read_prefixes(line)[1]) for line in inner] if inner else _following(block, start + len(first), origin)
    )
    found = _exception_in(lines, len(text) - len(text.lstrip()))
    if found is None or not head:
        return None
    place, exception, frame = found
    return Traceback(
        start=place,
        origin=origin,
        text=exception,
        frame=frame,
        is_chained=any(marker in last for marker in _CHAINED),
        is_ignored=_IGNORED in last,
    )


def _end(block: bytes, at: int) -> int:
    return found if (found := block.find(b"\n", at)) >= 0 else len(block)


def _following(block: bytes, at: int, origin: Origin) -> Iterator[tuple[int, str]]:
    """The next lines of this origin after byte `at`, each with its start in the block."""
    for _ in range(_MOST_LINES):
        start = at + 1
        if start >= len(block):
            return
        at = _end(block, start)
        other, text = read_prefixes(window(block[start:at], 0))
        if other == origin:
            yield start, text


def _exception_in(lines: Iterable[tuple[int, str]], indent: int) -> tuple[int, str, str] | None:
    """The start and text of the exception's line, and the deepest frame. torchrun's table indents tracebacks."""
    frames: list[str] = []
    user_frames: list[str] = []
    for place, text in lines:
        if frame := _FRAME.match(text):
            function = f" in {frame['function']}" if frame["function"] else ""
            frames.append(f"{frame['file']}, line {frame['line']},{function}".rstrip(","))
            if not _LIBRARY.search(frame["file"]):
                user_frames.append(frames[-1])
        elif len(text) - len(text.lstrip()) <= indent:
            text = text.strip()
            return (place, text, (user_frames or frames or [""])[-1]) if _EXCEPTION.match(text) else None
    return None
