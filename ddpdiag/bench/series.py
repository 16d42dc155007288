"""Judge a sweep: find its bottleneck and its slow ranks, and make the table of its ranks.

Possible bottlenecks are tried in this order: a slow rank; too few cores (then no number is judged); latency, if all
messages are too short; the hardware, if its expected rate is reached. If none of them applies, the bottleneck is
unknown. A rank is slow if it copies more slowly than the other ranks of the run, or starts its calls later. This
comparison needs no table of hardware.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from ddpdiag.bandwidth import Bound, busbw, lowest_bound
from ddpdiag.bench.data import Data, Sweep
from ddpdiag.checks.api import Seen
from ddpdiag.checks.host import cores as hst001
from ddpdiag.comparison import median_without
from ddpdiag.model.bench import BenchRank, BenchRow, Bottleneck, RankRow, Series
from ddpdiag.stats import quantile
from ddpdiag.text import rate_text, share_of_expected_text, share_text, size_text, time_text, times_text


def series_of_sweep(seen: Seen[Data], sweep: Sweep, rows: Sequence[BenchRow]) -> Iterator[Series]:
    """Yield one `Series` for each dtype of a sweep: the result over all sizes of that dtype."""
    judged = judge_ranks(seen, sweep.backend)
    hosts = ranks_by_host(seen, sweep.trial.ranks)
    limits = {rank: data.limits for rank, data in sweep.data_by_rank.items()}
    # With fewer cores than ranks, ranks wait for a core, and do not reach a limit of the machine.
    limit = lowest_bound(sweep.collective, sweep.backend, hosts, limits) if judged.core_shortage is None else None
    slow_ranks = {f"rank {rank} on {seen.world.host_name(rank)}": why for rank, why in judged.slow_reasons.items()}
    rows_by_dtype: dict[str, list[BenchRow]] = defaultdict(list)
    for row in rows:
        rows_by_dtype[row.dtype].append(row)
    for dtype_rows in rows_by_dtype.values():
        peak = max(dtype_rows, key=lambda row: row.busbw_bytes_per_s)
        smallest = min(dtype_rows, key=lambda row: row.size_bytes)
        bottleneck, sentence = assess(
            dtype_rows, limit, host_count=len(hosts), core_shortage=judged.core_shortage, slow_ranks=slow_ranks
        )
        yield Series(
            backend=sweep.backend,
            collective=sweep.collective,
            dtype=peak.dtype,
            peak_busbw_bytes_per_s=peak.busbw_bytes_per_s,
            best_size_bytes=peak.size_bytes,
            latency_seconds=smallest.min_seconds if smallest.size_bytes <= SMALL_BYTES else None,
            expectation=limit.expectation if limit else None,
            share=_share(peak, limit),
            bottleneck=bottleneck,
            sentence=sentence,
        )


def ranks_by_host(seen: Seen[Data], ranks: Iterable[int]) -> dict[str, tuple[int, ...]]:
    """Group `ranks` by the name of their host. The second host of the same name is called "name (2)"."""
    wanted = frozenset(ranks)
    hosts: dict[str, tuple[int, ...]] = {}
    hosts_by_name: Counter[str] = Counter()
    for (name, _boot), ranks in seen.world.hosts.items():
        if members := tuple(rank for rank in ranks if rank in wanted):
            hosts_by_name[name] += 1
            hosts[name if hosts_by_name[name] == 1 else f"{name} ({hosts_by_name[name]})"] = members
    return hosts


# From this share of the expected bandwidth on, the expectation counts as reached (stas00, ml-engineering: 80 %).
GOOD_SHARE = 0.8
# The same if the CPU's copy rate is the limit: gloo's threads pass each segment to each other. Two ranks on an idle
# host with two cores reached 0.59 to 0.68 of what copies and loopback allow.
GOOD_COPY_SHARE = 0.5
# Up to this size, a call costs more than its bytes on every fabric with known numbers.
SMALL_BYTES = 64 << 10
# If the time does not even double from the smallest size to a size at least 8 times as large, all of it is latency.
FLAT_RATIO = 2.0
_FLAT_SIZE_RATIO = 8
# If the rate is highest at the largest size, and that size is below this limit (chosen), larger messages may be faster.
_LARGE_ENOUGH_BYTES = 64 << 20
# NCCL over TCP sockets instead of InfiniBand is 5 to 20 times slower.
SOCKET_SHARE = 0.2
_BOTTLENECK_NAMES = {Bottleneck.NIC: "the network cards", Bottleneck.NVLINK: "NVLink", Bottleneck.PCIE: "PCIe"}


def assess(
    rows: Sequence[BenchRow],
    limit: Bound | None,
    *,
    host_count: int,
    core_shortage: tuple[int, int] | None = None,
    slow_ranks: Mapping[str, str] = {},
) -> tuple[Bottleneck, str]:
    """Find the bottleneck in the rows of one dtype. Returns it with a sentence that explains it to users.

    `core_shortage` is (ranks, cores) of a host with fewer cores than ranks. The keys of `slow_ranks` are names such as
    "rank 3 on n1", and the values are the reasons.
    """
    smallest, largest = (pick(rows, key=lambda row: row.size_bytes) for pick in (min, max))
    peak = max(rows, key=lambda row: row.busbw_bytes_per_s)
    subject = f"{peak.collective} over {peak.backend}"
    if len(slow_ranks) == 1:
        ((name, why),) = slow_ranks.items()
        return Bottleneck.SLOW_RANK, f"{name} slows the others down: it {why}."
    if slow_ranks:
        reasons = "; ".join(f"{name} {why}" for name, why in slow_ranks.items())
        return Bottleneck.SLOW_RANK, f"{len(slow_ranks)} ranks slow the others down: {reasons}."
    if core_shortage is not None:
        why = "the numbers do not describe this machine, and are not judged"
        return Bottleneck.NOT_JUDGED, f"More ranks ({core_shortage[0]}) than cores ({core_shortage[1]}): {why}."
    is_flat = largest.min_seconds < FLAT_RATIO * smallest.min_seconds
    if largest.size_bytes <= SMALL_BYTES or (is_flat and largest.size_bytes >= _FLAT_SIZE_RATIO * smallest.size_bytes):
        call_time = time_text(smallest.min_seconds)
        sizes = f"up to {size_text(largest.size_bytes)}"
        return Bottleneck.LATENCY, f"{subject} is latency-bound {sizes}: {call_time} a call."
    rate, share = f"{rate_text(peak.busbw_bytes_per_s)} busbw at {size_text(peak.size_bytes)}", _share(peak, limit)
    if limit is None or share is None:
        return Bottleneck.UNKNOWN, f"{subject}: {rate}; what this hardware should reach is not known."
    reached = share_of_expected_text(peak.busbw_bytes_per_s, limit.busbw_bytes_per_s).removesuffix(" expected")
    compared = f"{rate}, {reached} expected ({limit.source})"
    if share >= (GOOD_COPY_SHARE if limit.bottleneck is Bottleneck.COPY else GOOD_SHARE):
        copies = "copies on this host's CPU" if host_count == 1 else "copies on the hosts' CPUs"
        return limit.bottleneck, f"{subject} is bound by {_BOTTLENECK_NAMES.get(limit.bottleneck, copies)}: {compared}."
    if limit.network_unknown:
        why = "the limit may be the network between the hosts, whose cards do not report their speed"
    elif peak is largest and largest.size_bytes < _LARGE_ENOUGH_BYTES:
        why = "larger messages (-e) may reach more"
    elif peak.backend == "nccl" and host_count > 1 and share <= SOCKET_SHARE:
        why = "this is usual where NCCL uses TCP sockets instead of InfiniBand (NCCL_DEBUG=INFO then shows NET/Socket)"
    else:
        why = "the bottleneck is not known"
    return Bottleneck.UNKNOWN, f"{subject} stays below what this hardware should reach: {compared}; {why}."


def _share(peak: BenchRow, limit: Bound | None) -> float | None:
    """The bus bandwidth of `peak` as a share of the expected one; None if no bandwidth is expected."""
    expected = limit.busbw_bytes_per_s if limit else 0.0
    return peak.busbw_bytes_per_s / expected if expected > 0 else None


def bench_ranks(seen: Seen[Data], sweep: Sweep) -> Iterator[BenchRank]:
    """Yield the figures of each rank at the largest size of the sweep's first dtype; nothing if no size is complete."""
    if not sweep.rank_rows:
        return
    dtype = next(iter(sweep.rank_rows))[0]
    size_bytes = max(size for other, size in sweep.rank_rows if other == dtype)
    judgement = judge_ranks(seen, sweep.backend)
    for rank, data in sweep.data_by_rank.items():
        row = sweep.rank_rows[dtype, size_bytes].get(rank)
        median = row.median_seconds if row else None
        yield BenchRank(
            backend=sweep.backend,
            collective=sweep.collective,
            rank=rank,
            local_rank=seen.world.arrivals[rank].place.local_rank,
            host=seen.world.host_name(rank),
            device=data.device,
            gpu_uuid=data.gpu_uuid,
            pci=data.pci,
            pid=data.pid,
            device_index=data.device_index,
            size_bytes=size_bytes,
            seconds=median,
            busbw_bytes_per_s=busbw(sweep.collective, size_bytes, median, sweep.rank_count) if median else None,
            spread_share=row.cv if row else None,
            lag_seconds=row.lag_seconds if row else None,
            copy_bytes_per_s=quantile(sorted(data.copy_rates), 0.5) if data.copy_rates else None,
            slow_reason=judgement.slow_reasons.get(rank, ""),
        )


