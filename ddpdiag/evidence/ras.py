"""Client of NCCL's RAS: the state of all communicators of a running job, as the job's processes know it.

Since NCCL 2.24 each process of a job has a RAS thread. It knows all processes that share communicators, directly or in
turn, and answers clients at NCCL_RAS_ADDR (localhost:28028). All processes of a host listen there (SO_REUSEPORT), so a
connection reaches any job of the user. Processes of a second user cannot listen at the same address.

- Up to 2.28.3 the answer is text. It lists only ranks that differ from most others; ranks that agree have no counters.
- 2.28.7 to 2.32.3 can answer in JSON. 2.28.7 and 2.28.9 omit a comma in each missing rank.
- `launched` counts the collectives that a rank has given to its GPU: broadcast, reduce, all-gather, reduce-scatter and
  all-reduce, but not sends, receives, or what a CUDA graph repeats. The progress counters of 2.32.3 are not shown.

Sources: NCCL's src/ras/client_support.cc of 2.24.3 to 2.30.7 and of 2.32's development, strings of 2.32.3's library.
"""

import re
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, structs

ADDRESS_VARIABLE, ENABLE_VARIABLE = "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"
DEFAULT_ADDRESS = "localhost:28028"
_ADDRESS = re.compile(r"(\[[0-9A-Za-z_.:%]{1,64}\]|[0-9A-Za-z_.-]{1,253}):(\d{1,5})")
# All commands at once: a command that is unknown to the version is answered by a line "ERROR: ...". With TIMEOUT, a
# process that does not respond delays the answer by 1 s instead of 5 s.
_QUESTION = b"CLIENT PROTOCOL 2\nTIMEOUT 1\nSET FORMAT json\nVERBOSE STATUS\n"
_HANDSHAKE = re.compile(rb"SERVER PROTOCOL \d{1,9}\n(?:(?:OK|ERROR: [^\n]*)\n)*")
# A connection may reach a stopped process or another job; the next one may reach another process.
_MAX_TRIES = 8
_FIRST_BYTES_SECONDS = 0.4
# A rank takes 560 bytes in each of its communicators: 1,024 ranks with 13 communicators have 7.5 MB.
_MAX_BYTES = 16 << 20
# The most counts that a text may imply: it names no rank of a large group.
_MAX_ENTRIES = 1 << 18

_Word = Annotated[str, Meta(pattern=r"\A[0-9A-Za-z_.:%+-]{1,64}\Z")]
_Number = Annotated[int, Meta(ge=-1, lt=1 << 31)]
_Index = Annotated[int, Meta(ge=0, lt=1 << 20)]
_Count = Annotated[int, Meta(ge=0)]


class MemberState(Enum):
    """The state of a rank in a communicator. Of the first three, RAS has no data on the communicator."""

    DEAD = "dead"  # the process has not responded for 60 s
    UNREACHABLE = "unreachable"  # the process does not respond
    MISSING = "missing"  # the process responds, but is not or no longer in the communicator
    ERROR = "error"  # NCCL reported an error to the rank
    ABORT = "abort"
    FINALIZE = "finalize"  # in ncclCommFinalize or ncclCommDestroy
    INIT = "init"  # in ncclCommInitRank
    RUNNING = "running"


class Status(Struct, frozen=True):
    """The status of a rank as the JSON shows it. `unresponsive` and `considered_dead` are those of missing ranks."""

    init_state: int = 0
    async_error: int = 0
    finalize_called: bool = False
    destroy_flag: bool = False
    abort_flag: bool = False
    unresponsive: bool | None = None
    considered_dead: bool = False

    @property
    def error(self) -> int:
        """The number of an error of NCCL (ncclResult_t), neither ncclSuccess (0) nor ncclInProgress (7). 0: none."""
        return next((number for number in (self.init_state, self.async_error) if number not in (0, 7)), 0)

    @property
    def state(self) -> MemberState:
        is_missing, is_closed = self.unresponsive is not None, self.finalize_called or self.destroy_flag
        flags = (
            self.considered_dead,
            self.unresponsive,
            is_missing,
            self.error,
            self.abort_flag,
            is_closed,
            self.init_state,
        )
        return next((state for state, flag in zip(MemberState, flags, strict=False) if flag), MemberState.RUNNING)


class Member(Struct, frozen=True, rename={"gpu": "nvml_dev", "launched": "collective_counts"}):
    """A rank of a communicator. `rank` counts within the communicator. `host` is an IP address (empty: not known).

    `launched` is, by collective, how many the rank has launched.
    """

    rank: _Index
    host: _Word = ""
    pid: _Number = -1
    gpu: _Number = -1
    status: Status = Status()
    launched: dict[_Word, _Count] = {}

    @property
    def state(self) -> MemberState:
        return self.status.state

    @property
    def process(self) -> tuple[str, int, int]:
        return self.host, self.pid, self.gpu


