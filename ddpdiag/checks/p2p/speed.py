"""All-reduce far below what its path can do.

NCCL's log (P2P004) shows the path between the ranks, and NVML what its links carry. Where the all-reduce of COL001 over
nccl stays below `far_ratio` of that, it is measured once more, with a larger message (128 MiB, less where that takes
long), and where that is slow as well, again in new processes and after a check which processes use the GPUs. A run
whose all-reduce is fast enough measures nothing more. Short messages are bound by latency, so the time of a call of 4
bytes is left out of all.

It is an error where the first and the last of them agree, NCCL's own log shows the path, and nothing else uses the GPUs
or the cores; else a warning, which states what is missing. Where the second measurement is fast enough, the first is a
note. Where NCCL copies directly between GPUs (P2P) and stays slow, a last measurement with NCCL_P2P_DISABLE=1 shows
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
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from msgspec import Struct

from ddpdiag.checks.api import Check, Scope, Seen, SkipReason, Stage, inapplicable, new_trial, unneeded
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.collective.all_reduce import SMALL_BYTES, affordable
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu.other_users import not_free, used_meanwhile
from ddpdiag.checks.p2p import transport
from ddpdiag.checks.p2p.copies import check as copies
from ddpdiag.checks.p2p.copies.judge import ACS, copies_by_rank
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.checks.p2p.nccl_path import (
    FAR_RATIO,
    Cause,
    Path,
    Timed,
    causes_text,
    compare_fix,
    doubts_of,
    doubts_text,
    limited_by,
    path_of,
)
from ddpdiag.checks.rates import severity_of_rate
from ddpdiag.checks.world import ONE_RANK, without_gpu
from ddpdiag.model import Finding, Kind, Severity, Trial
from ddpdiag.model.bench import Bottleneck
from ddpdiag.model.trial import CONTEXT_STEP, Context
from ddpdiag.probes.gpu.health import GpuUsers
from ddpdiag.stats import Samples, samples
from ddpdiag.text import rate_text, reached_text, share_text, size_text

FINDINGS = {
    "far-below": FindingSpec(
        "less than `far_ratio` of what the path can do, twice; an error unless the message states why it is a warning, "
        "and a note if the second measurement is fast enough."
    )
}

# Long enough for the rate of any link, also where many ranks share it.
_BYTES, _BYTES_PER_RANK, _MOST_BYTES = 128 << 20, 128 << 10, 1 << 30
# One call of a slow path may take so long.
_CALL_SECONDS = 0.4


_CLOCKS = ("GPU005.slowdown", "GPU005.warm", "GPU010.slowdown", "GPU010.warm")
_COPIES = ("P2P002.slow", "P2P002.p2p-slower")
# Findings of other checks that show what makes a path slow, by what sets its rate.
_SEEN_BY = {
    Bottleneck.NVLINK: (*_COPIES, "GPU006", "GPU010.nvlink-down", "GPU010.nvlink-errors", *_CLOCKS),
    Bottleneck.PCIE: (*_COPIES, "P2P002.host-slow", "GPU004.narrow", "P2P001.acs", "P2P001.disabled", *_CLOCKS),
    Bottleneck.NIC: ("P2P004.no-gdr", "GPU004.narrow", *_CLOCKS),
}
# NCCL goes through the host's memory then.
AROUND = {"NCCL_P2P_DISABLE": "1"}
_ASSIGNED = "NCCL_P2P_DISABLE=1"
# As P2P003's `rescue`: through the host's memory an all-reduce is slower than over links that work.
_AROUND_RATIO = 2.0
_GO_AROUND = (
    f"Run the job with {_ASSIGNED} until direct copies are fast. Run `nvidia-smi nvlink -s` there for links that are "
    f"down. {ACS}"
)


class Data(Struct, frozen=True, kw_only=True):
    """One rank: seconds of calls of 4 bytes and of `bytes`, and the users of its GPU right before."""

    backend: str
    bytes: int
    small_seconds: Samples
    large_seconds: Samples
    before: GpuUsers = GpuUsers()


def measure(ctx: Context) -> Data:
    """The users of this rank's GPU before a new process has a context there; seconds of small and large all-reduces."""
    from ddpdiag.workloads.collectives import time_all_reduce
    from ddpdiag.workloads.devices import gpu_users_before
    from ddpdiag.workloads.group import process_group

    backend, size = str(ctx.trial.params["backend"]), int(ctx.trial.params["bytes"])
    ctx.step(CONTEXT_STEP)
    before = gpu_users_before(ctx.place.local_rank) if ctx.trial.fresh else GpuUsers()
    with process_group(ctx, backend) as device:
        small = time_all_reduce(ctx, SMALL_BYTES, device, (5, 20))
        seconds = time_all_reduce(ctx, size, device, (1, 1))
        calls = affordable(0, 5, max(seconds), ctx.end - time.monotonic())
        seconds += time_all_reduce(ctx, size, device, calls)
    return Data(
        backend=backend, bytes=size, small_seconds=samples(small), large_seconds=samples(seconds), before=before
    )


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """Once more, where COL001's all-reduce is far below what the path can do; if it still is, again in new processes,
    which look for other users of the GPUs before; then without direct copies."""
    first, path, ratio = first_of(seen), path_here(seen), seen.number("far_ratio")
    if first is None or isinstance(path, str) or len(seen.world.living) < seen.world.size:
        return ()
    if not first.is_far_below(path.busbw_bytes_per_s, ratio):
        return ()
    # Bytes that keep the slow path busy for a moment, no fewer than before.
    most = min(max(_BYTES, _BYTES_PER_RANK * first.ranks), _MOST_BYTES)
    size = max(first.size_bytes, min(most, int(_CALL_SECONDS * first.size_bytes / first.seconds) & ~0xFFFF))
    params: dict[str, str | int | float | bool] = {"backend": seen.world.backend, "bytes": size}
    plain = [trial for trial in seen.trials if not trial.env]
    if not plain:
        return (new_trial(seen, params=params),)
    again = again_of(seen)
    if again is None or not again.is_far_below(path.busbw_bytes_per_s, ratio):
        return ()
    if not any(trial.fresh for trial in plain):
        # Other users of a GPU are looked for by a process that has no context there yet.
        return (new_trial(seen, params=params, fresh=True),)
    if len(plain) < len(seen.trials) or "P2P" not in path.transports:
        return ()
    return (new_trial(seen, params=params, env=AROUND, fresh=True, may_fail=True),)


