"""The result of a sweep: its bottleneck, its ranks side by side, and the slow ones among them.

A slow rank explains everything else; more ranks than cores explain away all numbers; messages too short for bandwidth
are bound by latency; then comes the part of the machine whose limit was reached. Anything else is reported as unknown.

A rank is slow if it copies more slowly than its peers, or starts its calls late. That evidence is relative to the other
ranks of the same run, so that it needs no table of hardware.
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
    """The result of each dtype over all sizes."""
    among = standing(seen, sweep.backend)
    hosts = hosts_of_ranks(seen, sweep.trial.ranks)
    limits = {rank: data.limits for rank, data in sweep.ranks.items()}
    # Ranks that wait for each other's cores do not measure a limit of the machine.
    limit = bound(sweep.collective, sweep.backend, hosts, limits) if among.crowd is None else None
    slow = {f"rank {rank} on {seen.world.host_of(rank)}": why for rank, why in among.slow.items()}
    kinds: dict[str, list[BenchRow]] = defaultdict(list)
    for row in rows:
        kinds[row.dtype].append(row)
    for own in kinds.values():
        peak, smallest = max(own, key=lambda row: row.busbw_bytes_per_s), min(own, key=lambda row: row.size_bytes)
        part, sentence = assess(own, limit, hosts=len(hosts), crowd=among.crowd, slow=slow)
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
    """The ranks by host; of machines that share a name, the second one is "name (2)"."""
    taking = frozenset(ranks)
    hosts: dict[str, tuple[int, ...]] = {}
    numbers: Counter[str] = Counter()
    for (name, _boot), ranks in seen.world.hosts.items():
        if own := tuple(rank for rank in ranks if rank in taking):
            numbers[name] += 1
            hosts[name if numbers[name] == 1 else f"{name} ({numbers[name]})"] = own
    return hosts


# At least this much of the expectation counts as reached (stas00, ml-engineering: 80 %).
GOOD_SHARE = 0.8
# Of what copies and loopback allow: gloo's threads hand each segment to each other. Two ranks on an idle host of two
# cores reached 0.59 to 0.68 of it.
GOOD_COPY_SHARE = 0.5
# Up to here the call itself costs more than its bytes on every fabric with known numbers.
SMALL_BYTES = 64 << 10
# Times that do not even double from the smallest size to one 8 times as large are all latency.
FLAT_RATIO = 2.0
_FLAT_RANGE = 8
# Chosen: with smaller messages a rate that still rises with the size says nothing about the hardware.
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
    """The bottleneck of a sweep of one dtype, and a sentence that names the subject, the number and the expectation.

    `crowd` is (ranks, cores) of a host with fewer cores than ranks; `slow` has the reason for each slow rank by its
    name.
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
    """The peak over the expectation."""
    expected = limit.busbw_bytes_per_s if limit else 0.0
    return peak.busbw_bytes_per_s / expected if expected > 0 else None


def ranks(seen: Seen[Data], sweep: Sweep) -> Iterator[BenchRank]:
    """The table of ranks at the largest size of the sweep's first dtype."""
    if not sweep.rows:
        return
    dtype = next(iter(sweep.rows))[0]
    size_bytes = max(size for other, size in sweep.rows if other == dtype)
    among = standing(seen, sweep.backend)
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
            slow=among.slow.get(rank, ""),
        )


# Between NVRx's straggler (a score below 0.75, so 1.33x slower) and twice as slow (DLRover). On two noisy cores, equal
# ranks differ by more than a third now and then.
SLOW_RATIO = 1.5
# A scheduler moves processes between cores several times a second, so that few moments show nothing; a rank that is
# slow by itself is slower than its peers in most of them.
MIN_MOMENTS = 5
STEADY_RATIO = 1.2
# A real straggler is last in 8 of 10 windows; of ranks that merely take turns none is.
LATE_SHARE = 0.8
# Starting half of a transfer late makes the collective half as slow again: the same ratio.
LAG_SHARE = SLOW_RATIO - 1


class RankEvidence(NamedTuple):
    """The evidence on one rank; None where a figure was not measured.

    `copies` are its copies in bytes per second, at several moments of the run at which all ranks copied; the same
    moments for all. `lag_share` is the median of its lags over the median transfer time, at large sizes, and
    `late_share` the share of the calls in which it was the last to start.
    """

    copies: tuple[float, ...] = ()
    lag_share: float | None = None
    late_share: float | None = None


