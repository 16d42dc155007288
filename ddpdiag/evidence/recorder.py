"""Read torch's flight recorder, which records the collectives that this process posted.

The recorder is on by default for nccl and gloo (torch 2.13), and is read in the process itself, so no file is needed.
`state` and `retired` of an entry are not read: for gloo every entry stays "scheduled" for ever, and an unfinished
collective can be "retired" (measured, torch 2.13). Torch's class for gloo and its older class for NCCL have a recorder
each. From torch 2.15 on, "nccl" means the class nccl2. Hooks record this class and others, and each such recorder is
read by the name of its class (FlightRecorderHook.hpp). Classes without a hook cannot be read.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ddpdiag.evidence.dumps import Dump, Entry, collective_of
from ddpdiag.model import Collective

MAX_COLLECTIVES = 8
# torch's reading function by class; gloo's exists since torch 2.8. Without NCCL, both functions return the same.
_READERS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
# For a class that a hook records, the reader needs the class's own name: "nccl2", which torch registers as "nccl".
_HOOK_READER, _HOOK_CLASSES = "_dump_fr_trace_json", ("nccl2",)
# Variables with the recorder's size. The first one that is set counts (FlightRecorder.hpp); 0 turns the recorder off.
BUFFER_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")

_decoder: msgspec.json.Decoder[Dump] = msgspec.json.Decoder(Dump, strict=False)


def posted_collectives(since_unix_seconds: float = 0.0) -> tuple[Collective, ...] | None:
    """Read the last collectives that this process posted since `since_unix_seconds`, the oldest first.

    None if torch.distributed is not imported, or if the collectives are not recorded (see `why_unreadable`).
    """
    traces = _traces()
    recent = [e for trace in traces for e in trace.entries if e.time_created_ns >= since_unix_seconds * 1e9]
    collectives = _last_collectives(recent)
    return collectives if traces and (collectives or not why_unreadable()) else None


def why_unreadable() -> str:
    """The reason why the collectives of some open group cannot be read, without a full stop; empty if there is none."""
    backends = _open_backends()
    size_variable = next((name for name in BUFFER_NAMES if os.environ.get(name)), "")
    if backends and os.environ.get(size_variable) == "0":
        return f"{size_variable}=0 turns torch's flight recorder off"
    unrecorded = [name for name in backends if not _is_recorded(name)]
    version = getattr(sys.modules.get("torch"), "__version__", "")
    return f"torch {version} keeps no record of what {unrecorded[0]} does" if unrecorded else ""


def _is_recorded(backend: str) -> bool:
    """Whether torch records the collectives of groups of this class.

    The recorder lists a group of gloo, or of a class with a hook, as soon as the group is opened.
    """
    if backend in _READERS:
        return _reader_function(_READERS[backend]) is not None
    trace = _read_trace(_HOOK_READER, {"backend": backend, "includeCollectives": False})
    return trace is not None and bool(trace.pg_config)


def _open_backends() -> list[str]:
    """The names of the backend classes of all open groups, as the classes report them."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    names: dict[str, None] = {}
    for group, (configured, _) in dict(world.pg_map).items() if world is not None else ():
        try:
            classes = [group._get_backend(device).name() for device in group._device_types]
        except RuntimeError:  # the group is still being created
            classes = []
        # A group whose class is written in Python has no backends by device.
        names |= dict.fromkeys(classes or [str(configured)])
    return list(names)


def _traces() -> list[Dump]:
    # The classes that a hook may record: all that this torch has registered, and those of open groups.
    backend = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "Backend", None)
    names = dict.fromkeys((*_HOOK_CLASSES, *getattr(backend, "backend_list", ()), *_open_backends()))
    recorders: list[tuple[str, dict[str, object]]] = [(reader, {}) for reader in _READERS.values()]
    recorders += [(_HOOK_READER, {"backend": name}) for name in names if name not in _READERS]
    return [trace for reader, options in recorders if (trace := _read_trace(reader, options)) is not None]


def _reader_function(name: str) -> Callable[..., bytes] | None:
    return getattr(sys.modules.get("torch._C._distributed_c10d"), name, None)


def _read_trace(name: str, options: Mapping[str, object]) -> Dump | None:
    """Call the reader `name` of torch. None if there is no such reader, or if it fails or returns another format."""
    if (reader := _reader_function(name)) is None:
        return None
    try:
        return _decoder.decode(reader(**options))
    except (RuntimeError, TypeError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _last_collectives(entries: Sequence[Entry]) -> tuple[Collective, ...]:
    """The last MAX_COLLECTIVES collectives, the oldest first.

    A group that is opened again keeps its name, and counts from 1 again. Only entries of its newest opening are used.
    """
    ordered = sorted(dict.fromkeys(entries), key=lambda entry: entry.time_created_ns)
    newest = {entry.process_group: entry.pg_id for entry in ordered}
    return tuple(
        map(collective_of, [each for each in ordered if each.pg_id == newest[each.process_group]][-MAX_COLLECTIVES:])
    )
