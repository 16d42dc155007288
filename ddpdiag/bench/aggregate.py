"""The benchmark, put together from what all ranks gave: limits, rows, series, ranks."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ddpdiag.bandwidth import algbw, bound, busbw
from ddpdiag.bench.bottleneck import Facts, Slow, assess
from ddpdiag.bench.data import Cell, Data, Line
from ddpdiag.bench.fit import fit
from ddpdiag.bench.slow import Standing, standing
from ddpdiag.checks.api import Row, Seen
from ddpdiag.model import Trial
from ddpdiag.model.bench import Average, Bench, BenchRank, BenchRow, Limits, Measured, RankTime, Series
from ddpdiag.stats import quantile


def lowest(limits: Iterable[Limits]) -> Limits:
    """The lowest of what ranks have, which no one card has; `nvlink_switched` only where all are."""
    known = tuple(limits)
    values = {name: [getattr(own, name) for own in known] for name in Limits.__struct_fields__}
    lowest = {name: min((value for value in own if value is not None), default=None) for name, own in values.items()}
    return Limits(**lowest | {"nic": None, "nvlink_switched": _all(values["nvlink_switched"])})


def _all(values: Sequence[bool | None]) -> bool | None:
    """True or False where every rank says so or one denies it; None where one does not say."""
    if False in values:
        return False
    return True if values and None not in values else None


def links_up(ranks: Iterable[Data]) -> tuple[int, int] | None:
    """The fewest and the most NVLinks that are up on GPUs of one model, of the model where these differ most.

    None if there are no links. A GPU without any counts only beside one that leads to a switch: some boards bridge
    some of their GPUs.
    """
    models: dict[str, list[Limits]] = defaultdict(list)
    for data in ranks:
        if data.limits.nvlinks is not None:
            models[data.device].append(data.limits)
    ranges = [found for own in models.values() if (found := _range(own))]
    return max(ranges, default=None, key=lambda found: found[1] - found[0])


def _range(own: Sequence[Limits]) -> tuple[int, int] | None:
    switched = any(limits.nvlink_switched for limits in own)
    links = [limits.nvlinks or 0 for limits in own if limits.nvlinks or switched]
    return (min(links), max(links)) if links else None


# Sweeps --------------------------------------------------------------------------------------------------------------


Key = tuple[int, str, str, int, int]


@dataclass(frozen=True)
class Sweep:
    """One trial that took all ranks: one collective over one backend."""

    trial: Trial
    backend: str
    collective: str
    ranks: Mapping[int, Data]
    size: int

    @cached_property
    def keys(self) -> tuple[Key, ...]:
        """Lines that every rank has that has any; the others were cut short."""
        measured = sum(bool(data.lines) for data in self.ranks.values())
        return tuple(key for key, own in self.lines.items() if len(own) == measured)

    @cached_property
    def lines(self) -> Mapping[Key, Mapping[int, Line]]:
        """Each line on each rank that has it, in the order of the first rank that has any."""
        lines: dict[Key, dict[int, Line]] = {}
        for rank, data in self.ranks.items():
            for line in data.lines:
                lines.setdefault(line.key, {})[rank] = line
        return lines


def sweeps(seen: Seen[Data]) -> tuple[Sweep, ...]:
    """The sweeps, in the order in which they were run; the answers of trials that were cut short count as well."""
    by_trial: dict[int, list[Row[Data]]] = {}
    for row in seen.rows_so_far:
        if "round" not in row.trial.params:
            by_trial.setdefault(row.trial.number, []).append(row)
    return tuple(
        Sweep(
            rows[0].trial,
            str(rows[0].trial.params["backend"]),
            str(rows[0].trial.params["collective"]),
            {row.place.rank: row.data for row in sorted(rows, key=lambda row: row.place.rank)},
            len(rows[0].trial.ranks),
        )
        for rows in by_trial.values()
    )


def asked_of(seen: Seen[Data]) -> Bench:
    """What was asked for."""
    return seen.options.bench or Bench()


# Rows ----------------------------------------------------------------------------------------------------------------


def rows(sweep: Sweep, average: Average) -> Iterator[BenchRow]:
    """The lines of a sweep over all its ranks; without those that have no time of the rank that `average` asks for."""
    for key in sweep.keys:
        lines = sweep.lines[key]
        first = next(iter(lines.values()))
        row = BenchRow(
            backend=sweep.backend,
            collective=sweep.collective,
            cycle=first.cycle,
            size_bytes=first.size_bytes,
            count=first.count,
            dtype=first.dtype,
            op=first.op,
            root=first.root,
            out_of_place=_measured(
                sweep, first, {r: c for r, line in lines.items() if (c := line.out_of_place)}, average
            ),
            in_place=_measured(sweep, first, {r: c for r, line in lines.items() if (c := line.in_place)}, average),
        )
        if row.natural() is not None:
            yield row


def _measured(sweep: Sweep, line: Line, cells: Mapping[int, Cell], average: Average) -> Measured | None:
    """One mode over all ranks; None where no rank has it, or not the one whose time is asked for."""
    seconds = _averaged({rank: cell.seconds.mean for rank, cell in cells.items()}, average)
    if seconds is None:
        return None
    wrong = [cell.wrong for cell in cells.values() if cell.wrong is not None]
    first = next(iter(cells.values()))
    return Measured(
        seconds=seconds,
        algbw_bytes_per_s=algbw(line.size_bytes, seconds),
        busbw_bytes_per_s=busbw(sweep.collective, line.size_bytes, seconds, sweep.size),
        wrong=sum(wrong) if wrong else None,
        calls=min(cell.seconds.count for cell in cells.values()),
        transfer_seconds=first.transfer_seconds,
        skew_seconds=first.skew_seconds,
        ranks=tuple(
            RankTime(rank=rank, seconds=own.seconds, lag_seconds=own.lag_seconds, wrong=own.wrong, times=own.times)
            for rank, own in cells.items()
        ),
    )


def _averaged(seconds: Mapping[int, float], average: Average) -> float | None:
    """What -a asks for, of the ranks' times; None where there is none, or none of rank 0, whose time is asked for."""
    if not seconds:
        return None
    match average:
        case Average.RANK_0:
            return seconds.get(0)
        case Average.MEAN:
            return sum(seconds.values()) / len(seconds)
        case Average.FASTEST:
            return min(seconds.values())
        case Average.SLOWEST:
            return max(seconds.values())


