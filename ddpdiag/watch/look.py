"""A look of `ddpdiag watch` at a training that writes nothing any more: what each rank of a host does.

A rank's stack and process show its activity: the rank waits in a collective, waits for its data, or does something
else. In a CPU job a waiting rank sleeps. In a GPU job any Python line may wait: `loss.item()` waits for a kernel of
NCCL, while core and GPU are in full use. In such a job only a rank that holds the GIL is known not to wait, because
torch releases the GIL whenever it waits for CUDA.
"""

import os
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cached_property

from msgspec import Struct

from ddpdiag.checks.failure_evidence import state_text
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.checks.posted import in_words, last
from ddpdiag.model import Collective, ProcessState
from ddpdiag.probes.gpu.nvml import GpuUse
from ddpdiag.text import begun

# A rank with its innermost Python frame in these files of torch (2.6-2.13) waits for others: c10d's calls, among them
# the barrier and the rendezvous of a new group; functional collectives; what a new DDP does over all ranks.
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
# How many frames may be inside of the loader's frame: those of the queue on which it waits.
_LOADER_DEPTH = 12
# A rank that waits asleep uses no core; a watchdog thread or two use some per cent.
_IDLE_CORES = 0.2
_BUSY_CORES = 0.6
# An import on a busy machine or file system still uses this much.
_IMPORTING_CORES = 0.02
# How much the use of a core may differ between two looks at a rank that does the same.
_SAME_CORES = 0.2


class Activity(Enum):
    """The activity of a rank."""

    GONE = "gone"
    STOPPED = "stopped"
    STUCK = "stuck"
    WAITING = "waiting"  # in a collective, for others
    LOADING = "loading"  # for its own data
    ELSEWHERE = "elsewhere"  # it runs something else, and waits for no other rank
    OPEN = "open"  # on a GPU: it may wait for a kernel, or not
    UNSEEN = "unseen"  # there is no stack


class Helper(Struct, frozen=True, kw_only=True):
    """A process that a rank started, such as a worker of its data loader. `state` and `wchan`: see `ProcessState`."""

    pid: int
    name: str
    state: str | None = None
    wchan: str | None = None


class Witness(Struct, frozen=True, kw_only=True):
    """What was seen of one rank from outside of its process.

    `process` is None if the rank had ended. The state in `process` is D only if the rank was at the same place a moment
    before. `core_share` is the part of a core that the main thread used, or waited for while others used the core.
    `holds_gpu` is whether the rank has a GPU open, `holds_gil` whether its main thread has the GIL (None: cannot be
    seen). `no_stack` says why `process` has no stack. `collectives` is as in `Outcome`, `no_collectives` says why it is
    None, and `posted_seconds` is the age of the newest entry.
    """

    rank: int
    pid: int
    process: ProcessState | None = None
    core_share: float | None = None
    holds_gpu: bool | None = None
    holds_gil: bool | None = None
    no_stack: str = ""
    helpers: tuple[Helper, ...] = ()
    collectives: tuple[Collective, ...] | None = None
    no_collectives: str = ""
    posted_seconds: float | None = None

    @property
    def stack(self) -> tuple[str, ...]:
        """Python frames, innermost first."""
        return self.process.stack if self.process is not None else ()

    @property
    def place(self) -> str:
        """The innermost frame without its line number, in which ranks in one retry loop differ. Empty: no stack."""
        return self.stack[0].rpartition(":")[0] if self.stack else ""

    @property
    def call(self) -> str:
        """The function of the innermost frame."""
        return self.stack[0].partition(" (")[0] if self.stack else ""

    @property
    def is_busy(self) -> bool:
        """Whether the rank is known to use a core."""
        return self.core_share is not None and self.core_share >= _BUSY_CORES

    @property
    def is_idle(self) -> bool:
        """Whether the rank is known to use next to nothing of a core."""
        return self.core_share is not None and self.core_share <= _IDLE_CORES

    @property
    def is_launching(self) -> bool:
        """Whether this process is torchrun, and waits for other hosts."""
        return any(_file_of(frame) in _LAUNCHER_FILES for frame in self.stack)

    @property
    def is_importing(self) -> bool:
        """Whether the rank imports modules and progresses. `import torch` takes minutes on a busy file system."""
        if self.process is None or not any(_IMPORT in frame for frame in self.stack):
            return False
        return self.process.state == "R" or (self.core_share or 0.0) >= _IMPORTING_CORES

    @property
    def activity(self) -> Activity:
        """The activity of the rank, as far as its own state shows it."""
        state = self.process.state if self.process is not None else "Z"
        if state in ("Z", "X"):
            return Activity.GONE
        if state in ("T", "t"):
            return Activity.STOPPED
        if state == "D":
            return Activity.STUCK
        if not self.stack:
            return Activity.UNSEEN
        in_collective = _file_of(self.stack[0]) in _COLLECTIVE_FILES or self.place in _COLLECTIVE_FRAMES
        if in_collective and not (self.holds_gil and self.is_busy):
            return Activity.WAITING
        if any(_file_of(frame) == _LOADER_FILE for frame in self.stack[:_LOADER_DEPTH]):
            return Activity.LOADING
        if self.place == _BACKWARD and self.is_idle and not self.holds_gpu:
            return Activity.WAITING
        return Activity.ELSEWHERE if self.holds_gil or not self.holds_gpu else Activity.OPEN

    @property
    def doing(self) -> str:
        """What the rank does, in words: "running, holding the GIL, in spin (train.py:7)"."""
        if self.process is None:
            return "no longer running"
        use = ", using a core" if self.is_busy else ""
        gil = ", holding the GIL" if self.holds_gil else ""
        return state_text(self.process) + use + gil + (f", in {self.stack[0]}" if self.stack else "")

    def is_unmoved(self, before: "Witness") -> bool:
        """Whether `before` shows the same process at the same place in the code, with a similar use of its core."""
        if (before.rank, before.pid) != (self.rank, self.pid) or not self.stack or before.stack != self.stack:
            return False
        if before.core_share is None or self.core_share is None:
            return False
        return abs(before.core_share - self.core_share) <= _SAME_CORES


