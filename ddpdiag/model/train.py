"""Training by several strategies: the options and the results.

Rates count images (samples) of all ranks together. Bytes are those of the rank with the most. A figure that was not
measured is None.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from msgspec import Struct

from ddpdiag.errors import UsageError, did_you_mean
from ddpdiag.model.declared import option

# The number of blocks of the network (strategies.workloads.trainer). A rank of a pipeline has one block or more.
BLOCKS = 4


class Strategy(Enum):
    """The strategies by which torch trains one network on several devices. The values are the names that users type."""

    SINGLE = "single"
    DP = "dp"
    DDP = "ddp"
    FSDP = "fsdp"
    TENSOR_PARALLEL = "tensor-parallel"
    PIPELINE = "pipeline"
    MODEL_PARALLEL = "model-parallel"


class StrategyStatus(Enum):
    """The result of a strategy.

    WRONG: the loss differs from the loss of one process alone. UNFINISHED: the time was too short, or there is no loss
    of one process to compare with.
    """

    WORKS = "works"
    WRONG = "wrong"
    HANGS = "hangs"
    FAILS = "fails"
    UNFINISHED = "not finished"
    NOT_POSSIBLE = "not possible here"


_PANEL = "What is trained"


def _parse_strategies(texts: Sequence[str]) -> tuple[Strategy, ...]:
    """Parse comma-separated names of strategies, and drop repetitions. "all" means all strategies."""
    known = {strategy.value: strategy for strategy in Strategy}
    names = [name.strip().lower().replace("_", "-") for text in texts for name in text.split(",")]
    if "all" in names:
        return tuple(Strategy)
    for name in names:
        if name not in known:
            raise UsageError(f"expected {', '.join(known)} or all{did_you_mean(name, known)}")
    return tuple(dict.fromkeys(known[name] for name in names))


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """The request for a training: the options of `ddpdiag train`."""

    strategy: tuple[Strategy, ...] = option(
        (Strategy.SINGLE, Strategy.DDP, Strategy.FSDP),
        f"{', '.join(strategy.value for strategy in Strategy)}, all (a,b; default: single,ddp,fsdp). single always "
        "runs, for the comparison.",
        metavar="NAME",
        panel=_PANEL,
        words=lambda: (*(strategy.value for strategy in Strategy), "all"),
        parse=_parse_strategies,
    )
    steps: int = option(
        30, "Steps of each training; the first 3 are not timed.", metavar="N", panel=_PANEL, min=2, max=2_000
    )
    batch_size: int = option(64, "Images of a step, over all ranks.", metavar="N", panel=_PANEL, min=1, max=65_536)
    group_size: int = option(
        2,
        "Devices over which each rank of model-parallel cuts its network.",
        metavar="N",
        panel=_PANEL,
        min=2,
        max=BLOCKS,
    )
    budget: float = option(120.0, "Time limit of the run.", metavar="SECONDS", panel=_PANEL, min=5.0)
    compare_launchers: bool = option(
        False,
        "Train ddp on this host, started by mp.spawn, torchrun, torch.distributed.run, torch.distributed.launch "
        "(with --use-env, too) and by hand: which of them work, and how long a start and a step take.",
        panel=_PANEL,
    )


class StrategyRow(Struct, frozen=True, kw_only=True):
    """The result of one strategy: one line of the table of `ddpdiag train`.

    `reason` says why the strategy did not work; empty if it did. `devices` is the number of devices that computed.
    `speedup` is the rate divided by the rate of `single`, `efficiency` is `speedup` divided by the number of devices.
    `peak_bytes` is the peak of a rank's memory (resident on a CPU, allocated on GPUs). `state_bytes` is the size of a
    rank's parameters, gradients and optimizer state. `deviation` is the largest difference of the loss from the loss of
    `single`.
    """

    strategy: Strategy
    status: StrategyStatus
    reason: str = ""
    ranks: tuple[int, ...] = ()
    devices: int | None = None
    samples_per_second: float | None = None
    speedup: float | None = None
    efficiency: float | None = None
    peak_bytes: int | None = None
    state_bytes: int | None = None
    deviation: float | None = None


class TrainReport(Struct, frozen=True, kw_only=True):
    """The judged results of all strategies. `tolerance` is the largest accepted `deviation` of a strategy."""

    request: TrainRequest
    batch_size: int
    device: str
    rows: tuple[StrategyRow, ...]
    tolerance: float
    sentence: str
    torch_version: str | None = None
