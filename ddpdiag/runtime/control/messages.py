"""Messages between supervisors and rank 0: typed structs, never pickle."""

import msgspec
from msgspec import Struct, field, structs

from ddpdiag import __version__
from ddpdiag.model import Arrival, Options, Outcome, Place, Trial
from ddpdiag.model.trial import Opening

# The largest honest message is an outcome with a stack dump, some 100 kB.
MAX_MESSAGE_BYTES = 4 << 20

# Supervisor to rank 0 ------------------------------------------------------------------------------------------------


class Hello(Struct, frozen=True, tag="hello"):
    """I am here, with this version of ddpdiag."""

    arrival: Arrival
    version: str = __version__


class AnyHello(Struct, frozen=True, tag="hello"):
    """A hello of a version whose other fields are not known here."""

    version: str = ""


class BarrierReached(Struct, frozen=True, tag="ready"):
    """My worker reached the barrier of this trial; `offer` counts if I am the first of my group, or it `shares`."""

    trial: int
    offer: str
    shares: bool = False


class Partial(Struct, frozen=True, tag="partial"):
    """What the trial has given on my rank so far; `text` says for people how far it is."""

    trial: int
    data: msgspec.Raw
    text: str = ""


class Leaving(Struct, frozen=True, tag="leaving"):
    """I was told to leave by this signal, so I am not at fault."""

    signal: int


class Pong(Struct, frozen=True, tag="alive"):
    """Nothing to say, but here."""


# Rank 0 to supervisor ------------------------------------------------------------------------------------------------


class HelloAck(Struct, frozen=True, tag="seated"):
    """Your hello was heard; this proves the run id."""

    version: str = __version__


class Refused(Struct, frozen=True, tag="refused"):
    """You cannot take part; the sentence says why, and `exit_code` how to leave."""

    sentence: str
    exit_code: int


class Start(Struct, frozen=True, tag="welcome"):
    """All came, or their time is over: this is your place, with the local rank settled.

    `nonce` tells this run from others of its run id: records in `--shared-dir` lie in a folder with that name.
    """

    place: Place
    options: Options
    nonce: str = ""


class RunTrial(Struct, frozen=True, tag="order"):
    """Run this trial.

    `runs` are the ranks of your group, in its order, as stretches of consecutive ranks (first, last), and the trial's
    own groups are left out: to list 10,000 ranks for each of them took 600 MB of the wire.
    """

    trial: Trial
    runs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def to(cls, group: tuple[int, ...], trial: Trial) -> "RunTrial":
        """The message for each rank of a group."""
        runs: list[tuple[int, int]] = []
        for rank in group:
            if runs and runs[-1][1] == rank - 1:
                runs[-1] = (runs[-1][0], rank)
            else:
                runs.append((rank, rank))
        return cls(structs.replace(trial, groups=()), tuple(runs))

    def unpacked(self) -> Trial:
        """The trial, with this group as its only one."""
        group = tuple(rank for first, last in self.runs for rank in range(first, last + 1))
        return structs.replace(self.trial, groups=(group,))


class BarrierOpen(Struct, frozen=True, tag="open"):
    """The barrier of this trial opens; the first rank of your group is at `host` and offers `offer`.

    `peers` holds host and offer of every rank of the group, where the check asked for them.
    """

    trial: int
    host: str
    offer: str
    peers: tuple[Opening, ...] = ()


class Ack(Struct, frozen=True, tag="noted"):
    """Your result of this trial is in the recording; until this comes it is sent again at every ping."""

    trial: int


class Stop(Struct, frozen=True, tag="stop"):
    """Your part in this trial is over, because of somebody else."""

    trial: int


class Ping(Struct, frozen=True, tag="rollcall"):
    """Answer at once, whatever you do. Also rank 0's heartbeat."""


class Shutdown(Struct, frozen=True, tag="farewell"):
    """The files are written; leave with this code. Everything of yours is acknowledged.

    `lost` are ranks that cannot tidy up themselves, with their nonces: who shares their host removes their files.
    """

    exit_code: int
    sentence: str
    lost: dict[int, str] = field(default_factory=dict)


# An outcome is in its rank's own file before it is sent.
Upward = Hello | BarrierReached | Partial | Outcome | Leaving | Pong
Downward = HelloAck | Refused | Start | RunTrial | BarrierOpen | Ack | Stop | Ping | Shutdown
