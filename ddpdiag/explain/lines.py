"""One line of a log: who printed it, and what is left without the prefixes that launchers and loggers put before it."""

import re
from typing import NamedTuple

# Longer lines are progress bars and dumps; what is searched for stands near its anchor.
_BEFORE, _AFTER, _HEAD = 1_000, 2_000, 200

# `srun -l`, `pdsh`, Open MPI's --tag-output, torch's own [rank3]:, torchrun's --tee, Ray, time stamps of loggers.
_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?P<task>\d{1,6}): ",
        r"\[(?:\d{1,6},)?(?P<rank>\d{1,6})\]<std(?:out|err|diag)>:\s?",
        r"\([A-Za-z]\w{0,60} pid=\d{1,9}(?:, ip=(?P<host>[0-9a-fA-F.:]{1,45}))?\) ?",
        r"\[rank[ ]?(?P<rank>\d{1,6})\]:\s?",
        r"\[[a-z_]{1,40}(?P<local>\d{1,6})\]:\s?",
        # What counts is no host; but gpu01 and worker-01 are, since nobody counts so.
        r"(?!python|(?:epoch|step|iter|iteration|batch|rank|line)[-_]?\d*: |(?:gpu|cuda|worker)[-_]?(?!0\d)\d*: )"
        r"(?:slurmstepd-)?(?P<host>[a-z][a-z.-]{0,60}\d[a-z0-9.-]{0,60}): ",
        r"\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?Z?\]?[ \t]{1,4}",
    )
)
# A logger's time, srun's task, torchrun's rank and torch's own: nothing has more.
_MOST_PREFIXES = 5
_SPEAKERS = (
    re.compile(r"\bRank (?P<rank>\d{1,6})\]"),
    re.compile(r"(?:^|\s)(?P<host>[A-Za-z][\w.-]{0,80}):\d{1,7}:\d{1,7} \[\d{1,3}\]"),
)
# torchrun's table of failures has a line for each; one of four lies between the rank and its exit code.
_TABLE_RANK = re.compile(r"rank {6}: (\d{1,6}) ")
_TABLE_HOST = re.compile(r"host {6}: (\S{1,100})")


class Speaker(NamedTuple):
    """Who printed a line, as far as it says so."""

    rank: int | None = None
    local_rank: int | None = None
    task: int | None = None
    host: str | None = None


class Line(NamedTuple):
    """A line without its prefixes."""

    speaker: Speaker
    text: str


def window(line: bytes, at: int) -> str:
    """The line as text; of a long one its head and what lies around `at`."""
    if len(line) > _HEAD + _BEFORE + _AFTER:
        line = line[:_HEAD] + line[max(_HEAD, at - _BEFORE) : at + _AFTER]
    return line.decode("utf-8", "replace")


def read_line(text: str) -> Line:
    """Who speaks, and what is said."""
    found: dict[str, str] = {}
    for _ in range(_MOST_PREFIXES):
        match = next((match for prefix in _PREFIXES if (match := prefix.match(text))), None)
        if match is None:
            break
        found |= {name: value for name, value in match.groupdict().items() if value is not None}
        text = text[match.end() :]
    for pattern in _SPEAKERS:
        if speaks := pattern.search(text):
            found = speaks.groupdict() | found
    numbers = {name: int(found[name]) if name in found else None for name in ("rank", "local", "task")}
    return Line(Speaker(numbers["rank"], numbers["local"], numbers["task"], found.get("host")), text.rstrip())


def table_speaker(before: str, speaker: Speaker) -> Speaker:
    """The worker of which a line of torchrun's table of failures tells, from the lines before it."""
    ranks, hosts = _TABLE_RANK.findall(before), _TABLE_HOST.findall(before)
    return speaker._replace(rank=int(ranks[-1]) if ranks else speaker.rank, host=hosts[-1] if hosts else speaker.host)
