"""What one rank gives of a training by some strategy (TRN002), and what was asked for."""

from msgspec import Struct

from ddpdiag.model import Options
from ddpdiag.model.train import Train


class Data(Struct, frozen=True, kw_only=True):
    """One rank's part in one trial. `not_possible` says what this torch lacks; then nothing was trained.

    `losses` are the mean loss over the `images` that this rank saw in a step; `parts` (of single alone) those of each
    rank's share of the images. `start` is the SHA-256 of the first weights. `seconds` are those of `timed_steps`.
    """

    device: str
    not_possible: str = ""
    start: str = ""
    end: str = ""
    losses: tuple[float, ...] = ()
    parts: tuple[tuple[float, ...], ...] = ()
    images: int = 0
    timed_steps: int = 0
    seconds: float = 0.0
    peak_bytes: int | None = None
    state_bytes: int | None = None
    communication_share: float | None = None


def asked_of(options: Options) -> Train:
    """What `ddpdiag train` was asked for; the defaults for a check that was selected by its code."""
    return options.train if options.train is not None else Train()
