"""All-reduce far below what its path can do.

NCCL's log (P2P004) shows the path between the ranks, and NVML what its links carry. Where the all-reduce of COL001 over
nccl stays below `far_ratio` of that, it is measured once more, with a larger message (128 MiB, less where that takes
long) and after a check which processes use the GPUs; a run whose all-reduce is fast enough measures nothing more. Short
messages are bound by latency, so the time of a call of 4 bytes is left out of both.

It is an error where both measurements agree, NCCL's own log shows the path, and nothing else uses the GPUs or the
cores; else a warning, which states what is missing. Where the second measurement is fast enough, the first is a note.
Where NCCL copies directly between GPUs (P2P) and is slow twice, a third measurement with NCCL_P2P_DISABLE=1 shows
whether direct copies are the cause. For TCP sockets and for gloo no rate is expected: their speed depends on the hosts'
cores.

Findings:

Causes: NCCL variables that limit its channels, GPUs that are slowed down by heat or power, a narrow PCIe link, NVLinks
with errors, an IOMMU or ACS. The finding names those that this run shows, and no other.

Fix: do what the finding recommends.

Confirm by hand: Nccl-tests' `all_reduce_perf -b 4M -e 1G -f 4 -g 1` under the same launcher on an idle host; `ddpdiag
allreduce-bench -e 1G`.

Sources: nccl-tests, doc/PERFORMANCE.md (bus bandwidth); NCCL's src/graph/topo.h and topo.cc (rates of links); Azure's
health checks (github.com/Azure/azurehpc-health-checks); stas00, ml-engineering (80 % of the nominal rate is good).
"""

import time
from collections.abc import Sequence

from ddpdiag.checks.api import Check, Scope, Seen, Stage, new_trial
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.collective.all_reduce import SMALL_BYTES, affordable
from ddpdiag.checks.findings import Explained
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.checks.p2p.nccl_path import FAR_RATIO, Timed
from ddpdiag.checks.p2p.speed_judge import AROUND, Data, again_of, first_of, judge, path_here
from ddpdiag.checks.world import World, without_gpu
from ddpdiag.model import Kind, Trial
from ddpdiag.model.trial import CONTEXT_STEP, Context
from ddpdiag.stats import samples
from ddpdiag.text import rate_text, reached_text, size_text

FINDINGS = {
    "far-below": Explained(
        "less than `far_ratio` of what the path can do, twice; an error unless the message states why it is a warning, "
        "and a note if the second measurement is fast enough."
    )
}

# Long enough for the rate of any link, also where many ranks share it.
_BYTES, _BYTES_PER_RANK, _MOST_BYTES = 128 << 20, 128 << 10, 1 << 30
# One call of a slow path may take so long.
_CALL_SECONDS = 0.4


def measure(ctx: Context) -> Data:
    """The users of this rank's GPU before it starts, and the seconds of a small and of a large all-reduce."""
    from ddpdiag.workloads.collectives import Calls, connect, time_all_reduce
    from ddpdiag.workloads.devices import gpu_users_before
    from ddpdiag.workloads.group import process_group

    backend, size = str(ctx.trial.params["backend"]), int(ctx.trial.params["bytes"])
    ctx.step(CONTEXT_STEP)
    before = gpu_users_before(ctx.place.local_rank)
    with process_group(ctx, backend) as device:
        connect(ctx, device)
        small = time_all_reduce(ctx, SMALL_BYTES, device, Calls(5, 20))
        seconds = time_all_reduce(ctx, size, device, Calls(1, 1))
        calls = Calls(*affordable(0, 5, max(seconds), ctx.end - time.monotonic()))
        seconds += time_all_reduce(ctx, size, device, calls)
    return Data(
        backend=backend, bytes=size, small_seconds=samples(small), large_seconds=samples(seconds), before=before
    )


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """Once more, where COL001's all-reduce is far below what the path can do; then without direct copies."""
    first, path, ratio = first_of(seen), path_here(seen), seen.number("far_ratio")
    if first is None or isinstance(path, str) or len(seen.world.living) < seen.world.size:
        return ()
    if not first.is_far_below(path.busbw_bytes_per_s, ratio):
        return ()
    params: dict[str, str | int | float | bool] = {"backend": seen.world.backend, "bytes": _size(first)}
    if not seen.trials:
        return (new_trial(seen, params=params),)
    again = again_of(seen)
    is_slow = again is not None and again.is_far_below(path.busbw_bytes_per_s, ratio)
    if len(seen.trials) > 1 or not is_slow or "P2P" not in path.transports:
        return ()
    return (new_trial(seen, params=params, env=AROUND, fresh=True, may_fail=True),)


def _size(first: Timed) -> int:
    """Bytes that keep the slow path busy for a moment, no fewer than before."""
    most = min(max(_BYTES, _BYTES_PER_RANK * first.ranks), _MOST_BYTES)
    return max(first.size_bytes, min(most, int(_CALL_SECONDS * first.size_bytes / first.seconds) & ~0xFFFF))


def ground(world: World) -> str | None:
    """Only NCCL has a path whose rate is known."""
    if world.size == 1:
        return "one rank alone has no other rank to communicate with"
    if world.backend != "nccl":
        return f"the backend is {world.backend}; what its path can do is not known"
    return without_gpu(world)


def moot(seen: Seen[Data]) -> str | None:
    """Why it is not measured once more."""
    first, path = first_of(seen), path_here(seen)
    if first is None:
        return f"no all-reduce over {seen.world.backend} was timed (COL001)"
    if isinstance(path, str):
        return path
    rate = first.busbw_bytes_per_s
    reached = f"{rate_text(rate)} busbw at {size_text(first.size_bytes)}"
    return f"the all-reduce of COL001 reached {reached}, {reached_text(rate, path.busbw_bytes_per_s)}"


CHECK = Check(
    "P2P005",
    "all-reduce-speed",
    Stage.P2P,
    Scope.WORLD,
    manual=__doc__ or "",
    findings=FINDINGS,
    judge=judge,
    data=Data,
    measure=measure,
    plan=plan,
    ground=ground,
    moot=moot,
    blocked=fallback.blocks,
    follows=(all_reduce.CHECK.code,),
    kind=Kind.TORCH,
    # A new context and communicator, and 7 calls of 0.4 s at most where the path is slow.
    deadline=20,
    settings={"far_ratio": FAR_RATIO},
)
