"""Read the lines of NCCL's own diagnostics, its ATTN lines, and lines about network requests that do not complete.

The patterns match NCCL 2.31 and 2.32: src/ras/diagnostics_*.cc, src/diagnostics, src/debug.cc, and
src/transport/net_ib/wqe_lat_mon.cc. A line in another form is ignored.
"""

import re
from collections.abc import Sequence

from msgspec import Struct

_MAX_LINES = 64
_MAX_CHARACTERS = 500
# The end of the report that RAS prints from its own thread.
RAS_BEGIN, RAS_END = "NCCL DIAG === RAS Diagnostics ===", "NCCL DIAG RAS diagnostics completed"

_LINE = re.compile(r"NCCL (?:DIAG \[(OK|INFO)\]|ATTN |(?:INFO|WARN) NET/IB: WQE stall)")
# A set with more than eight ranks is shortened: "{0,1,2,3,4,5,6,7,...} (N=12)".
_RANK_SET = re.compile(r"rank\(s\) \{([\d,]{1,99})[,.]*\}")
_RANK = re.compile(r"(?:-nic|on|first) rank (\d{1,9})\b")
_LINK = re.compile(r"srcRank=(\d{1,9}) .*?dstRank=(\d{1,9})\b")
_HOST = re.compile(r"on host (\S+?)\.?(?: |$)|rank \d+ \(([^)\s]+)\):")


class Diagnostic(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. `level` is "OK", "INFO" (a fault, or data that NCCL could not get), or "ATTN" (also for stalls).

    `ranks`, `links` (source and destination) and `hosts` are those that the line names.
    """

    level: str
    text: str
    ranks: tuple[int, ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    hosts: tuple[str, ...] = ()


def parse_diagnostics(text: str, group: Sequence[int]) -> tuple[Diagnostic, ...]:
    """Parse output of NCCL. NCCL's ranks are positions in `group`, which has the job's ranks."""
    matches = [(match, line) for line in text.split("\n") if (match := _LINE.search(line))]
    lines = dict.fromkeys((match[1] or "ATTN", line.strip()[:_MAX_CHARACTERS]) for match, line in matches)
    return tuple(_parse(level, line, group) for level, line in [*lines][:_MAX_LINES])


def _parse(level: str, text: str, group: Sequence[int]) -> Diagnostic:
    numbers = [int(number) for found in _RANK_SET.findall(text) for number in found.split(",") if number]
    numbers += map(int, _RANK.findall(text))
    links = [(int(source), int(target)) for source, target in _LINK.findall(text)]
    return Diagnostic(
        level=level,
        text=text,
        ranks=tuple(dict.fromkeys(group[number] for number in numbers if number < len(group))),
        links=tuple((group[a], group[b]) for a, b in links if max(a, b) < len(group)),
        hosts=tuple(dict.fromkeys(host for found in _HOST.findall(text) for host in found if host)),
    )