def skip(seen: Seen[Data]) -> SkipReason | None:
    """Only NCCL has a path whose rate is known, and only a slow one is measured once more."""
    if seen.world.size == 1:
        return inapplicable(ONE_RANK)
    if seen.world.backend != "nccl":
        return inapplicable(f"the backend is {seen.world.backend}; what its path can do is not known")
    return (
        inapplicable(without_gpu(seen.world))
        or fallback.blocks(seen)
        or unneeded(None if seen.trials or plan(seen) else _why_not(seen))
    )


def _why_not(seen: Seen[Data]) -> str:
    """Why it is not measured once more."""
    first, path = first_of(seen), path_here(seen)
    if first is None:
        return f"no all-reduce over {seen.world.backend} was timed (COL001)"
    if isinstance(path, str):
        return path
    rate = first.busbw_bytes_per_s
    reached = f"{rate_text(rate)} busbw at {size_text(first.size_bytes)}"
    return f"the all-reduce of COL001 reached {reached}, {reached_text(rate, path.busbw_bytes_per_s)}"


def first_of(seen: Seen[Data]) -> Timed | None:
    """COL001's all-reduce over the job's backend; None where a rank has no right result."""
    rows = {
        row.place.rank: row.data for row in seen.of(all_reduce.CHECK).rows if row.data.backend == seen.world.backend
    }
    if len(rows) < seen.world.size or any(row.wrong for row in rows.values()):
        return None
    return _timed({rank: (row.large_bytes, row.large_seconds, row.small_seconds) for rank, row in rows.items()})


def again_of(seen: Seen[Data], env: Mapping[str, str] | None = None) -> Timed | None:
    """The second measurement, or that with these variables; None where a rank has no result."""
    rows = _rows(seen, env or {})
    if len(rows) < seen.world.size:
        return None
    return _timed({rank: (row.bytes, row.large_seconds, row.small_seconds) for rank, row in rows.items()})


def _rows(seen: Seen[Data], env: Mapping[str, str]) -> dict[int, Data]:
    return {row.place.rank: row.data for row in seen.rows if row.trial.env == env}


def _timed(rows: Mapping[int, tuple[int, Samples, Samples]]) -> Timed:
    """The shortest call of the slowest rank: noise only adds, and an all-reduce is as fast as the last of them."""
    return Timed(
        "all_reduce",
        size_bytes=max(size for size, _, _ in rows.values()),
        ranks=len(rows),
        seconds=max(large.min for _, large, _ in rows.values()),
        latency_seconds=min(small.min for _, _, small in rows.values()),
    )


