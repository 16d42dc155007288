"""Arithmetic and memory of each GPU: as fast as its peers, and right.

The slowest GPU sets the pace of a DDP job, and one that computes wrong values spoils all of it. Each rank multiplies
matrices on its GPU, in bf16 (fp16 before Ampere) and in fp32 without TensorFloat-32, and copies within the GPU's
memory, for less than half a second (`--depth deep`: some seconds, so that heat shows). The rates are compared with
other GPUs of that model in the run and with the data sheet; meanwhile NVML tells what holds the clocks down. Some rows
of each product are compared with fp64. All bits must be the same where model, number of processors, driver, cuBLAS and
torch are. If one measurement of a GPU is wrong or slow, all are repeated; a GPU is slow only if both measurements show
it.

`ddpdiag host --torch` measures the GPUs of the host one after the other. First products are not measured: they load
kernels and raise the clocks. A slice of a GPU (MIG), or a GPU that two ranks use at once, is compared with no other.
CPUs are measured with `--depth standard`: their values are judged, their speed is not, since other processes use their
cores. The rate of a copy counts what is read and what is written.

Findings:

Causes: heat, a power brake, a lower power limit or locked clocks, another process on the GPU; if none of these is seen,
the card. Fix: as the finding says; take a host whose GPU computes wrong values out of jobs.

Confirm by hand: `dcgmi diag -r 3`; `nvidia-smi dmon -s pc` while a job runs; stas00's mamf-finder.py; nvbandwidth's
device_local_copy.

Sources: cuBLAS, results reproducibility (docs.nvidia.com/cuda/cublas); Higham, Accuracy and Stability of Numerical
Algorithms, 3.5; Sinha et al., SC22, arXiv 2208.11035 (speed of equal GPUs varies by 8 %, at most 22 %); stas00,
ml-engineering, maximum achievable matmul FLOPS; NVIDIA's data sheets, with sparsity left out.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, inapplicable, new_trial, unneeded
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.gpu.compute.data import MEMORY, Data, by_model, units_of
from ddpdiag.checks.gpu.compute.judge import judge as judge
from ddpdiag.checks.gpu.compute.judge import signs, undecided
from ddpdiag.checks.gpu.devices import NO_GPU_IN_TORCH
from ddpdiag.model import Depth, Kind, Scalar, Trial
from ddpdiag.model.measurements import Compute
from ddpdiag.model.trial import Context
from ddpdiag.probes.gpu.visibility import device_index

FINDINGS = {
    "wrong": FindingSpec(
        "elements of a product deviate from fp64 by more than rounding can, or words of a copy within the memory "
        "differ. An error if both measurements show it, a warning if one does."
    ),
    "bits": FindingSpec(
        "a product has other bits than its repeat on the same GPU, or than most GPUs that must have the same ones. "
        "Severity as above."
    ),
    "differ": FindingSpec.warning("GPUs that must compute the same bits do not, and no majority says whose are right."),
    "slow": FindingSpec(
        "less than `peer_ratio` of the median of the other GPUs of that model in this run. A warning; an error below "
        "`broken_ratio`; good to know where another process uses the GPU.",
        slows=True,
    ),
    "nameplate": FindingSpec(
        "less than `nameplate_ratio` of the products, or `memory_ratio` of the copies, that the data sheet promises. "
        "Severity as above."
    ),
    "throttled": FindingSpec.warning(
        "hardware slowdown, software or hardware thermal slowdown, or a power brake, seen several times under load."
    ),
    "unmeasured": FindingSpec.note(
        "cuBLAS does not start, or the GPU has no memory left; the reason is shown. Whether a job can train "
        "there is for the training stage to say."
    ),
}

_ON_CPU = "on_cpu"
# For one GPU more, with a context that has to be made.
_RESERVE_SECONDS = 2.0


def measure(ctx: Context) -> Data:
    import torch

    from ddpdiag.workloads.compute import compute

    if ctx.trial.params[_ON_CPU]:
        return Data(devices=(compute(ctx, torch.device("cpu")),))
    count = torch.cuda.device_count()
    if not count:
        # Why there is none is for other checks to find out.
        reason = "torch shows no GPU to this rank"
        return Data(devices=(Compute(device="", torch=str(torch.__version__), unmeasured=reason),))
    # A host that is asked alone has no other rank for its other GPUs.
    chosen = range(count) if ctx.options.alone else (device_index(ctx.place.local_rank, count) or 0,)
    found: list[Compute] = []
    for index in chosen:
        if found and time.monotonic() > ctx.end - _RESERVE_SECONDS:
            reason = f"no time was left for GPU {index}"
            found.append(Compute(device="", torch=str(torch.__version__), index=index, unmeasured=reason))
        else:
            found.append(compute(ctx, torch.device("cuda", index)))
    return Data(devices=tuple(found))


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """One rank of each GPU; all of them once more where a measurement of one is wrong or slow."""
    on_cpu = not seen.world.gpus
    if not seen.trials:
        ranks = seen.world.living if on_cpu else _takers(seen)
        return (new_trial(seen, groups=tuple((rank,) for rank in ranks), params={_ON_CPU: on_cpu}),) if ranks else ()
    units = units_of(seen)
    # Does the first measurement speak against any GPU?
    if len(seen.trials) > 1 or not (any(signs(seen, units, 0)) or any(undecided(own, 0) for own in by_model(units))):
        return ()
    groups = tuple(group for group in seen.trials[0].groups if group[0] in seen.world.living)
    return (new_trial(seen, groups=groups, params={_ON_CPU: on_cpu}),) if groups else ()


def _takers(seen: Seen[Data]) -> list[int]:
    """Ranks that torch shows a GPU to, one for each GPU; all that may use one where torch was not asked (GPU002)."""
    known = seen.of(devices.CHECK).by_rank
    ranks: list[int] = []
    taken: set[str] = set()
    for rank in seen.world.living:
        gpu = known[rank].gpu if rank in known else None
        if gpu is None and (rank in known or not seen.world.arrivals[rank].gpus):
            continue
        uuid = gpu.uuid if gpu is not None else None
        if uuid is None or uuid not in taken:
            ranks.append(rank)
            taken |= {uuid} if uuid else set()
    return ranks


def skip(seen: Seen[Data]) -> SkipReason | None:
    """Without GPUs a quick check leaves it out."""
    if not seen.world.gpus and seen.options.depth is Depth.QUICK:
        return inapplicable("no GPU is visible on any host; CPUs are measured with --depth standard")
    return None if seen.trials or plan(seen) else unneeded(NO_GPU_IN_TORCH)


def columns(seen: Seen[Data]) -> Mapping[int, Mapping[str, Scalar]]:
    """What each rank's GPU reached, at best; of several, the slowest."""
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    for unit in units_of(seen):
        for name, rate in unit.best.items():
            own, column = rows[unit.rank], f"{name}_{_unit(name)}"
            own[column] = min(rate, own.get(column, rate))
    return {rank: dict(own) for rank, own in rows.items()}


