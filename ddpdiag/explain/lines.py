"""Read lines of logs: strip the prefixes of launchers, containers and loggers, and find the rank and host.

This module also finds Python's tracebacks: the line of the exception, and the deepest frame in the user's code. Because
lines of several ranks may alternate, a traceback is read from the following lines of the same rank and host only.
"""

import json
import re
import string
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile
from typing import NamedTuple

# Of a long line (progress bars, dumps), only its first bytes and the bytes around a card's anchor are read.
_BYTES_BEFORE_ANCHOR, _BYTES_AFTER_ANCHOR, _HEAD_BYTES = 1_000, 2_000, 200
# Words with a counter (gpu1, worker1) are not hosts; gpu01 and worker-01 are, since counters have no leading 0.
_NOT_A_HOST = r"(?!python|(?:epoch|step|iter|iteration|batch|rank|line)[-_]?\d*: |(?:gpu|cuda|worker)[-_]?(?!0\d)\d*: )"
_DAY_AND_TIME = r"\d{4}[-/]\d\d[-/]\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
_LETTERS = string.ascii_lowercase
# Patterns of prefixes, each with the characters that may begin it. Most lines begin with none, and are skipped quickly.
_PREFIXES = tuple(
    (frozenset(first), re.compile(pattern))
    for first, pattern in (
        # `srun -l`, which pads the numbers of ten and more tasks.
        (" " + string.digits, r" {0,5}(?P<task>\d{1,6}): "),
        # Open MPI's --tag-output, to which SageMaker adds more than the rank.
        ("[", r"\[(?:\d{1,6},)?(?:mpirank:)?(?P<rank>\d{1,6})(?:,[\w.-]{1,60})?\]<std(?:out|err|diag)>:\s?"),
        # Ray; SkyPilot.
        (
            "(",
            r"\([A-Za-z]\w{0,60}(?:, rank=(?P<rank>\d{1,6}),)? pid=\d{1,9}(?:, ip=(?P<host>[0-9a-fA-F.:]{1,45}))?\) ?",
        ),
        # Determined AI.
        (string.hexdigits, r"[0-9a-f]{8}(?: \[rank=(?P<rank>\d{1,6})\])? \|\| ?"),
        # vLLM, whose logger repeats its prefix on each line of a traceback; FastChat, which logs its standard error so.
        ("EW", r"(?:ERROR|WARNING) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w/.]{1,80}\.py:\d{1,6}\] ?"),
        (string.digits, rf"{_DAY_AND_TIME} \| [A-Z]{{4,8}} {{0,4}}\| std(?:out|err) \| ?"),
        # torch itself; torchrun's --tee.
        ("[", r"\[rank[ ]?(?P<rank>\d{1,6})\]:\s?"),
        ("[", r"\[[a-z_]{1,40}(?P<local_rank>\d{1,6})\]:\s?"),
        # pdsh, clush; DeepSpeed's launcher, which calls hosts worker-1; `kubectl logs --prefix`; docker compose.
        (_LETTERS, rf"{_NOT_A_HOST}(?:slurmstepd-)?(?P<host>[a-z][a-z.-]{{0,60}}\d[a-z0-9.-]{{0,60}}): "),
        (string.digits, r"(?P<host>\d{1,3}(?:\.\d{1,3}){3}): "),
        ("w", r"worker-\d{1,6}: "),
        ("[", r"\[pod/(?P<host>[a-z0-9.-]{1,80})/[a-z0-9.-]{1,80}\] "),
        (_LETTERS, r"(?P<host>[a-z][\w.-]{0,60}[-_]\d[\w.-]{0,60}) {1,40}\| ?"),
        # containerd, for each line of a container; the times of loggers and CloudWatch; the milliseconds of `aws logs`.
        (string.digits, rf"{_DAY_AND_TIME} std(?:out|err) [FP] "),
        # SGLang; the rank is that in the group for tensor parallelism, mostly the only one.
        ("[", rf"\[{_DAY_AND_TIME}(?: DP\d{{1,4}})? TP(?P<rank>\d{{1,4}})(?: EP\d{{1,4}})?\] "),
        # The pattern keeps the indentation of a traceback's frames.
        ("[" + string.digits, rf"\[?{_DAY_AND_TIME}\]?[ \t](?:[ \t]{{1,3}}(?!File \"|[ \t]))?"),
        # Python's logging after the time: the logger's name and a level that is no failure.
        ("-", r"- [\w.-]{1,60} - (?:DEBUG|INFO|WARNING) - "),
        # Lines quoted in a mail or an issue; lines counted by LlamaFactory.
        (">", r"> ?"),
        ("[", r"\[\d{1,6}\] (?=\[)"),
        ("1", r"1\d{12}[ \t]"),
    )
)
# No line has more: the times of a container and a logger, srun's task, and the ranks of torchrun and torch.
_MAX_PREFIXES = 5
# The message in a line that is a JSON object; `py_callstack` is the traceback in torch's error.json.
_JSON_MESSAGE = re.compile(r'"(?:log|message|msg|textPayload|MESSAGE|py_callstack)"\s{0,4}:\s{0,4}"((?:[^"\\]|\\.)*)')
_ERROR_FILE_START = '{"message": {"message": '

