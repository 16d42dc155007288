"""Logs of one job: their order, the rank and host that their paths name, and the times of their lines.

Launchers write a file for each rank or host, and name the rank or host in the path: rank3.log, log.3,
slurm-123-n17.out, torchrun's RUN_ID_x/attempt_0/3/stderr.log (local rank 3). A rank or host that a line itself names
is preferred.
"""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from time import localtime
from typing import NamedTuple

from ddpdiag.explain.lines import UNKNOWN_ORIGIN, Origin

_PROCESS_PATTERNS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"local[_-]?rank[._-]?(?P<local_rank>\d{1,6})(?!\d)",
        r"(?<![a-z])rank[._-]?(?P<rank>\d{1,6})(?!\d)",
        r"(?:^|/)attempt_\d+/(?P<local_rank>\d{1,6})/(?:stdout\.log|stderr\.log|error\.json)$",
        r"(?<![a-z])task[._-]?(?P<task>\d{1,6})(?!\d)",
    )
)
# A bare number may also be that of a job, so it is a rank only if the numbers of the logs begin as those of ranks do.
_BARE_NUMBER = re.compile(
    r"(?:^|/)(\d{1,6})/(?:std)?(?:out|err)[\w.]*$|(?:^|/)(?:log|(?:std)?(?:out|err)|output)[._-](\d{1,6})(?:\.[a-z]{3})?$"
)
_HOST_PATTERNS = (
    re.compile(r"(?:^|/)slurm-\d+[._-](?P<host>[A-Za-z][\w.-]{0,60}?)\.(?:log|out|err|txt)$"),
    re.compile(r"(?:^|/)(?P<host>(?:n|nid|cn|ip|[a-z-]{0,20}(?:node|host|compute))-?\d[\d-]*)(?=[/_.]|$)"),
)
_SLURM_JOB = re.compile(r"(?:^|/)slurm-(\d+)")
_NUMBER = re.compile(r"(\d+)")
_RANK_IN_LINE = re.compile(rb"\[rank ?(\d{1,6})\]:|\bRank (\d{1,6})\]")
_MONTHS = b"Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
# error.json; ISO 8601 (Slurm, loggers), with "_" in torchrun's table; glog ("[E1117 12:34:56.789 "); syslog.
_TIME = re.compile(
    rb"\"timestamp\": \"(\d{10})\"|"
    rb"(?:\b\d{4}[-/](\d\d)[-/](\d\d)[ T_]|\b[IWEF](\d\d)(\d\d) |\b(" + b"|".join(_MONTHS) + rb") {1,2}(\d{1,2}) )"
    rb"(\d\d):(\d\d):(\d\d(?:[.,]\d{1,9})?)"
)
_TIME_SEARCH_BYTES = 16_384


class Log(NamedTuple):
    """A log that is read in `pieces`. Its `origin` holds for lines that name no rank or host themselves."""

    name: str
    pieces: Iterable[bytes]
    origin: Origin = UNKNOWN_ORIGIN


def origins_of_paths(paths: Sequence[str]) -> dict[str, Origin]:
    """The rank, local rank, task and host that the path of each log names."""
    tails = {path: "/".join(PurePath(os.path.abspath(path)).parts[-3:]) for path in paths}  # attempt_0/3/stderr.log
    origins = {path: _origin_of_path(tail) for path, tail in tails.items()}
    # Slurm names the log of a whole job after the job's first host, so the name of one host alone proves nothing.
    if len({origin.host for origin in origins.values()} - {None}) == 1:
        origins = {path: origin._replace(host=None) for path, origin in origins.items()}
    matches = {path: _BARE_NUMBER.search(tail) for path, tail in tails.items() if not origins[path].is_process}
    numbers = {path: int(match[1] or match[2]) for path, match in matches.items() if match is not None}
    if numbers and min(numbers.values()) < len(paths):
        origins |= {path: origins[path]._replace(rank=number) for path, number in numbers.items()}
    return origins


def _origin_of_path(path: str) -> Origin:
    process = next((match for pattern in _PROCESS_PATTERNS if (match := pattern.search(path))), None)
    host = next((match["host"] for pattern in _HOST_PATTERNS if (match := pattern.search(path))), None)
    numbers = process.groupdict() if process is not None else {}
    return Origin(host=host, **{name: int(number) for name, number in numbers.items()})


def origin_of_head(block: bytes, origin: Origin) -> Origin:
    """The origin of a log, with the global rank in its first lines where the path names only the local rank."""
    if origin.local_rank is None or origin.rank is not None:
        return origin
    ranks = {int(first or second) for first, second in _RANK_IN_LINE.findall(block)}
    return origin._replace(rank=ranks.pop()) if len(ranks) == 1 else origin


def in_order(paths: Iterable[str]) -> list[str]:
    """Sort paths by name, with numbers in their order: rank2.log before rank10.log."""

    def key(path: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in _NUMBER.split(path)]

    return sorted(paths, key=key)


def doubt_about_job(paths: Sequence[str]) -> str:
    """Why the logs may be those of several jobs; empty if their paths have a common form."""
    jobs = {match[1] for path in paths if (match := _SLURM_JOB.search(path))}
    if len(jobs) > 1:
        return f"their names have {len(jobs)} job numbers of Slurm"
    forms = {_NUMBER.sub("", PurePath(path).stem) for path in paths}
    has_origin = any(origin != UNKNOWN_ORIGIN for origin in origins_of_paths(paths).values())
    return "their names have no common form" if 1 < len(forms) > len(paths) / 2 and not has_origin else ""


def time_near(block: bytes, start: int, end: int) -> float | None:
    """The time in the line from `start` to `end`, else in the nearest earlier line, else in the nearest later line.

    The time is in seconds and orders the lines of one job: lines of glog have no year, so the year is left out.
    """
    matches = [*_TIME.finditer(block, max(0, start - _TIME_SEARCH_BYTES), end)]
    match = matches[-1] if matches else _TIME.search(block, end, end + _TIME_SEARCH_BYTES)
    if match is None:
        return None
    second = float((match[10] or b"0").replace(b",", b"."))
    if match[1]:
        _, month, day, hour, minute, *_ = localtime(int(match[1]))
        second = int(match[1]) % 60
    else:
        month = _MONTHS.index(match[6]) + 1 if match[6] else int(match[2] or match[4])
        day, hour, minute = int(match[3] or match[5] or match[7]), int(match[8]), int(match[9])
    return (month * 31 + day) * 86_400 + hour * 3_600 + minute * 60 + second
