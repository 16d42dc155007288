"""What `ddpdiag watch` sees of a training that writes nothing any more, its judgement, and what each rank does.

What a rank does shows from its stack and its process: it waits in a collective, for its data, or is elsewhere. Of a CPU
job a rank that waits sleeps. Of a GPU job any Python line may be one that waits: `loss.item()` waits for a kernel of
NCCL, at full use of core and GPU. So there only a rank that holds the GIL is known not to wait: what waits for CUDA in
torch gives it away.
"""

import os
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct, field

from ddpdiag.checks.failure_evidence import state_text
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.checks.known_errors import KnownError
from ddpdiag.checks.posted import in_words, last
from ddpdiag.model import Collective, ProcessState
from ddpdiag.probes.gpu.nvml import GpuUse
from ddpdiag.text import begun

# Up to the year 5138, which clocks can show.
Seconds = Annotated[float, Meta(ge=0, le=1e11)]
WATCH_SCHEMA = "ddpdiag.watch/1"  # 1: the first


class Helper(Struct, frozen=True, kw_only=True):
    """A process that a rank started, such as a worker of its data loader: state and wchan as in `ProcessState`."""

    pid: int
    name: str
    state: str | None = None
    wchan: str | None = None


class RankSeen(Struct, frozen=True, kw_only=True):
    """One rank of this host, as it was seen.

    `process` is None if it had ended by then; its `state` is D only if it was in the same place a moment before.
    `core_share` is how much of a core its main thread used, or waited for beside others; `holds_gpu` is whether it has
    a GPU open, `holds_gil` whether its main thread has the GIL (None: cannot be seen). `no_stack` says why `process`
    has no stack; then `threads` are its threads as "name (state)", most frequent first. `collectives` is as in
    `Outcome`, `no_collectives` says why there is none, and `posted_seconds` is the age of its newest entry.
    """

    rank: int
    pid: int
    process: ProcessState | None = None
    core_share: float | None = None
    holds_gpu: bool | None = None
    holds_gil: bool | None = None
    no_stack: str = ""
    threads: tuple[str, ...] = ()
    helpers: tuple[Helper, ...] = ()
    collectives: tuple[Collective, ...] | None = field(default=None, name="flight")
    no_collectives: str = field(default="", name="no_flight")
    posted_seconds: float | None = None


class Failure(Struct, frozen=True, kw_only=True):
    """That the command failed: how it `ended`, the known text that explains this, and the ranks that printed it.

    `missing` are ranks that others waited for in vain, as far as their text names them.
    """

    ended: str
    known: KnownError
    ranks: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()


class Stall(Struct, frozen=True, kw_only=True, tag="stall"):
    """One look at the ranks of one host.

    `unix_seconds` is when; `silent_seconds` is how long nothing had been heard, `asked` that a signal wanted the look,
    `timed_out` that a rank had written its recorder, `recorder` that --flight-recorder was given,
    and `stall_seconds` the patience. `number` counts the silences of the run from 1, `looks` the looks at this one.
    `guessed` says that nothing named the ranks, so that they are numbered in the order of their start;
    `remote_launcher` is a program below the command that starts ranks on other hosts, where there is one.
    `blocked_seconds` is how long the reader of the command's output has not taken any. `unmoved` says that an earlier
    look at this silence saw all ranks in the same places. `notes` are sentences on what could not be seen. `failure` is
    set where the command has ended instead.
    """

    host: str
    unix_seconds: Seconds
    silent_seconds: Seconds
    stall_seconds: Seconds
    command: str
    asked: bool = False
    timed_out: bool = False
    recorder: bool = False
    number: int = 1
    looks: int = 1
    world_size: int | None = None
    guessed: bool = False
    remote_launcher: str = field(default="", name="far_launcher")
    ranks: tuple[RankSeen, ...] = ()
    gpus: tuple[GpuUse, ...] = ()
    gpus_unseen: str = ""
    blocked_seconds: float = 0.0
    unmoved: bool = False
    notes: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    failure: Failure | None = None
    schema: str = WATCH_SCHEMA


