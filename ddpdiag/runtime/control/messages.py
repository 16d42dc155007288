"""Messages between supervisors and rank 0, never pickled. Supervisors send those above `HelloAck`, rank 0 the rest."""

import msgspec
from msgspec import Struct, field, structs

from ddpdiag import __version__
from ddpdiag.model import Arrival, Outcome, Place, RunOptions, Trial
from ddpdiag.model.trial import BarrierResult

# The largest regular message is an outcome with a stack dump, some 100 kB.
MAX_MESSAGE_BYTES = 4 << 20


class Hello(Struct, frozen=True, tag=True):
    """The first message of a rank: who it is (place, host, address, GPUs), in `arrival`, and its version of ddpdiag."""

    arrival: Arrival
    version: str = __version__


class OtherVersionHello(Struct, frozen=True, tag="Hello"):
    """A `Hello` of another version of ddpdiag. Its other fields may be unknown to this version, and are not decoded."""

    version: str = ""


class BarrierReached(Struct, frozen=True, tag=True):
    """The sender's worker has reached the barrier of this trial.

    `offer` is a text for other ranks, such as the port of a store. Every rank of the group receives that of the group's
    first rank or, with `is_exchange`, those of all.
    """

    trial: int
    offer: str
    is_exchange: bool = False


class PartialData(Struct, frozen=True, tag=True):
    """The data that the trial has measured on the sender's rank up to now. `text` describes the progress for people."""

    trial: int
    data: msgspec.Raw
    text: str = ""


class Leaving(Struct, frozen=True, tag=True):
    """The sender received this signal and will end, so it is not to blame for its end."""

    signal: int


class Pong(Struct, frozen=True, tag=True):
    """The answer to `Ping`, which shows that the sender is alive."""


class HelloAck(Struct, frozen=True, tag=True):
    """The answer to a hello: rank 0 of this run accepts the receiver."""

    version: str = __version__


class Refused(Struct, frozen=True, tag=True):
    """The receiver cannot take part, for the reason in `sentence`, and must exit with `exit_code`.

    If `other_run`, the receiver belongs to another run. It does not exit, and looks for its rank 0 at the next port.
    """

    sentence: str
    exit_code: int
    other_run: bool = False


class Start(Struct, frozen=True, tag=True):
    """All ranks have joined, or the wait for them is over. `place` is the receiver's place, completed by rank 0.

    `nonce` is rank 0's nonce. No other run has it, so it is part of the name of the run's folder in `--shared-dir`.
    """

    place: Place
    options: RunOptions
    nonce: str = ""


class RunTrial(Struct, frozen=True, tag=True):
    """Run this trial.

    `rank_ranges` holds the ranks of the receiver's group as ranges (first, last). `trial.groups` is empty, because
    sending all groups to each of 10,000 ranks took 600 MB. `rank_ranges` is empty if the group is the receiver alone,
    so that all such ranks get the same message.
    """

    trial: Trial
    rank_ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def for_group(cls, group: tuple[int, ...], trial: Trial) -> "RunTrial":
        ranges: list[tuple[int, int]] = []
        for rank in group if len(group) > 1 else ():
            if ranges and ranges[-1][1] == rank - 1:
                ranges[-1] = (ranges[-1][0], rank)
            else:
                ranges.append((rank, rank))
        return cls(structs.replace(trial, groups=()), tuple(ranges))

    def trial_for(self, receiver: int) -> Trial:
        """The trial, with the receiver's group as its only group."""
        group = tuple(rank for first, last in self.rank_ranges for rank in range(first, last + 1))
        return structs.replace(self.trial, groups=(group or (receiver,),))


class BarrierOpen(Struct, frozen=True, tag=True):
    """The barrier of this trial opens. `host` and `offer` are the address and the offer of the group's first rank.

    `peers` holds address and offer of every rank of the group, if a rank asked for an exchange.
    """

    trial: int
    host: str
    offer: str
    peers: tuple[BarrierResult, ...] = ()


class Ack(Struct, frozen=True, tag=True):
    """The receiver's outcome of this trial is recorded. Until then the receiver sends the outcome at every ping."""

    trial: int


class Stop(Struct, frozen=True, tag=True):
    """The receiver must end this trial, because another rank failed, or because the receiver's group is late."""

    trial: int


class Ping(Struct, frozen=True, tag=True):
    """The heartbeat of rank 0, which the receiver answers at once."""


class Shutdown(Struct, frozen=True, tag=True):
    """The run is over, and the receiver exits with `exit_code`. `sentence` gives the result in words.

    `lost_nonces` holds the nonce of each lost rank, whose files the other ranks of its host remove.
    """

    exit_code: int
    sentence: str
    lost_nonces: dict[int, str] = field(default_factory=dict)


# A supervisor writes each outcome to its record before it sends the outcome.
MessageToRank0 = Hello | BarrierReached | PartialData | Outcome | Leaving | Pong
MessageToRank = HelloAck | Refused | Start | RunTrial | BarrierOpen | Ack | Stop | Ping | Shutdown
