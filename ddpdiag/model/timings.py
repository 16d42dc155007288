"""Where a run's seconds went: per stage and per kind, and for whom the others waited."""

from msgspec import Struct, field

# In the order in which they follow each other within a trial. `start`: until a process, or a worker, could begin;
# `import`: of torch, as far as a trial waited for it; `context`: the device, and CUDA's context on it; `group`: opening
# the process group, and its first connection; `measure`: the rest of what a check does itself; `wait`: for ranks that
# came or ended later than the one in the middle; `failed`: in trials that did not end well; `own`: our own orders,
# plans, gates and judgement; `unknown`: what the recording does not tell.
KINDS = ("start", "import", "context", "group", "measure", "wait", "failed", "own", "unknown")

# Rows before the first stage, after the last one, and for what belongs to no stage.
START, JUDGEMENT, OTHER = "start", "judgement", "other"


class Spent(Struct, frozen=True, kw_only=True):
    """What one stage took; `kinds` adds up to `seconds` and leaves out what took nothing."""

    stage: str
    seconds: float
    kinds: dict[str, float] = field(default_factory=dict)


class Wait(Struct, frozen=True, kw_only=True):
    """For whom the run waited, `times` over: `seconds` in all.

    The longest wait was in check `code` (empty: at the start), where the first of `ranks` was later than others mostly
    by the kind `why` (empty: not known).

    No ranks where those that were late together are too many to single any out. `up_seconds` is how old the process of
    the first one was when it looked for rank 0: one that is young was launched late, an old one was slow to start.
    """

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    seconds: float
    times: int
    code: str = ""
    why: str = ""
    up_seconds: float | None = None


class Timings(Struct, frozen=True, kw_only=True):
    """A run from the start of rank 0's process to its verdict: `stages` add up to `seconds`.

    `waits` has the longest first, and few of them. What comes after the judgement (the files, the farewell) is not in
    it, because it is not over when this is written.
    """

    seconds: float
    stages: tuple[Spent, ...]
    waits: tuple[Wait, ...] = ()
