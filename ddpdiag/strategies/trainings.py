"""The trainings of TRN002: the data that a rank reports, and the ranks and devices of each strategy."""

import math

from msgspec import Struct

from ddpdiag.checks.api import Seen
from ddpdiag.checks.world import World
from ddpdiag.model import RunOptions, Trial
from ddpdiag.model.train import BLOCKS, Strategy, TrainRequest


class Data(Struct, frozen=True, kw_only=True):
    """One rank's results of one trial. `not_possible` says why this torch cannot train by the strategy; "" if it can.

    `losses` has the mean loss of each step, over the `images` that this rank gets in a step. The checksums are the
    SHA-256 of the weights before and after all steps ("": not computed). `seconds` is the time of all `timed_steps`.
    """

    device: str
    not_possible: str = ""
    start_checksum: str = ""
    end_checksum: str = ""
    losses: tuple[float, ...] = ()
    images: int = 0
    timed_steps: int = 0
    seconds: float = 0.0
    peak_bytes: int | None = None
    state_bytes: int | None = None


def train_options(options: RunOptions) -> TrainRequest:
    """The options of `ddpdiag train`, or their defaults if `ddpdiag check` selected TRN002."""
    return options.train if options.train is not None else TrainRequest()


# The width of the last layers: large enough for tensor parallelism to be useful, and quick on a CPU.
HIDDEN_WIDTH = 128


def strategies_of(world: World) -> tuple[Strategy, ...]:
    """The possible strategies, single first as the reference; empty if no requested strategy is possible."""
    requested = train_options(world.options).strategy
    if all(why_impossible(each, world) for each in requested):
        return ()
    return tuple(each for each in dict.fromkeys((Strategy.SINGLE, *requested)) if not why_impossible(each, world))


def ranks_of(strategy: Strategy, world: World) -> tuple[int, ...]:
    """The ranks that train by a strategy; empty if the strategy is not possible in this world."""
    if why_impossible(strategy, world):
        return ()
    match strategy:
        case Strategy.SINGLE | Strategy.DP:
            return world.living_ranks[:1]
        case Strategy.PIPELINE:
            return world.living_ranks[:BLOCKS]
        case Strategy.MODEL_PARALLEL if world.backend == "nccl":
            return _ranks_with_device_group(world)
        case _:
            return world.living_ranks


def batch_size_of(world: World) -> int:
    """The number of images of a step over all ranks: the requested number, or the number of ranks if that is larger."""
    return max(train_options(world.options).batch_size, world.size)


def hidden_width_of(world: World) -> int:
    """HIDDEN_WIDTH, rounded up to a multiple of the number of ranks, so that tensor-parallel can cut layers evenly."""
    return math.ceil(HIDDEN_WIDTH / world.size) * world.size


def trial_of(seen: Seen[Data], strategy: Strategy) -> Trial | None:
    """The trial of a strategy, or None if none was planned yet."""
    return next((trial for trial in seen.trials if trial.params["strategy"] == strategy.value), None)


def devices_of(strategy: Strategy, world: World) -> int:
    """The number of devices on which a strategy computes, over all its ranks."""
    ranks = ranks_of(strategy, world)
    match strategy:
        case Strategy.DP:
            return world.arrivals[ranks[0]].gpus
        case Strategy.MODEL_PARALLEL if world.backend == "nccl":
            return len(ranks) * train_options(world.options).group_size
        case _:
            return len(ranks)


def _ranks_with_device_group(world: World) -> tuple[int, ...]:
    """The ranks whose local rank is below the number of groups of --group-size GPUs on their host."""
    groups = {rank: world.arrivals[rank].gpus // train_options(world.options).group_size for rank in world.living_ranks}
    return tuple(rank for rank in world.living_ranks if (world.places[rank].local_rank or 0) < groups[rank])


def why_impossible(strategy: Strategy, world: World) -> str | None:
    """The reason why a strategy is not possible in this world, or None."""
    match strategy:
        case Strategy.DP:
            if world.backend != "nccl":
                return f"it copies the network to GPUs, and over {world.backend} ranks train on the CPU"
            ranks = world.living_ranks
            gpus = world.arrivals[ranks[0]].gpus if ranks else 0
            return None if gpus > 1 else f"one process needs 2 GPUs or more, and rank {ranks[0]} sees {gpus}"
        case Strategy.MODEL_PARALLEL if world.backend == "nccl" and not _ranks_with_device_group(world):
            available = max((arrival.gpus for arrival in world.arrivals.values()), default=0)
            needed = train_options(world.options).group_size
            return f"a rank needs {needed} GPUs (--group-size), and no rank sees more than {available}"
        case Strategy.SINGLE | Strategy.MODEL_PARALLEL:
            return None
        case _:
            return "it needs 2 ranks or more, and there is one" if world.size == 1 else None
