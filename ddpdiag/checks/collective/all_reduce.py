"""All-reduce: correct values, latency and bandwidth on every rank.

DDP spends its communication time in this collective. Every rank contributes integers that depend on its number, so that
the sum is known exactly: a wrong sum means corrupted data (seen with P2P behind an IOMMU) or a rank that was counted
twice. Then a small message is timed for the latency and a large one for the bandwidth, with each rank's own clock.

Where a sum is wrong, the ranks broadcast known values one after the other. A sender whose values arrive wrong at most
of the others is named, and so is a receiver at which the values of most of the others arrive wrong; if a single link
delivers wrong values, the link is named and neither of its ends, unless a rank finds its own copy corrupted. If all
broadcasts are correct, the ranks sum in pairs, and a rank whose pair is wrong each time is named. If the sum differs by
exactly one rank's part, the finding names that rank.

busbw is defined as in nccl-tests: bytes / seconds x 2(n-1)/n, comparable with a link's rate whatever the number of
ranks. With more ranks than cores the numbers do not describe the machine and are not judged.

Findings:

Fix: for wrong values run again with NCCL_P2P_DISABLE=1, and check ACS/IOMMU settings; for a slow network check the
interface in use.

Confirm by hand: Nccl-tests' `all_reduce_perf -b 8 -e 128M -f 2 -g 1 -c 1` under the same launcher; over gloo, `ddpdiag
allreduce-bench`.

Sources: nccl-tests, doc/PERFORMANCE.md (bus bandwidth); PyTorch issue 84803 (wrong values with P2P behind an IOMMU).
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.bandwidth import factor
from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, inapplicable, new_trial
from ddpdiag.checks.fabric.notes import round_robin
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import leave_out, ranks_text, who_text
from ddpdiag.checks.world import without_gpu
from ddpdiag.model import Depth, Finding, Kind, Scalar, Trial
from ddpdiag.model.trial import Context
from ddpdiag.stats import Samples, odd_ones_out, samples
from ddpdiag.text import begun

FINDINGS = {
    "wrong": FindingSpec.error(
        "a sum differs from what the ranks contributed. The message names the rank whose part is wrong, if it can be "
        "decided."
    )
}

SMALL_BYTES = 4
# The share of a trial's time left that one size may take.
_SHARE = 0.5
# More than this share of a row or a column of the broadcasts must be wrong to condemn it.
_MOST = 0.5
# Where something is wrong, so many ranks at most broadcast, one after the other, so much.
MAX_SENDERS = 64
BROADCAST_BYTES = 1 << 20
# Rounds of pairs, each with other partners: two tell one rank from its first partner, three if it had none at first.
MAX_ROUNDS = 3
# Parts of ranks that lie so far apart are alike (see workloads.collectives.pattern).
RANK_PERIOD = 64
LARGE_BYTES = {Depth.QUICK: 4 << 20, Depth.STANDARD: 32 << 20, Depth.DEEP: 128 << 20}


class Data(Struct, frozen=True):
    """This rank's seconds for one call of each size (bytes per rank), and the elements that were wrong.

    Where any rank's were, the first `senders` ranks broadcast, and those of `wrong_from` were heard wrong here; the
    only timings are then those of the checked calls. `off_by` is by how many ramps the large sum differs everywhere.
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
    off_by: int | None = None


