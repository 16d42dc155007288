"""All-reduce: correct values, latency and bandwidth on every rank.

DDP spends its communication time in this collective. Every rank contributes integers that depend on its number, so that
the sum is known exactly: a wrong sum means corrupted data (seen with P2P behind an IOMMU). Then a small message is
timed for the latency and a large one for the bandwidth, with each rank's own clock.

If a sum is wrong, the ranks broadcast known values one after the other. A sender is named if its values arrive wrong at
most other ranks, and a receiver is named if the values of most other ranks arrive wrong there. If single links deliver
wrong values, the links are named and not the ranks at their ends, unless a rank finds its own copy corrupted.

busbw is defined as in nccl-tests: bytes / seconds x 2(n-1)/n, comparable with a link's rate whatever the number of
ranks. With more ranks than cores the numbers do not describe the machine and are not judged.

Findings:

Fix: for wrong values see P2P003, which tries variables, and check ACS/IOMMU settings; for a slow network check the
interface in use.

Confirm by hand: Nccl-tests' `all_reduce_perf -b 8 -e 128M -f 2 -g 1 -c 1` under the same launcher; over gloo, `ddpdiag
allreduce-bench`.

Sources: nccl-tests, doc/PERFORMANCE.md (bus bandwidth); PyTorch issue 84803 (wrong values with P2P behind an IOMMU).
"""

import time
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import islice
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.bandwidth import busbw_factor
from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, inapplicable, new_trial
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import leave_out, ranks_text, subject_text
from ddpdiag.checks.matrix import Link, find_pattern
from ddpdiag.checks.world import no_gpu_reason
from ddpdiag.evidence.nccl_diagnostics import Diagnostic
from ddpdiag.model import Depth, Finding, Kind, Scalar, Trial
from ddpdiag.model.trial import Context
from ddpdiag.stats import Samples, find_odd_ranks, samples
from ddpdiag.text import begun

FINDINGS = {
    "wrong": FindingSpec.error(
        "a sum differs from what the ranks contributed. The message names the rank whose part is wrong, if it can be "
        "decided."
    )
}

SMALL_BYTES = 4
# The share of a trial's remaining time that the calls of one size may take.
_TIME_SHARE = 0.5
# After a wrong sum, at most this many ranks broadcast this many bytes, one rank after the other.
MAX_SENDERS = 64
BROADCAST_BYTES = 1 << 20
LARGE_BYTES = {Depth.QUICK: 4 << 20, Depth.STANDARD: 32 << 20, Depth.DEEP: 128 << 20}


