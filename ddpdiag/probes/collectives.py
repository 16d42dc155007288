"""The libraries' records of this process's collectives: torch's flight recorder, and NCCL's RAS service.

Which collectives did this process post last? The recorder is on by default for nccl and gloo (torch 2.13), and is read
in the process itself, so that no file is needed. Its `state` and `retired` are not read: for gloo every entry is
"scheduled" for ever, and one that is not over can be "retired" (measured, torch 2.13). gloo and the older class of NCCL
have a recorder each. Every other class that a hook of torch records (from 2.15 on, where nccl2 is what "nccl" means)
has one that is read by the class's own name (FlightRecorderHook.hpp); the rest cannot be read.

What does NCCL know of a job that hangs? From 2.24 on a thread of NCCL in each process listens on localhost:28028 (or
$NCCL_RAS_ADDR); all processes of a user on a host share that port. Any of them collects from all others what each
communicator is at, and names ranks that lag behind, or do not answer. The protocol is text (src/ras/client.cc and
client_support.cc of NCCL): "CLIENT PROTOCOL 2" is answered by "SERVER PROTOCOL n", "TIMEOUT seconds" by "OK", "VERBOSE
STATUS" by the report, at whose end the connection is closed.
"""

import contextlib
import math
import os
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
# The first since torch 2.8; builds of torch without NCCL give the same by both.
_READERS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
# Where a hook records, the reader takes the name of the class. "nccl" is registered, and its class says "nccl2".
_HOOKED_READER, _HOOKED = "_dump_fr_trace_json", ("nccl2",)
# The first that is set counts (FlightRecorder.hpp), and 0 turns the recorder off.
BUFFER_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


class _Entry(Struct, frozen=True):
    """The fields that are used of an entry (version 2.10 of the trace; the fields are there since torch 2.5)."""

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
    pg_config: dict[str, object] = field(default_factory=dict)


_trace: msgspec.json.Decoder[_Trace] = msgspec.json.Decoder(_Trace)


class TraceDump(NamedTuple):
    """The content of a dump: the last collectives, the oldest first, and when the newest was posted (Unix time)."""

    collectives: tuple[Collective, ...]
    newest_unix_seconds: float | None


def read_dump(trace: object) -> TraceDump | None:
    """The flight recorder that another process wrote, as plain data; None for something else."""
    try:
        entries = msgspec.convert(trace, _Trace, strict=False).entries
    except msgspec.ValidationError:
        return None
    newest = max((entry.time_created_ns / 1e9 for entry in entries), default=None)
    return TraceDump(_last(entries), newest)


def posted(since_unix_seconds: float = 0.0) -> tuple[Collective, ...] | None:
    """The last collectives that were posted since then, the oldest first.

    None without torch.distributed (it is not imported for this), and where nothing is recorded: see `unreadable`.
    """
    traces = _traces()
    recent = [e for trace in traces for e in trace.entries if e.time_created_ns >= since_unix_seconds * 1e9]
    collectives = _last(recent)
    return collectives if traces and (collectives or not unreadable()) else None


def unreadable() -> str:
    """Why the collectives of a group that is open cannot be read, without its full stop; empty if they can."""
    backends = _open_backends()
    size = next((name for name in BUFFER_NAMES if os.environ.get(name)), "")
    if backends and os.environ.get(size) == "0":
        return f"{size}=0 turns torch's flight recorder off"
    lacking = [name for name in backends if not _is_recorded(name)]
    version = getattr(sys.modules.get("torch"), "__version__", "")
    return f"torch {version} keeps no record of what {lacking[0]} does" if lacking else ""


def _is_recorded(backend: str) -> bool:
    """Whether torch keeps a record of this class of groups.

    A hook publishes its group when that is opened, and so does gloo; the older NCCL at its first collective only.
    """
    if backend in _READERS:
        return _reader(_READERS[backend]) is not None
    trace = _read(_HOOKED_READER, {"backend": backend, "includeCollectives": False})
    return trace is not None and bool(trace.pg_config)


def _open_backends() -> list[str]:
    """The classes of the groups that are open, by the name that each gives itself."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    names: dict[str, None] = {}
    for group, (configured, _) in dict(world.pg_map).items() if world is not None else ():
        try:
            own = [group._get_backend(device).name() for device in group._device_types]
        except RuntimeError:  # it is only half made
            own = []
        # A class that is written in Python is itself the group, and has no devices.
        names |= dict.fromkeys(own or [str(configured)])
    return list(names)


def _traces() -> list[_Trace]:
    # Classes that a hook may record: those that this torch has registered, or that are open.
    backend = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "Backend", None)
    names = dict.fromkeys((*_HOOKED, *getattr(backend, "backend_list", ()), *_open_backends()))
    recorders: list[tuple[str, dict[str, object]]] = [(reader, {}) for reader in _READERS.values()]
    recorders += [(_HOOKED_READER, {"backend": name}) for name in names if name not in _READERS]
    return [trace for reader, options in recorders if (trace := _read(reader, options)) is not None]


def _reader(name: str) -> Callable[..., bytes] | None:
    return getattr(sys.modules.get("torch._C._distributed_c10d"), name, None)


def _read(name: str, options: Mapping[str, object]) -> _Trace | None:
    """None for a trace of another form than those known, and from a torch whose reader takes no such options."""
    if (reader := _reader(name)) is None:
        return None
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
    return tuple(
        Collective(
            seq=entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id,
            name=entry.profiling_name,
            elements=sum(map(math.prod, entry.input_sizes)),
            dtype="/".join(dict.fromkeys(entry.input_dtypes)),
            group=entry.process_group[0] if entry.process_group else "",
            p2p=entry.is_p2p,
        )
        for entry in [own for own in ordered if own.pg_id == newest[own.process_group]][-LAST:]
    )


RAS_PORT = 28028
MOST_RAS_BYTES = 16 << 10
RAS_CUT = "[no more was said in time: some process may not answer]"
# Which process takes a call is up to the kernel; one that is stopped takes it, too, and never answers.
_GREETING_SECONDS = 0.4


class RasAddress(NamedTuple):
    """The address at which a socket of this process listens."""

    family: socket.AddressFamily
    host: str
    port: int


def ras_service(env: Mapping[str, str]) -> RasAddress | None:
    """The address of NCCL's thread in this process; None if there is none. Other processes' ports are not touched."""
    # "host:port" or "[::1]:port"; NCCL's own port if nothing is said.
    digits = (env.get("NCCL_RAS_ADDR") or str(RAS_PORT)).rpartition(":")[2]
    port = int(digits) if digits.isascii() and digits.isdigit() else 0
    if not 0 < port < 1 << 16:
        return None
    own = frozenset(open_files(PROC / "self"))
    for seen in tcp_sockets():
        if seen.port == port and seen.listens and f"socket:[{seen.inode}]" in own:
            return RasAddress(seen.family, seen.address, port)
    return None


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


def _report(sock: socket.socket, end: float) -> str:
    got, whole = b"", False
    with contextlib.suppress(OSError):
        while len(got) < MOST_RAS_BYTES and not whole:
            more = _received(sock, MOST_RAS_BYTES - len(got), end)
            got, whole = got + more, not more
    text = got.decode(errors="replace").strip()
    return text if whole or not text else f"{text}\n{RAS_CUT}"


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


def _received(sock: socket.socket, size: int, end: float) -> bytes:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("no time is left")
    sock.settimeout(left)
    return sock.recv(size)
