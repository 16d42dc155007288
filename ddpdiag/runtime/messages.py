"""What a supervisor, its nursery and its workers say to each other: typed structs, never pickle."""

import msgspec
from msgspec import Struct, field

from ddpdiag.model import Collective, Options, Place, Status, Trial
from ddpdiag.runtime.control.messages import BarrierOpen

# Supervisor to worker, and back --------------------------------------------------------------------------------------


class Task(Struct, frozen=True, tag="task"):
    """Measure this. `env` is applied first (`None` unsets); `scratch` is a private directory on this host.

    `end` is when the supervisor will end it, on the monotonic clock of this host.
    """

    place: Place
    trial: Trial
    options: Options
    scratch: str
    env: dict[str, str | None]
    end: float


class BarrierReached(Struct, frozen=True, tag="atgate"):
    """The worker waits for its group; `shares` asks for everybody's offers."""

    offer: str
    shares: bool = False


class WorkerPartial(Struct, frozen=True, tag="sofar"):
    """What is measured so far, and how far that is, in words."""

    data: msgspec.Raw
    text: str = ""


class Answer(Struct, frozen=True, tag="answer"):
    """The trial ended by itself: `data` (DONE), or `error`, a short traceback in `detail` and the `flight` (RAISED)."""

    status: Status
    data: msgspec.Raw = msgspec.Raw(b"null")  # an empty Raw would be written as nothing, which is no JSON
    error: str = ""
    detail: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    flight: tuple[Collective, ...] | None = None


class Posted(Struct, frozen=True, tag="posted"):
    """The worker's witness answers: the collectives posted last in this trial; None if torch keeps no record."""

    flight: tuple[Collective, ...] | None


class Ras(Struct, frozen=True, tag="ras"):
    """What NCCL's own service said then, if the worker was asked to ask it; empty if nothing, or if there is none."""

    text: str


class More(Struct, frozen=True):
    """Not a word: what came is a part of one."""


WorkerWord = BarrierReached | WorkerPartial | Answer
WorkerOrder = Task | BarrierOpen

# Supervisor to nursery, and back -------------------------------------------------------------------------------------


class Fork(Struct, frozen=True, tag="fork"):
    """Fork a worker; its sockets, step page and stack file travel beside this message as descriptors."""


class Enough(Struct, frozen=True, tag="enough"):
    """Import nothing beyond torch itself."""


class Imported(Struct, frozen=True, tag="imported"):
    """torch is there, after so many seconds."""

    seconds: float


class Forked(Struct, frozen=True, tag="forked"):
    """The worker asked for runs as `pid`."""

    pid: int


class Exited(Struct, frozen=True, tag="exited"):
    """A worker ended; `code` is negative for a signal, as in subprocess."""

    pid: int
    code: int


NurseryWord = Imported | Forked | Exited

decode_worker_word: msgspec.json.Decoder[WorkerWord] = msgspec.json.Decoder(WorkerWord)
decode_witness: msgspec.json.Decoder[Posted | Ras] = msgspec.json.Decoder(Posted | Ras)
decode_worker_order: msgspec.json.Decoder[WorkerOrder] = msgspec.json.Decoder(WorkerOrder)
decode_nursery_word: msgspec.json.Decoder[NurseryWord] = msgspec.json.Decoder(NurseryWord)
