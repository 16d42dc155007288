"""What this process's libraries know of its collectives: torch's flight recorder, and NCCL's RAS service.

Which collectives did this process post last? The recorder is on by default for nccl and gloo (torch 2.13), and is read
in the process itself, so that no file is needed. Its `state` and `retired` are not read: for gloo every entry is
"scheduled" for ever, and one that is not over can be "retired" (measured, torch 2.13).

What does NCCL know of a job that hangs? From 2.24 on a thread of NCCL in each process listens on localhost:28028 (or
$NCCL_RAS_ADDR); all processes of a user on a host share that port. Any of them collects from all others what each
communicator is at, and names ranks that lag behind, or do not answer. The protocol is text (src/ras/client.cc and
client_support.cc of NCCL): "CLIENT PROTOCOL 2" is answered by "SERVER PROTOCOL n", "TIMEOUT seconds" by "OK", "VERBOSE
STATUS" by the report, at whose end the connection is closed.
"""

import contextlib
import math
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct, field

from ddpdiag.model import Collective
from ddpdiag.probes.host.kernel import PROC, open_files, tcp_sockets

LAST = 8
# The first for gloo (torch 2.8 and newer), the second for NCCL; in newer builds both give the same.
_READERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")

# A group, by its reader and torch's number for it, which no later group of the process gets again.
Group = tuple[str, str]


class _Entry(Struct, frozen=True):
    """What is used of an entry (version 2.10 of the trace; the fields are there since torch 2.5)."""

    profiling_name: str
    process_group: tuple[str, ...] = ()
    pg_id: int = 0
    collective_seq_id: int = 0
    p2p_seq_id: int = 0
    is_p2p: bool = False
    input_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    time_created_ns: int = 0


class _Trace(Struct, frozen=True):
    entries: tuple[_Entry, ...] = ()
    pg_status: dict[str, object] = field(default_factory=dict)


_trace: msgspec.json.Decoder[_Trace] = msgspec.json.Decoder(_Trace)


class TraceDump(NamedTuple):
    """What a dump holds: the last collectives, the oldest first, and when the newest was posted (Unix time)."""

    collectives: tuple[Collective, ...]
    newest_unix_seconds: float | None


def read_dump(trace: object) -> TraceDump | None:
    """What another process wrote of its flight recorder, as plain data; None for something else."""
    try:
        entries = msgspec.convert(trace, _Trace, strict=False).entries
    except msgspec.ValidationError:
        return None
    newest = max((entry.time_created_ns / 1e9 for entry in entries), default=None)
    return TraceDump(_last(entries), newest)


def groups() -> frozenset[Group]:
    """The groups in which this process has posted anything so far; takes some 10 us."""
    return frozenset((name, group) for name, trace in _traces(includeCollectives=False) for group in trace.pg_status)


def posted(before: frozenset[Group]) -> tuple[Collective, ...] | None:
    """The last collectives of other groups than those `before`, the oldest first.

    None without torch.distributed (it is not imported for this) or without a flight recorder in it.
    """
    traces = _traces()
    if not traces:
        return None
    return _last([e for name, trace in traces for e in trace.entries if (name, str(e.pg_id)) not in before])


def _traces(**options: bool) -> list[tuple[str, _Trace]]:
    c10d = sys.modules.get("torch._C._distributed_c10d")
    readers = [(name, reader) for name in _READERS if (reader := getattr(c10d, name, None)) is not None]
    return [(name, trace) for name, reader in readers if (trace := _read(reader, options)) is not None]


