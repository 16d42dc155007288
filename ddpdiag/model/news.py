"""Messages about the progress of a run, for the display. They are not recorded: the recording has other lines.

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
    """The run begins. It will end within `budget_seconds`."""

    budget_seconds: float


class Waiting(Struct, frozen=True, kw_only=True):
    """`came` ranks have joined. In `left_seconds` the run begins without those that are still missing."""

    came: int
    missing: tuple[int, ...]
    left_seconds: float


class Gathered(Struct, frozen=True, kw_only=True):
    """The wait for ranks is over: this many `ranks` joined, from this many `hosts`."""

    ranks: int
    hosts: int
    missing: tuple[int, ...]


class StageBegan(Struct, frozen=True, kw_only=True):
    """A stage begins, or continues: checks that need torch run after all that do not."""

    name: str


class StageEnded(Struct, frozen=True, kw_only=True):
    """A stage has ended or, with `more`, is interrupted and will continue.

    `status` is "skipped" if nothing of the stage ran, and "failed" if a trial failed: `failed` then has the codes of
    the checks with a failed trial. Findings do not count, because they are judged later.
    """

    name: str
    status: StageStatus
    seconds: float
    failed: tuple[str, ...] = ()
    more: bool = False


class CheckBegan(Struct, frozen=True, kw_only=True):
    """A check begins that has trials to run."""

    code: str
    name: str


class TrialBegan(Struct, frozen=True, kw_only=True):
    """A trial begins, and ends within `deadline_seconds`. `importing`: it is the first trial that needs torch."""

    deadline_seconds: float
    importing: bool = False


class Pending(Struct, frozen=True, kw_only=True):
    """The number of ranks that have done their part of the trial, and the ranks for which they wait, with their hosts.

    `awaited` are the ranks that have not reached the barrier at which others wait. If no rank waits at a barrier, they
    are all ranks that have not answered.
    """

    ranks: int
    done: int
    awaited: tuple[int, ...]
    hosts: tuple[str, ...]


class Progressed(Struct, frozen=True, kw_only=True):
    """A text of the running check about its progress."""

    text: str


class Happened(Struct, frozen=True, kw_only=True):
    """An event that changes the run: a signal, a rank that is lost."""

    text: str


class Seeking(Struct, frozen=True, kw_only=True):
    """This rank tries to reach rank 0 at `host`, for another `left_seconds`."""

    rank: int
    host: str
    left_seconds: float


class Joined(Struct, frozen=True, kw_only=True):
    """This rank joined the run. Rank 0, at `host`, will make the report."""

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
    """The receiver of a run's progress. Any thread may call its methods, which neither raise nor wait."""

    def tell(self, news: News) -> None:
        """Show this news."""

    def close(self) -> None:
        """Remove the display; no more news follows."""
