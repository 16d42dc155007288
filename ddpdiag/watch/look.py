"""`Look`: what each rank of a host does at a moment when the training writes nothing any more.

A rank's stack and process show its activity: the rank waits in a collective, waits for its data, or does something
else. In a CPU job a waiting rank sleeps. In a GPU job any Python line may wait: `loss.item()` waits for a kernel of
NCCL, while core and GPU are in full use. In a GPU job only a rank that holds the GIL is known not to wait, because
torch releases the GIL whenever it waits for CUDA.
"""

import os
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.checks.failure_evidence import state_text
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.evidence.attribution import Job, find_faults
from ddpdiag.evidence.collectives import collective_text, last_collective
from ddpdiag.evidence.ras import Snapshot
from ddpdiag.evidence.witness import Witness
from ddpdiag.model import Collective, Finding, ProcessState
from ddpdiag.probes.gpu.nvml import GpuUse
from ddpdiag.text import begun

# A rank whose innermost Python frame is in these files or frames of torch (2.6-2.13) waits for other ranks. The frames
# are those in which a new DistributedDataParallel compares and sends the model.
_COLLECTIVE_FILES = frozenset({"distributed_c10d.py", "_functional_collectives.py", "rendezvous.py"})
_DDP_FUNCTIONS = ("_verify_param_shape_across_processes", "_sync_module_states", "_broadcast_coalesced")
_COLLECTIVE_FRAMES = frozenset(f"{function} (utils.py" for function in _DDP_FUNCTIONS)
_BACKWARD = "_engine_run_backward (graph.py"
_IMPORT = "importlib._bootstrap"
_LAUNCHER_FILES = frozenset({"dynamic_rendezvous.py", "static_tcp_rendezvous.py", "c10d_rendezvous_backend.py"})
_LOADER_FILE = "dataloader.py"
# A rank with one of these files in its innermost frames waits for a process that it started.
_CHILD_FILES = frozenset(
    {"subprocess.py", "popen_fork.py", "popen_spawn_posix.py", "queues.py", "connection.py", "pool.py", "_base.py"}
)
# The frames of a worker of a data loader: one is in all of them, the other only if the worker makes a batch.
_WORKER_FRAME, _BATCH_FRAME = "_worker_loop (worker.py:", "fetch (fetch.py:"
# How many of the innermost frames are searched for the frame of a loader, which waits in the frames of a queue.
_WAITING_FRAMES = 12
_MAX_CALLS = 4
_LINE = re.compile(r":\d+\)")
# A rank that waits asleep uses no core, but its watchdog threads use some per cent of one.
_IDLE_CORES = 0.2
_BUSY_CORES = 0.6
# The least part of a core that an import uses, on a busy machine or file system, too.
_IMPORTING_CORES = 0.02
# How much of a core the use may differ between two looks at a rank that does the same.
_SAME_CORES = 0.2


class Activity(Enum):
    """The activity of a rank, as far as it can be known from outside."""

    ENDED = "ended"
    STOPPED = "stopped"
    STUCK = "stuck"
    WAITING = "waiting"  # in a collective, for other ranks
    LOADING = "loading"  # waiting for its data loader
    ELSEWHERE = "elsewhere"  # in other code, and not waiting for other ranks
    MAY_WAIT = "may wait"  # in other code of a GPU job, where it may wait for a kernel
    NO_STACK = "no stack"  # unknown, because no stack could be read


class UserFrame(NamedTuple):
    """A frame of the user's own code, which is neither in Python's library nor in an installed package."""

    function: str
    path: str
    line: int

    @property
    def place(self) -> str:
        """The file and line, such as "data.py:12"."""
        return f"{os.path.basename(self.path)}:{self.line}"


def where_text(stack: Sequence[str], user_frames: Sequence[UserFrame]) -> str:
    """The innermost frame of the user's code, then that of a library: "load (data.py:12), in read (socket.py)"."""
    text = f"{user_frames[0].function} ({user_frames[0].place})" if user_frames else stack[0]
    return text if text == stack[0] else f"{text}, in {without_lines(stack[0])}"


class Helper(Struct, frozen=True, kw_only=True):
    """A process that a rank started, such as a worker of its data loader, with its state and wchan in proc(5).

    `stack` has the frames of its main thread, innermost first, if they were read, and `user_frames` the user's ones.
    """

    pid: int
    name: str
    state: str | None = None
    wchan: str | None = None
    stack: tuple[str, ...] = ()
    user_frames: tuple[UserFrame, ...] = ()

    @property
    def is_idle(self) -> bool:
        """Whether this is a worker of a data loader that makes no batch."""
        text = " ".join(self.stack)
        return _WORKER_FRAME in text and _BATCH_FRAME not in text


