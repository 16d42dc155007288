"""One step of DistributedDataParallel: correct gradients, and the slowest rank.

What: one step of DDP is compared with the same step in one process that has the images of all ranks. The network is a
ConvNet with GroupNorm, because with BatchNorm the gradients rightly differ from those of one process. GELU and mean
pooling keep rounding errors small. Then the parts of some steps are timed: data, forward, backward, all-reduce,
optimizer. Last, an all-reduce of 25 MiB is timed, the size of DDP's buckets.

Why: training can succeed although one rank sometimes computes wrong gradients. A job is as slow as its slowest rank. An
all-reduce ends on all ranks together, so the rank that waits least in it is the slowest.

Findings and their causes:

Fix: for data, check the disk or file server of that host; for cores, other processes, pinning and cgroup limits; for
compute and clocks, GPU005 and the GPU itself. RDZ004 and FAB001 compare the links between hosts.

Confirm by hand: Run torch.profiler or NVIDIA Nsight Systems on two ranks: the rank that waits least in all-reduce is
the slow one; `pidstat -u -w 1` shows cores, `nvidia-smi dmon` clocks.

Sources: Li et al., PyTorch Distributed, VLDB 2020 (buckets); arXiv 2510.15596 (variation of GPU times).
"""

import os
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from ddpdiag.bandwidth import busbw
from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, inapplicable, new_trial, unneeded
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.checks.training.gradients import proof_findings
from ddpdiag.checks.training.stragglers import median_step, straggler_findings, typical_window
from ddpdiag.checks.world import USUAL_RANKS_PER_CORE, no_gpu_reason
from ddpdiag.model import Depth, Finding, Kind, Scalar, Trial
from ddpdiag.model.measurements import Proof, Steps
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.programs import CoreUse, CoreUseMeter

FINDINGS = {
    "weights": FindingSpec.warning(
        "ranks draw different initial weights from one seed: different versions of torch, or memory errors. DDP hides "
        "it."
    ),
    "gradient": FindingSpec.error(
        "a rank gives the all-reduce a different gradient than two others compute from the same images: its arithmetic "
        "or memory is at fault, or another model of CPU or GPU rounds differently."
    ),
    "unequal": FindingSpec.error(
        "DDP's result is not the mean of the gradients of the ranks, which one process computes from all images."
    ),
    "straggler": FindingSpec.warning(
        "a rank's own work is above `ratio` (1.10) times the median, by 2 ms at least, and it waits less than the "
        "median, in `windows` (80 %) of the windows. 9 % of GPU time varies in a healthy fleet (arXiv 2510.15596). The "
        "part that is longer gives the class: data (files, decoding), compute, cores (the process has less of its "
        "cores than others: the processes there are named), clocks (GPU005 found them held down). Where more than two "
        "ranks share a core, none is named.",
        slows_job=True,
    ),
}

# gloo connects each rank with every other: with more ranks a second group takes too long for a quick check.
_MAX_QUICK_RANKS = 32
# A window is several steps. Several windows are timed, because other activity of the system may disturb one. If more
# than two ranks share a core, no straggler is named, and one window is enough for the columns of the report.
_WINDOWS, _CROWDED_WINDOWS = 10, 1


class Data(Struct, frozen=True, kw_only=True):
    """One rank's measurements. If the trial ended early, only `proof` may be set."""

    proof: Proof | None = None
    steps: Steps | None = None
    core_use: CoreUse | None = None


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """Plan one trial over the job's backend, with the workarounds that P2P003 found for the job."""
    if seen.trials or _reason_to_omit(seen) is not None:
        return ()
    env = fallback.job_workarounds(seen)
    return (new_trial(seen, params={"backend": seen.world.backend}, env=env),)


def _reason_to_omit(seen: Seen[Data]) -> str | None:
    """The reason why this check is omitted at depth quick, or None."""
    options, ranks = seen.options, seen.world.size
    is_selected = any(seen.check.code.startswith(code) for code in options.select) or "training" in options.stages
    if is_selected or options.depth is not Depth.QUICK or ranks <= _MAX_QUICK_RANKS or seen.world.backend == "nccl":
        return None
    return f"{ranks} ranks over {seen.world.backend} are tested with --depth standard, or --select {seen.check.code}"


