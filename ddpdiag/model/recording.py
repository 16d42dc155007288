"""The recording of a run, which is the only input of judgement."""

from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct, field

from ddpdiag.model.options import RunOptions
from ddpdiag.model.trial import Arrival, Outcome, Trial

# The number is the version of the format: 1 is the first.
SCHEMA = "ddpdiag.recording/1"
# `ddpdiag simulate` has at most this many ranks. A header that claims more would make lists that fill the memory.
MAX_RANKS = 1 << 23


class Header(Struct, frozen=True, kw_only=True, tag="header"):
    """The first line of every recording. `created` is UTC in ISO 8601.

    `checks` are the codes of all checks of the version that wrote the recording, so that a newer version does not
    report its new checks as missing. `layout` is the host of each rank, by rank; empty if the launcher does not name
    the hosts. `authentication` says how ranks proved that they belong to the run ("token", "inherited", "same host",
    "key file", "none"; empty if not known).
    """

    run_id: str
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    launcher: str
    options: RunOptions
    created: str
    version: str
    checks: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()
    authentication: str = ""
    schema: str = SCHEMA


class EventKind(Enum):
    """The kinds of events outside trials, about one rank or about the run."""

    ABSENT = "absent"  # never joined
    DUPLICATE = "duplicate"  # a second process with the same rank
    OTHER_RUN = "other-run"  # a process of another run connected to this run's port
    LEAVING = "leaving"  # reported a signal to end (SIGTERM, SIGINT)
    LOST = "lost"  # joined, then stopped responding
    MISMATCH = "mismatch"  # has another world size
    VERSION = "version"  # has another version of ddpdiag
    SIGNAL = "signal"  # rank 0 received a signal to end
    BUDGET = "budget"  # the budget was spent before all checks ran


# The events that show that a signal asked a rank to end.
SIGNAL_EVENTS = (EventKind.SIGNAL, EventKind.LEAVING)


class Event(Struct, frozen=True, kw_only=True, tag="event"):
    """An event at `seconds` after the start of the run. `rank` is None if the event concerns the whole run.

    `host_answered`, for a lost rank, says whether its host still answered a plain TCP connect (None: not tried). If
    the host answered, only the rank's process ended. `reporter` is the rank that recorded the loss of rank 0.
    """

    kind: EventKind
    rank: int | None = None
    seconds: float = 0.0
    detail: str = ""
    host: str = ""
    host_answered: bool | None = None
    reporter: int | None = None


class Skip(Struct, frozen=True, kw_only=True, tag="skip"):
    """A check that was not run, and the reason.

    `is_inapplicable`: the check had nothing to test (no GPU, one rank). If it is False, the check should have run.
    """

    code: str
    reason: str
    is_inapplicable: bool


class End(Struct, frozen=True, kw_only=True, tag="end"):
    """The last line of a complete recording."""

    seconds: float


Line = Header | Arrival | Trial | Outcome | Event | Skip | End


class Recording(Struct, frozen=True, kw_only=True):
    """All lines of a run, by kind. `problems` are sentences about faults of the files, such as unreadable lines."""

    header: Header
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    events: tuple[Event, ...] = ()
    skips: tuple[Skip, ...] = ()
    end: End | None = None
    problems: tuple[str, ...] = ()
