"""The benchmark's whole report from a recording, with its result in one sentence, and the findings of COL002."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain

from ddpdiag.bench.data import Data, Sweep, missing_kinds, missing_sizes, rows, sweeps
from ddpdiag.bench.series import ranks, series
from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import leave_out, ranks_text
from ddpdiag.checks.launch import variables as lch002
from ddpdiag.checks.launch import versions as lch003
from ddpdiag.comparison.benchmarks import find, missing, series_of, shape_of, slower, worse
from ddpdiag.model import Finding, Scalar
from ddpdiag.model.bench import BaselineSeries, Bench, BenchRank, BenchReport, BenchRow, Measured, Series
from ddpdiag.text import count, is_exceeded, rate_text, share_text, size_text, time_text

# At most so many sentences; of more, only their number.
_MOST_SAID = 3
_NOT_KNOWN = "what this hardware should reach is not known."


def summary(found: Sequence[Series]) -> str:
    """The sentence of a benchmark: that of its one series, or one for each bottleneck that several share."""
    groups: dict[tuple[str, str], list[Series]] = {}
    for one in found:
        groups.setdefault((one.backend, held_back(one) or one.sentence), []).append(one)
    # The same sentence of several is about a rank or the machine, not about a collective.
    said = list(
        dict.fromkeys(
            own[0].sentence if len({one.sentence for one in own}) == 1 else _together(own, what)
            for (_, what), own in groups.items()
        )
    )
    left = len(said) - _MOST_SAID
    rest = [f"{left} more {'result is' if left == 1 else 'results are'} in the report."] if left > 0 else []
    return " ".join((*said[:_MOST_SAID], *rest)) or "Nothing was measured."


def held_back(one: Series) -> str:
    """What a series' sentence states before the numbers: "is bound by PCIe"; nothing if that is not its subject."""
    head, _, rest = one.sentence.partition(f"{one.collective} over {one.backend}")
    if head:
        return ""
    if rest.startswith(": "):
        return _NOT_KNOWN if rest.endswith(_NOT_KNOWN) else ""
    return rest.strip().partition(": ")[0]


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
    if len(shares) == len(found) and not is_exceeded(shares[-1], 1.0):
        reached = f", {_span(share_text(shares[0]), share_text(shares[-1]))} of what is expected"
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
    asked, done = seen.options.bench or Bench(), sweeps(seen)
    wanted = len(asked.collectives) * max(1, len(asked.backends))
    by_sweep = [(sweep, tuple(rows(sweep, asked.average))) for sweep in done]
    every = tuple(row for _, own in by_sweep for row in own)
    found = tuple(one for sweep, own in by_sweep for one in series(seen, sweep, own))
    modes = [mode for row in every for mode in row.modes().values()]
    rates, checked = [mode.busbw_bytes_per_s for mode in modes], [own.wrong for own in modes if own.wrong is not None]
    shape = shape_of({f"{name} {number}": own for number, ((name, _), own) in enumerate(seen.world.hosts.items())})
    created = seen.recording.header.created
    saved = (series_of(own, shape=shape, fabric=_fabric(seen, one), created=created) for one, own in by_sweep)
    notes = [note for sweep in done for data in sweep.ranks.values() for note in data.notes]
    notes += [
        f"{sweep.collective} over {sweep.backend} was cut short; the table has the sizes that all ranks measured"
        for sweep in done
        if not seen.succeeded(sweep.trial)
    ]
    versions = seen.of(lch003.CHECK).by_rank
    variables = seen.of(lch002.CHECK).by_rank
    return BenchReport(
        asked=asked,
        created=created,
        rows=every,
        series=found,
        ranks=tuple(line for sweep, own in by_sweep for line in ranks(seen, sweep, own)),
        notes=tuple(dict.fromkeys(notes)),
        average_busbw_bytes_per_s=sum(rates) / len(rates) if rates else None,
        wrong=sum(checked) if checked else None,
        complete=len(done) == wanted and all(_is_whole(seen, sweep) for sweep in done),
        sentence=summary(found),
        saved=tuple(chain.from_iterable(saved)),
        torch_version=next((data.torch for data in versions.values()), None),
        nccl_version=next((data.nccl for data in versions.values()), None),
        env=dict(next((data.variables for data in variables.values()), {})),
    )


