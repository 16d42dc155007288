"""Messages between supervisors and rank 0: typed structs, never pickle. From HelloAck on, rank 0 is the sender."""

import msgspec
from msgspec import Struct, field, structs

from ddpdiag import __version__
from ddpdiag.model import Arrival, Options, Outcome, Place, Trial
from ddpdiag.model.trial import Opening

# The largest honest message is an outcome with a stack dump, some 100 kB.
MAX_MESSAGE_BYTES = 4 << 20


class Hello(Struct, frozen=True, tag=True):
    """The first message of a rank, with its version of ddpdiag."""

    arrival: Arrival
    version: str = __version__


class AnyHello(Struct, frozen=True, tag="Hello"):
    """A hello of a version whose other fields are not known here."""

    version: str = ""


class BarrierReached(Struct, frozen=True, tag=True):
    """The sender's worker reached the barrier of this trial.

    `offer` counts if the sender is the first rank of its group, or if the group `shares` all offers.
    """

    trial: int
    offer: str
    shares: bool = False


class Partial(Struct, frozen=True, tag=True):
    """The trial's data on the sender's rank so far; `text` describes its progress for people."""

    trial: int
    data: msgspec.Raw
    text: str = ""


class Leaving(Struct, frozen=True, tag=True):
    """The sender got this signal to end, so that it is not at fault."""

    signal: int


class Pong(Struct, frozen=True, tag=True):
    """An empty message: the sender lives."""


class HelloAck(Struct, frozen=True, tag=True):
    """Answers a hello; this proves the run id."""

    version: str = __version__


class Refused(Struct, frozen=True, tag=True):
    """The receiver cannot take part, for the reason in the sentence; it exits with `exit_code`.

    One that belongs to `other_run` goes on to look for its own rank 0, at the next port.
    """

    sentence: str
    exit_code: int
    other_run: bool = False


class Start(Struct, frozen=True, tag=True):
    """All ranks joined, or their time is over: the receiver's place, with the local rank settled.

    `nonce` tells this run from others of its run id: records in `--shared-dir` lie in a folder with that name.
    """

    place: Place
    options: Options
    nonce: str = ""


class RunTrial(Struct, frozen=True, tag=True):
    """Run this trial.

    `runs` are the ranks of the receiver's group, in its order, as stretches of consecutive ranks (first, last), and the
    trial's own groups are left out: to list 10,000 ranks for each of them took 600 MB of the wire. None for a receiver
    that is alone, so that all such ranks get the same message.
    """

    trial: Trial
    runs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def to(cls, group: tuple[int, ...], trial: Trial) -> "RunTrial":
        """The message for each rank of a group."""
        runs: list[tuple[int, int]] = []
        for rank in group if len(group) > 1 else ():
            if runs and runs[-1][1] == rank - 1:
                runs[-1] = (runs[-1][0], rank)
            else:
                runs.append((rank, rank))
        return cls(structs.replace(trial, groups=()), tuple(runs))

    def unpacked(self, receiver: int) -> Trial:
        """The trial, with the receiver's group as its only one."""
        group = tuple(rank for first, last in self.runs for rank in range(first, last + 1))
        return structs.replace(self.trial, groups=(group or (receiver,),))


class BarrierOpen(Struct, frozen=True, tag=True):
    """The barrier of this trial opens; the first rank of the receiver's group is at `host` and offers `offer`.

    `peers` holds host and offer of every rank of the group, where the check asked for them.
    """

    trial: int
    host: str
    offer: str
    peers: tuple[Opening, ...] = ()


class Ack(Struct, frozen=True, tag=True):
    """The receiver's result of this trial is in the recording; without this it sends it again at every ping."""

    trial: int


class Stop(Struct, frozen=True, tag=True):
    """The receiver's part in this trial is over, because of another rank."""

    trial: int


class Ping(Struct, frozen=True, tag=True):
    """A request to answer at once; also rank 0's heartbeat."""


class Shutdown(Struct, frozen=True, tag=True):
    """The files are written, and all results are acknowledged: the receiver exits with this code.

    `lost` are ranks that cannot tidy up themselves, with their nonces: ranks of the same host remove their files.
    """

    exit_code: int
    sentence: str
    lost: dict[int, str] = field(default_factory=dict)


# An outcome is in its rank's own file before it is sent.
Upward = Hello | BarrierReached | Partial | Outcome | Leaving | Pong
Downward = HelloAck | Refused | Start | RunTrial | BarrierOpen | Ack | Stop | Ping | Shutdown
