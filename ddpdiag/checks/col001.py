"""All-reduce: right values, latency and bandwidth on every rank.

The collective that DDP spends its time in. Every rank contributes integers that depend on its number, so that the sum
is known exactly: a wrong one means corrupted data (seen with P2P behind an IOMMU) or a rank that was counted twice.
Then a small message is timed for the latency and a large one for the bandwidth, with each rank's own clock.

busbw is what nccl-tests calls it: bytes / seconds x 2(n-1)/n, comparable with a link's rate whatever the number of
ranks. With more ranks than cores the numbers say nothing about the machine and are not judged.

Fix: for wrong values run again with NCCL_P2P_DISABLE=1, and check ACS/IOMMU settings; for a slow network look at the
interface in use.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from ddpdiag.check import Check, Context, Scope, Seen, Stage, new_trial
from ddpdiag.model import Depth, Finding, Kind, Scalar, Severity, Trial
from ddpdiag.stats import Samples, odd_ones_out, samples
from ddpdiag.world import World, without_gpu

SMALL_BYTES = 4
# The share of a trial's time left that one size may take.
_SHARE = 0.5
LARGE_BYTES = {Depth.QUICK: 4 << 20, Depth.STANDARD: 32 << 20, Depth.DEEP: 128 << 20}


class Data(Struct, frozen=True):
    """This rank's seconds for one call of each size (bytes per rank), and the elements that were wrong."""

    backend: str
    ranks: int
    small_bytes: int
    small_seconds: Samples
    large_bytes: int
    large_seconds: Samples
    wrong: int


def measure(ctx: Context) -> Data:
    """Check and time both sizes."""
    from ddpdiag.workloads.collectives import Calls, connect, time_all_reduce
    from ddpdiag.workloads.group import process_group

    backend = str(ctx.trial.params["backend"])
    end = time.monotonic() + ctx.trial.deadline_seconds

    def afford(warmup: int, timed: int) -> Callable[[float], Calls]:
        return lambda seconds: Calls(*affordable(warmup, timed, seconds, end - time.monotonic()))

    with process_group(ctx, backend) as device:
        connect(ctx, device)
        small = time_all_reduce(ctx, SMALL_BYTES, device, afford(5, 30))
        large = time_all_reduce(ctx, LARGE_BYTES[ctx.options.depth], device, afford(2, 8))
    return Data(
        backend,
        len(ctx.group),
        small.bytes,
        samples(small.seconds),
        large.bytes,
        samples(large.seconds),
        small.wrong + large.wrong,
    )


def affordable(warmup: int, timed: int, call_seconds: float, left_seconds: float) -> tuple[int, int]:
    """Fewer calls when time is short, so that a slow network is slow and not hung: half of what is left is spent.

    One call is always timed: a slow answer is worth more than none.
    """
    calls = int(max(0.0, left_seconds) * _SHARE / max(call_seconds, 1e-9))
    if calls >= warmup + timed:
        return warmup, timed
    timed = max(1, min(timed, calls - 1))
    return max(0, min(warmup, calls - timed)), timed


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """gloo first, since it needs least; then the job's own backend."""
    backends = tuple(dict.fromkeys(("gloo", seen.world.backend)))
    done = len(seen.trials)
    return (new_trial(seen, params={"backend": backends[done]}),) if done < len(backends) else ()


def ground(world: World) -> str | None:
    """One rank sends nothing, and nccl none without GPUs."""
    return "one rank alone communicates with nobody" if world.size == 1 else without_gpu(world)


def busbw(bytes_: int, seconds: float, ranks: int) -> float:
    """Bus bandwidth of an all-reduce in bytes per second (nccl-tests, doc/PERFORMANCE.md: algbw x 2(n-1)/n)."""
    return bytes_ / seconds * 2 * (ranks - 1) / ranks


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """Wrong values."""
    for trial in seen.trials:
        rows = {row.place.rank: row.data for row in seen.rows if row.trial is trial}
        if any(data.wrong for data in rows.values()):
            yield _wrong(seen, str(trial.params["backend"]), {rank: data.wrong for rank, data in rows.items()})


def _wrong(seen: Seen[Data], backend: str, wrong: Mapping[int, int]) -> Finding:
    got = sorted(rank for rank, count in wrong.items() if count)
    odd = odd_ones_out({rank: bool(count) for rank, count in wrong.items()})
    blamed = got if odd is not None and set(odd.ranks) == set(got) else []
    whose = (
        "every rank" if len(got) == len(wrong) else f"{len(got)} of {len(wrong)} ranks ({', '.join(map(str, got[:8]))})"
    )
    return seen.finding(
        "wrong",
        Severity.ERROR,
        f"wrong values from {backend}",
        f"The all-reduce over {backend} gave wrong values on {whose}: "
        f"{max(wrong.values())} elements differ from the exact sum.",
        ranks=blamed,
        evidence={"wrong_elements": max(wrong.values()), "ranks": list(got[:64])},
        remedy="Do not train on this allocation. On GPUs run again with NCCL_P2P_DISABLE=1, and check ACS and IOMMU.",
    )


def columns(seen: Seen[Data]) -> Mapping[int, Mapping[str, Scalar]]:
    """Each rank's numbers over the backend that the job would use (the last one tried)."""
    return {
        rank: {
            "busbw_bytes_per_s": busbw(data.large_bytes, data.large_seconds.median, data.ranks),
            "latency_seconds": data.small_seconds.median,
        }
        for rank, data in seen.by_rank.items()
        if data.ranks > 1
    }


def figures(seen: Seen[Data]) -> Mapping[str, Scalar]:
    """Per backend, the slowest rank's numbers: an all-reduce is as fast as the last of them."""
    out: dict[str, Scalar] = {}
    for backend in dict.fromkeys(row.data.backend for row in seen.rows):
        rows = [row.data for row in seen.rows if row.data.backend == backend and row.data.ranks > 1]
        if rows:
            slowest = max(rows, key=lambda data: data.large_seconds.median)
            name = f"all_reduce.{backend}"
            out[f"{name}.bytes"] = slowest.large_bytes
            out[f"{name}.busbw_bytes_per_s"] = busbw(slowest.large_bytes, slowest.large_seconds.median, slowest.ranks)
            out[f"{name}.latency_seconds"] = max(data.small_seconds.median for data in rows)
    return out


CHECK = Check(
    "COL001",
    "all-reduce",
    Stage.COLLECTIVE,
    Scope.WORLD,
    manual=__doc__ or "",
    judge=judge,
    data=Data,
    measure=measure,
    plan=plan,
    ground=ground,
    columns=columns,
    figures=figures,
    kind=Kind.TORCH,
    deadline=15,
)