def _is_whole(seen: Seen[Data], sweep: Sweep) -> bool:
    """Are all its sizes there, from all its ranks?"""
    heard = set(sweep.ranks) == set(sweep.trial.ranks)
    return heard and seen.succeeded(sweep.trial) and all(data.whole for data in sweep.ranks.values())


def _fabric(seen: Seen[Data], sweep: Sweep) -> dict[str, str]:
    """What must be alike beside the shape of the world, in words: devices, network cards, cores."""
    limits = [data.limits for data in sweep.ranks.values()]
    devices = sorted({data.device for data in sweep.ranks.values()})
    rates = sorted({own.nic_bytes_per_s for own in limits if own.nic_bytes_per_s is not None})
    fabric = {"devices": ", ".join(devices) or "unknown"}
    if sweep.backend != "nccl":
        cores = sorted({own.cores for own in limits if own.cores is not None})
        fabric["cores"] = " to ".join(dict.fromkeys(map(str, (cores[0], cores[-1])))) if cores else "unknown"
    if len(seen.world.hosts) > 1:
        fabric["network"] = ", ".join(f"{rate / 125e6:g} Gbit/s" for rate in rates) or "of unknown speed"
    return fabric


# The findings ---------------------------------------------------------------------------------------------------------


_SHOWN = 16


def findings(seen: Seen[Data], far_below: Iterator[Finding]) -> Iterator[Finding]:
    """All findings about what was measured, `far_below` among them; none where no benchmark was run."""
    if not seen.trials:
        return
    report = bench_of(seen)
    yield from _unsupported(seen)
    yield from _unmeasured(seen, report)
    yield from _rows_missing(seen, report)
    yield from _wrong(seen, report)
    yield from _slow(seen, report)
    yield from far_below
    yield from _below(seen, report)
    yield from _compared(seen, report)


def _unsupported(seen: Seen[Data]) -> Iterator[Finding]:
    missing = tuple(dict.fromkeys(text for row in seen.rows for text in row.data.unsupported))
    if missing:
        yield seen.finding(
            "unsupported",
            missing[0],
            f"{'; '.join(missing)}.",
            evidence={"unsupported": list(missing)},
            fix="Leave this combination out (-d, -o), or use another backend (--backend).",
            of_the_run=True,
        )


def _unmeasured(seen: Seen[Data], report: BenchReport) -> Iterator[Finding]:
    """Sweeps that went well and have no row: nothing is known, which is never healthy."""
    measured = {(row.backend, row.collective) for row in report.rows}
    for sweep in sweeps(seen):
        excused = any(data.unsupported for data in sweep.ranks.values())
        if (sweep.backend, sweep.collective) in measured or excused or not seen.succeeded(sweep.trial):
            continue
        notes = "; ".join(dict.fromkeys(text for data in sweep.ranks.values() for text in data.notes))
        yield seen.finding(
            "unmeasured",
            f"{sweep.collective} over {sweep.backend} was not measured",
            f"No size of {sweep.collective} over {sweep.backend} was measured{': ' + notes if notes else ''}.",
            fix="Measure smaller sizes (such as `-b 1K -e 1M`), or allow more time (`-T SECONDS`).",
            of_the_run=True,
        )


