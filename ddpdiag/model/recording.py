"""A run as it happened: the only input of judgement."""

from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct, field

from ddpdiag.model.options import Options
from ddpdiag.model.trial import Arrival, Outcome, Trial

# History: 1 = first.
SCHEMA = "ddpdiag.recording/1"
# As many as `ddpdiag simulate` can have; of more, lists of ranks would fill the memory.
MOST_RANKS = 1 << 23


class Header(Struct, frozen=True, kw_only=True, tag="header"):
    """First line of every recording. `created` is UTC in ISO 8601.

    `checks` are the codes that the writing version knew: a newer one does not miss in it what came later.
    `layout` is the host of each rank, where the launcher names it, else empty. `secret` says by what ranks proved
    themselves ("token", "inherited", "same host", "key file", "none"); empty where nothing is known of it.
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

    ABSENT = "absent"  # never came
    DUPLICATE = "duplicate"  # a second process with the same rank
    OTHER_RUN = "other-run"  # a process of another run came to this run's port
    LEAVING = "leaving"  # reported a signal to end (SIGTERM, SIGINT)
    LOST = "lost"  # came, then fell silent
    MISMATCH = "mismatch"  # came with another world size
    VERSION = "version"  # came with another version of ddpdiag
    SIGNAL = "signal"  # rank 0 received a signal to end
    BUDGET = "budget"  # the budget was spent before all was done


TOLD_TO_LEAVE = (EventKind.SIGNAL, EventKind.LEAVING)


class Event(Struct, frozen=True, kw_only=True, tag="event"):
    """Something that happened at `seconds` after the start; `rank` is `None` when it concerns the run.

    `answers` says of a lost rank whether its host still answered a plain TCP connect, so that only its process is gone;
    `None` means that no rank tried. `reporter` is the rank that lost rank 0, in its own record.
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

    `grounds` says that it had nothing to look at here (no GPU, one rank); otherwise it should have run and could not.
    """

    code: str
    reason: str
    grounds: bool


class End(Struct, frozen=True, kw_only=True, tag="end"):
    """The last line of a complete recording."""

    seconds: float


Line = Header | Arrival | Trial | Outcome | Event | Skip | End


class Recording(Struct, frozen=True, kw_only=True):
    """All lines of a run, sorted by kind. `notes` says what was wrong with the files (cut off, unreadable lines)."""

    header: Header
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    events: tuple[Event, ...] = ()
    skips: tuple[Skip, ...] = ()
    end: End | None = None
    notes: tuple[str, ...] = ()
