"""The result of a sweep: a line through it, its bottleneck, its ranks side by side, and the slow ones among them.

A rank is slow if it copies more slowly than its peers, or starts its calls late. All evidence is relative to
the other ranks of the same run, so that it needs no table of hardware.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from ddpdiag.bandwidth import bound, busbw
from ddpdiag.bench.bottleneck import Facts, Slow, assess, fit
from ddpdiag.bench.data import Data, Sweep
from ddpdiag.checks.api import Seen
from ddpdiag.checks.host import cores as hst001
from ddpdiag.comparison import median_without
from ddpdiag.model.bench import BenchRank, BenchRow, Measured, Series, Timing
from ddpdiag.stats import quantile
from ddpdiag.text import share_text, times_text


def series(seen: Seen[Data], sweep: Sweep, found: Sequence[BenchRow]) -> Iterator[Series]:
    """The result of each dtype, op and root over all sizes."""
    kinds: dict[tuple[str, str, int], list[tuple[BenchRow, Measured]]] = defaultdict(list)
    for row in found:
        if (mode := row.natural()) is not None:
            kinds[row.dtype, row.op, row.root].append((row, mode))
    for own in kinds.values():
        peak, peak_mode = max(own, key=lambda each: each[1].busbw_bytes_per_s)
        # The shortest call of the slowest rank.
        points = [(row.size_bytes, max(timing.seconds.min for timing in mode.ranks.values())) for row, mode in own]
        known = fit(sweep.collective, sweep.size, points)
        among = standing(seen, sweep.backend)
        hosts = hosts_of_ranks(seen, sweep.trial.ranks)
        limits = {rank: data.limits for rank, data in sweep.ranks.items()}
        # Ranks that wait for each other's cores do not measure a limit of the machine.
        limit = bound(sweep.collective, sweep.backend, hosts, limits) if among.crowd is None else None
        facts = Facts(
            collective=sweep.collective,
            backend=sweep.backend,
            ranks=sweep.size,
            hosts=len(hosts),
            peak_busbw_bytes_per_s=peak_mode.busbw_bytes_per_s,
            best_bytes=peak.size_bytes,
            fit=known,
            bound=limit,
            points=points,
            oversubscribed=among.crowd,
            slow=tuple(Slow(rank, seen.world.host_of(rank), why) for rank, why in among.slow.items()),
        )
        part, sentence = assess(facts)
        yield Series(
            backend=sweep.backend,
            collective=sweep.collective,
            dtype=peak.dtype,
            op=peak.op,
            root=peak.root,
            peak_busbw_bytes_per_s=facts.peak_busbw_bytes_per_s,
            best_bytes=facts.best_bytes,
            fit=known,
            expectation=limit.expectation if limit else None,
            share=facts.share,
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


# Ranks ---------------------------------------------------------------------------------------------------------------


def ranks(seen: Seen[Data], sweep: Sweep, found: Sequence[BenchRow]) -> Iterator[BenchRank]:
    """The table of ranks at the largest size of the sweep's first dtype, op and root."""
    if not found:
        return
    first = found[0]
    alike = [row for row in found if (row.dtype, row.op, row.root) == (first.dtype, first.op, first.root)]
    reference = max(alike, key=lambda row: row.size_bytes)
    mode = reference.natural()
    times = mode.ranks if mode else {}
    among = standing(seen, sweep.backend)
    for rank, data in sweep.ranks.items():
        time = times.get(rank)
        median = time.seconds.median if time else None
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
            size_bytes=reference.size_bytes,
            seconds=median,
            busbw_bytes_per_s=busbw(sweep.collective, reference.size_bytes, median, sweep.size) if median else None,
            spread_share=time.seconds.cv if time else None,
            lag_seconds=time.lag_seconds if time else None,
            copy_bytes_per_s=quantile(sorted(data.copies), 0.5) if data.copies else None,
            slow=among.slow.get(rank, ""),
        )


# Slow ranks ----------------------------------------------------------------------------------------------------------

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
            cores = int(hst001.usable_cores(rows).cores)
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
    timings: list[Timing] = []
    for data in own:
        # The modes of the large sizes; of the largest one where all are small.
        least = min(_LARGE_BYTES, max((row.size_bytes for row in data.rows), default=0))
        timings += [timing for row in data.rows if row.size_bytes >= least for timing in row.modes]
    shares = sorted(
        timing.lag_seconds / timing.transfer_seconds
        for timing in timings
        if timing.lag_seconds is not None and timing.transfer_seconds
    )
    calls = sum(timing.seconds.count for timing in timings if timing.last is not None)
    last = sum(timing.last for timing in timings if timing.last is not None)
    return RankEvidence(
        copies=tuple(rate for data in own for rate in data.copies)[:moments],
        lag_share=quantile(shares, 0.5) if shares else None,
        late_share=last / calls if calls else None,
    )
