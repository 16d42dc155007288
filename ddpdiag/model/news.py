"""The progress of a run, for the display. None of it is kept: the recording has lines of its own.

Rank 0 sends, in this order: `Started`, `Waiting` while ranks are missing, `Gathered`; for each stage `StageBegan`, for
each check of it `CheckBegan`, for each of its trials `TrialBegan` and, while that runs, `Pending` and `Progressed`;
then `StageEnded`. `Happened` may be sent at any time. Another rank sends `Seeking` and `Joined`, and nothing else.
`Waiting`, `Pending` and `Seeking` are sent once a second, so that a display without a clock gets one.
"""

from typing import Literal, Protocol, TypeAlias

from msgspec import Struct

# "cut short": the budget was spent before the last trial of the stage.
StageStatus: TypeAlias = Literal["done", "failed", "skipped", "cut short"]


class Started(Struct, frozen=True, kw_only=True):
    """The run begins, and will end within its budget."""

    budget_seconds: float


class Waiting(Struct, frozen=True, kw_only=True):
    """Not all ranks have joined; in so many seconds the run begins without those that are missing."""

    came: int
    missing: tuple[int, ...]
    left_seconds: float


class Gathered(Struct, frozen=True, kw_only=True):
    """The wait is over: so many ranks joined, from so many hosts."""

    ranks: int
    hosts: int
    missing: tuple[int, ...]


class StageBegan(Struct, frozen=True, kw_only=True):
    """A stage begins, or continues: checks that need torch run after all that do not."""

    name: str


class StageEnded(Struct, frozen=True, kw_only=True):
    """A stage is over, or interrupted if `more` of it will run.

    "skipped" if nothing of it ran, "failed" if a trial failed: `failed` then has the codes of those checks.
    Findings are judged later, and are no part of this.
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
    """The number of ranks that have done their part of the trial, and the ranks for which they wait, with their hosts.

    `awaited` are those that have not reached the barrier at which others wait; where none is at a barrier, all that
    have not answered.
    """

    ranks: int
    done: int
    awaited: tuple[int, ...]
    hosts: tuple[str, ...]


class Progressed(Struct, frozen=True, kw_only=True):
    """The check is so far, in its own words."""

    text: str


class Happened(Struct, frozen=True, kw_only=True):
    """An event that changes the run: a signal, a rank that is lost."""

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
    """Receives the progress of the run; calls may come from any thread, and none of them raises or waits."""

    def tell(self, news: News) -> None:
        """Show this news."""

    def close(self) -> None:
        """No more news follows; remove what was drawn."""