_ORIGIN_PATTERNS = (
    ("Rank ", re.compile(r"\bRank (?P<rank>\d{1,6})\]")),
    (" [", re.compile(r"(?:^|\s)(?P<host>[A-Za-z][\w.-]{0,80}):\d{1,7}:\d{1,7} \[\d{1,3}\]")),
)
# torchrun's table of failures has a worker's rank and host on separate lines above the worker's exit code.
_TABLE_RANK = re.compile(r"rank {6}: (\d{1,6}) ")
_TABLE_HOST = re.compile(r"host {6}: (\S{1,100})")


class Origin(NamedTuple):
    """The rank, local rank (torchrun), task (`srun -l`) and host that printed a line, each None if not shown."""

    rank: int | None = None
    local_rank: int | None = None
    task: int | None = None
    host: str | None = None

    @property
    def is_process(self) -> bool:
        """Whether a single process is named, rather than only a host or nothing."""
        return (self.rank, self.local_rank, self.task) != (None, None, None)


UNKNOWN_ORIGIN = Origin()


def completed(origin: Origin, default: Origin) -> Origin:
    """The origin, with what it does not name taken from `default`."""
    return origin._replace(
        **{name: getattr(default, name) for name, value in origin._asdict().items() if value is None}
    )


# Lines up to this length are not clipped.
MAX_LINE_BYTES = _HEAD_BYTES + _BYTES_BEFORE_ANCHOR + _BYTES_AFTER_ANCHOR


def clip_line(line: bytes, at: int) -> str:
    """Decode a line. Of a long line, only the first bytes and those around byte `at` are kept."""
    if len(line) > MAX_LINE_BYTES:
        line = line[:_HEAD_BYTES] + line[max(_HEAD_BYTES, at - _BYTES_BEFORE_ANCHOR) : at + _BYTES_AFTER_ANCHOR]
    return line.decode("utf-8", "replace")


def read_line(text: str) -> tuple[Origin, str]:
    """The origin of a line, and its text without the prefixes of launchers and loggers.

    If the line is a JSON object, the text is the message in that object, which may have several lines.
    """
    groups, text = _strip_prefixes(text)
    for marker, pattern in _ORIGIN_PATTERNS:
        if marker in text and (match := pattern.search(text)):
            groups = match.groupdict() | groups
    return _origin_of(groups), text


def read_prefixes(text: str) -> tuple[Origin, str]:
    """Do the same as `read_line`, but take the origin from the prefixes only, not from the text after them."""
    groups, text = _strip_prefixes(text)
    return _origin_of(groups), text


