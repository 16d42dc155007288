"""What supervisors and rank 0 say to each other: typed structs, never pickle."""

import hashlib
import hmac
from typing import TypeVar

import msgspec
from msgspec import Struct, field, structs

from ddpdiag.model import Arrival, Options, Outcome, Place, Trial

# The largest honest message is an outcome with a stack dump, some 100 kB.
MAX_MESSAGE_BYTES = 4 << 20


# Supervisor to rank 0 ------------------------------------------------------------------------------------------------


class Hello(Struct, frozen=True, tag="hello"):
    """I am here."""

    arrival: Arrival


class Ready(Struct, frozen=True, tag="ready"):
    """My worker stands at the gate of this trial; `offer` counts if I am the first of my group, or it `shares`."""

    trial: int
    offer: str
    shares: bool = False


class Result(Struct, frozen=True, tag="result"):
    """What the trial gave on my rank; already written to my own file."""

    outcome: Outcome


class Partial(Struct, frozen=True, tag="partial"):
    """What the trial has given on my rank so far; `text` says for people how far it is."""

    trial: int
    data: msgspec.Raw
    text: str = ""


class Leaving(Struct, frozen=True, tag="leaving"):
    """I was told to leave by this signal: I am a bystander."""

    signal: int


class Pong(Struct, frozen=True, tag="alive"):
    """Nothing to say, but here."""


# Rank 0 to supervisor ------------------------------------------------------------------------------------------------


class HelloAck(Struct, frozen=True, tag="seated"):
    """Your hello was heard; this proves the run id."""


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
        """The order for each rank of a group."""
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
    """The gate of this trial opens; the first rank of your group is at `host` and offers `offer`.

    `peers` holds host and offer of every rank of the group, where the check asked for them.
    """

    trial: int
    host: str
    offer: str
    peers: tuple[tuple[str, str], ...] = ()


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


Upward = Hello | Ready | Partial | Result | Leaving | Pong
Downward = HelloAck | Refused | Start | RunTrial | BarrierOpen | Ack | Stop | Ping | Shutdown

_up: msgspec.json.Decoder[Upward] = msgspec.json.Decoder(Upward)
_down: msgspec.json.Decoder[Downward] = msgspec.json.Decoder(Downward)


class _Framed(Struct, frozen=True):
    run_id: str
    body: msgspec.Raw
    mac: str = ""


_framed: msgspec.json.Decoder[_Framed] = msgspec.json.Decoder(_Framed)


class Wire:
    """Stamps messages with the run id and, when `token` (DDPDIAG_TOKEN) is set, with an HMAC-SHA256 of id and body."""

    def __init__(self, run_id: str, token: str = "") -> None:
        self._run_id = run_id
        self._token = token.encode()
        self._last: tuple[Upward | Downward, bytes] | None = None

    def close(self, message: Upward | Downward) -> bytes:
        """The message as bytes for the wire; one that goes to many is written once, if it is the same object."""
        last = self._last  # read once: rank 0's own supervisor is another thread
        if last is not None and last[0] is message:
            return last[1]
        body = msgspec.json.encode(message)
        sealed = msgspec.json.encode(_Framed(self._run_id, msgspec.Raw(body), self._mac(body)))
        self._last = message, sealed
        return sealed

    def decode_upward(self, data: bytes) -> Upward | None:
        """A supervisor's message, or None if it is not of this run."""
        body = self._verified(data)
        return None if body is None else _decode(_up, body)

    def decode_downward(self, data: bytes) -> Downward | None:
        """Rank 0's message, or None if it is not of this run."""
        body = self._verified(data)
        return None if body is None else _decode(_down, body)

    def _verified(self, data: bytes) -> bytes | None:
        sealed = _decode(_framed, data) if len(data) <= MAX_MESSAGE_BYTES else None
        if sealed is None or sealed.run_id != self._run_id:
            return None
        body = bytes(sealed.body)
        # As bytes: compare_digest raises TypeError for a string that is not ASCII, and anybody may send one.
        mac = sealed.mac.encode(errors="surrogatepass")
        return body if hmac.compare_digest(mac, self._mac(body).encode()) else None

    def _mac(self, body: bytes) -> str:
        if not self._token:
            return ""
        return hmac.new(self._token, self._run_id.encode() + b"\0" + body, hashlib.sha256).hexdigest()


T = TypeVar("T")


def _decode(decoder: "msgspec.json.Decoder[T]", data: bytes) -> T | None:
    """The message, or None for noise: a port scanner must not end a run."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
