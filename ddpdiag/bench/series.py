"""The result of a sweep: its bottleneck, the table of its ranks, and the slow ranks.

The bottleneck is the first that applies: a slow rank; more ranks than cores, with which no number is judged; latency,
if all messages are too short for bandwidth; the part of the machine whose limit was reached. Else it is unknown.

A rank is slow if it copies more slowly than the other ranks of the run, or starts its calls later. This evidence needs
no table of hardware.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from ddpdiag.bandwidth import Bound, bound, busbw
from ddpdiag.bench.data import Data, Sweep
from ddpdiag.checks.api import Seen
from ddpdiag.checks.host import cores as hst001
from ddpdiag.comparison import median_without
from ddpdiag.model.bench import BenchRank, BenchRow, Bottleneck, RankRow, Series
from ddpdiag.stats import quantile
from ddpdiag.text import rate_text, reached_text, share_text, size_text, time_text, times_text


def series(seen: Seen[Data], sweep: Sweep, rows: Sequence[BenchRow]) -> Iterator[Series]:
    """Yield the result of each dtype of a sweep over all its sizes."""
    judged = standing(seen, sweep.backend)
    hosts = hosts_of_ranks(seen, sweep.trial.ranks)
    limits = {rank: data.limits for rank, data in sweep.ranks.items()}
    # With fewer cores than ranks the ranks wait for each other's cores, and do not reach a limit of the machine.
    limit = bound(sweep.collective, sweep.backend, hosts, limits) if judged.crowd is None else None
    slow = {f"rank {rank} on {seen.world.host_of(rank)}": why for rank, why in judged.slow.items()}
    kinds: dict[str, list[BenchRow]] = defaultdict(list)
    for row in rows:
        kinds[row.dtype].append(row)
    for kind in kinds.values():
        peak, smallest = max(kind, key=lambda row: row.busbw_bytes_per_s), min(kind, key=lambda row: row.size_bytes)
        part, sentence = assess(kind, limit, hosts=len(hosts), crowd=judged.crowd, slow=slow)
        yield Series(
            backend=sweep.backend,
            collective=sweep.collective,
            dtype=peak.dtype,
            peak_busbw_bytes_per_s=peak.busbw_bytes_per_s,
            best_bytes=peak.size_bytes,
            latency_seconds=smallest.min_seconds if smallest.size_bytes <= SMALL_BYTES else None,
            expectation=limit.expectation if limit else None,
            share=_share(peak, limit),
            bottleneck=part,
            sentence=sentence,
        )


def hosts_of_ranks(seen: Seen[Data], ranks: Iterable[int]) -> dict[str, tuple[int, ...]]:
    """These ranks by the name of their host. If hosts share a name, the second one is "name (2)"."""
    wanted = frozenset(ranks)
    hosts: dict[str, tuple[int, ...]] = {}
    numbers: Counter[str] = Counter()
    for (name, _boot), ranks in seen.world.hosts.items():
        if found := tuple(rank for rank in ranks if rank in wanted):
            numbers[name] += 1
            hosts[name if numbers[name] == 1 else f"{name} ({numbers[name]})"] = found
    return hosts


# At least this much of the expectation counts as reached (stas00, ml-engineering: 80 %).
GOOD_SHARE = 0.8
# The same share if the limit is copies on a CPU, where gloo's threads pass each segment to each other. Two ranks on an
# idle host of two cores reached 0.59 to 0.68 of what copies and loopback allow.
GOOD_COPY_SHARE = 0.5
# Up to this size, a call costs more than its bytes on every fabric with known numbers.
SMALL_BYTES = 64 << 10
# Times that do not even double from the smallest size to one at least 8 times as large are all latency.
FLAT_RATIO = 2.0
_FLAT_RANGE = 8
# Chosen: if the rate still rises at a largest size below this, larger messages may be faster.
_LARGE_ENOUGH_BYTES = 64 << 20
# NCCL over TCP sockets instead of InfiniBand is 5 to 20 times slower.
SOCKET_SHARE = 0.2
_PARTS = {Bottleneck.NIC: "the network cards", Bottleneck.NVLINK: "NVLink", Bottleneck.PCIE: "PCIe"}


def assess(
    rows: Sequence[BenchRow],
    limit: Bound | None,
    *,
    hosts: int,
    crowd: tuple[int, int] | None = None,
    slow: Mapping[str, str] = {},
) -> tuple[Bottleneck, str]:
    """The bottleneck of a sweep of one dtype, and a sentence with the collective, its rate and the expectation.

    `crowd` is (ranks, cores) of a host with fewer cores than ranks. `slow` has the reason for each slow rank, such as
    "rank 3 on n1".
    """
    smallest, largest = (pick(rows, key=lambda row: row.size_bytes) for pick in (min, max))
    peak = max(rows, key=lambda row: row.busbw_bytes_per_s)
    subject = f"{peak.collective} over {peak.backend}"
    if len(slow) == 1:
        return Bottleneck.SLOW_RANK, " ".join(f"{name} slows the others down: it {why}." for name, why in slow.items())
    if slow:
        reasons = "; ".join(f"{name} {why}" for name, why in slow.items())
        return Bottleneck.SLOW_RANK, f"{len(slow)} ranks slow the others down: {reasons}."
    if crowd is not None:
        why = "the numbers do not describe this machine, and are not judged"
        return Bottleneck.NOT_JUDGED, f"More ranks ({crowd[0]}) than cores ({crowd[1]}): {why}."
    flat = largest.min_seconds < FLAT_RATIO * smallest.min_seconds
    if largest.size_bytes <= SMALL_BYTES or (flat and largest.size_bytes >= _FLAT_RANGE * smallest.size_bytes):
        call = time_text(smallest.min_seconds)
        return Bottleneck.LATENCY, f"{subject} is latency-bound up to {size_text(largest.size_bytes)}: {call} a call."
    rate, share = f"{rate_text(peak.busbw_bytes_per_s)} busbw at {size_text(peak.size_bytes)}", _share(peak, limit)
    if limit is None or share is None:
        return Bottleneck.UNKNOWN, f"{subject}: {rate}; what this hardware should reach is not known."
    reached = reached_text(peak.busbw_bytes_per_s, limit.busbw_bytes_per_s).removesuffix(" expected")
    compared = f"{rate}, {reached} expected ({limit.source})"
    if share >= (GOOD_COPY_SHARE if limit.part is Bottleneck.COPY else GOOD_SHARE):
        copies = "copies on this host's CPU" if hosts == 1 else "copies on the hosts' CPUs"
        return limit.part, f"{subject} is bound by {_PARTS.get(limit.part, copies)}: {compared}."
    if limit.network_unknown:
        why = "the limit may be the network between the hosts, whose cards do not report their speed"
    elif peak is largest and largest.size_bytes < _LARGE_ENOUGH_BYTES:
        why = "larger messages (-e) may reach more"
    elif peak.backend == "nccl" and hosts > 1 and share <= SOCKET_SHARE:
        why = "this is usual where NCCL uses TCP sockets instead of InfiniBand (NCCL_DEBUG=INFO then shows NET/Socket)"
    else:
        why = "the bottleneck is not known"
    return Bottleneck.UNKNOWN, f"{subject} stays below what this hardware should reach: {compared}; {why}."


def _share(peak: BenchRow, limit: Bound | None) -> float | None:
    """The peak as a share of the expectation; None without an expectation."""
    expected = limit.busbw_bytes_per_s if limit else 0.0
    return peak.busbw_bytes_per_s / expected if expected > 0 else None


def ranks(seen: Seen[Data], sweep: Sweep) -> Iterator[BenchRank]:
    """Yield the lines of the table of ranks, at the largest size of the sweep's first dtype."""
    if not sweep.rows:
        return
    dtype = next(iter(sweep.rows))[0]
    size_bytes = max(size for other, size in sweep.rows if other == dtype)
    judged = standing(seen, sweep.backend)
    for rank, data in sweep.ranks.items():
        row = sweep.rows[dtype, size_bytes].get(rank)
        median = row.median_seconds if row else None
        yield BenchRank(
            backend=sweep.backend,
            collective=sweep.collective,
            rank=rank,
            local_rank=seen.world.arrivals[rank].place.local_rank,
            host=seen.world.host_of(rank),
            device=data.device,
            gpu_uuid=data.gpu_uuid,
            pci=data.pci,
            pid=data.pid,
            device_index=data.device_index,
            size_bytes=size_bytes,
            seconds=median,
            busbw_bytes_per_s=busbw(sweep.collective, size_bytes, median, sweep.size) if median else None,
            spread_share=row.cv if row else None,
            lag_seconds=row.lag_seconds if row else None,
            copy_bytes_per_s=quantile(sorted(data.copies), 0.5) if data.copies else None,
            slow=judged.slow.get(rank, ""),
        )