# A rank whose copies take this many times as long is slow: between NVRx (score below 0.75, so 1.33x) and DLRover (2x).
# On two noisy cores, equal ranks sometimes differ by more than a third.
SLOW_RATIO = 1.5
# A scheduler moves processes between cores several times a second, so fewer measurements than these show nothing. A
# rank with a lasting fault is slower than the others by at least STEADY_RATIO in 8 of 10 measurements.
MIN_MOMENTS = 5
STEADY_RATIO = 1.2
# A rank that delays the others starts last in 8 of 10 calls. If ranks are late in turn, no rank is last so often.
LATE_SHARE = 0.8
# A rank that starts late by half of the transfer time makes the collective 1.5 times as long, which is SLOW_RATIO.
LAG_SHARE = SLOW_RATIO - 1


class RankEvidence(NamedTuple):
    """The measurements that show whether one rank is slow; None for a figure that was not measured.

    `copy_rates` are the rates, in bytes per second, at which the rank copied while all other ranks copied as well.
    `lag_share` is the median of the rank's lag (its start after the first rank) divided by the transfer time.
    `started_last_share` is the share of calls that the rank started last. Small sizes do not count for either share.
    """

    copy_rates: tuple[float, ...] = ()
    lag_share: float | None = None
    started_last_share: float | None = None