def _strip_prefixes(text: str) -> tuple[dict[str, str], str]:
    groups: dict[str, str] = {}
    for _ in range(_MAX_PREFIXES):
        if text.startswith("{") and (message := _json_message(text)) is not None:
            text = message
            continue
        first = text[:1]
        match = next((match for chars, prefix in _PREFIXES if first in chars and (match := prefix.match(text))), None)
        if match is None:
            break
        groups |= {name: value for name, value in match.groupdict().items() if value is not None}
        text = text[match.end() :]
    return groups, text.rstrip()


def _origin_of(groups: dict[str, str]) -> Origin:
    host = groups.pop("host", None)
    return Origin(host=host, **{name: int(number) for name, number in groups.items()})


def _json_message(text: str) -> str | None:
    # torch's error.json has the last line of the traceback before the traceback.
    match = _JSON_MESSAGE.search(text, len(_ERROR_FILE_START) if text.startswith(_ERROR_FILE_START) else 0)
    if match is None:
        return None
    try:
        message = json.loads(f'"{match[1]}"', strict=False)
    except ValueError:
        return match[1]
    # A JSON escape can be half of a surrogate pair, which UTF-8 cannot encode.
    return str(message).encode("utf-8", "replace").decode()


def table_origin(before: str, origin: Origin) -> Origin:
    """The origin of a line in torchrun's table of failures: `origin` with the rank and host of the lines `before`."""
    ranks, hosts = _TABLE_RANK.findall(before), _TABLE_HOST.findall(before)
    return origin._replace(rank=int(ranks[-1]) if ranks else origin.rank, host=hosts[-1] if hosts else origin.host)


_TRACEBACK_START = b"Traceback (most recent call last)"
# At most so many tracebacks in a block: more are repetitions. A traceback with more lines comes from a recursion.
_MAX_TRACEBACKS, _MAX_TRACEBACK_LINES = 500, 300
_LOOK_BACK_BYTES = 400
_MAX_MESSAGE_LINES = 3
_FRAME = re.compile(r'\s+File "(?P<file>[^"]{1,400})", line (?P<line>\d{1,9})(?:, in (?P<function>\S{1,200}))?')
_NUMBER = re.compile(r"\d+")
# A carriage return, which progress bars print, ends a line, too.
_LINE_END = re.compile(rb"\r?\n|\r")
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Za-z_]\w{0,80}(?::(?: |$)|$)")
_CHAINED_MARKERS = ("During handling of the above exception", "direct cause of the following exception")
# Python prints this while a process ends or frees memory, also in healthy jobs.
_IGNORED_MARKER = "Exception ignored in"
LIBRARY_FILE = re.compile(
    r"^<|/(?:site|dist)-packages/|/lib(?:64)?/python\d|/importlib/|/bin/(?:torchrun|accelerate|deepspeed)$"
)


class Traceback(NamedTuple):
    """A traceback in a block of lines.

    `text` is the line of its exception, `start` the byte at which that line begins in the block, and `frame` the place
    in the code that raised it. `is_chained` is set if the exception was caused by the previous exception, or was raised
    while that was handled. `is_ignored` is set if Python reported the exception and continued.
    """

    start: int
    origin: Origin
    text: str
    frame: str
    is_chained: bool
    is_ignored: bool


def tracebacks(block: bytes, *, is_first: bool = False) -> Iterator[Traceback]:
    """Yield the complete tracebacks in a block of lines, and with `is_first` also one that began before the block."""
    at = block.find(_TRACEBACK_START)
    frame = block.find(b'File "', 0, at if at >= 0 else len(block)) if is_first else -1
    if frame >= 0 and (traceback := _read_traceback(block, _line_start(block, frame), frame)) is not None:
        yield traceback
    for _ in range(_MAX_TRACEBACKS):
        if at < 0:
            return
        if (traceback := _read_traceback(block, _line_start(block, at), at)) is not None:
            yield traceback
        at = block.find(_TRACEBACK_START, at + len(_TRACEBACK_START))


def message_after(block: bytes, end: int, origin: Origin) -> str:
    """The message of an exception whose line ends with a colon: the next few lines of `origin` after byte `end`."""
    texts = (text.strip() for _, text in _following_lines(block, end, origin))
    return " ".join(islice(filter(None, texts), _MAX_MESSAGE_LINES))


