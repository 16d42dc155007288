"""torch's record of this process's collectives, the flight recorder.

It is on by default for nccl and gloo (torch 2.13), and is read in the process itself, so that no file is needed. Its
`state` and `retired` are not read: for gloo every entry is "scheduled" for ever, and one that is not over can be
"retired" (measured, torch 2.13). gloo and the older class of NCCL have a recorder each. Every other class that a hook
of torch records (from 2.15 on, where nccl2 is what "nccl" means) has one that is read by the class's own name
(FlightRecorderHook.hpp); the rest cannot be read.
"""

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct, field

from ddpdiag.model import Collective

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