def slow_ranks(evidence: Mapping[int, RankEvidence], *, memory: str = "its own memory") -> dict[int, str]:
    """The reason for each slow rank, without a subject: "copies within its own memory 2.1x slower than ...".

    The result is empty if more than half of the ranks would be slow, because the cause is then not a single rank.
    """
    slowdowns = copy_slowdowns(evidence)
    reasons_by_rank: dict[int, str] = {}
    for rank in sorted(evidence):
        reasons = []
        if (slowdown := slowdowns.get(rank, 0.0)) >= SLOW_RATIO:
            reasons.append(f"copies within {memory} {times_text(slowdown)} slower than the median rank")
        last_share, lag_share = evidence[rank].started_last_share or 0.0, evidence[rank].lag_share or 0.0
        if len(evidence) > 1 and last_share >= LATE_SHARE and lag_share >= LAG_SHARE:
            late = f"late by {share_text(lag_share)} of a transfer"
            reasons.append(f"starts last in {share_text(last_share)} of the calls, {late}")
        if reasons:
            reasons_by_rank[rank] = " and ".join(reasons)
    return reasons_by_rank if 2 * len(reasons_by_rank) <= len(evidence) else {}


def copy_slowdowns(evidence: Mapping[int, RankEvidence]) -> dict[int, float]:
    """Map each rank that copies steadily more slowly than the others to its slowdown, such as 2.1.

    At one moment, the slowdown is the median rate of the other ranks divided by the rank's rate. The result is the
    median over all moments. A disturbance that slows all ranks at once, or one rank rarely, has no effect.
    """
    moments = max((len(each.copy_rates) for each in evidence.values()), default=0)
    by_moment = [
        _slowdowns({rank: each.copy_rates[moment] for rank, each in evidence.items() if moment < len(each.copy_rates)})
        for moment in range(moments)
    ]
    ratios_by_rank = {rank: sorted(ratios[rank] for ratios in by_moment if rank in ratios) for rank in evidence}
    return {
        rank: quantile(ratios, 0.5)
        for rank, ratios in ratios_by_rank.items()
        if len(ratios) >= MIN_MOMENTS and quantile(ratios, 1 - LATE_SHARE) >= STEADY_RATIO
    }