def _read(reader: Callable[..., bytes], options: Mapping[str, bool]) -> _Trace | None:
    """None for a trace of another form than those known."""
    try:
        return _trace.decode(reader(**options))
    except (RuntimeError, TypeError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _last(entries: Sequence[_Entry]) -> tuple[Collective, ...]:
    """The last collectives, the oldest first.

    A group that was opened again has its old name and counts from 1: only what belongs to the newest one is left.
    """
    ordered = sorted(dict.fromkeys(entries), key=lambda entry: entry.time_created_ns)
    newest = {entry.process_group: entry.pg_id for entry in ordered}
    return tuple(_collective(entry) for entry in ordered if entry.pg_id == newest[entry.process_group])[-LAST:]


def _collective(entry: _Entry) -> Collective:
    return Collective(
        seq=entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id,
        name=entry.profiling_name,
        elements=sum(map(math.prod, entry.input_sizes)),
        dtype="/".join(dict.fromkeys(entry.input_dtypes)),
        group=entry.process_group[0] if entry.process_group else "",
        p2p=entry.is_p2p,
    )


RAS_PORT = 28028
MOST_RAS_BYTES = 16 << 10
RAS_CUT = "[no more was said in time: some process may not answer]"
# Which process takes a call is up to the kernel; one that is stopped takes it, too, and never answers.
_GREETING_SECONDS = 0.4


class RasAddress(NamedTuple):
    """Where a socket of ours listens."""

    family: socket.AddressFamily
    host: str
    port: int


def ras_service(env: Mapping[str, str]) -> RasAddress | None:
    """Where NCCL's thread in this process listens; None if there is none. Strangers on that port are left alone."""
    if (port := _port(env.get("NCCL_RAS_ADDR", ""))) is None:
        return None
    own = frozenset(open_files(PROC / "self"))
    for seen in tcp_sockets():
        if seen.port == port and seen.listens and f"socket:[{seen.inode}]" in own:
            return RasAddress(seen.family, seen.address, port)
    return None


def _port(address: str) -> int | None:
    """The port of "host:port" or "[::1]:port"; NCCL's own one if nothing is said."""
    if not address:
        return RAS_PORT
    digits = address.rpartition(":")[2]
    return int(digits) if digits.isascii() and digits.isdigit() and 0 < int(digits) < 1 << 16 else None


def ras_report(address: RasAddress, greet_until: float, seconds: float) -> str:
    """NCCL's report, as far as it arrives within `seconds`; nothing if no process greets until then (monotonic).

    NCCL writes a header at once, and the rest when all its processes have answered or their time-out is over.
    """
    while time.monotonic() < greet_until:
        with contextlib.suppress(OSError), socket.socket(address.family, socket.SOCK_STREAM) as sock:
            greeted = min(greet_until, time.monotonic() + _GREETING_SECONDS)
            sock.settimeout(max(0.01, greeted - time.monotonic()))
            sock.connect((address.host, address.port))
            if not _answer(sock, "CLIENT PROTOCOL 2", greeted).startswith("SERVER PROTOCOL "):
                return ""
            end = time.monotonic() + seconds
            # NCCL's processes wait no longer than that for each other; by itself it is 5 s.
            _answer(sock, "TIMEOUT 1", end)
            sock.sendall(b"VERBOSE STATUS\n")
            return _report(sock, end)
    return ""


def _answer(sock: socket.socket, line: str, end: float) -> str:
    """The line that answers ours; TimeoutError if none does."""
    sock.sendall(f"{line}\n".encode())
    answer = b""
    while not answer.endswith(b"\n") and len(answer) < 256:
        got = _received(sock, 256, end)
        if not got:
            break
        answer += got
    return answer.decode(errors="replace")


def _report(sock: socket.socket, end: float) -> str:
    got, whole = b"", False
    with contextlib.suppress(OSError):
        while len(got) < MOST_RAS_BYTES and not whole:
            more = _received(sock, MOST_RAS_BYTES - len(got), end)
            got, whole = got + more, not more
    text = got.decode(errors="replace").strip()
    return text if whole or not text else f"{text}\n{RAS_CUT}"


def _received(sock: socket.socket, size: int, end: float) -> bytes:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("no time is left")
    sock.settimeout(left)
    return sock.recv(size)
