"""Benchmark of the collectives: every size, every rank, and an interpretation.

`ddpdiag allreduce-bench` runs this check; `ddpdiag check` runs it only by name (`--select COL002`). Sizes, calls and
columns are those of nccl-tests: algbw is size over time. For an all-reduce, busbw is algbw x 2(n-1)/n; the rate of a
link limits it, whatever the number of ranks. Each rank keeps its own times: since all ranks finish a collective
together, the rank with the shortest time started it last. At some moments all ranks copy in their own memory at once:
if one copies slower than the others, that rank is slow; if all are slow, the memory is. `ddpdiag check` finds slow
links.

Findings and their causes:

Fix: remove the bottleneck that the report's sentence on the benchmark names; `ddpdiag check` finds the cause of a slow
host, GPU or link.

Confirm by hand: Run nccl-tests' `all_reduce_perf` with the same -b, -e, -f, -n and -w under the same launcher, and
compare the columns.

Sources: nccl-tests, doc/PERFORMANCE.md and src/common.cu; SuperBench (5 % against a baseline of the same system).
"""

import os
from collections.abc import Iterator, Sequence

from msgspec import structs

from ddpdiag.bench.data import Data
from ddpdiag.bench.judge import bench_report, curves_of, findings
from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, inapplicable, new_trial
from ddpdiag.checks.findings import Effect, FindingSpec, Section
from ddpdiag.checks.world import ONE_RANK_REASON
from ddpdiag.model import Finding, Kind, RunOptions, Scalar, Trial
from ddpdiag.model.bench import BenchRequest
from ddpdiag.model.trial import Context

FINDINGS = {
    "wrong": FindingSpec.error(
        "an element is not the exact result: corrupted memory, or a broken transport (P2P behind an IOMMU)."
    ),
    "slow-rank": FindingSpec.warning(
        "one rank copies 1.5 times slower than the others, or starts last in most calls: a core that it shares, or a "
        "throttled GPU. Compare that host with another; run `ddpdiag check` on it.",
        slows_job=True,
    ),
    "far-below": FindingSpec.warning(
        "the bus bandwidth over nccl within one host is less than `far_ratio` of the rate of its links. P2P005 "
        "measures it again, with NCCL's log."
    ),
    "below": FindingSpec.error("the bus bandwidth does not reach `--min-busbw`."),
    "unmeasured": FindingSpec.unchecked(
        "there was no time or no memory for some rows, whose sizes and types are listed, or for all of them."
    ),
    "unsupported": FindingSpec.error(
        "a backend, type or collective that this torch or this backend does not have.", effect=Effect.USAGE
    ),
}

# Added to the time of a sweep for its deadline, because NCCL takes some seconds to open a group.
_GROUP_OPENING_SECONDS = 10.0
# The part of the budget that is kept for the other checks, the report and the start of a trial.
_RESERVED_SECONDS = 6.0


def measure(ctx: Context) -> Data:
    """Run this rank's part of a sweep of one collective over one backend."""
    from ddpdiag.bench.workloads.measure import run_benchmark
    from ddpdiag.workloads.devices import describe
    from ddpdiag.workloads.group import backend_error, process_group

    backend, collective = str(ctx.trial.params["backend"]), str(ctx.trial.params["collective"])
    empty = Data(backend=backend, collective=collective, rank_count=len(ctx.group), pid=os.getpid(), device="")
    if (unknown := backend_error(backend)) is not None:
        return structs.replace(empty, unsupported=(str(unknown),))
    with process_group(ctx, backend) as device:
        card = describe(device)
        data = structs.replace(empty, device=card.name, device_index=card.gpu_index, gpu_uuid=card.uuid, pci=card.pci)
        return run_benchmark(ctx, data, device, seconds_per_sweep(ctx.options))


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """The trial of the next collective and backend, or an empty tuple after the last one."""
    request = seen.options.bench or BenchRequest()
    earlier_params = [trial.params for trial in seen.trials]
    for name in request.collective:
        for backend in request.backend or (seen.world.backend,):
            params = {"backend": backend, "collective": name}
            if params not in earlier_params:
                trial = new_trial(seen, params=params)
                if f"{trial.code}.deadline_seconds" in seen.options.settings:
                    return (trial,)
                seconds = seconds_per_sweep(seen.options) + _GROUP_OPENING_SECONDS
                return (structs.replace(trial, deadline_seconds=seconds),)
    return ()


def seconds_per_sweep(options: RunOptions) -> float:
    """The seconds of the budget for one sweep."""
    request = options.bench or BenchRequest()
    sweep_count = len(request.collective) * max(1, len(request.backend))
    return max(1.0, (options.budget_seconds - _RESERVED_SECONDS) / sweep_count)


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """Yield all findings about the benchmark; nothing if it had no trial."""
    return findings(seen)


def skip(seen: Seen[Data]) -> SkipReason | None:
    """The reason to skip the benchmark in a run of one rank, which sends nothing; else None."""
    return inapplicable(ONE_RANK_REASON if seen.world.size == 1 else None)


def report(seen: Seen[Data]) -> Contribution:
    """The highest bus bandwidth of each collective and backend, and for `ddpdiag allreduce-bench` its section.

    If several dtypes were measured, the bandwidth is that of the first.
    """
    bench = bench_report(seen)
    rates: dict[str, Scalar] = {}
    for series in bench.series:
        rates.setdefault(f"bench.{series.collective}.{series.backend}.busbw_bytes_per_s", series.peak_busbw_bytes_per_s)
    if seen.options.bench is None:
        return Contribution(figures=rates)
    section = Section(
        question="How well {} can communicate",
        sentence=bench.sentence,
        has_answer=bool(bench.series),
        bench=bench,
        series=curves_of(seen),
    )
    return Contribution(figures=rates, section=section)


# As in P2P005: far below every rate that counts as good, and as slow as over a wrong network.
SETTINGS = {"far_ratio": 0.1}
CHECK: Check[Data] = Check(__name__, "COL002", "bench", Stage.COLLECTIVE, Scope.WORLD, Kind.TORCH, deadline=60)