class Communicator(Struct, frozen=True):
    """A communicator: NCCL's hash of it, the number of its ranks, and the ranks that the answer describes."""

    hash: _Word
    size: _Index
    ranks: tuple[Member, ...] = ()
    missing_ranks: tuple[Member, ...] = ()

    @property
    def members(self) -> tuple[Member, ...]:
        return (*self.ranks, *self.missing_ranks)


class Snapshot(Struct, frozen=True):
    """The communicators of a job at one moment, and the number of its processes if the answer says that.

    `is_complete`: the answer describes all ranks. A text describes only the ranks that differ from most others.
    """

    communicators: tuple[Communicator, ...]
    is_complete: bool = True
    process_count: int | None = None

    def may_be_of(self, pids: Collection[int], world_size: int | None) -> bool:
        """Whether the job has one of the processes `pids`. A text names few processes, so their number must do."""
        if any(member.pid in pids for each in self.communicators for member in each.members):
            return True
        return not self.is_complete and (world_size is None or self.process_count in (None, world_size))


def read_snapshot(address: str, pids: Collection[int], world_size: int | None, end: float) -> Snapshot | str:
    """Ask RAS at `address` for the job with the processes `pids` until `end` (time.monotonic).

    Returns a snapshot, or the reason why there is none, without a full stop.
    """
    parts = _ADDRESS.fullmatch(address)
    if parts is None or int(parts[2]) >= 1 << 16:
        return f"{ADDRESS_VARIABLE} is no host and port: expected such as {DEFAULT_ADDRESS}"
    reason = ""
    for _ in range(_MAX_TRIES):
        try:
            snapshot = parse_answer(_ask((parts[1].strip("[]"), int(parts[2])), end))
        except TimeoutError:
            reason = f"{address} did not respond in time"
        except (OSError, UnicodeError) as error:  # refused, an unknown host, or a name that no host can have
            return f"{address}: {getattr(error, 'strerror', None) or error} (NCCL is older than 2.24, or disabled it)"
        else:
            if snapshot is None:
                return f"the answer of {address} is none of NCCL's, is cut off, or larger than {_MAX_BYTES >> 20} MiB"
            if snapshot.may_be_of(pids, world_size):
                return snapshot
            reason = f"only another job responds at {address}: give each job a {ADDRESS_VARIABLE} of its own"
        if time.monotonic() >= end:
            break
    return reason


def _ask(address: tuple[str, int], end: float) -> bytes:
    """Send the question, and read until the process closes the connection. Raises TimeoutError after `end`."""
    limit = min(end, time.monotonic() + _FIRST_BYTES_SECONDS)
    data = bytearray()
    with socket.create_connection(address, timeout=_seconds_until(limit)) as connection:
        connection.sendall(_QUESTION)
        while len(data) <= _MAX_BYTES:
            connection.settimeout(_seconds_until(limit))
            chunk = connection.recv(1 << 16)
            if not chunk:
                return bytes(data)
            data += chunk
            limit = end
    return b""


def _seconds_until(limit: float) -> float:
    seconds = limit - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def parse_answer(answer: bytes) -> Snapshot | None:
    """Parse the lines of the handshake and the status after them. None if it is not a complete answer of RAS."""
    handshake = _HANDSHAKE.match(answer)
    status = answer[handshake.end() :] if handshake else b""
    parse = next((parse for start, parse in _PARSERS.items() if status.startswith(start)), None)
    return parse(status) if parse else None


def _parse_json(status: bytes) -> Snapshot | None:
    repaired = re.sub(rb'("nvml_dev": -?\d+)(\s+"status")', rb"\1,\2", status)
    try:
        return msgspec.json.decode(repaired, type=Snapshot)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