def measure(ctx: Context) -> Data:
    """Check both sizes; then time them, or find out whose values are wrong."""
    from ddpdiag.workloads.collectives import broadcasts, check_all_reduce, on_any_rank, time_all_reduce
    from ddpdiag.workloads.group import process_group

    backend = str(ctx.trial.params["backend"])

    def calls(warmup: int, timed: int, seconds: float) -> tuple[int, int]:
        return affordable(warmup, timed, seconds, ctx.end - time.monotonic())

    senders, wrong_from = 0, tuple[int, ...]()
    with process_group(ctx, backend) as device:
        small = check_all_reduce(ctx, SMALL_BYTES, device)
        large = check_all_reduce(ctx, LARGE_BYTES[ctx.options.depth], device)
        small_seconds, large_seconds = [small.seconds], [large.seconds]
        if "round" in ctx.trial.params:
            ctx.step("leave the pair")
        elif on_any_rank(ctx, small.wrong + large.wrong > 0):
            _, most = calls(0, MAX_SENDERS, large.seconds)
            senders, wrong_from = broadcasts(ctx, BROADCAST_BYTES, device, most)
        else:
            small_seconds = time_all_reduce(ctx, small.bytes, device, calls(5, 30, small.seconds))
            large_seconds = time_all_reduce(ctx, large.bytes, device, calls(2, 8, large.seconds))
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
        off_by=large.off_by,
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
    """gloo first, since it needs least; then the job's own backend. Pairs, where a sum is wrong for no reason known."""
    for backend in dict.fromkeys(("gloo", seen.world.backend)):
        whole = _trials(seen, backend, in_pairs=False)
        if not whole:
            return (new_trial(seen, params={"backend": backend}),)
        rounds = len(_trials(seen, backend, in_pairs=True))
        if rounds < MAX_ROUNDS and _needs_pair_tests(seen, backend, whole[0]):
            groups = round_robin(whole[0].ranks, rounds)
            return (new_trial(seen, groups=groups, params={"backend": backend, "round": rounds}),)
    return ()


def _trials(seen: Seen[Data], backend: str, *, in_pairs: bool) -> list[Trial]:
    return [t for t in seen.trials if t.params["backend"] == backend and ("round" in t.params) is in_pairs]


def _needs_pair_tests(seen: Seen[Data], backend: str, whole: Trial) -> bool:
    """Is a sum wrong, and may several ranks be the cause?"""
    rows = _rows(seen, whole)
    if len(rows) < 3 or not seen.succeeded(whole) or not any(data.wrong for data in rows.values()):
        return False
    found = _by_broadcasts(rows)
    return not found.ranks and not found.links and len(_suspects(seen, backend, rows)) > 1


def _rows(seen: Seen[Data], trial: Trial) -> dict[int, Data]:
    return {row.place.rank: row.data for row in seen.rows if row.trial is trial}


def _suspects(seen: Seen[Data], backend: str, rows: Mapping[int, Data]) -> tuple[int, ...]:
    heard: dict[tuple[int, ...], bool] = {}
    for trial in _trials(seen, backend, in_pairs=True):
        answers = _rows(seen, trial)
        for pair in trial.groups:
            if all(rank in answers for rank in pair):
                heard[pair] = any(answers[rank].wrong for rank in pair)
    return suspects(tuple(rows), heard)


def suspects(ranks: Sequence[int], heard: Mapping[tuple[int, ...], bool]) -> tuple[int, ...]:
    """Ranks that were in no pair with a correct sum; `heard` says of each pair whether its sum was wrong."""
    cleared = {rank for pair, wrong in heard.items() if not wrong for rank in pair}
    return tuple(rank for rank in ranks if rank not in cleared)


def skip(seen: Seen[Data]) -> SkipReason | None:
    """One rank sends nothing, and nccl none without GPUs."""
    alone = "there is one rank only, so there is no communication" if seen.world.size == 1 else None
    return inapplicable(alone or without_gpu(seen.world))


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    for trial in seen.trials:
        rows = {} if "round" in trial.params else _rows(seen, trial)
        if any(data.wrong for data in rows.values()):
            yield _wrong(seen, str(trial.params["backend"]), rows)


