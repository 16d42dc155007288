"""The benchmark's whole report from a recording."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from ddpdiag.bandwidth.baseline import series_of, shape_of
from ddpdiag.bandwidth.summary import summary
from ddpdiag.checks.api import Seen
from ddpdiag.checks.bench.data import Data
from ddpdiag.checks.bench.view import Sweep, asked_of, ranks, rows, series, sweeps
from ddpdiag.checks.launch import variables as lch002
from ddpdiag.checks.launch import versions as lch003
from ddpdiag.model.bench import BaselineSeries, BenchReport, BenchRow


@lru_cache(maxsize=1)
def bench_of(seen: Seen[Data]) -> BenchReport:
    """Rows, series and ranks of all sweeps; empty where nothing was measured. Worked out once for each `seen`."""
    asked, done = asked_of(seen), sweeps(seen)
    by_sweep = [(sweep, tuple(rows(sweep, asked.average))) for sweep in done]
    every = tuple(row for _, own in by_sweep for row in own)
    found = tuple(one for sweep, own in by_sweep for one in series(seen, sweep, own))
    versions = seen.of(lch003.CHECK).by_rank
    variables = seen.of(lch002.CHECK).by_rank
    return BenchReport(
        asked=asked,
        created=seen.recording.header.created,
        rows=every,
        series=found,
        ranks=tuple(line for sweep, own in by_sweep for line in ranks(seen, sweep, own)),
        remarks=_remarks(seen, done),
        average_busbw_bytes_per_s=_mean(every),
        wrong=_wrong(every),
        complete=_complete(seen, done),
        sentence=summary(found),
        saved=_saved(seen, done, every),
        torch_version=next((data.torch for data in versions.values()), None),
        nccl_version=next((data.nccl for data in versions.values()), None),
        env=dict(next((data.variables for data in variables.values()), {})),
    )


def _modes(found: Iterable[BenchRow]) -> Iterable[tuple[float, int | None]]:
    for row in found:
        for mode in (row.out_of_place, row.in_place):
            if mode is not None:
                yield mode.busbw_bytes_per_s, mode.wrong


def _mean(found: Sequence[BenchRow]) -> float | None:
    rates = [rate for rate, _ in _modes(found)]
    return sum(rates) / len(rates) if rates else None


def _wrong(found: Sequence[BenchRow]) -> int | None:
    checked = [wrong for _, wrong in _modes(found) if wrong is not None]
    return sum(checked) if checked else None


def _complete(seen: Seen[Data], done: Sequence[Sweep]) -> bool:
    """Did every sweep go well on all its ranks, and was none cut short?"""
    asked = asked_of(seen)
    wanted = len(asked.collectives) * max(1, len(asked.backends))
    return len(done) == wanted and all(is_whole(seen, sweep) for sweep in done)


def is_whole(seen: Seen[Data], sweep: Sweep) -> bool:
    """Are all its sizes there, from all its ranks?"""
    heard = set(sweep.ranks) == set(sweep.trial.ranks)
    return heard and seen.went_well(sweep.trial) and all(data.whole for data in sweep.ranks.values())


def _remarks(seen: Seen[Data], done: Sequence[Sweep]) -> tuple[str, ...]:
    own = [remark for sweep in done for data in sweep.ranks.values() for remark in data.remarks]
    own += [
        f"{sweep.collective} over {sweep.backend} was cut short; these are the sizes that all ranks had measured"
        for sweep in done
        if not seen.went_well(sweep.trial)
    ]
    return tuple(dict.fromkeys(own))


def fabric_of(seen: Seen[Data], sweep: Sweep) -> dict[str, str]:
    """What must be alike beside the shape of the world, in words: devices, network cards, cores."""
    limits = [data.limits for data in sweep.ranks.values()]
    devices = sorted({data.device for data in sweep.ranks.values()})
    rates = sorted({own.nic_bytes_per_s for own in limits if own.nic_bytes_per_s is not None})
    fabric = {"devices": ", ".join(devices) or "unknown"}
    if sweep.backend != "nccl":
        cores = sorted({own.cores for own in limits if own.cores is not None})
        fabric["cores"] = (
            " to ".join(str(count) for count in dict.fromkeys((cores[0], cores[-1]))) if cores else "unknown"
        )
    if len(seen.world.hosts) > 1:
        fabric["network"] = ", ".join(f"{rate / 125e6:g} Gbit/s" for rate in rates) or "of unknown speed"
    return fabric


def _saved(seen: Seen[Data], done: Sequence[Sweep], found: Sequence[BenchRow]) -> tuple[BaselineSeries, ...]:
    shape = shape_of({f"{name} {number}": own for number, ((name, _), own) in enumerate(seen.world.hosts.items())})
    created = seen.recording.header.created
    kept: list[BaselineSeries] = []
    for sweep in done:
        own = [row for row in found if (row.backend, row.collective) == (sweep.backend, sweep.collective)]
        kept += series_of(own, shape=shape, fabric=fabric_of(seen, sweep), created=created)
    return tuple(kept)


def slow_by_backend(report: BenchReport) -> Mapping[str, Mapping[int, str]]:
    """The slow ranks of each backend, and why."""
    slow: dict[str, dict[int, str]] = {}
    for line in report.ranks:
        if line.slow:
            slow.setdefault(line.backend, {})[line.rank] = line.slow
    return slow