def _rows_missing(seen: Seen[Data], report: BenchReport) -> Iterator[Finding]:
    """Sizes of sweeps that went well for which time or memory was short; what a gate asks for is reported by itself."""
    least = report.asked.min_busbw_bytes_per_s or 0.0
    open_gates = {(one.backend, one.collective) for one in report.series if one.peak_busbw_bytes_per_s < least}
    for sweep in sweeps(seen):
        own = [row for row in report.rows if (row.backend, row.collective) == (sweep.backend, sweep.collective)]
        if not own or _is_whole(seen, sweep) or not seen.succeeded(sweep.trial):
            continue
        sizes, kinds = missing_sizes(report.asked, sweep, own), missing_kinds(report.asked, own)
        lacking = [*map(size_text, sizes), *kinds]
        if lacking and (sweep.backend, sweep.collective) not in open_gates:
            shown = f"{', '.join(lacking[:_SHOWN])}{', ...' if len(lacking) > _SHOWN else ''}"
            what = count(len(sizes), "size") if sizes else "a part"
            notes = "; ".join(dict.fromkeys(text for data in sweep.ranks.values() for text in data.notes))
            yield seen.finding(
                "unmeasured",
                f"{what} of {sweep.collective} over {sweep.backend} {'were' if len(sizes) > 1 else 'was'} not measured",
                f"Not measured: {shown}{f' ({notes})' if notes else ''}. The table shows what was measured.",
                evidence={"sizes_bytes": [*sizes[:_SHOWN]], "kinds": [*kinds[:_SHOWN]]},
                fix=(f"Measure these sizes alone: `-b {min(sizes)} -e {max(sizes)}`. Or" if sizes else "Measure")
                + " fewer calls per size (`-n 5`), or allow more time (`-T SECONDS`).",
                of_the_run=True,
            )


def _wrong(seen: Seen[Data], report: BenchReport) -> Iterator[Finding]:
    """One finding for each backend; COL001 finds the rank whose values were wrong."""
    by_backend: dict[str, list[tuple[BenchRow, Measured]]] = {}
    for row in report.rows:
        for mode in row.modes().values():
            if mode.wrong:
                by_backend.setdefault(row.backend, []).append((row, mode))
    for backend, bad in by_backend.items():
        got = sorted({own.rank for _, mode in bad for own in mode.ranks if own.wrong})
        total = sum(mode.wrong or 0 for _, mode in bad)
        row = bad[0][0]
        rows: list[Scalar] = [f"{each.collective} {size_text(each.size_bytes)}: {mode.wrong}" for each, mode in bad]
        yield seen.finding(
            "wrong",
            f"wrong values from {backend}",
            f"{row.collective} over {backend} gave {count(total, 'wrong element')} on {ranks_text(got)}, first with "
            f"{size_text(row.size_bytes)}; 0 expected. The rank with the wrong result may not be the rank that sent a "
            "wrong value.",
            evidence={"wrong": total, "arrived_at": [*got[:_SHOWN]], "rows": rows[:_SHOWN]},
            fix="Do not train here. Run `ddpdiag check --select COL001,P2P` with the same ranks: it finds the rank or "
            "the path that changes values.",
        )


def _slow(seen: Seen[Data], report: BenchReport) -> Iterator[Finding]:
    slow: dict[str, dict[int, BenchRank]] = {}
    for line in report.ranks:
        if line.slow:
            slow.setdefault(line.backend, {}).setdefault(line.rank, line)
    for line in (line for lines in slow.values() for line in lines.values()):
        yield seen.finding(
            "slow-rank",
            f"rank {line.rank} on {line.node} is the slowest rank over {line.backend}",
            f"Rank {line.rank} on {line.node} {line.slow}. All ranks wait for it in {line.backend}'s collectives.",
            ranks=[line.rank],
            evidence={
                "copy_bytes_per_s": line.copy_bytes_per_s,
                "pair_busbw_bytes_per_s": line.pair_busbw_bytes_per_s,
            },
            fix=f"On {line.node} end other processes (`top`, `nvidia-smi`), and compare clocks with another host "
            "(`lscpu`, `nvidia-smi -q -d CLOCK,PERFORMANCE`). If these are alike, compare its network card (`ethtool "
            f"INTERFACE`). If it stays slow, {leave_out([line.node])}.",
        )