# A rank whose copies take this many times as long is slow: between NVRx (score below 0.75, so 1.33x) and DLRover (2x).
# On two noisy cores, equal ranks sometimes differ by more than a third.
SLOW_RATIO = 1.5
# A scheduler moves processes between cores several times a second, so fewer moments than these show nothing. A rank
# with a lasting fault is slower by STEADY_RATIO than the others in 8 of 10 moments.
MIN_MOMENTS = 5
STEADY_RATIO = 1.2
# A real straggler starts last in 8 of 10 calls; if ranks are late in turn, no rank is that often the last.
LATE_SHARE = 0.8
# A rank that starts late by half of a transfer makes the collective 1.5 times as long, which is SLOW_RATIO.
LAG_SHARE = SLOW_RATIO - 1


class RankEvidence(NamedTuple):
    """The evidence on one rank; None for a figure that was not measured.

    `copies` has the rank's rates of copies in bytes per second, at moments of the run at which all ranks copied. At
    large sizes, `lag_share` is the median of lag over transfer time, `late_share` the share of calls started last.
    """

    copies: tuple[float, ...] = ()
    lag_share: float | None = None
    late_share: float | None = None


def slow_ranks(evidence: Mapping[int, RankEvidence], *, memory: str = "its own memory") -> dict[int, str]:
    """The slow ranks with the reason, as the words after "it": "copies 2.1x slower than the median rank".

    Empty if more than half of the ranks would be named, because they then share the cause.
    """
    copies = copy_ratios(evidence)
    named: dict[int, str] = {}
    for rank in sorted(evidence):
        reasons = []
        if (ratio := copies.get(rank, 0.0)) >= SLOW_RATIO:
            reasons.append(f"copies within {memory} {times_text(ratio)} slower than the median rank")
        late, lag = evidence[rank].late_share or 0.0, evidence[rank].lag_share or 0.0
        if len(evidence) > 1 and late >= LATE_SHARE and lag >= LAG_SHARE:
            reasons.append(f"starts last in {share_text(late)} of the calls, late by {share_text(lag)} of a transfer")
        if reasons:
            named[rank] = " and ".join(reasons)
    return named if 2 * len(named) <= len(evidence) else {}


