"""Benchmark of the collectives: every size, every rank, and an interpretation.

`ddpdiag allreduce-bench` runs this check; `ddpdiag check` runs it only by name (`--select COL002`). Sizes, calls and
columns are those of nccl-tests: algbw is size over time, busbw is algbw x 2(n-1)/n for an all-reduce, which a link's
rate bounds whatever the number of ranks. Each rank keeps its own times: since all ranks finish a collective together,
the rank with the shortest time started it last. At some moments all ranks copy in their own memory at once, and at the
end the ranks measure in pairs, so that a slow rank, its memory and its path to others can be distinguished.

Findings and their causes:

Fix: remove the bottleneck that the closing sentence names; `ddpdiag check` finds out why a host, a GPU or a link is
slow.

Confirm by hand: Run nccl-tests' `all_reduce_perf` with the same -b, -e, -f, -n and -w under the same launcher, and
compare the columns.

Sources: nccl-tests, doc/PERFORMANCE.md and src/common.cu; SuperBench (5 % against one's own baseline).
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from msgspec import structs

from ddpdiag.bandwidth import factor
from ddpdiag.bench.data import AGAIN, Data
from ddpdiag.bench.judge import bench_of, curves_of, findings
from ddpdiag.bench.series import hosts_of_ranks
from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, inapplicable, new_trial
from ddpdiag.checks.fabric.notes import round_robin
from ddpdiag.checks.findings import Effect, FindingSpec, Section
from ddpdiag.checks.gpu.other_users import used_meanwhile
from ddpdiag.checks.p2p import transport
from ddpdiag.checks.p2p.nccl_path import (
    FAR_RATIO,
    Cause,
    Path,
    Timed,
    causes_text,
    doubts_of,
    doubts_text,
    limited_by,
    path_of,
)
from ddpdiag.checks.world import ONE_RANK
from ddpdiag.model import Finding, Kind, Options, Scalar, Severity, Trial
from ddpdiag.model.bench import Bench, Bottleneck, Series
from ddpdiag.model.trial import CONTEXT_STEP, Context
from ddpdiag.text import rate_text, share_text, size_text

FINDINGS = {
    "wrong": FindingSpec.error(
        "an element is not the exact result: corrupted memory, or a broken transport (P2P behind an IOMMU)."
    ),
    "slow-rank": FindingSpec.warning(
        "one rank copies or communicates 1.5 times slower than the others, or starts last in most calls: a core that "
        "it shares, a throttled GPU, a bad NIC. Compare that host with another; run `ddpdiag check` on it.",
        slows=True,
    ),
    "far-below": FindingSpec(
        "the bus bandwidth over nccl is less than `far_ratio` of what the path that NCCL's log shows can do. It is "
        "measured once more then; an error where both measurements agree and nothing else uses the GPUs, else a "
        "warning, which states what is missing."
    ),
    "below": FindingSpec.error("the bus bandwidth does not reach `--min-busbw`."),
    "worse": FindingSpec.warning(
        "5 % less than in the `--baseline` of this world, and more than the spread of both runs. Find out what has "
        "changed."
    ),
    "incomparable": FindingSpec.not_seen(
        "the `--baseline` is of another world or hardware, or has other sizes, so that something was not compared."
    ),
    "unmeasured": FindingSpec.not_seen(
        "there was no time or no memory for some rows, whose sizes, types or operations are listed, or for all of them."
    ),
    "unsupported": FindingSpec.error(
        "backend, dtype, op or root that this torch, this backend or this world does not have.", effect=Effect.USAGE
    ),
}

# Sentences of series that name their bottleneck.
_TELLING = (Bottleneck.MISSING_PART, Bottleneck.SLOW_RANK)
_COMPARE = (
    "Run `ddpdiag check` with the same ranks while nothing else runs there: it measures each link, and names what "
    "slows GPUs down."
)
# Rounds of pairs, each with other partners: of three ranks all pairs are needed to distinguish one from its partners.
ROUNDS = 3
_PAIR_SECONDS = 4.0
# What is measured once more is one size, six times.
_SECOND_SECONDS = 10.0
# Of the budget, what rounds of pairs may take.
_PAIR_SHARE = 0.3
# What opening a group may take: NCCL some seconds.
_OPEN_SECONDS = 10.0
# What membership, the report and the start of a trial take of the budget.
_BESIDE_SECONDS = 6.0
_PAIR_BENCH = Bench(minbytes=4 << 20, maxbytes=4 << 20, iters=10, warmup_iters=2, check=0)


def measure(ctx: Context) -> Data:
    """A sweep of one collective over one backend; in a pair, one size."""
    from ddpdiag.bench.workloads.measure import bench, one_size
    from ddpdiag.workloads.devices import describe, gpu_users_before
    from ddpdiag.workloads.group import process_group, unknown_backend

    backend, collective = str(ctx.trial.params["backend"]), str(ctx.trial.params["collective"])
    empty = Data(backend=backend, collective=collective, ranks=len(ctx.group), pid=os.getpid(), device="")
    if (unknown := unknown_backend(backend)) is not None:
        return structs.replace(empty, unsupported=(str(unknown),))
    if AGAIN in ctx.trial.params:
        # One size once more, with the users of the GPU before it, and NCCL's log after it.
        ctx.step(CONTEXT_STEP)
        before = gpu_users_before(ctx.place.local_rank)
        with process_group(ctx, empty.backend) as device:
            rows = one_size(ctx, second_bench(ctx.trial), collective, device, _SECOND_SECONDS).rows
        return structs.replace(empty, rows=rows, before=before, path=transport.read(ctx, device))
    with process_group(ctx, backend) as device:
        about = describe(device)
        known = structs.replace(empty, device=about.name, device_index=about.number, gpu_uuid=about.uuid, pci=about.pci)
        if "round" in ctx.trial.params:
            return structs.replace(known, **one_size(ctx, _PAIR_BENCH, collective, device, _PAIR_SECONDS)._asdict())
        return bench(ctx, known, device, share_seconds(ctx.options, ctx.place.world_size))


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """Each collective over each backend; then pairs of ranks, over the backends that worked; then once more what is
    far below its expectation."""
    asked = seen.options.bench or Bench()
    backends = asked.backend or (seen.world.backend,)
    tried = [trial.params for trial in seen.trials]
    share = share_seconds(seen.options, seen.world.size)
    for backend, name in [(backend, name) for name in asked.collective for backend in backends]:
        params = {"backend": backend, "collective": name}
        if params not in tried:
            return (_lasting(seen, new_trial(seen, params=params), share),)
    for backend in backends if seen.world.size > 2 else ():
        # Only where something was measured over this backend, and nothing failed.
        own = [trial for trial in seen.trials if trial.params["backend"] == backend]
        measured = any(row.data.rows for row in seen.rows if row.data.backend == backend)
        if measured and all(seen.succeeded(trial) for trial in own):
            for number in range(ROUNDS):
                in_pairs: dict[str, str | int] = {"backend": backend, "collective": "all_reduce", "round": number}
                if in_pairs not in tried:
                    groups = round_robin(seen.world.living, number)
                    return (_lasting(seen, new_trial(seen, groups=groups, params=in_pairs), _PAIR_SECONDS),)
    if seen.left_seconds < _SECOND_SECONDS:
        return ()
    done = {trial.params["collective"] for trial in seen.trials if AGAIN in trial.params}
    slow = (one for one in suspects(seen) if one.collective not in done)
    return tuple(_lasting(seen, second_trial(seen, one), _SECOND_SECONDS) for one in islice(slow, 1))


def share_seconds(options: Options, world_size: int) -> float:
    """What the budget leaves for one sweep, with rounds of pairs after all of them."""
    asked = options.bench or Bench()
    backends = max(1, len(asked.backend))
    budget = options.budget_seconds - _BESIDE_SECONDS
    in_pairs = backends * ROUNDS * _PAIR_SECONDS if world_size > 2 else 0.0
    return max(1.0, (budget - min(in_pairs, budget * _PAIR_SHARE)) / (len(asked.collective) * backends))


def _lasting(seen: Seen[Data], trial: Trial, seconds: float) -> Trial:
    """With what it may take and what opening the group takes, unless `--set` gives a deadline."""
    if f"{trial.code}.deadline_seconds" in seen.options.settings:
        return trial
    return structs.replace(trial, deadline_seconds=seconds + _OPEN_SECONDS)


# Far below its expectation: measured once more with NCCL's log, and judged -------------------------------------------


def suspects(seen: Seen[Data]) -> Iterator[Series]:
    """Of each collective over NCCL the first series that is far below what is expected."""
    named: set[str] = set()
    for one in bench_of(seen).series:
        expected = one.expectation
        if one.backend != "nccl" or one.collective in named or expected is None:
            continue
        if _first(seen, one).is_far_below(expected.busbw_bytes_per_s, seen.number("far_ratio")):
            named.add(one.collective)
            yield one


def second_trial(seen: Seen[Data], one: Series) -> Trial:
    """The same collective at its best size once more, in a worker that has no context on its GPU yet."""
    params: dict[str, str | int | float | bool] = {
        "backend": one.backend,
        "collective": one.collective,
        AGAIN: one.best_bytes,
        "dtype": one.dtype,
        "op": one.op,
        "root": one.root,
    }
    return new_trial(seen, params=params, fresh=True)


def second_bench(trial: Trial) -> Bench:
    """The measurements of such a trial."""
    size, op, root = int(trial.params[AGAIN]), str(trial.params["op"]), int(trial.params["root"])
    return Bench(
        minbytes=size,
        maxbytes=size,
        iters=5,
        warmup_iters=1,
        check=0,
        datatype=(str(trial.params["dtype"]),),
        op=("sum" if op == "none" else op,),
        root=max(0, root),
    )


def far_below(seen: Seen[Data]) -> Iterator[Finding]:
    """One for each collective, unless no rate is expected of its path (TCP sockets)."""
    far_ratio = seen.number("far_ratio")
    for one in suspects(seen):
        trials = (trial for trial in seen.trials if AGAIN in trial.params)
        own = next((trial for trial in trials if trial.params["collective"] == one.collective), None)
        rows = {row.place.rank: row.data for row in seen.rows if row.trial is own}
        hosts = hosts_of_ranks(seen, seen.world.living)
        paths = {rank: row.path for rank, row in rows.items() if row.path is not None}
        path = path_of(one.collective, paths, hosts)
        # A network card's nominal speed is no expectation where NCCL's log does not show that it is used.
        if len(hosts) > 1 and not isinstance(path, Path):
            continue
        expectation, name = one.expectation, f"{one.collective} over {one.backend}"
        expected = expectation.busbw_bytes_per_s if expectation is not None else 0.0
        first = _first(seen, one)
        # The shortest call of the slowest rank; None where a rank has none.
        seconds = [timing.seconds.min for data in rows.values() for row in data.rows for timing in row.modes[:1]]
        again = None
        if len(seconds) >= first.ranks:
            latency = min(first.latency_seconds, max(seconds) / 2)
            again = first._replace(seconds=max(seconds), latency_seconds=latency)
        doubts = [*_doubts(first, again, path, rows, far_ratio)]
        causes = [*limited_by(paths)]
        if isinstance(path, Path) and path.transports:
            causes.insert(0, Cause(f"NCCL's log shows {path.transports}"))
        if one.bottleneck in _TELLING:
            causes.append(Cause(one.sentence.removesuffix(".")))
        rate = one.peak_busbw_bytes_per_s
        second = f" ({rate_text(again.busbw_bytes_per_s)} when measured again)" if again else ""
        yield seen.finding(
            "far-below",
            f"{name} is far too slow for this hardware: {rate_text(rate)}",
            f"{name} reaches {rate_text(rate)} busbw at {size_text(one.best_bytes)}{second}. At least "
            f"{share_text(far_ratio)} of {rate_text(expected)} is expected: "
            f"{expectation.source if expectation else ''}. {causes_text(causes)}{doubts_text(doubts)}",
            severity=Severity.WARNING if doubts else Severity.ERROR,
            hosts=seen.world.hosts_of(seen.world.living) if len(seen.world.hosts) == 1 else (),
            evidence={
                "busbw_bytes_per_s": rate,
                "second_busbw_bytes_per_s": again.busbw_bytes_per_s if again else None,
                "expected_bytes_per_s": expected,
                "transports": path.transports if isinstance(path, Path) else path,
                "causes": [cause.text for cause in causes],
                "doubts": [*doubts],
            },
            fix=next((cause.fix for cause in causes if cause.fix), _COMPARE),
        )


def _first(seen: Seen[Data], one: Series) -> Timed:
    ranks = len(seen.world.arrivals)
    seconds = one.best_bytes * factor(one.collective, ranks) / max(one.peak_busbw_bytes_per_s, 1e-9)
    latency = one.fit.latency_seconds if one.fit is not None else 0.0
    return Timed(one.collective, one.best_bytes, ranks, seconds, min(latency, seconds / 2))


def _doubts(
    first: Timed, again: Timed | None, path: Path | str, rows: Mapping[int, Data], ratio: float
) -> Iterator[str]:
    """Reasons for a warning instead of an error."""
    if again is None:
        yield "it was measured once only"
    elif isinstance(path, str):
        yield path
    elif not first.is_far_below(path.busbw_bytes_per_s, ratio):
        yield f"the path that NCCL takes ({path.transports}) can do {rate_text(path.busbw_bytes_per_s)} only"
    else:
        yield from doubts_of(path, again, ratio)
    uses = [(f"the GPU of rank {rank}", row.before) for rank, row in rows.items() if row.before is not None]
    yield from used_meanwhile(uses)


# The check -----------------------------------------------------------------------------------------------------------


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """All findings about what was measured; none where no benchmark was run."""
    return findings(seen, far_below(seen))


def skip(seen: Seen[Data]) -> SkipReason | None:
    """One rank sends nothing."""
    return inapplicable(ONE_RANK if seen.world.size == 1 else None)


def figures(seen: Seen[Data]) -> Mapping[str, Scalar]:
    """The highest bus bandwidth of each series."""
    out: dict[str, Scalar] = {}
    for series in bench_of(seen).series:
        out.setdefault(f"bench.{series.collective}.{series.backend}.busbw_bytes_per_s", series.peak_busbw_bytes_per_s)
    return out


def section(seen: Seen[Data]) -> Section | None:
    """The benchmark, if the run was made for it rather than for this check among others."""
    if seen.options.bench is None:
        return None
    report = bench_of(seen)
    return Section(
        question="How well {} can communicate",
        sentence=report.sentence,
        measured=bool(report.series),
        bench=report,
        series=curves_of(seen),
    )


def report(seen: Seen[Data]) -> Contribution:
    """All that the check adds to the report."""
    return Contribution(figures=figures(seen), section=section(seen))


SETTINGS = {"far_ratio": FAR_RATIO}
CHECK: Check[Data] = Check(__name__, "COL002", "bench", Stage.COLLECTIVE, Scope.WORLD, Kind.TORCH, deadline=60)
