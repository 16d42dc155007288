"""What a run tells while it goes on, for whoever shows it. None of it is kept: the recording has lines of its own.

Rank 0 tells, in this order: `Started`, `Waiting` while ranks are missing, `Gathered`; for each stage `StageBegan`, for
each check of it `CheckBegan`, for each of its trials `TrialBegan` and, while that runs, `Pending` and `Progressed`;
then `StageEnded`. `Happened` may come at any time. Another rank tells `Seeking` and `Joined`, and nothing else.
`Waiting`, `Pending` and `Seeking` are told once a second, so that who has no clock of its own gets one.
"""

from typing import Literal, Protocol, TypeAlias

from msgspec import Struct

# "cut short": the budget was spent before the last trial of the stage.
StageStatus: TypeAlias = Literal["done", "failed", "skipped", "cut short"]


class Started(Struct, frozen=True, kw_only=True):
    """The run begins, and will end within its budget."""

    budget_seconds: float


class Waiting(Struct, frozen=True, kw_only=True):
    """Not all ranks have come; in so many seconds the run begins without those that are missing."""

    came: int
    missing: tuple[int, ...]
    left_seconds: float


class Gathered(Struct, frozen=True, kw_only=True):
    """The wait is over: so many ranks came, from so many hosts."""

    ranks: int
    hosts: int
    missing: tuple[int, ...]


class StageBegan(Struct, frozen=True, kw_only=True):
    """A stage begins, or goes on: what needs torch comes after everything that does not."""

    name: str


class StageEnded(Struct, frozen=True, kw_only=True):
    """A stage is over, or interrupted if there is `more` to come.

    "skipped" if nothing of it ran, "failed" if a trial did not end well: `failed` then has the codes of those checks.
    What checks found in what they measured is judged later, and is no part of this.
    """

    name: str
    status: StageStatus
    seconds: float
    failed: tuple[str, ...] = ()
    more: bool = False


class CheckBegan(Struct, frozen=True, kw_only=True):
    """A check begins that has something to do."""

    code: str
    name: str


class TrialBegan(Struct, frozen=True, kw_only=True):
    """A trial was handed out, and ends within `deadline_seconds`; `importing`: it is the first that needs torch."""

    deadline_seconds: float
    importing: bool = False


class Pending(Struct, frozen=True, kw_only=True):
    """How many ranks of the trial have done their part, and for whom the others wait, with their hosts.

    `awaited` are those that have not reached the barrier at which others wait; where none is at a barrier, all that
    have not answered.
    """

    ranks: int
    done: int
    awaited: tuple[int, ...]
    nodes: tuple[str, ...]


class Progressed(Struct, frozen=True, kw_only=True):
    """The check is so far, in its own words."""

    text: str


class Happened(Struct, frozen=True, kw_only=True):
    """Something that changes the run: a signal, a rank that is lost."""

    text: str


class Seeking(Struct, frozen=True, kw_only=True):
    """This rank looks for rank 0 at `host`, for so many seconds more."""

    rank: int
    host: str
    left_seconds: float


class Joined(Struct, frozen=True, kw_only=True):
    """This rank takes part; rank 0, at `host`, will report."""

    rank: int
    host: str


News: TypeAlias = (
    Started
    | Waiting
    | Gathered
    | StageBegan
    | StageEnded
    | CheckBegan
    | TrialBegan
    | Pending
    | Progressed
    | Happened
    | Seeking
    | Joined
)


class Listener(Protocol):
    """Who is told how the run goes on; calls may come from any thread, and none of them raises or waits."""

    def tell(self, news: News) -> None:
        """Something new."""

    def close(self) -> None:
        """Nothing more will come; what was drawn is taken away."""
