"""What `ddpdiag watch` sees of a training that says nothing any more, and what it makes of that."""

from typing import Annotated

from msgspec import Meta, Struct, field

from ddpdiag.model.trial import Collective, ProcessState
from ddpdiag.probes.gpu.nvml import GpuUse

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
    """One rank of this host, as it stood.

    `process` is None if it was gone by then; its `state` is D only if it was in the same place a moment before.
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


class Stall(Struct, frozen=True, kw_only=True, tag="stall"):
    """One look at the ranks of one host.

    `unix_seconds` is when; `silent_seconds` is how long nothing had been heard, `asked` that a signal wanted the look,
    and `stall_seconds` the patience. `number` counts the silences of the run from 1, `looks` the looks at this one.
    `guessed` says that nothing named the ranks, so that they are numbered in the order of their start; `far_launcher`
    is a program below the command that starts ranks on other hosts, where there is one. `blocked` is
    how long the reader of the command's output has not taken any. `unmoved` says that an earlier look at this silence
    saw all ranks in the same places. `notes` are sentences on what could not be seen.
    """

    host: str
    unix_seconds: Seconds
    silent_seconds: Seconds
    stall_seconds: Seconds
    command: str
    asked: bool = False
    number: int = 1
    looks: int = 1
    world_size: int | None = None
    guessed: bool = False
    far_launcher: str = ""
    ranks: tuple[RankSeen, ...] = ()
    gpus: tuple[GpuUse, ...] = ()
    gpus_unseen: str = ""
    blocked_seconds: float = 0.0
    unmoved: bool = False
    notes: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    schema: str = WATCH_SCHEMA


class RankGroup(Struct, frozen=True, kw_only=True):
    """Ranks that do the same, and what that is, in one line of text."""

    ranks: tuple[int, ...]
    text: str


class Judged(Struct, frozen=True, kw_only=True):
    """What a look means: who holds the others up, and why; no ranks where the evidence cannot decide.

    `named` may hold a rank although nobody is at fault: it is the one for which the others wait. `moving` says that
    nothing activities still.
    """

    named: tuple[int, ...]
    title: str
    message: str
    fix: str
    moving: bool = False
    groups: tuple[RankGroup, ...] = ()
    stacks: dict[str, tuple[str, ...]] = {}
    notes: tuple[str, ...] = ()
