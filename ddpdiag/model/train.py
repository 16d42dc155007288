"""Training by several strategies: the options and the results.

Rates count images (samples) of all ranks together; bytes are those of the rank that holds most. What was not measured
is `None`.
"""

from enum import Enum

from msgspec import Struct


class Strategy(Enum):
    """Strategies by which torch trains one network on several devices, under the names that users type."""

    SINGLE = "single"
    DP = "dp"
    DDP = "ddp"
    FSDP = "fsdp"
    TENSOR_PARALLEL = "tensor-parallel"
    PIPELINE = "pipeline"
    MODEL_PARALLEL = "model-parallel"


class Ended(Enum):
    """The outcome of a strategy.

    WRONG: it trains, but not the same network as one process alone. UNFINISHED: the time was too short to know.
    NOT_COMPARED: it ran, and there is no loss of one process to compare with.
    """

    WORKS = "works"
    WRONG = "wrong"
    HANGS = "hangs"
    FAILS = "fails"
    UNFINISHED = "not finished"
    NOT_COMPARED = "not compared"
    NOT_POSSIBLE = "not possible here"


class Curve(Enum):
    """The batch that stays constant while ranks are added: that of all ranks (strong), or of each rank (weak)."""

    STRONG = "strong"
    WEAK = "weak"


class Train(Struct, frozen=True, kw_only=True):
    """The options of a training of `steps` steps. `batch_size` counts the images of one step over all ranks.

    `group_size` is the number of devices over which model-parallel cuts its network. `scaling`: ddp also trains on 1,
    2, 4 ... ranks.
    """

    strategies: tuple[Strategy, ...] = (Strategy.SINGLE, Strategy.DDP, Strategy.FSDP)
    steps: int = 30
    batch_size: int = 64
    group_size: int = 2
    dtype: str = "float32"
    scaling: bool = False


class StrategyRow(Struct, frozen=True, kw_only=True):
    """One line of the table.

    `reason` says why it did not work. `devices` are those that it computed on; `speedup` is its rate over that of
    single, `efficiency` that over the number of devices. `peak_bytes` is the peak of a rank's memory (resident on a
    CPU, allocated on GPUs), `state_bytes` what it holds of parameters, gradients and the optimizer's state.
    `communication_share` is the share of a step in which a collective, a send or a receive was under way, waiting for
    other ranks included, in the mean over the ranks. `deviation` is how far the loss was from that of single, at most.
    """

    strategy: Strategy
    ended: Ended
    reason: str = ""
    ranks: tuple[int, ...] = ()
    devices: int | None = None
    samples_per_second: float | None = None
    speedup: float | None = None
    efficiency: float | None = None
    peak_bytes: int | None = None
    state_bytes: int | None = None
    communication_share: float | None = None
    deviation: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None


class ScalingRow(Struct, frozen=True, kw_only=True):
    """One point of a curve: ddp on so many ranks, with so many images in a step of all ranks."""

    curve: Curve
    ranks: int
    batch_size: int
    ended: Ended
    reason: str = ""
    samples_per_second: float | None = None
    efficiency: float | None = None


class TrainReport(Struct, frozen=True, kw_only=True):
    """The table, judged. `batch_size` is what was taken: at least an image for each rank. `tolerance` is how far a loss
    may be from that of single."""

    asked: Train
    batch_size: int
    device: str
    rows: tuple[StrategyRow, ...]
    scaling: tuple[ScalingRow, ...]
    tolerance: float
    sentence: str
    torch_version: str | None = None
