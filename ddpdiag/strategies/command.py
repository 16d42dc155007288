"""`ddpdiag train`: options into data, then a run whose only measurement is the training by strategies."""

from collections.abc import Sequence

from ddpdiag.cli import check
from ddpdiag.cli.check import refuse_nccl_without_gpus
from ddpdiag.cli.options import CheckOptions, LaunchOptions, split
from ddpdiag.cli.outputs import Outputs
from ddpdiag.codec import readable
from ddpdiag.errors import UsageError, nearest
from ddpdiag.model.train import Strategy, Train
from ddpdiag.strategies.options import TrainOptions
from ddpdiag.strategies.runs import BLOCKS, TOLERANCES

# Membership, versions, cores, the trainings, and what happened to the run.
CODES = ("LCH", "HST001", "TRN002", "RUN")
MOST_STEPS, MOST_IMAGES = 2_000, 65_536


def run(launch: LaunchOptions, options: TrainOptions, outputs: Outputs) -> int:
    """Take part in a training, or start one on this host; the exit code."""
    refuse_nccl_without_gpus(options.backend)
    run_options = CheckOptions(
        select=CODES, backend=options.backend, budget=options.budget, data_dir=options.data_dir, set_=options.set_
    )
    return check.run(launch, run_options, outputs, train=train_of(options))


def train_of(options: TrainOptions) -> Train:
    """What the options ask for; UsageError for a value that makes no sense, before anything is started."""
    if options.dtype not in TOLERANCES:
        near = nearest(options.dtype, TOLERANCES)
        raise UsageError(f"--dtype {readable(options.dtype)}: expected {', '.join(TOLERANCES)}{near}")
    return Train(
        strategies=_strategies(options.strategy),
        steps=number_within("--steps", options.steps, 2, MOST_STEPS),
        batch_size=number_within("--batch-size", options.batch_size, 1, MOST_IMAGES),
        group_size=number_within("--group-size", options.group_size, 2, BLOCKS),
        dtype=options.dtype,
        scaling=options.scaling,
    )


def _strategies(values: Sequence[str]) -> tuple[Strategy, ...]:
    """Each once, in the order in which they were typed; "all" stands for all."""
    names = dict.fromkeys(name.lower().replace("_", "-") for name in split(values))
    known = {strategy.value: strategy for strategy in Strategy}
    if "all" in names:
        names = dict.fromkeys([*known])
    for name in names:
        if name not in known:
            near = nearest(name, known)
            raise UsageError(f"--strategy {readable(name)}: expected {', '.join(known)} or all{near}")
    return tuple(known[name] for name in names)


def number_within(option: str, value: int, least: int, most: int, *, context: str = "") -> int:
    """The value; UsageError if it is out of bounds."""
    if not least <= value <= most:
        raise UsageError(f"{option} {value}: expected {least} to {most:,}{context}")
    return value
