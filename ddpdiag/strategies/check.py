"""Strategies of training: those that work here, and the fastest one.

`ddpdiag train` runs this check; `ddpdiag check` runs it only by name (`--select TRN002`). One network learns the
shipped digits by each requested strategy: single (one process alone), dp (nn.DataParallel), ddp
(DistributedDataParallel), fsdp (fully_shard), tensor-parallel (DTensor), pipeline (GPipe), model-parallel (a network
over several devices of a rank, under DDP). All begin with the same weights and take the same images in each step, and
nothing in the network depends on how a batch is divided, so the loss of every step must be that of single except for
rounding (`tolerance`; float32 is computed as float32, without TF32). Each strategy runs in new processes with its own
deadline, so that the next one runs even after one that hangs. A strategy that the installed torch cannot run is
reported as not possible, which is no error. To test it, fsdp first shards one layer with known gradients, and pipeline
compares the sizes of the messages between its stages. The code of each strategy is one file in
ddpdiag/strategies/workloads, made to be copied.

Speed counts the images of all ranks per second, after three steps. Efficiency is the speed-up divided by the number of
devices. Peak is the most memory of a rank: resident on a CPU, allocated on GPUs. State is the size of a rank's
parameters, gradients and momentum.

Findings and their causes:

Fix: `ddpdiag check` finds faults of hosts, GPUs and network; use the simplest working strategy that is fast enough.

Confirm by hand: copy the loop of the strategy's file in ddpdiag/strategies/workloads into a script, run this script
under torchrun, and compare its losses with those of single.

Sources: PyTorch tutorials on DDP, fully_shard, tensor parallel and pipelining (docs.pytorch.org/tutorials).
"""

from collections.abc import Iterator, Sequence
from importlib import import_module

from msgspec import structs

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, inapplicable, new_trial
from ddpdiag.checks.findings import FindingSpec, Section
from ddpdiag.checks.world import no_gpu_reason
from ddpdiag.model import Finding, Kind, Trial
from ddpdiag.model.options import Figure, Sampling
from ddpdiag.model.train import Strategy, TrainReport
from ddpdiag.model.trial import Context
from ddpdiag.strategies.judge import findings, train_report
from ddpdiag.strategies.trainings import (
    Data,
    batch_size_of,
    hidden_width_of,
    ranks_of,
    strategies_of,
    train_options,
    trial_of,
)

FINDINGS = {
    "wrong": FindingSpec.error(
        "the loss is not that of single: first weights that differ, a collective that gives wrong values, arithmetic "
        "that differs between hosts. Ranks that began, or in ddp ended, with other parameters than most ranks are "
        "named."
    ),
    **dict.fromkeys(
        ("hangs", "fails"),
        FindingSpec.error("a training hangs or fails; the rank that stopped the others is named, as in RUN003."),
    ),
    "unmeasured": FindingSpec.unchecked(
        "there was no time, no reference, or no requested strategy is possible here, so nothing is known."
    ),
}

# The part of torch that a strategy needs and an older torch lacks, under its public name.
_TORCH_PARTS = {
    Strategy.FSDP: "torch.distributed.fsdp.fully_shard",
    Strategy.TENSOR_PARALLEL: "torch.distributed.tensor.parallel",
    Strategy.PIPELINE: "torch.distributed.pipelining",
}
# The shortest deadline of a strategy, even if earlier strategies that hung have used up the budget.
_MIN_SECONDS = 8.0


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """The trial of the next strategy; empty after the last. Its deadline is that given by --set, else an equal share of
    the remaining budget, but at least _MIN_SECONDS and at most the check's own deadline."""
    remaining = [strategy for strategy in strategies_of(seen.world) if trial_of(seen, strategy) is None]
    if not remaining:
        return ()
    strategy, share_seconds = remaining[0], seen.left_seconds / len(remaining)
    params = {
        "strategy": strategy.value,
        "backend": seen.world.backend,
        "batch": batch_size_of(seen.world),
        "hidden": hidden_width_of(seen.world),
    }
    groups = (ranks_of(strategy, seen.world),)
    trial = new_trial(seen, groups=groups, params=params, fresh=True, may_fail=True)
    if "TRN002.deadline_seconds" in seen.options.settings:
        return (trial,)
    deadline = min(trial.deadline_seconds, max(_MIN_SECONDS, share_seconds))
    return (structs.replace(trial, deadline_seconds=deadline),)


def measure(ctx: Context) -> Data:
    """Train by the trial's strategy. If this torch lacks the strategy, return the reason as `not_possible`."""
    import torch

    from ddpdiag.strategies.workloads.trainer import Task, use_exact_float32
    from ddpdiag.workloads import mnist

    params, train_args = ctx.trial.params, train_options(ctx.options)
    task = Task(steps=train_args.steps, batch_size=int(params["batch"]), hidden=int(params["hidden"]))
    use_exact_float32()
    strategy = Strategy(params["strategy"])
    ctx.report(Data(device=""), f"{strategy.value} on {len(ctx.group)} of {ctx.place.world_size} ranks")
    ctx.step("read the digits")
    digits = mnist.load()
    try:
        # If this torch lacks the strategy, its module raises ImportError before anything is trained.
        arguments = (train_args.group_size,) if strategy is Strategy.MODEL_PARALLEL else ()
        module = import_module(f"ddpdiag.strategies.workloads.{strategy.value.replace('-', '_')}")
        data: Data = module.train(ctx, task, digits, str(params["backend"]), *arguments)
        return data
    except ImportError as error:
        if strategy not in _TORCH_PARTS:
            raise
        return Data(device="", not_possible=f"torch {torch.__version__} has no {_TORCH_PARTS[strategy]} ({error.msg})")


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """Yield a finding for each training that does not work, with the blamed ranks."""
    yield from findings(seen)


def skip(seen: Seen[Data]) -> SkipReason | None:
    return inapplicable(no_gpu_reason(seen.world))


def report(seen: Seen[Data]) -> Contribution:
    """The images per second of each strategy that had a trial; for `ddpdiag train` also the section of the report."""
    train = train_report(seen)
    rows = (row for row in train.rows if row.ranks)
    figures = {f"train.{row.strategy.value}.samples_per_second": row.samples_per_second for row in rows}
    return Contribution(figures=figures, section=_section(train) if seen.options.train is not None else None)


def _section(train: TrainReport) -> Section:
    return Section(
        question="Which strategies {} can train with",
        sentence=train.sentence,
        has_answer=any(row.samples_per_second is not None for row in train.rows),
        train=train,
        figures=tuple(
            Figure(
                name=f"train.{row.strategy.value}.samples_per_second",
                title=f"training by {row.strategy.value}, samples",
                values=(row.samples_per_second,),
                sampling=Sampling.SINGLE,
                is_rate=True,
            )
            for row in train.rows
            if row.samples_per_second
        ),
    )


# The largest difference of a loss from that of single, in nats; the loss begins at ln 10 = 2.3. Sums in another order
# differ in the last bits: the largest deviations measured, of all strategies over 200 steps on a CPU, are a fifth of
# this or less.
SETTINGS = {"tolerance": 1e-4}
CHECK: Check[Data] = Check(__name__, "TRN002", "strategies", Stage.TRAINING, Scope.WORLD, Kind.TORCH, deadline=30)