def _wrong(seen: Seen[Data], backend: str, rows: Mapping[int, Data]) -> Finding:
    got = sorted(rank for rank, data in rows.items() if data.wrong)
    most = max(data.wrong for data in rows.values())
    found = _guilt(seen, backend, rows)
    whose = "every rank" if len(got) == len(rows) else f"{ranks_text(got)} of {len(rows)}"
    links = [f"rank {sender} -> rank {receiver}" for sender, receiver in found.links]
    who = who_text(seen, found.ranks) if found.ranks else ", ".join(links) or "No rank is blamed"
    nodes = seen.world.hosts_of(found.ranks)
    fix = f"{begun(leave_out(nodes)) if nodes else 'Do not train here'}, and have the memory there tested."
    if backend != "gloo":
        fix += " Run again with NCCL_P2P_DISABLE=1: if the sums are right then, direct copies of GPUs are at fault."
    by_senders: dict[tuple[int, ...], list[int]] = {}  # receivers by those from which they received wrong values
    for rank, own in rows.items():
        if own.wrong_from:
            by_senders.setdefault(own.wrong_from, []).append(rank)
    heard = [f"{ranks_text(ranks)}: wrong from {ranks_text(senders)}" for senders, ranks in by_senders.items()]
    return seen.finding(
        "wrong",
        f"wrong sums over {backend}" + (f", caused by {who}" if found.ranks else ""),
        f"The all-reduce over {backend} gave wrong sums on {whose}: up to {most} elements per rank differ from the "
        f"exact sum{_as_if(rows)}. {begun(who)}: {found.why}.",
        ranks=found.ranks,
        links=links,
        evidence={"backend": backend, "wrong_elements": most, "ranks": [*got], "wrong_from": [*heard]},
        fix=fix,
        guess=fix,
    )


def _as_if(rows: Mapping[int, Data]) -> str:
    """The meaning of a sum that is off by exactly one rank's part, on all ranks alike."""
    offs = {data.off_by for data in rows.values() if data.wrong}
    off = offs.pop() if len(offs) == 1 else None
    if off is None or not 1 <= abs(off) <= len(rows) <= RANK_PERIOD:
        return ""
    return f", as if the part of rank {abs(off) - 1} had been {'counted twice' if off > 0 else 'left out'}"


class Culprit(NamedTuple):
    """Ranks, or else links (sender, receiver), to blame, and why; neither if the evidence cannot decide."""

    why: str
    ranks: tuple[int, ...] = ()
    links: tuple[tuple[int, int], ...] = ()


def _guilt(seen: Seen[Data], backend: str, rows: Mapping[int, Data]) -> Culprit:
    """By broadcasts and sums; where they cannot decide, a rank whose pair is wrong in each round is at fault."""
    found, rounds = _by_broadcasts(rows), _trials(seen, backend, in_pairs=True)
    if found.ranks or found.links or not rounds:
        return found
    left = _suspects(seen, backend, rows)
    if len(rounds) == 1 and left in rounds[0].groups:  # there was no time for other partners
        one, other = left
        why = "the sum of these two is wrong, and there was no time left to test them with other ranks"
        return Culprit(why, links=((one, other), (other, one)))
    if 0 < 2 * len(left) < len(rows):
        return Culprit("pairs of ranks without it have correct sums, and every pair with it has a wrong one", left)
    return Culprit(f"{found.why}; the sums of pairs of ranks do not show where the fault is")


def _by_broadcasts(rows: Mapping[int, Data]) -> Culprit:
    """The ranks or links that the broadcasts show; else the ranks whose sums differ from most."""
    senders = min(data.senders for data in rows.values())
    found = find_culprit({rank: data.wrong_from for rank, data in rows.items()}, senders)
    if found.ranks or found.links:
        return found
    odd = odd_ones_out({rank: data.wrong > 0 for rank, data in rows.items()})
    if odd is not None and odd.ranks and odd.usual is False:
        return Culprit("only its sum is wrong", odd.ranks)
    return found if senders else Culprit("there was no time left to find out whose values are wrong")