class RankState(Struct, frozen=True, kw_only=True):
    """The state of one rank, as read from outside of its process.

    `process` is None if the rank had ended. The state in `process` is D only if the rank was in the same wchan a moment
    before. `core_share` is the share of time in which the main thread used a core or waited for one (None: not known).
    `switches` is how often it has begun to wait since its start, so an equal number shows that it did not wake up.
    `written_bytes` is how much the rank has written since its start, to any file or pipe.
    `holds_gpu` is whether the rank has a GPU open, `holds_gil` whether its main thread has the GIL (None: not known).
    `user_frames` are the frames of the user's code in its stack, innermost first, and `why_no_stack` says why `process`
    has no stack. `helpers` are the processes that it started, and those that these started. `witness` is what its
    flight recorder shows, `why_no_collectives` says why it is None, and `posted_age_seconds` is the newest one's age.
    """

    rank: int
    pid: int
    process: ProcessState | None = None
    core_share: float | None = None
    switches: int | None = None
    written_bytes: int | None = None
    holds_gpu: bool | None = None
    holds_gil: bool | None = None
    user_frames: tuple[UserFrame, ...] = ()
    why_no_stack: str = ""
    helpers: tuple[Helper, ...] = ()
    witness: Witness | None = None
    why_no_collectives: str = ""
    posted_age_seconds: float | None = None

    @property
    def last_collective(self) -> Collective | None:
        """The last collective that the rank posted, if its flight recorder was read."""
        return last_collective(self.witness.operations) if self.witness is not None else None

    @property
    def stack(self) -> tuple[str, ...]:
        """The Python frames of the main thread, innermost first."""
        return self.process.stack if self.process is not None else ()

    @property
    def place(self) -> str:
        """The innermost frame up to the line number, which differs in a loop: "spin (train.py". Empty: no stack."""
        return self.stack[0].rpartition(":")[0] if self.stack else ""

    @property
    def call(self) -> str:
        """The name of the function of the innermost frame. Empty: no stack."""
        return self.stack[0].partition(" (")[0] if self.stack else ""

    @property
    def waits_for_child(self) -> bool:
        """Whether the rank waits for a process that it started, such as a worker of its data loader."""
        return bool(self.helpers) and any(
            _file_name(frame) in (_LOADER_FILE, *_CHILD_FILES) for frame in self.stack[:_WAITING_FRAMES]
        )

    @property
    def awaited_helper(self) -> Helper | None:
        """The process for which the rank seems to wait, with its stack. None if it is not known."""
        helpers = self.helpers if self.waits_for_child else ()
        return next((helper for helper in helpers if helper.stack and not helper.is_idle), None)

    @property
    def is_busy(self) -> bool:
        """Whether the main thread is known to use a core."""
        return self.core_share is not None and self.core_share >= _BUSY_CORES

    @property
    def is_idle(self) -> bool:
        """Whether the main thread is known to use almost nothing of a core."""
        return self.core_share is not None and self.core_share <= _IDLE_CORES

    @property
    def is_launching(self) -> bool:
        """Whether this process is torchrun, and waits for other hosts."""
        return any(_file_name(frame) in _LAUNCHER_FILES for frame in self.stack)

    @property
    def is_importing(self) -> bool:
        """Whether the rank imports modules and makes progress. `import torch` takes minutes on a busy file system."""
        if self.process is None or not any(_IMPORT in frame for frame in self.stack):
            return False
        return self.process.state == "R" or (self.core_share or 0.0) >= _IMPORTING_CORES

    @property
    def activity(self) -> Activity:
        """The activity of the rank, by its own state alone."""
        state = self.process.state if self.process is not None else "Z"
        if state in ("Z", "X"):
            return Activity.ENDED
        if state in ("T", "t"):
            return Activity.STOPPED
        if state == "D":
            return Activity.STUCK
        if not self.stack:
            return Activity.NO_STACK
        in_collective = _file_name(self.stack[0]) in _COLLECTIVE_FILES or self.place in _COLLECTIVE_FRAMES
        if in_collective and not (self.holds_gil and self.is_busy):
            return Activity.WAITING
        if any(_file_name(frame) == _LOADER_FILE for frame in self.stack[:_WAITING_FRAMES]):
            return Activity.LOADING
        if self.place == _BACKWARD and self.is_idle and not self.holds_gpu:
            return Activity.WAITING
        return Activity.ELSEWHERE if self.holds_gil or not self.holds_gpu else Activity.MAY_WAIT

    @property
    def activity_text(self) -> str:
        """The activity of the rank in words: "running, holding the GIL, in spin (train.py:7)"."""
        if self.process is None:
            return "no longer running"
        use = ", using a core" if self.is_busy else ""
        gil = ", holding the GIL" if self.holds_gil else ""
        return state_text(self.process) + use + gil + (f", in {self.where_text}" if self.stack else "")

    @property
    def where_text(self) -> str:
        """The place in the code where the rank is, with the user's line first. It must have a stack."""
        return where_text(self.stack, self.user_frames)

    def is_unmoved(self, before: "RankState") -> bool:
        """Whether `before`, an earlier state, shows the same process, stack, and about the same use of a core."""
        if (before.rank, before.pid) != (self.rank, self.pid) or not self.stack or before.stack != self.stack:
            return False
        if before.core_share is None or self.core_share is None:
            return False
        return abs(before.core_share - self.core_share) <= _SAME_CORES


