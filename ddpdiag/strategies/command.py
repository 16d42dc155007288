"""`ddpdiag train`: options into data, then a run whose only measurement is the training by strategies."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddpdiag.cli import check
from ddpdiag.cli.outputs import Outputs
from ddpdiag.cli.repeated import split
from ddpdiag.codec import readable
from ddpdiag.errors import UsageError
from ddpdiag.model.train import Strategy, Train
from ddpdiag.probes.gpus import visible_gpus
from ddpdiag.probes.procfs import proc_root
from ddpdiag.runtime.launchers import Asked
from ddpdiag.strategies.runs import BLOCKS, TOLERANCES

# Who came, what they run, cores of their own, the trainings, and what happened to the run.
CODES = ("LCH", "HST001", "TRN002", "RUN")
_MOST_STEPS, _MOST_IMAGES = 2_000, 65_536


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The options of the training as they were typed."""

    strategy: tuple[str, ...]
    steps: int
    batch_size: int
    group_size: int
    dtype: str
    scaling: bool


def run(asked: Asked, wishes: check.Wishes, flags: Flags, outputs: Outputs) -> int:
    """Take part in a training, or start one on this host; the exit code."""
    refuse_nccl_without_gpus(wishes.backend)
    return check.run(asked, replace(wishes, train=train_of(flags)), outputs)


def refuse_nccl_without_gpus(backend: str) -> None:
    """UsageError now, rather than from every rank."""
    if backend.lower() == "nccl" and visible_gpus(os.environ, proc_root(os.environ)) == 0:
        raise UsageError("--backend nccl needs a GPU, and this host shows none; expected gloo, or a host with GPUs")


def train_of(flags: Flags) -> Train:
    """What the flags ask for; UsageError for a value that makes no sense, before anything is started."""
    if flags.dtype not in TOLERANCES:
        raise UsageError(f"--dtype {readable(flags.dtype)}: expected {', '.join(TOLERANCES)}")
    return Train(
        strategies=_strategies(flags.strategy),
        steps=_number("--steps", flags.steps, 2, _MOST_STEPS),
        batch_size=_number("--batch-size", flags.batch_size, 1, _MOST_IMAGES),
        group_size=_number("--group-size", flags.group_size, 2, BLOCKS),
        dtype=flags.dtype,
        scaling=flags.scaling,
    )


def _strategies(values: Sequence[str]) -> tuple[Strategy, ...]:
    """Each once, in the order in which they were typed; "all" stands for all."""
    names = dict.fromkeys(name.lower().replace("_", "-") for name in split(values))
    known = {strategy.value: strategy for strategy in Strategy}
    if "all" in names:
        names = dict.fromkeys([*known])
    for name in names:
        if name not in known:
            raise UsageError(f"--strategy {readable(name)}: expected {', '.join(known)} or all")
    return tuple(known[name] for name in names)


def _number(option: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise UsageError(f"{option} {value}: expected {least} to {most:,}")
    return value