def find_culprit(wrong_from: Mapping[int, Sequence[int]], senders: int) -> Culprit:
    """Which rank or link corrupts values, by what each receiver got wrong when ranks below `senders` broadcast.

    In the matrix of senders and receivers, a wrong row is a sender and a wrong column a receiver; a row and a column
    together are the link between the two, and a single wrong cell is a link as well.
    """
    received = sorted(wrong_from.items())
    if changed := tuple(rank for rank, wrong in received if rank in wrong):
        return Culprit("its values are corrupted in its own memory, before they are sent", changed)
    links = tuple((sender, rank) for rank, wrong in received for sender in sorted(wrong))
    if not links:
        return Culprit("the values that ranks broadcast arrive unchanged, so the summation is at fault")
    if len(links) == 1:  # it has two ends, and condemns neither
        return Culprit(
            "only values on this link arrive wrong; the sender, the receiver or the path between them is at fault",
            links=links,
        )
    # At which share of the others a sender's values arrive wrong, and those of which share a receiver gets wrong.
    times = Counter(sender for sender, _ in links)
    rows = {sender: times[sender] / max(1, len(wrong_from) - 1) for sender in range(senders)}
    columns = {rank: len(wrong) / max(1, senders - (rank < senders)) for rank, wrong in received}
    bad_senders = tuple(rank for rank, share in rows.items() if share > _MOST)
    bad_receivers = tuple(rank for rank, share in columns.items() if share > _MOST)
    if bad_senders and not bad_receivers:
        return Culprit("the values that it sends arrive wrong, and those of the others arrive unchanged", bad_senders)
    if bad_receivers and not bad_senders:
        return Culprit("the values that it receives are wrong, and at the others they are correct", bad_receivers)
    # One sender that all get wrong, and one receiver that gets all wrong: in a ring, neighbours. Broadcasts pass
    # through other ranks, so that a bad cable spoils what others send as well.
    whole = [(a, b) for a, row in rows.items() for b, column in columns.items() if a != b and row == column == 1.0]
    if len(whole) == 1:
        return Culprit("the sender, the receiver or the path between them corrupts this data", links=tuple(whole))
    return Culprit("neither a single sender nor a single receiver explains the wrong values")


def _busbw(data: Data) -> float:
    """ZeroDivisionError where no time was measured: numbers of a stranger are not judged."""
    return data.large_bytes / data.large_seconds.median * factor("all_reduce", data.ranks)


def columns(seen: Seen[Data]) -> Mapping[int, Mapping[str, Scalar]]:
    """Each rank's numbers over the backend that the job would use (the last one tried)."""
    return {
        row.place.rank: {
            "busbw_bytes_per_s": _busbw(data),
            "latency_seconds": data.small_seconds.median,
        }
        for row in seen.rows
        if "round" not in row.trial.params and (data := row.data).ranks > 1
    }


def figures(seen: Seen[Data]) -> Mapping[str, Scalar]:
    """Per backend, the slowest rank's numbers: an all-reduce is as fast as the last of them."""
    out: dict[str, Scalar] = {}
    whole = [row.data for row in seen.rows if "round" not in row.trial.params and row.data.ranks > 1]
    for backend in dict.fromkeys(data.backend for data in whole):
        rows, name = [data for data in whole if data.backend == backend], f"all_reduce.{backend}"
        slowest = max(rows, key=lambda data: data.large_seconds.median)
        out[f"{name}.bytes"] = slowest.large_bytes
        out[f"{name}.busbw_bytes_per_s"] = _busbw(slowest)
        out[f"{name}.latency_seconds"] = max(data.small_seconds.median for data in rows)
    return out


def report(seen: Seen[Data]) -> Contribution:
    """All that the check adds to the report."""
    return Contribution(columns=columns(seen), figures=figures(seen))


CHECK: Check[Data] = Check(__name__, "COL001", "all-reduce", Stage.COLLECTIVE, Scope.WORLD, Kind.TORCH, deadline=15)