_PROCESS = r"[Pp]rocess (?P<pid>\d{1,9}) on node (?P<host>[0-9A-Za-z_.:%-]{1,64})"
# A line on a group of ranks or on one rank: "  30 ranks have launched up to operation 640", "  Rank 3 has not launched
# any operations -- GPU 4 (NVML 7) managed by process 42 on node 10.0.0.1". Then ranks of the group may follow, by name.
_LINE = re.compile(
    r"  (?:Rank (?P<rank>\d{1,6})|\d{1,6} ranks)"
    r"(?: (?:has|have) (?:launched up to operation (?P<count>\d{1,18})|(?P<none>not launched any operations)))?"
    rf"(?: -- (?:GPU (?P<gpu>\d{{1,4}})(?: \(NVML (?P<nvml>\d{{1,4}})\))? managed by {_PROCESS}|\[.*\]))?"
)
# 2.24 and 2.25 name the ranks without data in one line.
_MISSING_LINE = re.compile(r"^  The missing ranks?: (\d{1,6}(?:,\d{1,6})*)$", re.M)
_COLLECTIVE = re.compile(r"^  Communicator ranks have different (\w{1,32}) operation counts\n", re.M)
_SECTION = re.compile(r"^#(\d{1,9})-\d{1,9} \(([0-9a-f]{1,16})\) ([A-Z]+)\n", re.M)
_DEAD = re.compile(r"^DEAD\n((?:  .*\n)*)", re.M)
_SIZE = re.compile(r"^ *(\d{1,9})(?: +\d+){2} +[\d-]+ +(\d{1,6}) +\d+ +[A-Z]+ +[A-Z,]+$", re.M)
_TOTALS = re.compile(r"^ *\d+ +\d+ +\d+ +(\d{1,9}) +\d+$", re.M)


def _parse_text(status: bytes) -> Snapshot | None:
    """Parse which ranks do not respond, and which have launched other numbers of collectives, if all are running."""
    head, _, body = status.decode("ascii", "replace").partition("\nCommunicators...")
    if "\nWarnings\n========\n" not in body:
        return None
    processes, *parts = _SECTION.split(body)
    sizes = dict(_SIZE.findall(processes))
    dead = {(match[2], int(match[1])) for text in _DEAD.findall(processes) for match in re.finditer(_PROCESS, text)}
    found: dict[tuple[str, int], dict[int, Member]] = {}
    entries = 0
    for group, name, word, text in zip(*(parts[index::4] for index in range(4)), strict=True):
        size = int(sizes.get(group, 0))
        entries += size * text.count(" operation counts\n")
        if entries > _MAX_ENTRIES:
            return None
        members = found.setdefault((name, size), {})
        if word == "INCOMPLETE":
            members |= {each.rank: each for each in _absent_members(text, dead, "\nINCOMPLETE\n" not in processes)}
        elif word == "MISMATCH" and "  Communicator ranks have different status\n" not in text:
            _add_counts(members, {*range(size)} - members.keys(), text)
    communicators = (Communicator(name, size, ranks=tuple(ranks.values())) for (name, size), ranks in found.items())
    total = _TOTALS.search(head)
    return Snapshot(tuple(communicators), is_complete=False, process_count=int(total[1]) if total else None)


def _absent_members(text: str, dead: Collection[tuple[str, int]], all_are_dead: bool) -> Iterator[Member]:
    listed = [_member(match) for match in _lines(text) if match["rank"]]
    for member in listed or [Member(int(rank)) for ranks in _MISSING_LINE.findall(text) for rank in ranks.split(",")]:
        is_dead = all_are_dead or (member.host, member.pid) in dead
        yield structs.replace(member, status=Status(unresponsive=True, considered_dead=is_dead))


def _add_counts(members: dict[int, Member], running: Collection[int], text: str) -> None:
    """Add to `members` what each rank has launched. A single group without names has all ranks that are not named."""
    _, *parts = _COLLECTIVE.split(text)
    for collective, block in zip(parts[::2], parts[1::2], strict=True):
        groups: list[tuple[int, list[Member]]] = []
        for match in _lines(block):
            if match["count"] or match["none"]:
                groups.append((int(match["count"] or 0), []))
            if match["rank"] and groups:
                groups[-1][1].append(_member(match))
        named = {member.rank for _, listed in groups for member in listed}
        unnamed = [listed for _, listed in groups if not listed]
        if len(unnamed) == 1:
            unnamed[0] += [Member(rank) for rank in running if rank not in named]
        for count, listed in groups:
            for member in listed:
                earlier = members.get(member.rank, member)
                place = member if member.host else earlier
                members[member.rank] = structs.replace(place, launched={**earlier.launched, collective: count})


def _lines(text: str) -> Iterator[re.Match[str]]:
    return filter(None, map(_LINE.fullmatch, text.splitlines()))


def _member(match: re.Match[str]) -> Member:
    gpu = int(match["nvml"] or match["gpu"] or -1)
    return Member(int(match["rank"]), match["host"] or "", int(match["pid"] or -1), gpu)


# The parser of each family of versions, by the first bytes of the answer.
_PARSERS: Mapping[bytes, Callable[[bytes], Snapshot | None]] = {b"{": _parse_json, b"NCCL version ": _parse_text}