def _file_of(frame: str) -> str:
    """The name of the file in a frame "function (file:line)"."""
    return os.path.basename(frame.rpartition(" (")[2].rpartition(":")[0])


class Look(Struct, frozen=True, kw_only=True, dict=True):
    """One look at the ranks of one host.

    `unix_seconds` is the time of the look, `silent_seconds` is how long nothing had been written, and `stall_seconds`
    is --stall. `asked`: a signal requested the look. `recorder`: --flight-recorder was given. `guessed`: no variable
    named the ranks, so they are numbered in the order of their start. `blocked_seconds` is how long the reader of the
    command's output has read none. `unmoved`: an earlier look at this silence saw all ranks at the same places.
    `notes` are sentences on what could not be seen.
    """

    host: str
    unix_seconds: float
    silent_seconds: float
    stall_seconds: float
    command: str
    asked: bool = False
    recorder: bool = False
    world_size: int | None = None
    guessed: bool = False
    ranks: tuple[Witness, ...] = ()
    gpus: tuple[GpuUse, ...] = ()
    gpus_unseen: str = ""
    blocked_seconds: float = 0.0
    unmoved: bool = False
    notes: tuple[str, ...] = ()

    @cached_property
    def by_rank(self) -> Mapping[int, Witness]:
        return {seen.rank: seen for seen in self.ranks}

    @cached_property
    def activities(self) -> Mapping[int, Activity]:
        return {seen.rank: seen.activity for seen in self.ranks}

    @property
    def is_start(self) -> bool:
        """Whether ranks still import modules, and all others wait for them."""
        importing = {seen.rank for seen in self.ranks if seen.is_importing}
        return bool(importing) and all(
            rank in importing or activity is Activity.WAITING for rank, activity in self.activities.items()
        )

    @property
    def progress_age(self) -> float | None:
        """Seconds since any rank posted a collective, as far as flight recorders show."""
        return min((seen.posted_seconds for seen in self.ranks if seen.posted_seconds is not None), default=None)

    @property
    def is_without_rank_0(self) -> bool:
        """Whether other hosts have ranks, rank 0 among them, and no flight recorder shows collectives.

        Then a healthy training looks like one that hangs: some ranks wait in a collective, others are on their way to
        it. Only a rank that is at the same place in two looks is believed to hang.
        """
        has_others = self.world_size is not None and self.world_size > len(self.ranks)
        return bool(self.ranks) and has_others and self.progress_age is None and 0 not in self.by_rank

    @property
    def proves_a_hang(self) -> bool:
        """Whether two looks at one silence saw all ranks at the same places, or a rank is dead, stopped or stuck."""
        return self.unmoved or bool(self.doing(Activity.GONE, Activity.STOPPED, Activity.STUCK))

    def is_unmoved(self, before: "Look | None") -> bool:
        """Whether `before`, an earlier look at the same silence, saw each rank at the same place. False for None."""
        if before is None or len(before.ranks) != len(self.ranks):
            return False
        return all(now.is_unmoved(then) for now, then in zip(self.ranks, before.ranks, strict=True))

    def doing(self, *wanted: Activity) -> tuple[int, ...]:
        """The ranks whose activity is one of `wanted`."""
        return tuple(sorted(rank for rank, activity in self.activities.items() if activity in wanted))

    # In words

    def calls_text(self, ranks: Sequence[int]) -> str:
        """The collectives in which `ranks` wait, in words: from flight recorders, else the names of the calls."""
        seen = [self.by_rank[rank] for rank in ranks]
        ends = {in_words(end) for one in seen if (end := last(one.collectives)) is not None}
        calls = dict.fromkeys(one.call for one in seen if one.call)
        return ", ".join(sorted(ends)) or " and ".join(calls) or "a collective"

    def waiting_text(self, waiting: Sequence[int]) -> str:
        """What the waiting ranks wait in: "ranks 0,2 wait in all_reduce"."""
        return f"{subject(waiting, 'waits', 'wait')} in {self.calls_text(waiting)}"

    def others_waiting(self, ranks: Sequence[int]) -> str:
        """A sentence on the ranks that wait, other than `ranks`. Empty if there are none."""
        waiting = tuple(rank for rank in self.doing(Activity.WAITING) if rank not in ranks)
        return f" {begun(self.waiting_text(waiting))}." if waiting else ""

    def where_text(self, ranks: Sequence[int]) -> str:
        """What `ranks` do, for the end of a sentence: ": it is running, in spin (train.py:7)"."""
        doing = dict.fromkeys(self.by_rank[rank].doing for rank in ranks)
        return f": {'it is' if len(ranks) == 1 else 'they are'} {'; '.join(list(doing)[:4])}"

    def place_text(self, ranks: Sequence[int]) -> str:
        """The place of a single rank, for a title: ", which is in spin (train.py:7)". Empty for several ranks."""
        stack = self.by_rank[ranks[0]].stack if len(ranks) == 1 else ()
        return f", which is in {stack[0]}" if stack else ""


def subject(ranks: Sequence[int], one: str, many: str) -> str:
    """Ranks and the verb of a sentence about them: "rank 1 is", "ranks 1-2 are"."""
    return f"{ranks_text(ranks)} {one if len(ranks) == 1 else many}"
