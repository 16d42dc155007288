"""Reader of torch's flight recorder, the record of the collectives that this process posted.

The recorder is on by default for nccl and gloo (torch 2.13), and is read in the process itself, so no file is needed.
`state` and `retired` are not read: for gloo every entry stays "scheduled" for ever, and an entry that is not over can
be "retired" (measured, torch 2.13). gloo and the older class of NCCL have one recorder each. From torch 2.15 on (where
"nccl" means nccl2), hooks record other classes, whose recorders are read by the name of the class
(FlightRecorderHook.hpp). The remaining classes cannot be read.
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
# The reader for gloo exists since torch 2.8. In builds of torch without NCCL both readers return the same.
_READERS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
# For a class that a hook records, the reader takes its name: "nccl2", although torch registers the class as "nccl".
_HOOKED_READER, _HOOKED = "_dump_fr_trace_json", ("nccl2",)
# The recorder's size. The first variable that is set counts (FlightRecorder.hpp), and 0 turns the recorder off.
BUFFER_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


class _Entry(Struct, frozen=True):
    """The fields of a recorded collective that are used (version 2.10 of the trace; torch 2.5 and newer write them)."""

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
    """The last collectives of a dump, the oldest first, and the Unix time at which the newest was posted."""

    collectives: tuple[Collective, ...]
    newest_unix_seconds: float | None


def read_dump(trace: object) -> TraceDump | None:
    """Convert a flight recorder's dump that another process wrote to plain data. None if `trace` is no such dump."""
    try:
        entries = msgspec.convert(trace, _Trace, strict=False).entries
    except msgspec.ValidationError:
        return None
    newest = max((entry.time_created_ns / 1e9 for entry in entries), default=None)
    return TraceDump(_last(entries), newest)


def posted(since_unix_seconds: float = 0.0) -> tuple[Collective, ...] | None:
    """Return the last collectives that were posted since `since_unix_seconds`, the oldest first.

    None without torch.distributed (this function does not import it), or if nothing is recorded: see `unreadable`.
    """
    traces = _traces()
    recent = [e for trace in traces for e in trace.entries if e.time_created_ns >= since_unix_seconds * 1e9]
    collectives = _last(recent)
    return collectives if traces and (collectives or not unreadable()) else None


def unreadable() -> str:
    """Say why the collectives of an open group cannot be read, without a full stop; empty if they can be read."""
    backends = _open_backends()
    size = next((name for name in BUFFER_NAMES if os.environ.get(name)), "")
    if backends and os.environ.get(size) == "0":
        return f"{size}=0 turns torch's flight recorder off"
    lacking = [name for name in backends if not _is_recorded(name)]
    version = getattr(sys.modules.get("torch"), "__version__", "")
    return f"torch {version} keeps no record of what {lacking[0]} does" if lacking else ""


def _is_recorded(backend: str) -> bool:
    """Whether torch keeps a record of groups of this class.

    A hook and gloo publish a group when the group is opened. The older NCCL class publishes it at its first collective.
    """
    if backend in _READERS:
        return _reader(_READERS[backend]) is not None
    trace = _read(_HOOKED_READER, {"backend": backend, "includeCollectives": False})
    return trace is not None and bool(trace.pg_config)


def _open_backends() -> list[str]:
    """The names of the classes of all open groups. Each name is the one that the class reports."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    names: dict[str, None] = {}
    for group, (configured, _) in dict(world.pg_map).items() if world is not None else ():
        try:
            classes = [group._get_backend(device).name() for device in group._device_types]
        except RuntimeError:  # the group is only half made
            classes = []
        # A group whose class is written in Python has no backend for each device.
        names |= dict.fromkeys(classes or [str(configured)])
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
    """Call a reader of torch. None for a trace of an unknown form, or if the reader takes no such options."""
    if (reader := _reader(name)) is None:
        return None
    try:
        return _trace.decode(reader(**options))
    except (RuntimeError, TypeError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _last(entries: Sequence[_Entry]) -> tuple[Collective, ...]:
    """The last LAST collectives, the oldest first.

    A group that was opened again keeps its name and counts from 1 again: only entries of its newest opening are used.
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
        for entry in [candidate for candidate in ordered if candidate.pg_id == newest[candidate.process_group]][-LAST:]
    )
