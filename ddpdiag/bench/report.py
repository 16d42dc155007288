"""The benchmark's whole report from a recording, with what it comes to in one sentence."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from ddpdiag.bench.aggregate import Sweep, asked_of, ranks, rows, series, sweeps
from ddpdiag.bench.data import Data
from ddpdiag.checks.api import Seen
from ddpdiag.checks.launch import variables as lch002
from ddpdiag.checks.launch import versions as lch003
from ddpdiag.comparison.benchmarks import series_of, shape_of
from ddpdiag.model.bench import BaselineSeries, BenchReport, BenchRow, Series
from ddpdiag.text import rate_text

# So many sentences; of more, how many there are.
MOST_SAID = 3
_NOT_KNOWN = "what this hardware should reach is not known."


def summary(found: Sequence[Series]) -> str:
    """The sentence of a benchmark: that of its one series, or one for each thing that holds several back."""
    said = list(dict.fromkeys(_sentences(found)))
    left = len(said) - MOST_SAID
    rest = [f"{left} more {'result is' if left == 1 else 'results are'} in the report."] if left > 0 else []
    return " ".join((*said[:MOST_SAID], *rest)) or "Nothing was measured."


def _sentences(found: Sequence[Series]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[Series]] = {}
    for one in found:
        groups.setdefault((one.backend, held_back(one) or one.sentence), []).append(one)
    for (_, what), own in groups.items():
        # The same sentence of several is about a rank or the machine, not about a collective.
        yield own[0].sentence if len({one.sentence for one in own}) == 1 else _together(own, what)


def held_back(one: Series) -> str:
    """What a series' sentence says of it before the numbers: "is bound by PCIe"; nothing if that is not its subject."""
    head, _, told = one.sentence.partition(f"{one.collective} over {one.backend}")
    if head:
        return ""
    if told.startswith(": "):
        return _NOT_KNOWN if told.endswith(_NOT_KNOWN) else ""
    return told.strip().partition(": ")[0]


def _together(found: Sequence[Series], what: str) -> str:
    """ "all_reduce and broadcast over gloo: each is bound by PCIe, 1.2 to 2.4 GB/s busbw, 80 to 90 % of what ..."."""
    collectives = tuple(dict.fromkeys(one.collective for one in found))
    names = " and ".join(filter(None, (", ".join(collectives[:-1]), collectives[-1])))
    many = f" ({len(found)} series)" if len(found) > len(collectives) else ""
    rates = sorted(one.peak_busbw_bytes_per_s for one in found)
    busbw = f"{_span(rate_text(rates[0]), rate_text(rates[-1]))} busbw"
    if what == _NOT_KNOWN:
        return f"{names} over {found[0].backend}{many}: {busbw}; {what}"
    shares = sorted(one.share for one in found if one.share is not None)
    reached = ""
    if len(shares) == len(found):
        reached = f", {_span(f'{shares[0] * 100:.0f} %', f'{shares[-1] * 100:.0f} %')} of what is expected"
    return f"{names} over {found[0].backend}{many}: each {what}, {busbw}{reached}."


def _span(low: str, high: str) -> str:
    """ "580 MB/s to 2.06 GB/s", or "1.2 to 2.4 GB/s"."""
    if low == high:
        return low
    number, _, unit = low.partition(" ")
    return f"{number if high.endswith(f' {unit}') else low} to {high}"


# The report ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def bench_of(seen: Seen[Data]) -> BenchReport:
    """Rows, series and ranks of all sweeps; empty where nothing was measured. Worked out once for each `seen`."""
    asked, done = asked_of(seen), sweeps(seen)
    by_sweep = [(sweep, tuple(rows(sweep, asked.average))) for sweep in done]
    every = tuple(row for _, own in by_sweep for row in own)
    found = tuple(one for sweep, own in by_sweep for one in series(seen, sweep, own))
    modes = [mode for row in every for mode in row.modes().values()]
    rates, checked = [mode.busbw_bytes_per_s for mode in modes], [own.wrong for own in modes if own.wrong is not None]
    versions = seen.of(lch003.CHECK).by_rank
    variables = seen.of(lch002.CHECK).by_rank
    return BenchReport(
        asked=asked,
        created=seen.recording.header.created,
        rows=every,
        series=found,
        ranks=tuple(line for sweep, own in by_sweep for line in ranks(seen, sweep, own)),
        notes=_notes(seen, done),
        average_busbw_bytes_per_s=sum(rates) / len(rates) if rates else None,
        wrong=sum(checked) if checked else None,
        complete=_complete(seen, done),
        sentence=summary(found),
        saved=_saved(seen, done, every),
        torch_version=next((data.torch for data in versions.values()), None),
        nccl_version=next((data.nccl for data in versions.values()), None),
        env=dict(next((data.variables for data in variables.values()), {})),
    )


def _complete(seen: Seen[Data], done: Sequence[Sweep]) -> bool:
    """Did every sweep go well on all its ranks, and was none cut short?"""
    asked = asked_of(seen)
    wanted = len(asked.collectives) * max(1, len(asked.backends))
    return len(done) == wanted and all(is_whole(seen, sweep) for sweep in done)


def is_whole(seen: Seen[Data], sweep: Sweep) -> bool:
    """Are all its sizes there, from all its ranks?"""
    heard = set(sweep.ranks) == set(sweep.trial.ranks)
    return heard and seen.went_well(sweep.trial) and all(data.whole for data in sweep.ranks.values())


def _notes(seen: Seen[Data], done: Sequence[Sweep]) -> tuple[str, ...]:
    own = [note for sweep in done for data in sweep.ranks.values() for note in data.notes]
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