def slow_ranks(evidence: Mapping[int, RankEvidence], *, memory: str = "its own memory") -> dict[int, str]:
    """The slow ranks with the reason, as the words after "it": "copies 2.1x slower than the median rank".

    Empty where more than half of the ranks would be named: then they share the cause.
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
    """The ratio of the others' median rate of copies to that of each rank; 0 where it is not known, or changes.

    The ratio at each moment, then the median over the moments: a disturbance of the whole host affects all ranks, and
    one of a single rank now and then is outvoted.
    """
    moments = max((len(own.copies) for own in evidence.values()), default=0)
    at = [
        _ratios({rank: own.copies[moment] for rank, own in evidence.items() if moment < len(own.copies)})
        for moment in range(moments)
    ]
    known = {rank: sorted(ratios[rank] for ratios in at if ratios.get(rank, 0.0) > 0) for rank in evidence}
    lasting = {
        rank: quantile(own, 0.5)
        for rank, own in known.items()
        if len(own) >= MIN_MOMENTS and quantile(own, 1 - LATE_SHARE) >= STEADY_RATIO
    }
    return dict.fromkeys(evidence, 0.0) | lasting


def _ratios(rates: Mapping[int, float]) -> dict[int, float]:
    """For each rank the median of the others over its own; 0 where either was not measured."""
    # Less than a byte per second is no measurement, and ratios to it may not be finite.
    measured = {rank: rate for rank, rate in rates.items() if 1 <= rate < math.inf}
    known = sorted(measured.values())
    if len(known) < 2:
        return dict.fromkeys(rates, 0.0)
    return dict.fromkeys(rates, 0.0) | {rank: median_without(known, rate) / rate for rank, rate in measured.items()}


# Below this size a call is over before a rank can be late by much of it.
_LARGE_BYTES = 1 << 20


class Standing(NamedTuple):
    """The ranks over one backend: the slow ones with the reason, and (ranks, cores) of a machine with too few cores."""

    slow: Mapping[int, str]
    crowd: tuple[int, int] | None


@lru_cache(maxsize=8)
def standing(seen: Seen[Data], backend: str) -> Standing:
    """The standing of the ranks, cached for each backend since every collective and every rank needs it.

    Ranks that wait for each other's cores are late and copy slowly by turns, so that none of them is called slow.
    """
    if (crowded := crowd(seen, backend)) is not None:
        return Standing({}, crowded)
    memory = "host memory" if backend == "gloo" else "its GPU's memory"
    return Standing(slow_ranks(evidence(seen, backend), memory=memory), None)


def crowd(seen: Seen[Data], backend: str) -> tuple[int, int] | None:
    """Ranks and cores of a machine that has fewer cores than ranks; containers of one machine share its boot id.

    Only where CPUs do the work: over nccl a rank needs hardly any.
    """
    if backend == "nccl":
        return None
    machines: dict[str, dict[int, int]] = {}
    for row in seen.rows_so_far:
        if row.data.backend == backend:
            own = machines.setdefault(seen.world.arrivals[row.place.rank].host_id, {})
            own[row.place.rank] = row.data.limits.cores or 0
    bound = seen.of(hst001.CHECK).by_rank
    for own in machines.values():
        rows = {rank: bound[rank] for rank in own if rank in bound}
        # The cores of all its ranks together, from HST001; else those of the rank with most.
        cores = max(own.values(), default=0)
        if len(rows) == len(own) and all(row.affinity for row in rows.values()):
            cores = int(hst001.usable_cores(rows))
        if 0 < cores < len(own):
            return len(own), cores
    return None


def evidence(seen: Seen[Data], backend: str) -> dict[int, RankEvidence]:
    """The evidence on each rank from all trials over a backend."""
    together: dict[int, list[Data]] = {}
    for row in seen.rows_so_far:
        if row.data.backend == backend:
            together.setdefault(row.place.rank, []).append(row.data)
    moments = min((sum(len(data.copies) for data in own) for own in together.values()), default=0)
    return {rank: _evidence_of(own, moments) for rank, own in together.items()}


def _evidence_of(own: list[Data], moments: int) -> RankEvidence:
    rows: list[RankRow] = []
    for data in own:
        # Large sizes; the largest one where all are small.
        least = min(_LARGE_BYTES, max((row.size_bytes for row in data.rows), default=0))
        rows += [row for row in data.rows if row.size_bytes >= least]
    shares = sorted(
        row.lag_seconds / row.transfer_seconds for row in rows if row.lag_seconds is not None and row.transfer_seconds
    )
    calls = sum(row.calls for row in rows if row.last is not None)
    last = sum(row.last for row in rows if row.last is not None)
    return RankEvidence(
        copies=tuple(rate for data in own for rate in data.copies)[:moments],
        lag_share=quantile(shares, 0.5) if shares else None,
        late_share=last / calls if calls else None,
    )
