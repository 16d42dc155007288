"""Reader of the files that torch's flight recorder writes when a job hangs, one for each rank.

A file is a pickle (what ProcessGroupNCCL's watchdog writes, torch 2.6 to 2.15) or JSON (what the debug server returns).
The rank is the number at the end of the file's name ("nccl_trace_rank_12"). Not every version writes every field:

- `pg_config` has the rank's groups by name, which is equal on all ranks; gloo leaves it empty (measured, torch 2.13).
- `pg_status` counts what a rank posted, by the number that the group has in the rank's process. Both fields list groups
  in the order in which they were opened. gloo also counts point-to-point operations, which its recorder does not list.
- gloo never records the end of an operation: all stay "scheduled" (measured, torch 2.13 and 2.15).
"""

import contextlib
import gc
import io
import json
import math
import os
import pickle
import re
import resource
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec import Struct, field

from ddpdiag.codec import read_bytes, readable
from ddpdiag.evidence.witness import Group, Witness
from ddpdiag.model import Collective

MAX_BYTES = 32 << 20
_RANK = re.compile(r"(\d{1,5})(?:\.(?:json|pkl|pickle))?$")
_PEER = re.compile(r"(?:send|recv) \d+(?:->|<-)(\d+)")
_ENDED = "completed"
# The limit of additional memory while a pickle is read, because nine bytes of a pickle can request gigabytes.
_MEMORY_BYTES = 256 << 20
_LIMITED = threading.Lock()  # the limit is the process's
# So many of the newest operations of each group are kept. Operations known to be open are always kept.
_NEWEST_KEPT = 16
# Reading takes some 12 ms for 2,000 entries with stacks, and a process some 100 ms to start.
_MAX_PROCESSES, _DUMPS_PER_PROCESS = 8, 32


class Entry(Struct, frozen=True, gc=False):
    """An operation in a dump, with the fields that ddpdiag uses (trace version 2.10; torch 2.5 and newer)."""

    profiling_name: str
    process_group: tuple[str, ...] = ()
    pg_id: int = 0
    collective_seq_id: int = 0
    p2p_seq_id: int = 0
    is_p2p: bool = False
    input_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    state: str = ""
    time_created_ns: int = 0


class _Config(Struct, frozen=True):
    desc: str = ""
    ranks: str = ""


class _Status(Struct, frozen=True):
    last_enqueued_collective: int = -1


class Dump(Struct, frozen=True):
    """The dump of one rank."""

    version: str = ""
    entries: tuple[Entry, ...] = ()
    pg_config: dict[str, _Config] = field(default_factory=dict)
    pg_status: dict[str, _Status] = field(default_factory=dict)


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler of numbers, texts, lists, tuples and dicts. It refuses classes, functions and references."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} in a flight recorder's dump")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("a reference in a flight recorder's dump")


def _unpickle(data: bytes) -> object:
    # An unpickler reads ahead only if its file has `peek`, and is four times slower without (measured, Python 3.12).
    return _PlainUnpickler(io.BufferedReader(io.BytesIO(data))).load()


def may_be_dump(path: str, head: bytes) -> bool:
    """Whether a file with these first bytes is a pickle, or JSON with a rank at the end of its name."""
    return head.startswith(b"\x80") or (head.lstrip()[:1] == b"{" and _RANK.search(Path(path).name) is not None)


def read_dumps(paths: Sequence[str]) -> tuple[dict[int, Witness], list[str]]:
    """Read the dumps of a job: the newest of each rank, and a sentence for each file that is left out."""
    problems: list[str] = []
    witnesses: dict[int, Witness] = {}
    files: dict[int, str] = {}
    ordered = sorted(paths, key=os.path.getmtime)
    for path, answer in zip(ordered, _read_all(ordered), strict=True):
        if isinstance(answer, str):
            problems.append(f"{answer}; it is left out")
            continue
        if answer.rank in files:
            problems.append(f"{readable(files[answer.rank])} is an older dump of rank {answer.rank}; it is left out")
        witnesses[answer.rank], files[answer.rank] = answer, path
    sizes = Counter(size for witness in witnesses.values() if (size := _world_size(witness)))
    usual_size = max(sizes, key=lambda size: (sizes[size], size), default=0)
    for rank, witness in list(witnesses.items()):
        if _world_size(witness) not in (0, usual_size):
            problems.append(
                f"{readable(files[rank])} is of a job with {_world_size(witness)} ranks, most dumps are of one with "
                f"{usual_size}; it is left out"
            )
            del witnesses[rank]
    return dict(sorted(witnesses.items())), problems