class RankGroup(Struct, frozen=True, kw_only=True):
    """Ranks that do the same, and what that is, in one line of text."""

    ranks: tuple[int, ...]
    text: str


class Judged(Struct, frozen=True, kw_only=True):
    """What a look means: the ranks that hold up the others, and why; no ranks where the evidence cannot decide.

    `named` may hold a rank although none is at fault: it is the one for which the others wait. `moving` is set where
    some rank continues.
    """

    title: str
    message: str
    fix: str = ""
    named: tuple[int, ...] = ()
    moving: bool = False
    groups: tuple[RankGroup, ...] = ()
    stacks: dict[str, tuple[str, ...]] = {}
    notes: tuple[str, ...] = ()


# Files of torch in whose innermost Python frame a rank waits for others (torch 2.6-2.13): c10d's calls, among them the
# barrier and the rendezvous of a new group; functional collectives; what DDP does over all ranks at its construction.
_COLLECTIVE_FILES = frozenset({"distributed_c10d.py", "_functional_collectives.py", "rendezvous.py"})
_COLLECTIVE_FRAMES = frozenset(
    {
        "_verify_param_shape_across_processes (utils.py",
        "_sync_module_states (utils.py",
        "_broadcast_coalesced (utils.py",
    }
)
_BACKWARD = "_engine_run_backward (graph.py"
_IMPORT = "importlib._bootstrap"
_LAUNCHER_FILES = frozenset({"dynamic_rendezvous.py", "static_tcp_rendezvous.py", "c10d_rendezvous_backend.py"})
_LOADER_FILE = "dataloader.py"
# The loader's own frames stand outside of those of the queue that it waits for.
_LOADER_DEPTH = 12
# A rank that waits asleep uses nothing; a watchdog thread or two use some per cent.
IDLE_CORES = 0.2
BUSY_CORES = 0.6
# An import on a busy machine or file system still uses this much.
_AT_WORK_CORES = 0.02


class Activity(Enum):
    """What a rank does."""

    GONE = "gone"
    STOPPED = "stopped"
    STUCK = "stuck"
    WAITING = "waiting"  # in a collective, for others
    LOADING = "loading"  # for its own data
    ELSEWHERE = "elsewhere"  # it runs something else, and waits for no other rank
    OPEN = "open"  # on a GPU: it may wait for a kernel, or not
    UNSEEN = "unseen"  # there is no stack


def activity_of(seen: RankSeen) -> Activity:
    """What a rank does, as far as it can be known from itself alone."""
    process = seen.process
    state = process.state if process is not None else None
    if process is None or state in ("Z", "X"):
        return Activity.GONE
    if state in ("T", "t"):
        return Activity.STOPPED
    if state == "D":
        return Activity.STUCK
    if not process.stack:
        return Activity.UNSEEN
    in_collective = _file_of(process.stack[0]) in _COLLECTIVE_FILES or place_of(process) in _COLLECTIVE_FRAMES
    if in_collective and not (seen.holds_gil and is_busy(seen)):
        return Activity.WAITING
    if any(_file_of(frame) == _LOADER_FILE for frame in process.stack[:_LOADER_DEPTH]):
        return Activity.LOADING
    if place_of(process) == _BACKWARD and is_idle(seen) and not seen.holds_gpu:
        return Activity.WAITING
    return Activity.ELSEWHERE if seen.holds_gil or not seen.holds_gpu else Activity.OPEN


def is_launching(seen: RankSeen) -> bool:
    """Is it torchrun, waiting for the other hosts?"""
    stack = seen.process.stack if seen.process is not None else ()
    return any(_file_of(frame) in _LAUNCHER_FILES for frame in stack)


def is_importing(seen: RankSeen) -> bool:
    """Is it importing modules, and at work? `import torch` alone takes seconds, or minutes on a busy file system."""
    process = seen.process
    if process is None or not any(_IMPORT in frame for frame in process.stack):
        return False
    return process.state == "R" or (seen.core_share or 0.0) >= _AT_WORK_CORES


