"""Which trainings a run of TRN002 takes, on which ranks, and why some are not possible here."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from ddpdiag.checks.api import Seen
from ddpdiag.checks.strategies.data import Data, asked_of
from ddpdiag.checks.world import World
from ddpdiag.model import Trial
from ddpdiag.model.train import Curve, Strategy, Train

# The network has four blocks (workloads.strategies.lesson), and a rank of a pipeline has one or more.
BLOCKS = 4
# As in the lesson; tensor-parallel cuts it evenly.
_HIDDEN = 128


class Job(NamedTuple):
    """One training: so many images in a step of these ranks together."""

    strategy: Strategy
    ranks: tuple[int, ...]
    batch: int


def jobs(world: World) -> tuple[Job, ...]:
    """All trainings, each once, in their order: single first, since the others are held against it."""
    asked = asked_of(world.options)
    if not possible(world) and not asked.scaling:
        return ()
    table = [job_of(strategy, world) for strategy in (Strategy.SINGLE, *asked.strategies)]
    curves = [job for _, job in points(world)] if asked.scaling else []
    return tuple(dict.fromkeys(job for job in (*table, *curves) if job is not None))


def job_of(strategy: Strategy, world: World) -> Job | None:
    """The training of one line of the table; None if it is not possible here."""
    if why_not(strategy, world) is not None:
        return None
    return Job(strategy, _ranks(strategy, world), batch_of(world))


def points(world: World) -> Iterator[tuple[Curve, Job]]:
    """ddp on 1, 2, 4 ... ranks, and on all; one rank alone is single."""
    batch = batch_of(world)
    for curve in Curve:
        for ranks in counts(world.size):
            together = batch * ranks if curve is Curve.WEAK else batch
            strategy = Strategy.SINGLE if ranks == 1 else Strategy.DDP
            yield curve, Job(strategy, world.living[:ranks], together)


def counts(size: int) -> tuple[int, ...]:
    """The powers of two up to `size`, and `size`."""
    return tuple(dict.fromkeys([*(1 << power for power in range(size.bit_length())), size]))


def batch_of(world: World) -> int:
    """The images of a step: those asked for, and at least one for each rank."""
    return max(asked_of(world.options).batch_size, world.size)


def hidden_of(world: World) -> int:
    """The width of the last layers: a multiple of the ranks, for tensor-parallel to cut."""
    return math.ceil(_HIDDEN / world.size) * world.size


def key_of(trial: Trial) -> Job:
    """The job of a trial."""
    return Job(Strategy(trial.params["strategy"]), trial.ranks, int(trial.params["batch"]))


def trial_of(seen: Seen[Data], job: Job) -> Trial | None:
    """The trial of a job, if there was one."""
    return next((trial for trial in seen.trials if key_of(trial) == job), None)


def devices_of(job: Job, world: World) -> int:
    """On how many devices it computes."""
    match job.strategy:
        case Strategy.DP:
            return world.arrivals[job.ranks[0]].gpus
        case Strategy.MODEL_PARALLEL if world.backend == "nccl":
            return len(job.ranks) * asked_of(world.options).group_size
        case _:
            return len(job.ranks)


def _ranks(strategy: Strategy, world: World) -> tuple[int, ...]:
    match strategy:
        case Strategy.SINGLE | Strategy.DP:
            return world.living[:1]
        case Strategy.PIPELINE:
            return world.living[:BLOCKS]
        case Strategy.MODEL_PARALLEL if world.backend == "nccl":
            return _with_own_devices(world, asked_of(world.options))
        case _:
            return world.living


def _with_own_devices(world: World, asked: Train) -> tuple[int, ...]:
    """Of each host as many ranks as it has groups of GPUs."""
    return tuple(
        rank
        for rank in world.living
        if (world.places[rank].local_rank or 0) < world.arrivals[rank].gpus // asked.group_size
    )


def why_not(strategy: Strategy, world: World) -> str | None:
    """Why a strategy is not possible here, or None."""
    asked = asked_of(world.options)
    match strategy:
        case Strategy.DP:
            return _why_not_dp(world)
        case Strategy.MODEL_PARALLEL if world.backend == "nccl" and not _with_own_devices(world, asked):
            most = max((arrival.gpus for arrival in world.arrivals.values()), default=0)
            return f"a rank needs {asked.group_size} GPUs (--group-size), and no rank sees more than {most}"
        case Strategy.SINGLE | Strategy.MODEL_PARALLEL:
            return None
        case _:
            return "it needs 2 ranks or more, and there is one" if world.size == 1 else None


def _why_not_dp(world: World) -> str | None:
    if world.backend != "nccl":
        return f"it copies the network to GPUs, and over {world.backend} ranks train on their CPU"
    gpus = world.arrivals[world.living[0]].gpus if world.living else 0
    return None if gpus > 1 else f"one process needs 2 GPUs or more, and rank {world.living[0]} sees {gpus}"


def possible(world: World) -> tuple[Strategy, ...]:
    """Those of the strategies asked for that can be tried here."""
    return tuple(each for each in asked_of(world.options).strategies if why_not(each, world) is None)
