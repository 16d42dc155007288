"""Which ranks of a benchmark are slow: the evidence, gathered from its trials."""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from ddpdiag.bandwidth.formulas import busbw
from ddpdiag.bandwidth.lines import Cell
from ddpdiag.bandwidth.slow import RankEvidence, slow_ranks
from ddpdiag.checks.api import Seen
from ddpdiag.checks.bench.data import Data
from ddpdiag.checks.host import cores as hst001
from ddpdiag.stats import quantile

# Below this size a call is over before a rank can be late by much of it.
_LARGE_BYTES = 1 << 20


class Standing(NamedTuple):
    """How the ranks do over one backend.

    `slow` says who is slow, and why; `pairs` are `pair_rates`; `crowd` is (ranks, cores) of a machine that has too few.
    """

    slow: Mapping[int, str]
    pairs: Mapping[int, float]
    crowd: tuple[int, int] | None


@lru_cache(maxsize=8)
def standing(seen: Seen[Data], backend: str) -> Standing:
    """Worked out once for each backend, since every collective and every rank asks for it."""
    crowded, pairs = crowd(seen, backend), pair_rates(seen, backend)
    slow = slow_ranks(evidence(seen, backend, pairs), crowded=crowded is not None)
    return Standing(slow, pairs, crowded)


def crowd(seen: Seen[Data], backend: str) -> tuple[int, int] | None:
    """Ranks and cores of a machine that has fewer cores than ranks; containers of one machine share its boot id.

    Only where CPUs do the work: over nccl a rank needs hardly any.
    """
    if backend == "nccl":
        return None
    machines: dict[str, dict[int, int]] = {}
    for row in seen.rows_so_far:
        if row.data.backend == backend and "round" not in row.trial.params:
            own = machines.setdefault(seen.world.arrivals[row.place.rank].host_id, {})
            own[row.place.rank] = row.data.limits.cores or 0
    bound = seen.of(hst001.CHECK).by_rank
    for own in machines.values():
        cores = _cores(own, bound)
        if 0 < cores < len(own):
            return len(own), cores
    return None


def _cores(own: Mapping[int, int], bound: Mapping[int, hst001.Data]) -> int:
    """Cores of one machine's ranks: together, as HST001 saw them; else what the one with most may use."""
    rows = {rank: bound[rank] for rank in own if rank in bound}
    if len(rows) == len(own) and all(row.affinity for row in rows.values()):
        return int(hst001.usable_cores(rows).cores)
    return max(own.values(), default=0)


def evidence(seen: Seen[Data], backend: str, pairs: Mapping[int, float]) -> dict[int, RankEvidence]:
    """What each rank did alone, in pairs, and how late it came, in all trials over a backend."""
    together: dict[int, list[Data]] = {}
    for row in seen.rows_so_far:
        if row.data.backend == backend and "round" not in row.trial.params:
            together.setdefault(row.place.rank, []).append(row.data)
    moments = min((sum(len(data.copies) for data in own) for own in together.values()), default=0)
    return {rank: _of_rank(own, moments, pairs.get(rank)) for rank, own in together.items()}


def _of_rank(own: list[Data], moments: int, pair: float | None) -> RankEvidence:
    copies = tuple(rate for data in own for rate in data.copies)[:moments]
    cells = [cell for data in own for cell in _large(data)]
    shares = sorted(
        cell.lag_seconds / cell.transfer_seconds
        for cell in cells
        if cell.lag_seconds is not None and cell.transfer_seconds
    )
    calls = sum(cell.seconds.count for cell in cells if cell.last is not None)
    last = sum(cell.last for cell in cells if cell.last is not None)
    return RankEvidence(
        copies=copies,
        pair_busbw=pair,
        lag_share=quantile(shares, 0.5) if shares else None,
        late_share=last / calls if calls else None,
    )


def _large(data: Data) -> list[Cell]:
    """The modes of the large sizes; of the largest one where all are small."""
    least = min(_LARGE_BYTES, max((line.size_bytes for line in data.lines), default=0))
    lines = [line for line in data.lines if line.size_bytes >= least]
    return [cell for line in lines for cell in (line.in_place, line.out_of_place) if cell is not None]


def pair_rates(seen: Seen[Data], backend: str) -> Mapping[int, float]:
    """The best bus bandwidth of each rank alone with one other, in bytes per second."""
    best: dict[int, float] = {}
    for row in seen.rows:
        if row.data.backend != backend or "round" not in row.trial.params:
            continue
        for line in row.data.lines:
            cell = line.in_place or line.out_of_place
            if cell is not None:
                rate = busbw(row.data.collective, line.size_bytes, cell.seconds.min, row.data.ranks)
                best[row.place.rank] = max(best.get(row.place.rank, 0.0), rate)
    return best
