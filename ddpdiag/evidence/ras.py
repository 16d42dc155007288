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

_Word = Annotated[str, Meta(pattern=r"\A[0-9A-Za-z_.:%+-]{1,64}\Z")]
_Number = Annotated[int, Meta(ge=-1, lt=1 << 31)]
_Index = Annotated[int, Meta(ge=0, lt=1 << 20)]
_Count = Annotated[int, Meta(ge=0)]


class MemberState(Enum):
    """The state of a rank in a communicator. The last three are ranks of which RAS has no data on the communicator."""

    RUNNING = "RUNNING"
    INIT = "INIT"  # in ncclCommInitRank
    FINALIZE = "FINALIZE"  # in ncclCommFinalize or ncclCommDestroy
    ABORT = "ABORT"
    ERROR = "ERROR"  # NCCL reported an error to the rank
    MISSING = "NOCOMM"  # the process responds, but is not or no longer in the communicator
    UNREACHABLE = "UNREACHABLE"  # the process does not respond
    DEAD = "DEAD"  # the process has not responded for 60 s


# ncclRemoteError: another rank failed.
REMOTE_ERROR = 6


class Member(Struct, frozen=True):
    """A rank of a communicator. `rank` counts within the communicator. `host` is an IP address (empty: not known).

    `launched` is, by collective, how many the rank has launched. `error` is the number of NCCL's error (ncclResult_t).
    """

    rank: int
    host: str = ""
    pid: int = -1
    gpu: int = -1
    state: MemberState = MemberState.RUNNING
    error: int = 0
    launched: Mapping[str, int] = {}

    @property
    def process(self) -> tuple[str, int, int]:
        return self.host, self.pid, self.gpu


class Communicator(Struct, frozen=True):
    """A communicator: NCCL's hash of it, the number of its ranks, and those of its ranks that the answer describes."""

    name: str
    size: int
    members: tuple[Member, ...]


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
        return not self.is_complete and world_size in (None, self.process_count)


def read_snapshot(address: str, pids: Collection[int], world_size: int | None, end: float) -> Snapshot | str:
    """Ask RAS at `address` for the job with the processes `pids` until `end` (time.monotonic).

    Returns a snapshot, or the reason why there is none, without a full stop.
    """
    parts = _ADDRESS.fullmatch(address)
    if parts is None or int(parts[2]) >= 1 << 16:
        return f"{ADDRESS_VARIABLE} is no host and port: expected such as {DEFAULT_ADDRESS}"
    where, reason = f"port {parts[2]}", ""
    for _ in range(_MAX_TRIES):
        try:
            snapshot = parse_answer(_ask((parts[1].strip("[]"), int(parts[2])), end))
        except TimeoutError:
            reason = f"{where} did not respond in time"
        except (OSError, UnicodeError) as error:  # refused, an unknown host, or a name that no host can have
            return f"{where}: {getattr(error, 'strerror', None) or error} (NCCL is older than 2.24, or disabled it)"
        else:
            if snapshot is None:
                return f"the answer of {where} is none of NCCL's, is cut off, or larger than {_MAX_BYTES >> 20} MiB"
            if snapshot.may_be_of(pids, world_size):
                return snapshot
            reason = f"only another job responds at {where}: give each job a {ADDRESS_VARIABLE} of its own"
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


class _Status(Struct, frozen=True):
    init_state: int = 0
    async_error: int = 0
    finalize_called: bool = False
    destroy_flag: bool = False
    abort_flag: bool = False
    # Only missing ranks have these two.
    unresponsive: bool | None = None
    considered_dead: bool = False

    @property
    def error(self) -> int:
        """The number of an error: neither ncclSuccess (0) nor ncclInProgress (7)."""
        return next((number for number in (self.init_state, self.async_error) if number not in (0, 7)), 0)

    @property
    def state(self) -> MemberState:
        facts = {
            MemberState.DEAD: self.considered_dead,
            MemberState.UNREACHABLE: bool(self.unresponsive),
            MemberState.MISSING: self.unresponsive is not None,
            MemberState.ERROR: bool(self.error),
            MemberState.ABORT: self.abort_flag,
            MemberState.FINALIZE: self.finalize_called or self.destroy_flag,
            MemberState.INIT: bool(self.init_state),
        }
        return next((state for state, holds in facts.items() if holds), MemberState.RUNNING)


class _Rank(Struct, frozen=True):
    rank: _Index
    host: _Word
    pid: _Number
    nvml_dev: _Number
    status: _Status
    collective_counts: dict[_Word, _Count] = {}

    def member(self) -> Member:
        state, error = self.status.state, self.status.error
        return Member(self.rank, self.host, self.pid, self.nvml_dev, state, error, self.collective_counts)


class _Communicator(Struct, frozen=True):
    hash: _Word
    secondary_hash: _Word
    size: _Index
    ranks: tuple[_Rank, ...]
    missing_ranks: tuple[_Rank, ...]


class _Answer(Struct, frozen=True):
    communicators: tuple[_Communicator, ...]


def _parse_json(status: bytes) -> Snapshot | None:
    repaired = re.sub(rb'("nvml_dev": -?\d+)(\s+"status")', rb"\1,\2", status)
    try:
        answer = msgspec.json.decode(repaired, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    communicators = []
    for each in answer.communicators:
        members = tuple(rank.member() for rank in (*each.ranks, *each.missing_ranks))
        communicators.append(Communicator(f"{each.hash} {each.secondary_hash}", each.size, members))
    return Snapshot(tuple(communicators))


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
    for group, name, word, text in zip(*(parts[index::4] for index in range(4)), strict=True):
        members = found.setdefault((name, int(sizes.get(group, 0))), {})
        if word == "INCOMPLETE":
            members |= {each.rank: each for each in _absent_members(text, dead, "\nINCOMPLETE\n" not in processes)}
        elif word == "MISMATCH" and "  Communicator ranks have different status\n" not in text:
            _add_counts(members, {*range(int(sizes.get(group, 0)))} - members.keys(), text)
    communicators = (Communicator(f"0x{name}", size, tuple(ranks.values())) for (name, size), ranks in found.items())
    total = _TOTALS.search(head)
    count = int(total[1]) if total else None
    return Snapshot(tuple(communicators), is_complete=False, process_count=count)


def _absent_members(text: str, dead: Collection[tuple[str, int]], all_are_dead: bool) -> Iterator[Member]:
    listed = [_member(match) for match in _lines(text) if match["rank"]]
    for member in listed or [Member(int(rank)) for ranks in _MISSING_LINE.findall(text) for rank in ranks.split(",")]:
        is_dead = all_are_dead or (member.host, member.pid) in dead
        yield structs.replace(member, state=MemberState.DEAD if is_dead else MemberState.UNREACHABLE)


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