# Series --------------------------------------------------------------------------------------------------------------


def series(seen: Seen[Data], sweep: Sweep, found: Sequence[BenchRow]) -> Iterator[Series]:
    """All sizes of each dtype, op and root, and what they mean."""
    kinds = dict.fromkeys((row.dtype, row.op, row.root) for row in found)
    for kind in kinds:
        own = [row for row in found if (row.dtype, row.op, row.root) == kind and row.natural() is not None]
        if own:
            yield _one_series(seen, sweep, own)


def _one_series(seen: Seen[Data], sweep: Sweep, own: Sequence[BenchRow]) -> Series:
    first = own[0]
    peak = max(own, key=_rate)
    points = [(row.size_bytes, _quickest(row)) for row in own]
    known = fit(sweep.collective, sweep.size, points)
    among = standing(seen, sweep.backend)
    hosts = _hosts(seen, sweep)
    limits = {rank: data.limits for rank, data in sweep.ranks.items()}
    # What ranks measure that wait for each other's cores is no limit of the machine.
    limit = bound(sweep.collective, sweep.backend, hosts, limits) if among.crowd is None else None
    facts = Facts(
        collective=sweep.collective,
        backend=sweep.backend,
        ranks=sweep.size,
        hosts=len(hosts),
        peak_busbw_bytes_per_s=_rate(peak),
        best_bytes=peak.size_bytes,
        fit=known,
        bound=limit,
        points=points,
        limits=lowest(limits.values()),
        links_up=links_up(sweep.ranks.values()),
        oversubscribed=among.crowd,
        cores_used=_cores_used(sweep, peak),
        slow=tuple(Slow(rank, seen.world.node_of(rank), why) for rank, why in among.slow.items()),
    )
    part, sentence = assess(facts)
    return Series(
        backend=sweep.backend,
        collective=sweep.collective,
        dtype=first.dtype,
        op=first.op,
        root=first.root,
        peak_busbw_bytes_per_s=facts.peak_busbw_bytes_per_s,
        best_bytes=facts.best_bytes,
        fit=known,
        expectation=limit.expectation if limit else None,
        share=facts.share,
        bottleneck=part,
        sentence=sentence,
    )


