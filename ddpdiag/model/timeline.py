"""The course of a run: when who came, and how long each rank was in each trial.

Seconds count from the start of the run at rank 0. Of a large world some ranks are shown: first those that are blamed,
that were lost, or whose trials did not end well.
"""

from msgspec import Struct


class Bar(Struct, frozen=True, kw_only=True):
    """One trial of check `code`, from its order to the end of its slowest rank. `statuses` counts its outcomes."""

    number: int
    code: str
    stage: str
    begin_seconds: float
    seconds: float
    deadline_seconds: float
    statuses: dict[str, int]


class Unfinished(Struct, frozen=True, kw_only=True):
    """How trial `number` ended on a rank, if not well; `at` is the last step that it announced."""

    number: int
    status: str
    at: str = ""


class Lane(Struct, frozen=True, kw_only=True):
    """One rank. `arrived_seconds` is None if it never came, `gone_seconds` None if it was there to the end.

    `seconds` has what each of the timeline's trials took on it, None where it took no part.
    """

    rank: int
    node: str
    arrived_seconds: float | None
    gone_seconds: float | None = None
    seconds: tuple[float | None, ...] = ()
    unfinished: tuple[Unfinished, ...] = ()


class Timeline(Struct, frozen=True, kw_only=True):
    """The trials in their order, and the ranks in theirs. `trials_in_all` and `ranks_in_all` count what is left out,
    too; of many trials the longest are here."""

    seconds: float
    trials: tuple[Bar, ...]
    lanes: tuple[Lane, ...]
    trials_in_all: int
    ranks_in_all: int