def _below(seen: Seen[Data], report: BenchReport) -> Iterator[Finding]:
    """What does not reach `--min-busbw`; of a sweep that was cut short that is not known."""
    if (least := report.asked.min_busbw_bytes_per_s) is None:
        return
    whole = {(sweep.backend, sweep.collective) for sweep in sweeps(seen) if _is_whole(seen, sweep)}
    for one in report.series:
        if one.peak_busbw_bytes_per_s >= least:
            continue
        if (one.backend, one.collective) not in whole:
            yield seen.finding(
                "unmeasured",
                f"whether {one.collective} over {one.backend} reaches {rate_text(least)} is not known",
                f"It was cut short; its best rate until then is {rate_text(one.peak_busbw_bytes_per_s)} busbw at "
                f"{size_text(one.best_bytes)}.",
                fix="Allow more time (`-T SECONDS`), or measure fewer sizes (-b, -e) with fewer calls (`-n 5`).",
                of_the_run=True,
            )
            continue
        yield seen.finding(
            "below",
            f"{one.collective} over {one.backend} does not reach {rate_text(least)}",
            f"{one.collective} over {one.backend} reaches {rate_text(one.peak_busbw_bytes_per_s)} busbw at best, at "
            f"{size_text(one.best_bytes)}; --min-busbw requires {rate_text(least)}. {one.sentence}",
            evidence={
                "busbw_bytes_per_s": one.peak_busbw_bytes_per_s,
                "min_busbw_bytes_per_s": least,
                "size_bytes": one.best_bytes,
            },
            fix=_below_fix(one, least),
        )


def _below_fix(one: Series, least: float) -> str:
    best = one.expectation.busbw_bytes_per_s if one.expectation is not None else math.inf
    if best < least:
        return (
            f"These hosts allow {rate_text(best)} over {one.backend}: use another backend (nccl, with GPUs), or set "
            f"--min-busbw below that. To come closer, end other processes there (`top`)."
        )
    return "Run `ddpdiag check` with the same ranks: it measures each link, and names a slow rank or host."


def _compared(seen: Seen[Data], report: BenchReport) -> Iterator[Finding]:
    """This run and its baseline."""
    if report.asked.baseline is None:
        return
    for new in report.saved:
        old = find(report.asked.baseline, new)
        if not isinstance(old, str) and not (lost := missing(old, new)):
            yield from _worse(seen, old, new)
            continue
        why = old
        if not isinstance(old, str):
            sizes = " to ".join(dict.fromkeys(size_text(size) for size in (lost[0], lost[-1])))
            why = f"none of the sizes that show its bandwidth ({sizes}) was measured now"
        yield seen.finding(
            "incomparable",
            f"{new.collective} over {new.backend} cannot be compared with the baseline",
            f"Nothing was compared: {why}.",
            fix="Run again with the ranks, hosts and sizes of the baseline, or save this run as the new baseline "
            "(`--save-baseline FILE`).",
        )


def _worse(seen: Seen[Data], old: BaselineSeries, new: BaselineSeries) -> Iterator[Finding]:
    ranks = next((sweep.size for sweep in sweeps(seen)), 2)
    if lost := worse(old, new):
        most = max(lost, key=lambda each: each.share)
        rows: list[Scalar] = [
            f"{size_text(each.size_bytes)}: {rate_text(each.old_bytes_per_s)} -> {rate_text(each.new_bytes_per_s)}"
            for each in lost
        ]
        yield seen.finding(
            "worse",
            f"{new.collective} over {new.backend} is {share_text(most.share)} slower than its baseline",
            f"{new.collective} over {new.backend} reaches {rate_text(most.new_bytes_per_s)} busbw at "
            f"{size_text(most.size_bytes)}; the baseline of {old.created} reached {rate_text(most.old_bytes_per_s)}. "
            "At most 5 % less is accepted, and the calls of each run differ by less than this loss.",
            evidence={"sizes": rows[:_SHOWN]},
            fix="Run again to exclude a temporary load. Then compare with the time of the baseline: driver "
            "(`nvidia-smi`), link "
            "speed (`ethtool INTERFACE`, `ibstat`), and other jobs on these hosts (`top`).",
        )
    elif late := slower(old, new, ranks):
        yield seen.finding(
            "worse",
            f"small messages of {new.collective} over {new.backend} take {share_text(late.share)} longer than before",
            f"At {size_text(late.size_bytes)} a call takes {time_text(late.new_seconds)}; in the baseline of "
            f"{old.created} it took {time_text(late.old_seconds)}.",
            fix="Run again to exclude a temporary load. Then compare with the time of the baseline: driver "
            "(`nvidia-smi`), clocks "
            "(`lscpu`, `nvidia-smi -q -d CLOCK`), and other jobs on these hosts (`top`).",
        )