def place_of(process: ProcessState) -> str:
    """The innermost frame without its line: waiting ranks differ in lines of a retry loop."""
    return process.stack[0].rpartition(":")[0] if process.stack else ""


def call_of(process: ProcessState) -> str:
    """The function of the innermost frame."""
    return process.stack[0].partition(" (")[0] if process.stack else ""


def _file_of(frame: str) -> str:
    """The file in "function (file:line)"."""
    return os.path.basename(frame.rpartition(" (")[2].rpartition(":")[0])


def is_busy(seen: RankSeen) -> bool:
    """Does it use a core, as far as is known?"""
    return seen.core_share is not None and seen.core_share >= BUSY_CORES


def is_idle(seen: RankSeen) -> bool:
    """Does it use next to nothing, as far as is known?"""
    return seen.core_share is not None and seen.core_share <= IDLE_CORES


# In words ------------------------------------------------------------------------------------------------------------


def agree(ranks: Sequence[int], one: str, many: str) -> str:
    """The verb of a sentence about these ranks."""
    return one if len(ranks) == 1 else many


def subject(ranks: Sequence[int], one: str, many: str) -> str:
    """Such as "rank 1 is", or "ranks 1 and 2 are"."""
    return f"{ranks_text(ranks)} {agree(ranks, one, many)}"


def doing_text(seen: RankSeen) -> str:
    """Such as "running, holding the GIL, in spin (train.py:7)"."""
    process = seen.process
    if process is None:
        return "no longer running"
    use = ", using a core" if is_busy(seen) else ""
    gil = ", holding the GIL" if seen.holds_gil else ""
    return state_text(process) + use + gil + (f", in {process.stack[0]}" if process.stack else "")


class Look:
    """What a look has seen, what each rank does (`activities`), and sentences on both."""

    def __init__(self, stall: Stall) -> None:
        self.stall = stall
        self.activities: Mapping[int, Activity] = {seen.rank: activity_of(seen) for seen in stall.ranks}

    def seen(self, rank: int) -> RankSeen:
        """What was seen of a rank."""
        return next(seen for seen in self.stall.ranks if seen.rank == rank)

    def ranks(self, *wanted: Activity) -> tuple[int, ...]:
        """The ranks that do one of these."""
        return tuple(sorted(rank for rank, activity in self.activities.items() if activity in wanted))

    def waiting_text(self, waiting: Sequence[int]) -> str:
        """Such as "ranks 0 and 2 wait in all_reduce"."""
        return f"{subject(waiting, 'waits', 'wait')} in {self.calls_text(waiting)}"

    def others_waiting(self, ranks: Sequence[int]) -> str:
        """A sentence on the ranks that wait, other than `ranks`; nothing where there are none."""
        waiting = tuple(rank for rank in self.ranks(Activity.WAITING) if rank not in ranks)
        return f" {begun(self.waiting_text(waiting))}." if waiting else ""

    def calls_text(self, ranks: Sequence[int]) -> str:
        """The collective in which they wait: from the flight recorder, else the name of the call."""
        seen = [self.seen(rank) for rank in ranks]
        ends = {in_words(end) for one in seen if (end := last(one.collectives)) is not None}
        calls = dict.fromkeys(call_of(one.process) for one in seen if one.process is not None)
        return ", ".join(sorted(ends)) if ends else " and ".join(filter(None, calls)) or "a collective"

    def where_text(self, ranks: Sequence[int]) -> str:
        """Such as ": it is running, in spin (train.py:7)"."""
        doing = dict.fromkeys(doing_text(self.seen(rank)) for rank in ranks)
        return f": {agree(ranks, 'it is', 'they are')} {'; '.join(list(doing)[:4])}"

    def place_text(self, ranks: Sequence[int]) -> str:
        """Where a single one is, for a title."""
        process = self.seen(ranks[0]).process
        return f", which is in {process.stack[0]}" if len(ranks) == 1 and process is not None and process.stack else ""