def _read_traceback(block: bytes, start: int, at: int) -> Traceback | None:
    first_line = block[start : _line_end(block, at)[0]]
    origin, text = read_prefixes(clip_line(first_line, at - start))
    before_head = text[: max(0, text.rfind("Traceback"))]
    head, *message = text[len(before_head) :].split("\n")
    # The line before the traceback, of the same origin and not blank, shows whether its exception is chained.
    earlier = block[max(0, start - _LOOK_BACK_BYTES) : start].decode("utf-8", "replace").split("\n")
    before = (words for other, words in map(read_prefixes, reversed(earlier)) if other == origin and words)
    line_before = next(before, "") if text.startswith("Traceback") else text.partition("Traceback")[0]
    # The traceback is inside a JSON message with several lines, or on the following lines of the block.
    lines = (
        [(start, read_prefixes(line)[1]) for line in message]
        if message
        else _without_prefix(before_head, _following_lines(block, start + len(first_line), origin))
    )
    found = _find_exception(lines, len(text) - len(text.lstrip()))
    if found is None or not head:
        return None
    start_of_text, exception, frame = found
    return Traceback(
        start=start_of_text,
        origin=origin,
        text=exception,
        frame=frame,
        is_chained=any(marker in line_before for marker in _CHAINED_MARKERS),
        is_ignored=_IGNORED_MARKER in line_before,
    )


def _line_start(block: bytes, at: int) -> int:
    return max(block.rfind(end, max(0, at - 4096), at) for end in (b"\n", b"\r")) + 1


def _line_end(block: bytes, at: int) -> tuple[int, int]:
    """The byte at which the line that contains byte `at` ends, and the byte at which the next line begins."""
    return end.span() if (end := _LINE_END.search(block, at)) else (len(block), len(block))


def _following_lines(block: bytes, at: int, origin: Origin) -> Iterator[tuple[int, str]]:
    """Yield the next lines of `origin` after byte `at`: the byte at which each begins, and its text."""
    _, start = _line_end(block, at)
    for _ in range(_MAX_TRACEBACK_LINES):
        if start >= len(block):
            return
        end, following = _line_end(block, start)
        other, text = read_prefixes(clip_line(block[start:end], 0))
        if other == origin:
            yield start, text
        start = following


def _without_prefix(before_head: str, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """The lines of a traceback without the prefix that a logger of any program put before each of them.

    The prefix is what the first line has in common with the text `before_head` of the traceback, whatever the numbers
    in it are. Lines without it belong to another traceback or program.
    """
    for start, text in lines:
        letters = zip(_NUMBER.sub("0", before_head), _NUMBER.sub("0", text), strict=False)
        common = "".join(letter for letter, _ in takewhile(lambda pair: pair[0] == pair[1], letters))
        words = re.escape(common.rstrip()).replace("0", r"\d+")
        prefix = re.compile(f"{words} {{0,{len(common) - len(common.rstrip())}}}") if words else None
        yield start, text[match.end() :] if prefix and (match := prefix.match(text)) else text
        for later, text in lines:
            if prefix is None:
                yield later, text
            elif match := prefix.match(text):
                yield later, text[match.end() :]


def _find_exception(lines: Iterable[tuple[int, str]], indent: int) -> tuple[int, str, str] | None:
    """The start and text of the first line indented at most `indent`, and the deepest frame. None if no exception."""
    frames: list[str] = []
    user_frames: list[str] = []
    for start, text in lines:
        if frame := _FRAME.match(text):
            function = f" in {frame['function']}" if frame["function"] else ""
            frames.append(f"{frame['file']}, line {frame['line']},{function}".rstrip(","))
            if not LIBRARY_FILE.search(frame["file"]):
                user_frames.append(frames[-1])
        elif len(text) - len(text.lstrip()) <= indent:
            text = text.strip()
            return (start, text, (user_frames or frames or [""])[-1]) if _EXCEPTION.match(text) else None
    return None