def figures(seen: Seen[Data]) -> Mapping[str, Scalar]:
    """The slowest and the median of all GPUs."""
    rates: dict[str, list[float]] = defaultdict(list)
    for unit in units_of(seen):
        for name, rate in unit.best.items():
            rates[name].append(rate)
    found: dict[str, Scalar] = {}
    for name, values in rates.items():
        end = _unit(name)
        found |= {f"compute.{name}.min_{end}": min(values), f"compute.{name}.median_{end}": median(values)}
    return found


def _unit(name: str) -> str:
    return "bytes_per_s" if name == MEMORY else "flop_per_s"


def report(seen: Seen[Data]) -> Contribution:
    """All that the check adds to the report."""
    return Contribution(columns=columns(seen), figures=figures(seen))


SETTINGS = {
    # Equal GPUs of one fleet vary by 8 % on average and 22 % at most (Sinha et al., SC22).
    "peer_ratio": 0.75,
    # Half of the worst share of the data sheet that is published of any GPU: 51 % (stas00, ml-engineering; NVIDIA's
    # reach 80 to 87 %).
    "nameplate_ratio": 0.25,
    # Not measured on GPUs, and no published share is cited: half of the 80 % that a copy should reach at least.
    "memory_ratio": 0.4,
    # A tenth is no variation: the GPU is broken.
    "broken_ratio": 0.1,
    # A desktop keeps its GPU busy for a few percent.
    "busy_share": 0.1,
}
# Less than a second of work, some seconds with --depth deep; the first products load kernels.
CHECK: Check[Data] = Check(__name__, "GPU012", "compute", Stage.GPU, Scope.RANK, Kind.TORCH, deadline=30.0)
