"""News: messages about the progress of a run, for the display of each rank. They are not recorded.

Rank 0 sends `RunStarted`, then `WaitingForRanks` while ranks are missing, then `RanksGathered`. For each stage it sends
`StageBegan`, for each check of the stage `CheckBegan`, and for each trial of the check `TrialBegan`. While the trial
runs, it sends `TrialPending`, `CheckProgress` and `PartialResults`. At the end of the stage it sends `StageEnded`. It
may send `RunEvent` at any time. All other ranks send only `LookingForRank0` and `Joined`.
`WaitingForRanks`, `TrialPending` and `LookingForRank0` are sent once a second, because some displays have no clock.
"""

from contextlib import AbstractContextManager
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct

from ddpdiag.model.recording import Recording

# "cut short": the budget was spent before the last trial of the stage.
StageStatus: TypeAlias = Literal["done", "failed", "skipped", "cut short"]


class News(Struct, frozen=True, kw_only=True):
    """The base class of the messages."""


class RunStarted(News, frozen=True, kw_only=True):
    """The run begins. It will end within `budget_seconds`."""

    budget_seconds: float


class WaitingForRanks(News, frozen=True, kw_only=True):
    """`joined` ranks have joined. In `left_seconds` the run begins without the ranks that are still missing."""

    joined: int
    missing: tuple[int, ...]
    left_seconds: float


class RanksGathered(News, frozen=True, kw_only=True):
    """The wait for ranks is over. `ranks` is the number of ranks that joined, `hosts` the number of their hosts."""

    ranks: int
    hosts: int
    missing: tuple[int, ...]


class StageBegan(News, frozen=True, kw_only=True):
    """A stage begins or continues. It continues because checks that need torch run after those that do not."""

    name: str


class StageEnded(News, frozen=True, kw_only=True):
    """A stage has ended. With `will_continue`, the stage is only interrupted.

    `status` is "skipped" if nothing of the stage ran, and "failed" if a trial failed. `failed` has the codes of the
    checks with a failed trial. Findings do not count, because checks are judged later.
    """

    name: str
    status: StageStatus
    seconds: float
    failed: tuple[str, ...] = ()
    will_continue: bool = False


class CheckBegan(News, frozen=True, kw_only=True):
    """A check with trials to run begins."""

    code: str
    name: str


class TrialBegan(News, frozen=True, kw_only=True):
    """A trial begins, and ends within `deadline_seconds`. `imports_torch`: it is the first trial that needs torch."""

    deadline_seconds: float
    imports_torch: bool = False


class TrialPending(News, frozen=True, kw_only=True):
    """The state of a running trial: `done` of its `ranks` have done their part.

    `awaited` are the ranks that have not reached the barrier at which other ranks wait. If no rank waits at a barrier,
    `awaited` are all ranks that have not answered. `hosts` are the hosts of these ranks.
    """

    ranks: int
    done: int
    awaited: tuple[int, ...]
    hosts: tuple[str, ...]


class CheckProgress(News, frozen=True, kw_only=True):
    """A text from the running check about its progress."""

    text: str


class PartialResults(News, frozen=True, kw_only=True):
    """All ranks of the running trial have reported data since the last such message.

    `recording` is the recording so far. In it, ranks that are still measuring have an outcome with their partial data.
    """

    recording: Recording


class RunEvent(News, frozen=True, kw_only=True):
    """An event that changes the run, such as a signal or the loss of a rank."""

    text: str


class LookingForRank0(News, frozen=True, kw_only=True):
    """This rank tries to reach rank 0 at `host`. It gives up after another `left_seconds`."""

    rank: int
    host: str
    left_seconds: float


class Joined(News, frozen=True, kw_only=True):
    """This rank joined the run. Rank 0, at `host`, will make the report."""

    rank: int
    host: str


class Listener(Protocol):
    """The receiver of news. Any thread may call its methods. They neither raise nor wait."""

    def tell(self, news: News) -> None:
        """Show this news."""

    def erased(self) -> AbstractContextManager[None]:
        """Context manager: no line of the display is in the way meanwhile, and the caller may write whole lines."""

    def close(self) -> None:
        """Remove the display. Afterwards `tell` is not called."""
