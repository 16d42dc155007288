"""Messages between supervisors and rank 0: typed structs, never pickle. Rank 0 sends `HelloAck` and all below it."""

import msgspec
from msgspec import Struct, field, structs

from ddpdiag import __version__
from ddpdiag.model import Arrival, Options, Outcome, Place, Trial
from ddpdiag.model.trial import Opening

# The largest regular message is an outcome with a stack dump, some 100 kB.
MAX_MESSAGE_BYTES = 4 << 20


class Hello(Struct, frozen=True, tag=True):
    """The first message of a rank, with its version of ddpdiag."""

    arrival: Arrival
    version: str = __version__


class AnyHello(Struct, frozen=True, tag="Hello"):
    """The hello of another version of ddpdiag, whose other fields are not known to this one."""

    version: str = ""


class BarrierReached(Struct, frozen=True, tag=True):
    """The sender's worker has reached the barrier of this trial.

    `offer` counts if the sender is the first rank of its group, or if all ranks of the group get all offers (`shares`).
    """

    trial: int
    offer: str
    shares: bool = False


class Partial(Struct, frozen=True, tag=True):
    """The data that the trial has measured on the sender's rank up to now; `text` describes its progress for people."""

    trial: int
    data: msgspec.Raw
    text: str = ""


class Leaving(Struct, frozen=True, tag=True):
    """The sender got this signal to end, so that its end is not its fault."""

    signal: int


class Pong(Struct, frozen=True, tag=True):
    """An empty message: the sender lives."""


class HelloAck(Struct, frozen=True, tag=True):
    """The answer to a hello; it proves that the sender is of this run."""

    version: str = __version__


class Refused(Struct, frozen=True, tag=True):
    """The receiver cannot take part, for the reason in `sentence`; it exits with `exit_code`.

    With `other_run` it does not exit: it belongs to another run, and looks for its rank 0 at the next port.
    """

    sentence: str
    exit_code: int
    other_run: bool = False


class Start(Struct, frozen=True, tag=True):
    """All ranks have joined, or the wait for them is over. `place` is the receiver's, with its local rank filled in.

    `nonce` is rank 0's: no other run with this run id has it. It names the folder of the records in `--shared-dir`.
    """

    place: Place
    options: Options
    nonce: str = ""


class RunTrial(Struct, frozen=True, tag=True):
    """Run this trial.

    `runs` are the ranks of the receiver's group, as ranges of consecutive ranks (first, last). The trial's own `groups`
    are left out: to send 10,000 ranks to each of them took 600 MB. `runs` is empty for a group of one rank, so that all
    lone ranks get the same message.
    """

    trial: Trial
    runs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def to(cls, group: tuple[int, ...], trial: Trial) -> "RunTrial":
        runs: list[tuple[int, int]] = []
        for rank in group if len(group) > 1 else ():
            if runs and runs[-1][1] == rank - 1:
                runs[-1] = (runs[-1][0], rank)
            else:
                runs.append((rank, rank))
        return cls(structs.replace(trial, groups=()), tuple(runs))

    def unpacked(self, receiver: int) -> Trial:
        """The trial, with the receiver's group as its only group."""
        group = tuple(rank for first, last in self.runs for rank in range(first, last + 1))
        return structs.replace(self.trial, groups=(group or (receiver,),))


class BarrierOpen(Struct, frozen=True, tag=True):
    """The barrier of this trial opens; the first rank of the receiver's group is at `host` and offers `offer`.

    `peers` holds host and offer of every rank of the group, if the check asked for them.
    """

    trial: int
    host: str
    offer: str
    peers: tuple[Opening, ...] = ()


class Ack(Struct, frozen=True, tag=True):
    """The receiver's outcome of this trial is recorded. Until it gets this, it sends the outcome at every ping."""

    trial: int


class Stop(Struct, frozen=True, tag=True):
    """The receiver must end this trial, because of another rank."""

    trial: int


class Ping(Struct, frozen=True, tag=True):
    """A request to answer at once; it is also rank 0's heartbeat."""


class Shutdown(Struct, frozen=True, tag=True):
    """The report is written and all outcomes are acknowledged: the receiver exits with this code.

    `lost` holds the nonces of ranks that cannot remove their files: other ranks of their host do so.
    """

    exit_code: int
    sentence: str
    lost: dict[int, str] = field(default_factory=dict)


# A supervisor writes an outcome to its record before it sends it.
Upward = Hello | BarrierReached | Partial | Outcome | Leaving | Pong
Downward = HelloAck | Refused | Start | RunTrial | BarrierOpen | Ack | Stop | Ping | Shutdown