def _rate(row: BenchRow) -> float:
    mode = row.natural()
    return mode.busbw_bytes_per_s if mode else 0.0


def _quickest(row: BenchRow) -> float:
    """The shortest call of the slowest rank."""
    mode = row.natural()
    return max((own.seconds.min for own in mode.ranks), default=0.0) if mode else 0.0


def _hosts(seen: Seen[Data], sweep: Sweep) -> dict[str, tuple[int, ...]]:
    """The sweep's ranks by host; of machines that share a name, the second one is "name (2)"."""
    taking = frozenset(sweep.trial.ranks)
    hosts: dict[str, tuple[int, ...]] = {}
    numbers: Counter[str] = Counter()
    for (name, _boot), ranks in seen.world.hosts.items():
        if own := tuple(rank for rank in ranks if rank in taking):
            numbers[name] += 1
            hosts[name if numbers[name] == 1 else f"{name} ({numbers[name]})"] = own
    return hosts


def _cores_used(sweep: Sweep, row: BenchRow) -> float | None:
    key = (row.cycle, row.dtype, row.op, row.root, row.size_bytes)
    return max((line.cores for line in sweep.lines[key].values() if line.cores is not None), default=None)


# Ranks ---------------------------------------------------------------------------------------------------------------


def ranks(seen: Seen[Data], sweep: Sweep, found: Sequence[BenchRow]) -> Iterator[BenchRank]:
    """The table of ranks at the largest size of the sweep's first dtype, op and root."""
    if not found:
        return
    first = found[0]
    alike = [row for row in found if (row.dtype, row.op, row.root) == (first.dtype, first.op, first.root)]
    reference = max(alike, key=lambda row: row.size_bytes)
    mode = reference.natural()
    times = {own.rank: own for own in mode.ranks} if mode else {}
    among = standing(seen, sweep.backend)
    for rank, data in sweep.ranks.items():
        yield _bench_rank(seen, sweep, reference, rank, data, times.get(rank), among)


def _bench_rank(
    seen: Seen[Data],
    sweep: Sweep,
    row: BenchRow,
    rank: int,
    data: Data,
    time: RankTime | None,
    among: Standing,
) -> BenchRank:
    median = time.seconds.median if time else None
    return BenchRank(
        backend=sweep.backend,
        collective=sweep.collective,
        rank=rank,
        local_rank=seen.world.arrivals[rank].place.local_rank,
        node=seen.world.node_of(rank),
        device=data.device,
        gpu_uuid=data.gpu_uuid,
        pci=data.pci,
        pid=data.pid,
        device_index=data.device_index,
        size_bytes=row.size_bytes,
        seconds=median,
        algbw_bytes_per_s=algbw(row.size_bytes, median) if median else None,
        busbw_bytes_per_s=busbw(sweep.collective, row.size_bytes, median, sweep.size) if median else None,
        spread_share=time.seconds.cv if time else None,
        lag_seconds=time.lag_seconds if time else None,
        copy_bytes_per_s=quantile(sorted(data.copies), 0.5) if data.copies else None,
        pair_busbw_bytes_per_s=among.pairs.get(rank),
        slow=among.slow.get(rank, ""),
    )
