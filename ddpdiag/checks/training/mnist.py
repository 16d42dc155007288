"""A ConvNet learns handwritten digits with DistributedDataParallel.

What: the network of the classic MNIST tutorials is trained for a fixed number of steps at a fixed global batch, in
DistributedDataParallel over all ranks, and tested on images that it has not seen. The digits ship with ddpdiag.

Why: every part can work alone and training still fail. Afterwards the loss must have fallen, at least 90 % of the test
images must be recognised (95 % with `--depth standard`; a broken gradient stays near 10 %; above 128 ranks the global
batch grows and accuracy is only shown), and all ranks must hold the same parameters, bit for bit.

Findings and their causes:

Fix: for stolen cores, end the processes that the finding names, or ask for cores of your own. Otherwise exclude the
hosts of the named ranks, and run `ddpdiag check --stage gpu,collective` on them alone. Thresholds:
`--set TRN001.accuracy=0.9`, `--set TRN001.loss_share=0.9` (the last loss at most this share of the first).

Confirm by hand: Train any DDP example on the same hosts, and compare a hash of the parameters of all ranks:
`sum(p.double().sum() for p in model.parameters())` printed with repr. Beside it, `top` shows other processes, and
`mpstat -P ALL 1` steal time.

Sources: LeCun et al., Gradient-based learning applied to document recognition, 1998 (MNIST); Li et al., PyTorch
Distributed: Experiences on accelerating data parallel training, VLDB 2020.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, inapplicable, new_trial
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import leave_out, subject_text
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.checks.training.stolen_cores import MIN_OTHERS_SHARE, MIN_WAITED_SHARE, stolen_core_findings
from ddpdiag.checks.world import no_gpu_reason
from ddpdiag.model import Depth, Finding, Kind, Scalar, Trial
from ddpdiag.model.measurements import Training
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.programs import CoreUse, CoreUseMeter
from ddpdiag.stats import find_odd_ranks
from ddpdiag.text import begun, count

FINDINGS = {
    "diverged": FindingSpec.error(
        "ranks hold different parameters. Causes: an all-reduce with wrong results on one rank, memory errors in a "
        "GPU, or different versions of torch. Where hosts have different models of CPU or GPU, the last bits may "
        "differ."
    ),
    "nan": FindingSpec.error(
        "a loss or gradient is not finite. The ranks that had it first, before any exchange, are named: a GPU that "
        "computes wrong results, or its memory. If all ranks had it at once, suspect the learning rate or the images."
    ),
    "inaccurate": FindingSpec.error(
        "all ranks agree, but the network learned nothing: gradients are not averaged, or images and labels do not "
        "belong together."
    ),
    "stolen-cores": FindingSpec.warning(
        "processes that are not the job's use `others_share` (20 %) of the cores on which the ranks of a host may run "
        "(twice that where the ranks are more than these cores), and a rank waits for a core in `waited_share` (10 %) "
        "of the time in which it could run. They are named as far as they can be seen. Or the hypervisor gives as much "
        "to other virtual machines.",
        slows_job=True,
    ),
}

# With more ranks the global batch must grow, because each rank needs an image, and BatchNorm has hardly any images per
# rank. The accuracy then depends on the number of ranks more than on their health.
MAX_RANKS_FOR_ACCURACY = 128
# The least accepted share of recognised test images; tests/torch/test_schedule.py has its margin for 1 to 64 ranks.
ACCURACY = {Depth.QUICK: 0.90, Depth.STANDARD: 0.95, Depth.DEEP: 0.95}
# With 10 classes the first loss is near ln 10 = 2.3. It falls below 0.5 if the network learns, else it stays at 2.3.
LOSS_SHARE = 0.9


class Data(Struct, frozen=True, kw_only=True):
    """The results of the training on one rank, and the use of its cores during the training."""

    training: Training
    core_use: CoreUse | None = None


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """Plan one training of all ranks over the job's backend, with the workarounds that P2P003 found for the job."""
    env = fallback.job_workarounds(seen)
    return () if seen.trials else (new_trial(seen, params={"backend": seen.world.backend}, env=env),)


def measure(ctx: Context) -> Data:
    from ddpdiag.workloads import mnist, training
    from ddpdiag.workloads.group import process_group

    ctx.step("read the digits")
    digits = mnist.load()
    with process_group(ctx, str(ctx.trial.params["backend"])) as device:
        watch = CoreUseMeter(whole_host=not ctx.place.local_rank)
        _, trained = training.train(ctx, digits, training.SCHEDULES[ctx.options.depth], device)
        return Data(training=trained, core_use=watch.use())


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """Findings about stolen cores and values that are not finite. If all are finite, about parameters and accuracy."""
    trained = _training_by_rank(seen)
    if not trained:
        return
    uses = {rank: data.core_use for rank, data in seen.by_rank.items() if data.core_use is not None}
    yield from stolen_core_findings(seen, uses, seen.setting("others_share"), seen.setting("waited_share"))
    numbers = [number for each in trained.values() for number in (each.first_loss, each.last_loss, each.test_loss)]
    if any(each.first_bad_step is not None for each in trained.values()) or not all(map(math.isfinite, numbers)):
        # NaN has many bit patterns, so different checksums would say nothing.
        yield _not_finite_finding(seen, trained)
        return
    if odd := find_odd_ranks({rank: training.checksum for rank, training in trained.items()}):
        sets = f"{len(trained)} ranks have {len(odd.by_value)} different sets of parameters after training; 1 expected"
        differ = "differs" if len(odd.ranks) == 1 else "differ"
        odd_text = f"{subject_text(seen, odd.ranks)} {differ} from the majority"
        blame_text = begun(odd_text) if odd.ranks else "No set has a majority, so no rank is blamed"
        yield seen.finding(
            "diverged",
            "ranks have different parameters after training",
            f"{sets}. {blame_text}.",
            ranks=odd.ranks,
            evidence={f"checksum {str(value)[:12]}": list(ranks) for value, ranks in odd.by_value.items()},
            fix="Compare torch's version (`python -c 'import torch; print(torch.__version__)'`) and the models of CPU "
            "and GPU between the hosts. If they are equal, run `ddpdiag check --stage host,gpu,collective --depth "
            "standard`, which tests memory and sums.",
        )
    # Losses and accuracy are means over all ranks, so they are equal on each rank.
    yield from _accuracy_findings(seen, next(iter(trained.values())))


