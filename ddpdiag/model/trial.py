"""Trials, and what came of them."""

from enum import Enum

from msgspec import Raw, Struct, field

NOTHING = Raw(b"null")  # an empty Raw would be written as no JSON at all


class Kind(Enum):
    """Which worker runs a trial: one without torch, started at once, or one forked by the nursery."""

    PLAIN = "plain"
    TORCH = "torch"


class Status(Enum):
    """How a trial ran on one rank; what that means is a `Severity`, and judged later."""

    DONE = "done"
    RAISED = "raised"
    DIED = "died"
    HUNG = "hung"
    UNHEARD = "unheard"
    SKIPPED = "skipped"


class Trial(Struct, frozen=True, kw_only=True, tag="trial"):
    """One experiment of a check.

    `groups` lists the ranks that take part together; a rank is in one group at most. `env` overrides the
    worker's environment (`None` unsets). `number` is unique in the run, `attempt` within the check.
    `deadline_seconds` counts from the moment at which a rank receives the trial.
    """

    code: str
    groups: tuple[tuple[int, ...], ...]
    kind: Kind
    deadline_seconds: float
    number: int = 0
    attempt: int = 0
    params: dict[str, str | int | float | bool] = field(default_factory=dict)
    env: dict[str, str | None] = field(default_factory=dict)
    fresh: bool = False

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The group in which `rank` takes part, or an empty one."""
        return next((group for group in self.groups if rank in group), ())

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that takes part, in rising order."""
        return tuple(sorted(rank for group in self.groups for rank in group))


class ProcessState(Struct, frozen=True, kw_only=True):
    """A process that did not end in time, as /proc and its own stack dump show it.

    `state` is the letter of proc(5): R running, S sleeping, D in the kernel or a driver, T stopped.
    `stack` lists frames from the innermost one, as "function (file:line)". `survived` says that SIGKILL did not end it.
    """

    pid: int
    state: str | None = None
    wchan: str | None = None
    stack: tuple[str, ...] = ()
    survived: bool = False


class Outcome(Struct, frozen=True, kw_only=True, tag="outcome"):
    """What one trial gave on one rank.

    `data` is the check's own struct as JSON, present only when `status` is DONE. `step` counts the steps that
    the worker announced and `at` names the last of them. `told` says that rank 0 ended this rank's
    part because of somebody else: it is a bystander. `timings` holds seconds by kind (start, group, measure).
    """

    trial: int
    code: str
    rank: int
    status: Status
    data: Raw = NOTHING
    step: int = 0
    at: str = ""
    error: str = ""
    detail: str = ""
    told: bool = False
    process: ProcessState | None = None
    seconds: float = 0.0
    timings: dict[str, float] = field(default_factory=dict)