def copy_ratios(evidence: Mapping[int, RankEvidence]) -> dict[int, float]:
    """For each rank, how many times slower it copies than the median of the others; 0 if not known or not lasting.

    This is the median over the moments of the ratio at each moment. So disturbances of a whole host, which slow all its
    ranks at once, and rare ones of one rank have no effect.
    """
    moments = max((len(each.copies) for each in evidence.values()), default=0)
    by_moment = [
        _ratios({rank: each.copies[moment] for rank, each in evidence.items() if moment < len(each.copies)})
        for moment in range(moments)
    ]
    known = {rank: sorted(ratios[rank] for ratios in by_moment if ratios.get(rank, 0.0) > 0) for rank in evidence}
    lasting = {
        rank: quantile(ratios, 0.5)
        for rank, ratios in known.items()
        if len(ratios) >= MIN_MOMENTS and quantile(ratios, 1 - LATE_SHARE) >= STEADY_RATIO
    }
    return dict.fromkeys(evidence, 0.0) | lasting


def _ratios(rates: Mapping[int, float]) -> dict[int, float]:
    """For each rank the median rate of the others over this rank's rate; 0 if either was not measured."""
    # A rate below one byte per second is no measurement, and dividing by it may give infinity.
    measured = {rank: rate for rank, rate in rates.items() if 1 <= rate < math.inf}
    known = sorted(measured.values())
    if len(known) < 2:
        return dict.fromkeys(rates, 0.0)
    return dict.fromkeys(rates, 0.0) | {rank: median_without(known, rate) / rate for rank, rate in measured.items()}