def skip(seen: Seen[Data]) -> SkipReason | None:
    """Skip with one rank, without needed GPUs, if the backend fails, or in a quick check of many ranks without nccl."""
    reason = "there is one rank only" if seen.world.size == 1 else no_gpu_reason(seen.world)
    return inapplicable(reason) or fallback.skip_failing_backend(seen) or unneeded(_reason_to_omit(seen))


def measure(ctx: Context) -> Data:
    """Compare the gradients of DDP with those of one process (the proof), then time training steps."""
    from ddpdiag.workloads import mnist, training
    from ddpdiag.workloads.group import process_group
    from ddpdiag.workloads.proof import prove
    from ddpdiag.workloads.steps import time_steps

    ctx.step("read the digits")
    digits = mnist.load()
    with process_group(ctx, str(ctx.trial.params["backend"])) as device:
        proof = prove(ctx, digits, device)
        ctx.report(Data(proof=proof), "gradients compared")
        # If many ranks share a core, the times depend on the scheduler more than on the rank: few steps are timed.
        ranks_per_core = (ctx.place.local_world_size or 1) / len(os.sched_getaffinity(0))
        is_crowded = not training.is_true_on_all_ranks(ranks_per_core <= USUAL_RANKS_PER_CORE, device)
        windows = _CROWDED_WINDOWS if is_crowded else _WINDOWS
        watch = CoreUseMeter(whole_host=not ctx.place.local_rank)
        steps = time_steps(ctx, digits, device, windows)
        return Data(proof=proof, steps=steps, core_use=watch.use())


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """Findings about wrong gradients, then about slow ranks."""
    proofs = {row.place.rank: row.data.proof for row in seen.all_rows if row.data.proof is not None}
    if proofs:
        yield from proof_findings(seen, proofs)
    if steps := _steps_by_rank(seen):
        slowdowns = (finding for finding in seen.findings_of("GPU005") if finding.code == "GPU005.slowdown")
        throttled_gpus = frozenset(gpu for finding in slowdowns for gpu in finding.gpus)
        uses = {rank: data.core_use for rank, data in seen.by_rank.items() if data.core_use is not None}
        limits = (seen.setting("ratio"), seen.setting("windows"))
        yield from straggler_findings(seen, steps, throttled_gpus, uses, limits)


def _steps_by_rank(seen: Seen[Data]) -> dict[int, Steps]:
    return {rank: data.steps for rank, data in seen.by_rank.items() if data.steps is not None}


def columns(seen: Seen[Data]) -> Mapping[int, Mapping[str, Scalar]]:
    """The seconds of each part of a step, from each rank's window of median length, whose parts add up to a step."""
    parts = ("data", "forward", "backward", "optimizer", "wait")
    return {
        rank: {f"{part}_seconds": getattr(typical_window(steps), part) for part in parts}
        for rank, steps in _steps_by_rank(seen).items()
    }


def figures(seen: Seen[Data]) -> Mapping[str, Scalar]:
    """Medians over ranks of a step's parts, the lowest overlap of any rank, and the bus bandwidth of a bucket."""
    steps_by_rank = _steps_by_rank(seen)
    if not steps_by_rank:
        return {}
    step, bucket_bytes = median_step(steps_by_rank), next(iter(steps_by_rank.values())).bucket_bytes
    slowest = max(steps.bucket_seconds for steps in steps_by_rank.values())
    overlaps = [steps.overlap for steps in steps_by_rank.values() if steps.overlap is not None]
    parts = ("data", "forward", "backward", "wait", "optimizer")
    return {
        **{f"step.{part}_seconds": getattr(step, part) for part in parts},
        "step.overlap_share": min(overlaps) if overlaps else None,
        "step.bucket_bytes": bucket_bytes,
        "step.bucket_busbw_bytes_per_s": busbw("all_reduce", bucket_bytes, slowest, len(seen.trials[-1].ranks)),
    }


def report(seen: Seen[Data]) -> Contribution:
    return Contribution(columns=columns(seen), figures=figures(seen))


SETTINGS = {"ratio": 1.10, "windows": 0.8}
CHECK: Check[Data] = Check(__name__, "TRN003", "ddp-step", Stage.TRAINING, Scope.WORLD, Kind.TORCH, deadline=30)