def path_here(seen: Seen[Data]) -> Path | str:
    """The rate that NCCL's path between all ranks should reach; or the reason why it is not known."""
    if fallback.job_workarounds(seen):
        return "NCCL takes another path with the variables of P2P003"
    unique = len({name for name, _ in seen.world.hosts}) == len(seen.world.hosts)
    hosts = {name if unique else f"{name} {boot}": ranks for (name, boot), ranks in seen.world.hosts.items()}
    return path_of("all_reduce", seen.of(transport.CHECK).by_rank, hosts)


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    first, path, ratio = first_of(seen), path_here(seen), seen.number("far_ratio")
    if first is None or isinstance(path, str) or not first.is_far_below(path.busbw_bytes_per_s, ratio):
        return
    again, expected = again_of(seen), path.busbw_bytes_per_s
    doubts = [*_doubts(seen, path, again, ratio)]
    shares = [one.share_of(expected) for one in (first, again) if one is not None]
    severity = severity_of_rate(shares, least=ratio, error_below=ratio, doubts=doubts)
    is_note = severity is Severity.NOTE
    causes = [] if is_note else [*_causes(seen, path)]
    shown = again or first
    nodes = seen.world.hosts_of(seen.world.living) if len(seen.world.hosts) == 1 else ()
    where = f" on {nodes[0]}" if nodes else ""
    rate, backend = shown.busbw_bytes_per_s, seen.world.backend
    both = f" ({rate_text(first.busbw_bytes_per_s)} at {size_text(first.size_bytes)})" if again else ""
    yield seen.finding(
        "far-below",
        f"one of two measurements of the all-reduce over {backend} was slow: {rate_text(first.busbw_bytes_per_s)}"
        if is_note
        else f"the all-reduce over {backend} is far too slow for its path: {rate_text(rate)}",
        f"The all-reduce over {backend}{where} reaches {rate_text(rate)} busbw at {size_text(shown.size_bytes)}{both}. "
        f"At least {share_text(ratio)} of {rate_text(expected)} is expected: {path.text}."
        + ("" if is_note else f" {causes_text(causes)}{doubts_text(doubts)}"),
        severity=severity,
        hosts=() if is_note else nodes,
        evidence={
            "busbw_bytes_per_s": rate,
            "first_busbw_bytes_per_s": first.busbw_bytes_per_s,
            "expected_bytes_per_s": expected,
            "source": path.source,
            "transports": path.transports,
            "causes": [cause.text for cause in causes],
            "doubts": [*doubts],
        },
        fix="Nothing to do."
        if is_note
        else next((cause.fix for cause in causes if cause.fix), compare_fix(seen.world.hosts)),
    )


def _doubts(seen: Seen[Data], path: Path, again: Timed | None, ratio: float) -> Iterator[str]:
    """Reasons for a warning instead of an error."""
    yield from doubts_of(path, again, ratio)
    if (crowd := seen.world.ranks_per_core) > 1:
        yield f"{crowd:.1f} ranks share each core"
    yield from not_free(seen, _uuids(seen))
    yield from used_meanwhile([(f"the GPU of rank {rank}", row.before) for rank, row in _rows(seen, {}).items()])


def _uuids(seen: Seen[Data]) -> list[str]:
    rows = seen.of(transport.CHECK).by_rank
    return [row.gpu_uuid or f"the GPU of rank {rank}" for rank, row in rows.items()]


def _causes(seen: Seen[Data], path: Path) -> Iterator[Cause]:
    """The causes that this run shows, the likeliest first."""
    again, around = again_of(seen), again_of(seen, AROUND)
    if again and around and around.busbw_bytes_per_s > _AROUND_RATIO * again.busbw_bytes_per_s:
        yield Cause(f"with {_ASSIGNED} the same all-reduce reaches {rate_text(around.busbw_bytes_per_s)}", _GO_AROUND)
    yield from limited_by(seen.of(transport.CHECK).by_rank)
    uuids = {*_uuids(seen)}
    codes = _SEEN_BY.get(path.part, ())
    found: dict[str, Finding] = {}
    for finding in chain.from_iterable(map(seen.findings_of, dict.fromkeys(code.partition(".")[0] for code in codes))):
        concerns = not finding.gpus or uuids & {*finding.gpus}
        if finding.severity is not Severity.NOTE and concerns and finding.code.startswith(codes):
            found.setdefault(finding.code, finding)
    for finding in found.values():
        yield Cause(f"{finding.title} ({finding.code})", finding.fix)
    yield from _by_copies(seen, uuids)


def _by_copies(seen: Seen[Data], uuids: set[str]) -> Iterator[Cause]:
    """The rates of copies between the same GPUs, which separate the links from NCCL's use of them."""
    rates = sorted(
        pair.bytes_per_s
        for own in copies_by_rank(seen.of(copies.CHECK))
        for link, pair in own.pairs.items()
        if pair.access and pair.bytes_per_s and uuids.issuperset(ends := own.uuids(link)) and len(ends) == 2
    )
    if rates:
        span = " to ".join(dict.fromkeys((rate_text(rates[0]), rate_text(rates[-1]))))
        yield Cause(f"direct copies between these GPUs reach {span} (P2P002)")


SETTINGS = {"far_ratio": FAR_RATIO}
# A new context and communicator, and 7 calls of 0.4 s at most where the path is slow.
CHECK: Check[Data] = Check(__name__, "P2P005", "all-reduce-speed", Stage.P2P, Scope.WORLD, Kind.TORCH, deadline=20)