# Lags count from this size on: smaller calls are too short for a rank to be late by a large share of them.
_LARGE_BYTES = 1 << 20


class Standing(NamedTuple):
    """The slow ranks over one backend with the reasons, and (ranks, cores) of a machine with too few cores, or None."""

    slow: Mapping[int, str]
    crowd: tuple[int, int] | None


@lru_cache(maxsize=8)
def standing(seen: Seen[Data], backend: str) -> Standing:
    """Judge which ranks are slow over a backend. Cached, since every collective and every rank needs the result.

    With fewer cores than ranks, ranks wait for each other's cores and are late in turn, so no rank is called slow.
    """
    if (crowded := crowd(seen, backend)) is not None:
        return Standing({}, crowded)
    memory = "host memory" if backend == "gloo" else "its GPU's memory"
    return Standing(slow_ranks(evidence(seen, backend), memory=memory), None)


def crowd(seen: Seen[Data], backend: str) -> tuple[int, int] | None:
    """(ranks, cores) of the first machine with fewer cores than ranks; None without one, or over nccl, where a rank
    needs hardly any CPU. Containers on one machine count together, because they share its boot id."""
    if backend == "nccl":
        return None
    machines: dict[str, dict[int, int]] = {}
    for row in seen.rows_so_far:
        if row.data.backend == backend:
            machine = machines.setdefault(seen.world.arrivals[row.place.rank].host_id, {})
            machine[row.place.rank] = row.data.limits.cores or 0
    bound = seen.of(hst001.CHECK).by_rank
    for machine in machines.values():
        rows = {rank: bound[rank] for rank in machine if rank in bound}
        # The cores of all ranks of the machine together, from HST001; without that, those of the rank with most cores.
        cores = max(machine.values(), default=0)
        if len(rows) == len(machine) and all(row.affinity for row in rows.values()):
            cores = int(hst001.usable_cores(rows))
        if 0 < cores < len(machine):
            return len(machine), cores
    return None


def evidence(seen: Seen[Data], backend: str) -> dict[int, RankEvidence]:
    """The evidence on each rank from all trials over a backend."""
    by_rank: dict[int, list[Data]] = {}
    for row in seen.rows_so_far:
        if row.data.backend == backend:
            by_rank.setdefault(row.place.rank, []).append(row.data)
    moments = min((sum(len(data.copies) for data in trials) for trials in by_rank.values()), default=0)
    return {rank: _evidence_of(trials, moments) for rank, trials in by_rank.items()}


def _evidence_of(trials: list[Data], moments: int) -> RankEvidence:
    """The evidence from the data of one rank; of its copies the first `moments`, which all ranks have."""
    rows: list[RankRow] = []
    for data in trials:
        # Only large sizes count, or the largest size if all are small.
        least = min(_LARGE_BYTES, max((row.size_bytes for row in data.rows), default=0))
        rows += [row for row in data.rows if row.size_bytes >= least]
    shares = sorted(
        row.lag_seconds / row.transfer_seconds for row in rows if row.lag_seconds is not None and row.transfer_seconds
    )
    calls = sum(row.calls for row in rows if row.last is not None)
    last = sum(row.last for row in rows if row.last is not None)
    return RankEvidence(
        copies=tuple(rate for data in trials for rate in data.copies)[:moments],
        lag_share=quantile(shares, 0.5) if shares else None,
        late_share=last / calls if calls else None,
    )