def _training_by_rank(seen: Seen[Data]) -> dict[int, Training]:
    return {rank: data.training for rank, data in seen.by_rank.items()}


def _not_finite_finding(seen: Seen[Data], trained: Mapping[int, Training]) -> Finding:
    """The finding about NaN or infinity. It blames the ranks that had it first, unless they are all ranks or none."""
    steps = {rank: training.first_bad_step for rank, training in trained.items()}
    first = min((step for step in steps.values() if step is not None), default=None)
    ranks = [rank for rank, step in steps.items() if step is not None and step == first]
    if first is None:
        ranks, origin = [], "No rank had it before the all-reduce, so no rank is blamed"
    elif 1 < len(ranks) == len(trained):
        ranks, origin = [], f"All ranks had it at once, in step {first + 1}, so no rank is blamed"
    else:
        origin = f"{begun(subject_text(seen, ranks))} had it first, in step {first + 1} of {trained[ranks[0]].steps}"
    return seen.finding(
        "nan",
        "loss or gradients are not finite" + (f", first on {subject_text(seen, ranks)}" if ranks else ""),
        f"The loss or the gradients became NaN or infinite. {origin}.",
        ranks=ranks,
        evidence={"first_bad_step": None if first is None else first + 1},
        fix=f"{begun(leave_out(seen.world.host_names(ranks)))}, and test the arithmetic there: `ddpdiag host "
        f"--torch`{', `dcgmi diag -r 3`' if seen.world.gpu_count else ''}."
        if ranks
        else "Run `ddpdiag check --stage gpu,collective`, which checks GPUs and the sums of an all-reduce.",
    )


def _accuracy_findings(seen: Seen[Data], result: Training) -> Iterator[Finding]:
    max_loss = seen.setting("loss_share", LOSS_SHARE) * result.first_loss
    min_accuracy, ranks = seen.setting("accuracy", ACCURACY[seen.options.depth]), len(seen.trials[-1].ranks)
    if result.last_loss <= max_loss and (result.accuracy >= min_accuracy or ranks > MAX_RANKS_FOR_ACCURACY):
        return
    yield seen.finding(
        "inaccurate",
        "the test training learns too little",
        f"After {result.steps} steps on {count(ranks, 'rank')} the loss is {result.last_loss:.2f} (first "
        f"{result.first_loss:.2f}; at most {max_loss:.2f} is expected), and the network recognises "
        f"{result.accuracy:.1%} of the test images (at least {min_accuracy:.1%} is expected; guessing gives 10%).",
        evidence={
            "first_loss": result.first_loss,
            "last_loss": result.last_loss,
            "accuracy": result.accuracy,
            "accuracy_expected": min_accuracy,
        },
        fix="Run `ddpdiag check --stage collective`, which checks the sums of an all-reduce. If it finds nothing, run "
        "`ddpdiag check` on each host alone, and leave out a host that fails."
        if ranks > 1
        else "Run it again, then on another host: a host that fails each time computes wrongly, so leave it out.",
    )


def figures(seen: Seen[Data]) -> Mapping[str, Scalar]:
    """The speed and accuracy of all ranks together. The slowest rank's time counts, as ranks wait for each other."""
    trained = _training_by_rank(seen)
    if not trained:
        return {}
    result = next(iter(trained.values()))
    samples = sum(training.samples for training in trained.values())
    seconds = max(training.training_seconds for training in trained.values())
    names = ("accuracy", "first_loss", "last_loss", "test_loss", "steps")
    return {
        "training.samples_per_second": samples / seconds if seconds > 0 else None,
        **{f"training.{name}": getattr(result, name) for name in names},
        "training.seconds": seconds,
    }


def skip(seen: Seen[Data]) -> SkipReason | None:
    return inapplicable(no_gpu_reason(seen.world)) or fallback.skip_failing_backend(seen)


def report(seen: Seen[Data]) -> Contribution:
    columns: dict[int, dict[str, Scalar]] = {
        rank: {"samples_per_second": each.samples / each.training_seconds if each.training_seconds > 0 else None}
        for rank, each in _training_by_rank(seen).items()
    }
    return Contribution(columns=columns, figures=figures(seen))


SETTINGS = {
    "loss_share": LOSS_SHARE,
    "accuracy": ACCURACY[Depth.QUICK],
    "others_share": MIN_OTHERS_SHARE,
    "waited_share": MIN_WAITED_SHARE,
}
CHECK: Check[Data] = Check(__name__, "TRN001", "ddp-mnist", Stage.TRAINING, Scope.WORLD, Kind.TORCH, deadline=60)
