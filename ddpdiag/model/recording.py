"""The recording of a run, which is the only input of judgement."""

from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct, field

from ddpdiag.model.options import Options
from ddpdiag.model.trial import Arrival, Outcome, Trial

# History: 1 = first.
SCHEMA = "ddpdiag.recording/1"
# The most ranks that `ddpdiag simulate` can have. Lists of more ranks would fill the memory.
MOST_RANKS = 1 << 23


class Header(Struct, frozen=True, kw_only=True, tag="header"):
    """The first line of every recording. `created` is UTC in ISO 8601.

    `checks` are the codes of all checks of the version that wrote it, so that a newer version does not miss its new
    checks in it. `layout` is the host of each rank if the launcher names it, else empty. `secret` says how ranks proved
    that they belong to the run ("token", "inherited", "same host", "key file", "none"; empty if not known).
    """

    run_id: str
    world_size: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    launcher: str
    options: Options
    created: str
    version: str
    checks: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()
    secret: str = ""
    schema: str = SCHEMA


class EventKind(Enum):
    """The kinds of events of a rank, or of the run, outside a trial."""

    ABSENT = "absent"  # never joined
    DUPLICATE = "duplicate"  # a second process with the same rank
    OTHER_RUN = "other-run"  # a process of another run connected to this run's port
    LEAVING = "leaving"  # reported a signal to end (SIGTERM, SIGINT)
    LOST = "lost"  # joined, then stopped responding
    MISMATCH = "mismatch"  # has another world size
    VERSION = "version"  # has another version of ddpdiag
    SIGNAL = "signal"  # rank 0 received a signal to end
    BUDGET = "budget"  # the budget was spent before all checks ran


TOLD_TO_LEAVE = (EventKind.SIGNAL, EventKind.LEAVING)


class Event(Struct, frozen=True, kw_only=True, tag="event"):
    """An event at `seconds` after the start of the run. `rank` is None if it concerns the whole run.

    `answers`, for a lost rank, says whether its host still answered a plain TCP connect, so that only its process
    ended (None: no rank tried). `reporter` is the rank that recorded the loss of rank 0.
    """

    kind: EventKind
    rank: int | None = None
    seconds: float = 0.0
    detail: str = ""
    host: str = ""
    answers: bool | None = None
    reporter: int | None = None


class Skip(Struct, frozen=True, kw_only=True, tag="skip"):
    """A check that was not run, and why.

    `grounds`: the check had nothing to test (no GPU, one rank), so this is no failure. Else it should have run.
    """

    code: str
    reason: str
    grounds: bool


class End(Struct, frozen=True, kw_only=True, tag="end"):
    """The last line of a complete recording."""

    seconds: float


Line = Header | Arrival | Trial | Outcome | Event | Skip | End


class Recording(Struct, frozen=True, kw_only=True):
    """All lines of a run, by kind. `notes` are sentences about faults of the files (cut off, unreadable lines)."""

    header: Header
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    events: tuple[Event, ...] = ()
    skips: tuple[Skip, ...] = ()
    end: End | None = None
    notes: tuple[str, ...] = ()