def _read_all(paths: Sequence[str]) -> Iterator[Witness | str]:
    """Read dumps, with several processes if they are many. A dump that cannot be used gives a sentence."""
    processes = min(os.cpu_count() or 1, _MAX_PROCESSES, len(paths) // _DUMPS_PER_PROCESS)
    if processes < 2:
        yield from map(_read_or_say_why, paths)
        return
    with ProcessPoolExecutor(processes) as pool:
        for answer in pool.map(_encoded_answer, paths, chunksize=_DUMPS_PER_PROCESS // 2):
            yield msgspec.msgpack.decode(answer, type=Witness | str)


def _encoded_answer(path: str) -> bytes:
    return msgspec.msgpack.encode(_read_or_say_why(path))


def _read_or_say_why(path: str) -> Witness | str:
    try:
        witness = read_dump(path)
    except OSError as error:
        return f"cannot read {readable(path)}: {error.strerror or error}"
    if witness is None:
        return f"{readable(path)} is no complete dump of torch's flight recorder"
    ranks = {rank for group in witness.groups.values() for rank in group.ranks}
    if ranks and witness.rank not in ranks:
        return f"{readable(path)} is no dump of rank {witness.rank}: its groups have ranks {min(ranks)} to {max(ranks)}"
    return witness


def _world_size(witness: Witness) -> int:
    """The number of ranks of the largest group, or 0 if no group has recorded ranks."""
    return max((len(group.ranks) for group in witness.groups.values()), default=0)


def read_dump(path: str | Path, rank: int | None = None) -> Witness | None:
    """Read the dump of one rank, whose number ends the file's name unless `rank` is given.

    None if the file is no dump of a flight recorder, is cut off, or names no rank. Raises OSError if the file cannot be
    read, or is larger than 32 MiB.
    """
    if rank is None:
        number = _RANK.search(Path(path).name)
        rank = None if number is None else int(number[1])
    dump = _parse(read_bytes(path, MAX_BYTES))
    return None if dump is None or rank is None else _witness(rank, dump)


def _parse(data: bytes) -> Dump | None:
    try:
        with _LIMITED, _limited_memory():
            trace = _unpickle(data) if data.startswith(b"\x80") else json.loads(data)
            dump = msgspec.convert(trace, Dump, strict=False)
            return dump if dump.version else None
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, TypeError, AttributeError):
        return None
    except (MemoryError, OverflowError, RecursionError):  # an impossible length
        return None


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """Limit the growth of the address space to `_MEMORY_BYTES`, and pause garbage collection, which slows reading."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = min(value for value in (soft, hard, used + _MEMORY_BYTES) if value != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    collects_garbage = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects_garbage:
            gc.enable()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _witness(rank: int, dump: Dump) -> Witness:
    groups = {
        name: Group(description=config.desc, ranks=_parse_ranks(config.ranks))
        for name, config in dump.pg_config.items()
        if config.ranks not in ("", "[]")
    }
    knows_ends = not any(entry.profiling_name.startswith("gloo:") for entry in dump.entries)
    posted = _last_posted(dump, groups) if knows_ends else {}
    operations: list[Collective] = []
    counts: Counter[str] = Counter()
    ordered = sorted(dump.entries, key=attrgetter("time_created_ns"), reverse=True)
    for entry in ordered:
        name, *description = entry.process_group or ("",)
        if not entry.is_p2p:
            posted[name] = max(posted.get(name, 0), entry.collective_seq_id)
        if counts[name] >= _NEWEST_KEPT and (entry.state == _ENDED or not knows_ends):
            continue
        counts[name] += 1
        group = groups.setdefault(name, Group(description=description[0] if description else ""))
        operations.append(collective_of(entry, group.ranks))
    return Witness(
        rank=rank,
        operations=tuple(reversed(operations)),
        posted=posted,
        groups=groups,
        knows_ends=knows_ends,
        newest_unix_seconds=ordered[0].time_created_ns / 1e9 if ordered else None,
    )


def collective_of(entry: Entry, group_ranks: Sequence[int] = ()) -> Collective:
    """Convert an entry. `group_ranks` are the ranks of its group, if known, in the group's order."""
    peer = _PEER.search(entry.profiling_name)
    index = int(peer[1]) if peer else -1
    return Collective(
        seq=entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id,
        name=entry.profiling_name,
        elements=sum(map(math.prod, entry.input_sizes)),
        dtype="/".join(dict.fromkeys(entry.input_dtypes)),
        group=entry.process_group[0] if entry.process_group else "",
        p2p=entry.is_p2p,
        peer=group_ranks[index] if 0 <= index < len(group_ranks) else None,
        ended=entry.state == _ENDED,
    )


def _parse_ranks(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _last_posted(dump: Dump, groups: Mapping[str, Group]) -> dict[str, int]:
    """The number of the last collective of each group, from `pg_status`; empty if its groups cannot be identified.

    Groups with point-to-point operations are left out, because `pg_status` does not count only their collectives.
    """
    names, numbers = _sorted_by_number(groups), _sorted_by_number(dump.pg_status)
    if len(names) != len(numbers):
        return {}
    pairs = dict(zip(numbers, names, strict=True))
    if any(pairs.get(str(entry.pg_id)) != entry.process_group[0] for entry in dump.entries if entry.process_group):
        return {}
    p2p = {entry.process_group[0] for entry in dump.entries if entry.is_p2p and entry.process_group}
    return {name: dump.pg_status[number].last_enqueued_collective for number, name in pairs.items() if name not in p2p}


def _sorted_by_number(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))