class Data(Struct, frozen=True, omit_defaults=True):
    """One rank's results: the seconds of a call of each size (bytes per rank), and the number of wrong elements.

    If a sum is wrong on any rank, the first `senders` ranks broadcast known values, and only the checked calls are
    timed. `wrong_from` are the ranks whose broadcast values were wrong at this rank. `diagnostics` are NCCL's own lines
    about the group, which COL003 judges.
    """

    backend: str
    ranks: int
    small_bytes: int
    small_seconds: Samples
    large_bytes: int
    large_seconds: Samples
    wrong: int
    senders: int = 0
    wrong_from: tuple[int, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()


def measure(ctx: Context) -> Data:
    """Check the sums of both sizes. If they are right, time calls; if not, broadcast to find whose values are wrong."""
    from ddpdiag.workloads.collectives import check_all_reduce, check_broadcasts, is_true_on_any_rank, time_all_reduce
    from ddpdiag.workloads.group import process_group, read_diagnostics

    backend = str(ctx.trial.params["backend"])

    def limit_calls(warmup: int, timed: int, seconds: float) -> tuple[int, int]:
        return affordable_calls(warmup, timed, seconds, ctx.end - time.monotonic())

    senders, wrong_from = 0, tuple[int, ...]()
    with process_group(ctx, backend, diagnoses=True) as device:
        small = check_all_reduce(ctx, SMALL_BYTES, device)
        large = check_all_reduce(ctx, LARGE_BYTES[ctx.options.depth], device)
        small_seconds, large_seconds = [small.seconds], [large.seconds]
        if is_true_on_any_rank(ctx, small.wrong + large.wrong > 0):
            _, max_senders = limit_calls(0, MAX_SENDERS, large.seconds)
            senders, wrong_from = check_broadcasts(ctx, BROADCAST_BYTES, device, max_senders)
        else:
            small_seconds = time_all_reduce(ctx, small.bytes, device, limit_calls(5, 30, small.seconds))
            large_seconds = time_all_reduce(ctx, large.bytes, device, limit_calls(2, 8, large.seconds))
    return Data(
        backend=backend,
        ranks=len(ctx.group),
        small_bytes=small.bytes,
        small_seconds=samples(small_seconds),
        large_bytes=large.bytes,
        large_seconds=samples(large_seconds),
        wrong=small.wrong + large.wrong,
        senders=senders,
        wrong_from=wrong_from,
        diagnostics=read_diagnostics(ctx) if backend != "gloo" else (),
    )


def affordable_calls(warmup: int, timed: int, call_seconds: float, seconds_left: float) -> tuple[int, int]:
    """Reduce the numbers of warm-up calls and of timed calls, so that they take at most half of `seconds_left`.

    One call is always timed, so that a slow network is reported as slow and not as hung.
    """
    calls = int(max(0.0, seconds_left) * _TIME_SHARE / max(call_seconds, 1e-9))
    if calls >= warmup + timed:
        return warmup, timed
    timed = max(1, min(timed, calls - 1))
    return max(0, min(warmup, calls - timed)), timed


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """Plan one trial over gloo, which has the fewest requirements, then one over the job's backend, if different."""
    tried_backends = {trial.params["backend"] for trial in seen.trials}
    untried_backends = (backend for backend in ("gloo", seen.world.backend) if backend not in tried_backends)
    return tuple(new_trial(seen, params={"backend": backend}) for backend in islice(untried_backends, 1))


def skip(seen: Seen[Data]) -> SkipReason | None:
    """Skip with one rank, which has no partner, and without GPUs if the backend needs them."""
    one_rank = "there is one rank only, so there is no communication" if seen.world.size == 1 else None
    return inapplicable(one_rank or no_gpu_reason(seen.world))


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    for trial in seen.trials:
        rows = {row.place.rank: row.data for row in seen.rows if row.trial is trial}
        if any(data.wrong for data in rows.values()):
            yield _wrong_finding(seen, str(trial.params["backend"]), rows)


def _wrong_finding(seen: Seen[Data], backend: str, rows: Mapping[int, Data]) -> Finding:
    wrong_ranks = sorted(rank for rank, data in rows.items() if data.wrong)
    max_wrong = max(data.wrong for data in rows.values())
    culprit = find_culprit(rows)
    whose = "every rank" if len(wrong_ranks) == len(rows) else f"{ranks_text(wrong_ranks)} of {len(rows)}"
    links = [f"rank {sender} -> rank {receiver}" for sender, receiver in culprit.links]
    who = subject_text(seen, culprit.ranks) if culprit.ranks else ", ".join(links) or "No rank is blamed"
    hosts = seen.world.host_names(culprit.ranks)
    fix = f"{begun(leave_out(hosts)) if hosts else 'Do not train here'}, and have the memory there tested."
    if backend != "gloo":
        fix += " If P2P003 of this report names variables with which the sums are right, the memory is not at fault."
    by_senders: dict[tuple[int, ...], list[int]] = {}  # receivers, by the senders whose values arrived wrong
    for rank, data in rows.items():
        if data.wrong_from:
            by_senders.setdefault(data.wrong_from, []).append(rank)
    received = [f"{ranks_text(ranks)}: wrong from {ranks_text(senders)}" for senders, ranks in by_senders.items()]
    return seen.finding(
        "wrong",
        f"wrong sums over {backend}" + (f", caused by {who}" if culprit.ranks else ""),
        f"The all-reduce over {backend} gave wrong sums on {whose}: up to {max_wrong} elements per rank differ from "
        f"the exact sum. {begun(who)}: {culprit.why}.",
        ranks=culprit.ranks,
        links=links,
        evidence={"backend": backend, "wrong_elements": max_wrong, "ranks": [*wrong_ranks], "wrong_from": [*received]},
        fix=fix,
    )


class Culprit(NamedTuple):
    """The ranks or links (sender, receiver) to blame, and the reason. Both are empty if the evidence cannot decide."""

    why: str
    ranks: tuple[int, ...] = ()
    links: tuple[Link, ...] = ()


def find_culprit(rows: Mapping[int, Data]) -> Culprit:
    """Find the ranks or links that corrupt values: by the broadcasts, or by the sums if all broadcasts are right."""
    senders = min(data.senders for data in rows.values())
    if corrupted_ranks := tuple(rank for rank, data in sorted(rows.items()) if rank in data.wrong_from):
        return Culprit("its values are corrupted in its own memory, before they are sent", corrupted_ranks)
    wrong_links = {(sender, rank) for rank, data in rows.items() for sender in data.wrong_from}
    if wrong_links:
        return _culprit_of_links(wrong_links, {(a, b) for a in range(senders) for b in rows if a != b} - wrong_links)
    odd = find_odd_ranks({rank: data.wrong > 0 for rank, data in rows.items()})
    if odd is not None and odd.ranks and odd.majority is False:
        return Culprit("only its sum is wrong", odd.ranks)
    if not senders:
        return Culprit("there was no time left to find out whose values are wrong")
    return Culprit("the values that ranks broadcast arrive unchanged, so the summation is at fault")


def _culprit_of_links(wrong: Set[Link], right: Set[Link]) -> Culprit:
    """Blame the senders or receivers that explain the wrong links, else name the links.

    Broadcasts pass through other ranks, so a bad cable between two neighbours of a ring also corrupts the broadcasts of
    other ranks. The pattern then has one sender and one receiver, and only the link between them is named.
    """
    pattern = find_pattern(wrong, right)
    if pattern is None or pattern.is_everywhere or pattern.islands:
        return Culprit("neither a single sender nor a single receiver explains the wrong values")
    if len(pattern.senders) == len(pattern.receivers) == 1 and not pattern.hosts:
        link = (pattern.senders[0], pattern.receivers[0])
        return Culprit("the sender, the receiver or the path between them corrupts this data", links=(link,))
    if ranks := tuple(sorted({*pattern.hosts, *pattern.senders, *pattern.receivers})):
        return Culprit("the values that it sends or receives are wrong, and between the others they are correct", ranks)
    why = "only values on these links arrive wrong; the sender, the receiver or the path between them is at fault"
    return Culprit(why, links=pattern.links)


def _busbw(data: Data) -> float:
    return data.large_bytes / data.large_seconds.median * busbw_factor("all_reduce", data.ranks)


def columns(seen: Seen[Data]) -> Mapping[int, Mapping[str, Scalar]]:
    """Each rank's bus bandwidth and latency over the last backend that worked, usually the job's."""
    return {
        row.place.rank: {"busbw_bytes_per_s": _busbw(data), "latency_seconds": data.small_seconds.median}
        for row in seen.rows
        if (data := row.data).ranks > 1
    }


def figures(seen: Seen[Data]) -> Mapping[str, Scalar]:
    """The figures of each backend's slowest rank, because an all-reduce is as fast as its slowest rank."""
    figures_by_name: dict[str, Scalar] = {}
    with_peers = [row.data for row in seen.rows if row.data.ranks > 1]
    for backend in dict.fromkeys(data.backend for data in with_peers):
        rows, name = [data for data in with_peers if data.backend == backend], f"all_reduce.{backend}"
        slowest = max(rows, key=lambda data: data.large_seconds.median)
        figures_by_name[f"{name}.bytes"] = slowest.large_bytes
        figures_by_name[f"{name}.busbw_bytes_per_s"] = _busbw(slowest)
        figures_by_name[f"{name}.latency_seconds"] = max(data.small_seconds.median for data in rows)
    return figures_by_name


def report(seen: Seen[Data]) -> Contribution:
    return Contribution(columns=columns(seen), figures=figures(seen))


CHECK: Check[Data] = Check(__name__, "COL001", "all-reduce", Stage.COLLECTIVE, Scope.WORLD, Kind.TORCH, deadline=15)