def without_lines(text: str) -> str:
    """`text` with frames without their line numbers, which differ in a loop: "spin (train.py)"."""
    return _LINE.sub(")", text)


def _file_name(frame: str) -> str:
    """The name of the file, without folders, in a frame "function (file:line)"."""
    return os.path.basename(frame.rpartition(" (")[2].rpartition(":")[0])


class RasEvidence(Struct, frozen=True):
    """Two answers of NCCL's RAS and the seconds between them, or the reason why they are missing."""

    snapshots: tuple[Snapshot, Snapshot] | None = None
    seconds: float = 0.0
    why_missing: str = ""


class Look(Struct, frozen=True, kw_only=True, dict=True):
    """The state of all ranks of one host at one moment.

    `unix_seconds` is the time of the look, `silent_seconds` is how long nothing had been written, and `stall_seconds`
    is --stall. `is_requested`: a signal requested the look. `has_flight_recorder`: --flight-recorder was given.
    `ranks_are_guessed`: no variable named the ranks, so they are numbered in the order of their start. `why_no_gpus`
    says why `gpus` is unknown. `blocked_seconds` is for how long the command's output has not been read. `all_unmoved`:
    an earlier look at this silence saw all ranks at the same places. `pitfalls`: what lint reports where ranks are.
    `progress` is a sentence on what shows that the job continues (empty: nothing does). `is_unsettled`: earlier looks
    show neither progress nor a standstill.
    `missing_evidence`: sentences on what is unknown.
    """

    host: str
    unix_seconds: float
    silent_seconds: float
    stall_seconds: float
    command: str
    is_requested: bool = False
    has_flight_recorder: bool = False
    world_size: int | None = None
    ranks_are_guessed: bool = False
    ranks: tuple[RankState, ...] = ()
    gpus: tuple[GpuUse, ...] = ()
    why_no_gpus: str = ""
    ras: RasEvidence = RasEvidence()
    blocked_seconds: float = 0.0
    all_unmoved: bool = False
    pitfalls: tuple[Finding, ...] = ()
    progress: str = ""
    is_unsettled: bool = False
    missing_evidence: tuple[str, ...] = ()

    @cached_property
    def by_rank(self) -> Mapping[int, RankState]:
        return {state.rank: state for state in self.ranks}

    @cached_property
    def activities(self) -> Mapping[int, Activity]:
        return {state.rank: state.activity for state in self.ranks}

    @cached_property
    def recorded_faults(self) -> tuple[Finding, ...]:
        """The faults that the flight recorders of the ranks show, over all process groups."""
        return tuple(find_faults(Job({state.rank: state.witness for state in self.ranks if state.witness is not None})))

    @property
    def is_starting(self) -> bool:
        """Whether some ranks still import modules, and all other ranks wait in a collective."""
        importing = {state.rank for state in self.ranks if state.is_importing}
        return bool(importing) and all(
            rank in importing or activity is Activity.WAITING for rank, activity in self.activities.items()
        )

    @property
    def progress_age_seconds(self) -> float | None:
        """Seconds since any rank posted a collective. None if no flight recorder shows that."""
        ages = (state.posted_age_seconds for state in self.ranks)
        return min((age for age in ages if age is not None), default=None)

    @property
    def may_continue_elsewhere(self) -> bool:
        """Whether rank 0 is on another host, and neither flight recorders nor an earlier look show a hang.

        Then a healthy training looks like one that hangs, because some ranks may wait in a collective that others have
        not reached yet. So only a rank that is at the same place in two looks is believed to hang.
        """
        has_others = self.world_size is not None and self.world_size > len(self.ranks)
        is_without_rank_0 = bool(self.ranks) and has_others and 0 not in self.by_rank
        return is_without_rank_0 and self.progress_age_seconds is None and not self.all_unmoved

    @property
    def proves_a_hang(self) -> bool:
        """Whether two looks saw all ranks at the same places, or a rank has ended, is stopped or stuck."""
        return self.all_unmoved or bool(self.ranks_doing(Activity.ENDED, Activity.STOPPED, Activity.STUCK))

    def is_unmoved(self, before: "Look | None") -> bool:
        """Whether `before`, an earlier look at the same silence, shows each rank at the same place. False for None."""
        if before is None or len(before.ranks) != len(self.ranks):
            return False
        return all(now.is_unmoved(then) for now, then in zip(self.ranks, before.ranks, strict=True))

    def ranks_doing(self, *activities: Activity) -> tuple[int, ...]:
        """The ranks whose activity is one of `activities`, sorted."""
        return tuple(sorted(rank for rank, activity in self.activities.items() if activity in activities))

    def calls_text(self, ranks: Sequence[int]) -> str:
        """The collectives in which `ranks` wait: from flight recorders, else by function names and the user's lines."""
        states = [self.by_rank[rank] for rank in ranks]
        ends = {collective_text(end) for state in states if (end := state.last_collective) is not None}
        calls = dict.fromkeys(state.call + "".join(f" at {f.place}" for f in state.user_frames[:1]) for state in states)
        return ", ".join(sorted(ends)) or " and ".join(list(filter(None, calls))[:_MAX_CALLS]) or "a collective"

    def waiting_text(self, waiting: Sequence[int]) -> str:
        """The waiting ranks, and the collectives in which they wait: "ranks 0,2 wait in all_reduce"."""
        return f"{subject(waiting, 'waits', 'wait')} in {self.calls_text(waiting)}"

    def others_waiting_text(self, ranks: Sequence[int]) -> str:
        """A sentence on the waiting ranks that are not in `ranks`, after a space. Empty if there are none."""
        waiting = tuple(rank for rank in self.ranks_doing(Activity.WAITING) if rank not in ranks)
        return f" {begun(self.waiting_text(waiting))}." if waiting else ""

    def helpers_text(self, ranks: Sequence[int]) -> str:
        """Sentences, each after a space, on the processes for which `ranks` wait. Empty if none is known."""
        text = ""
        for rank in ranks:
            if (helper := self.by_rank[rank].awaited_helper) is not None:
                kind = "worker" if self.activities[rank] is Activity.LOADING else "child process"
                state = state_text(ProcessState(pid=helper.pid, state=helper.state))
                where = where_text(helper.stack, helper.user_frames)
                text += f" The {kind} of rank {rank}, pid {helper.pid}, is {state}, in {where}."
        return text

    def doing_text(self, ranks: Sequence[int]) -> str:
        """The end of a sentence that says what `ranks` do (": it is running, in spin (train.py:7)."), and sentences on
        the processes for which they wait."""
        doing = dict.fromkeys(self.by_rank[rank].activity_text for rank in ranks)
        text = "; ".join(list(doing)[:_MAX_CALLS])
        return f": {'it is' if len(ranks) == 1 else 'they are'} {text}." + self.helpers_text(ranks)

    def place_text(self, ranks: Sequence[int]) -> str:
        """The end of a title that says where a rank is: ", which is in spin (train.py:7)". Empty for several ranks."""
        state = self.by_rank[ranks[0]]
        return f", which is in {state.where_text.partition(', in ')[0]}" if len(ranks) == 1 and state.stack else ""


def subject(ranks: Sequence[int], singular: str, plural: str) -> str:
    """The ranks and the verb of a sentence, in singular or plural: "rank 1 is", "ranks 1-2 are"."""
    return f"{ranks_text(ranks)} {singular if len(ranks) == 1 else plural}"
