"""What a measurement may know and do, whoever runs it."""

from typing import NamedTuple, Protocol

from msgspec import Struct

from ddpdiag.model.options import Options
from ddpdiag.model.place import Place
from ddpdiag.model.trial import Trial


class Opening(NamedTuple):
    """What a gate hands out: where a rank (the group's first, unless said otherwise) can be reached, and its offer."""

    host: str
    offer: str


class Context(Protocol):
    """What a measurement may know and do. `group` lists the ranks taking part with this one, itself included."""

    place: Place
    trial: Trial
    options: Options
    group: tuple[int, ...]
    scratch: str  # a private directory on this host; removed at the end of the run

    @property
    def group_rank(self) -> int:
        """This rank's position in its group."""

    def step(self, label: str) -> None:
        """Announce the next step; the supervisor reads it from shared memory when this process hangs."""

    def barrier(self, offer: str = "") -> Opening:
        """Wait for all ranks of the group; what the first one offers reaches all of them."""

    def exchange(self, offer: str) -> tuple[Opening, ...]:
        """The same gate, but everybody learns everybody's offer, in the order of the group. For small groups."""

    @property
    def end(self) -> float:
        """When the supervisor ends this trial, on the clock of `time.monotonic`."""

    def report(self, data: Struct, text: str) -> None:
        """Hand over what is known so far, in case the trial is cut short; `text` tells people how far it is."""

    def timed(self, name: str, seconds: float) -> None:
        """Add `seconds` to one of the trial's own timings (context, group, measure)."""