def _slowdowns(rates: Mapping[int, float]) -> dict[int, float]:
    """Map each rank with a measured rate to the median rate of the other ranks, divided by its own rate."""
    # A rate below one byte per second is no measurement, and dividing by it may give infinity.
    measured = {rank: rate for rank, rate in rates.items() if 1 <= rate < math.inf}
    known = sorted(measured.values())
    return {rank: median_without(known, rate) / rate for rank, rate in measured.items()} if len(known) > 1 else {}


# Lags count from this size on: in smaller calls, even a short lag is a large share of the transfer time.
_LARGE_BYTES = 1 << 20


class RankJudgement(NamedTuple):
    """The reason for each slow rank over one backend, and the (ranks, cores) of a machine with too few cores."""

    slow_reasons: Mapping[int, str]
    core_shortage: tuple[int, int] | None


@lru_cache(maxsize=8)
def judge_ranks(seen: Seen[Data], backend: str) -> RankJudgement:
    """Judge which ranks are slow over a backend. The result is cached, because every sweep and rank line needs it.

    With fewer cores than ranks, ranks wait for a core and are late in turn, so no rank is called slow.
    """
    if (shortage := core_shortage(seen, backend)) is not None:
        return RankJudgement({}, shortage)
    memory = "host memory" if backend == "gloo" else "its GPU's memory"
    return RankJudgement(slow_ranks(evidence_by_rank(seen, backend), memory=memory), None)


def core_shortage(seen: Seen[Data], backend: str) -> tuple[int, int] | None:
    """The (ranks, cores) of the first machine with fewer cores than ranks. None if there is none, and always over nccl,
    which needs hardly any CPU. Ranks in several containers of a machine count together."""
    if backend == "nccl":
        return None
    machines: dict[str, dict[int, int]] = {}
    for row in seen.all_rows:
        if row.data.backend == backend:
            cores_by_rank = machines.setdefault(seen.world.arrivals[row.place.rank].host_id, {})
            cores_by_rank[row.place.rank] = row.data.limits.cores or 0
    affinity_by_rank = seen.of(hst001.CHECK).by_rank
    for cores_by_rank in machines.values():
        rank_rows = {rank: affinity_by_rank[rank] for rank in cores_by_rank if rank in affinity_by_rank}
        # HST001 knows the cores that all ranks of the machine have together. Without HST001, the rank with most counts.
        cores = max(cores_by_rank.values(), default=0)
        if len(rank_rows) == len(cores_by_rank) and all(row.affinity for row in rank_rows.values()):
            cores = int(hst001.usable_cores(rank_rows))
        if 0 < cores < len(cores_by_rank):
            return len(cores_by_rank), cores
    return None


def evidence_by_rank(seen: Seen[Data], backend: str) -> dict[int, RankEvidence]:
    """The `RankEvidence` of each rank, from all trials over a backend."""
    trials_by_rank: dict[int, list[Data]] = {}
    for row in seen.all_rows:
        if row.data.backend == backend:
            trials_by_rank.setdefault(row.place.rank, []).append(row.data)
    moments = min((sum(len(data.copy_rates) for data in trials) for trials in trials_by_rank.values()), default=0)
    return {rank: _evidence_of(trials, moments) for rank, trials in trials_by_rank.items()}


def _evidence_of(trials: list[Data], moments: int) -> RankEvidence:
    """Make the evidence from all data of one rank, with its first `moments` copy rates: every rank has as many."""
    rows: list[RankRow] = []
    for data in trials:
        # Only large sizes count; if all are small, only the largest.
        min_bytes = min(_LARGE_BYTES, max((row.size_bytes for row in data.rows), default=0))
        rows += [row for row in data.rows if row.size_bytes >= min_bytes]
    lag_shares = sorted(
        row.lag_seconds / row.transfer_seconds for row in rows if row.lag_seconds is not None and row.transfer_seconds
    )
    calls = sum(row.calls for row in rows if row.calls_started_last is not None)
    last_starts = sum(row.calls_started_last for row in rows if row.calls_started_last is not None)
    return RankEvidence(
        copy_rates=tuple(rate for data in trials for rate in data.copy_rates)[:moments],
        lag_share=quantile(lag_shares, 0.5) if lag_shares else None,
        started_last_share=last_starts / calls if calls else None,
    )
