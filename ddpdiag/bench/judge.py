"""The benchmark's report from a recording, its result in one sentence, and the findings of COL002."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from ddpdiag.bench.data import Data, Sweep, rows, sweeps
from ddpdiag.bench.series import ranks, series
from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import leave_out, ranks_text
from ddpdiag.checks.launch import versions as lch003
from ddpdiag.model import Finding
from ddpdiag.model.bench import Bench, BenchCurve, BenchPoint, BenchRank, BenchReport, RankRow, Series
from ddpdiag.text import begun, count, rate_text, share_text, size_text

# The most sentences in the summary; the rest is only counted.
_MOST_SENTENCES = 3


def summary(found: Sequence[Series]) -> str:
    """The first sentences of the series. Equal ones, such as those on one slow rank, are given once."""
    sentences = [*dict.fromkeys(one.sentence for one in found)]
    left = len(sentences) - _MOST_SENTENCES
    rest = [f"{left} more {'result is' if left == 1 else 'results are'} in the report."] if left > 0 else []
    return " ".join((*sentences[:_MOST_SENTENCES], *rest)) or "Nothing was measured."


@lru_cache(maxsize=1)
def bench_of(seen: Seen[Data]) -> BenchReport:
    """The rows, series and ranks of all sweeps; empty if nothing was measured. Cached for each `seen`."""
    asked, done = seen.options.bench or Bench(), sweeps(seen)
    wanted = len(asked.collective) * max(1, len(asked.backend))
    by_sweep = [(sweep, tuple(rows(sweep))) for sweep in done]
    all_rows = tuple(row for _, sweep_rows in by_sweep for row in sweep_rows)
    found = tuple(one for sweep, sweep_rows in by_sweep for one in series(seen, sweep, sweep_rows))
    checked = [row.wrong for row in all_rows if row.wrong is not None]
    notes = [note for sweep in done for data in sweep.ranks.values() for note in data.notes]
    notes += [
        f"{sweep.collective} over {sweep.backend} was cut short; the table has the sizes that all ranks measured"
        for sweep in done
        if not seen.succeeded(sweep.trial)
    ]
    versions = seen.of(lch003.CHECK).by_rank
    return BenchReport(
        asked=asked,
        rows=all_rows,
        series=found,
        ranks=tuple(line for sweep in done for line in ranks(seen, sweep)),
        notes=tuple(dict.fromkeys(notes)),
        wrong=sum(checked) if checked else None,
        complete=len(done) == wanted and all(_is_whole(seen, sweep) for sweep in done),
        sentence=summary(found),
        torch_version=next((data.torch for data in versions.values()), None),
        nccl_version=next((data.nccl for data in versions.values()), None),
    )


def _is_whole(seen: Seen[Data], sweep: Sweep) -> bool:
    """Whether a sweep measured all its sizes on all its ranks."""
    return (
        set(sweep.ranks) == set(sweep.trial.ranks)
        and seen.succeeded(sweep.trial)
        and all(data.whole for data in sweep.ranks.values())
    )


def _fabric(seen: Seen[Data], sweep: Sweep) -> dict[str, str]:
    """The hardware that must be equal for a comparison with another run, in words: devices, network cards, cores."""
    limits = [data.limits for data in sweep.ranks.values()]
    devices = sorted({data.device for data in sweep.ranks.values()})
    rates = sorted({each.nic_bytes_per_s for each in limits if each.nic_bytes_per_s is not None})
    fabric = {"devices": ", ".join(devices) or "unknown"}
    if sweep.backend != "nccl":
        cores = sorted({each.cores for each in limits if each.cores is not None})
        fabric["cores"] = " to ".join(dict.fromkeys(map(str, (cores[0], cores[-1])))) if cores else "unknown"
    if len(seen.world.hosts) > 1:
        fabric["network"] = ", ".join(f"{rate / 125e6:g} Gbit/s" for rate in rates) or "of unknown speed"
    return fabric


_SHOWN = 16


def findings(seen: Seen[Data]) -> Iterator[Finding]:
    """Yield all findings about the benchmark; nothing if it had no trial."""
    if not seen.trials:
        return
    report = bench_of(seen)
    yield from _unsupported(seen)
    yield from _unmeasured(seen)
    yield from _wrong(seen)
    yield from _slow(seen, report)
    yield from _far_below(seen, report)
    yield from _below(seen, report)


def _unsupported(seen: Seen[Data]) -> Iterator[Finding]:
    missing = tuple(dict.fromkeys(text for row in seen.rows for text in row.data.unsupported))
    if missing:
        yield seen.finding(
            "unsupported",
            missing[0],
            f"{'; '.join(missing)}.",
            evidence={"unsupported": list(missing)},
            fix="Leave this type or collective out (-d, --collective), or use another backend (--backend).",
            of_the_run=True,
        )


def _unmeasured(seen: Seen[Data]) -> Iterator[Finding]:
    """Yield a finding for each successful sweep with missing rows, for which time or memory was too short."""
    for sweep in sweeps(seen):
        unsupported = any(data.unsupported for data in sweep.ranks.values())
        if unsupported or not seen.succeeded(sweep.trial) or (sweep.rows and _is_whole(seen, sweep)):
            continue
        notes = "; ".join(dict.fromkeys(text for data in sweep.ranks.values() for text in data.notes))
        what = f"{'a part' if sweep.rows else 'no size'} of {sweep.collective} over {sweep.backend}"
        yield seen.finding(
            "unmeasured",
            f"{what} was {'not ' if sweep.rows else ''}measured",
            f"{begun(what)} was {'not ' if sweep.rows else ''}measured{f': {notes}' if notes else ''}.",
            fix="Measure fewer sizes (`-b`, `-e`) with fewer calls (`-n 5`), or allow more time (`-T SECONDS`).",
            of_the_run=True,
        )


def _wrong(seen: Seen[Data]) -> Iterator[Finding]:
    """Yield a finding for each backend with wrong values. COL001 finds the rank that sent them."""
    by_backend: dict[str, list[tuple[int, str, RankRow]]] = {}
    for sweep in sweeps(seen):
        for by_rank in sweep.rows.values():
            bad = [(rank, sweep.collective, row) for rank, row in by_rank.items() if row.wrong]
            by_backend.setdefault(sweep.backend, []).extend(bad)
    for backend, bad in ((backend, bad) for backend, bad in by_backend.items() if bad):
        got, total = sorted({rank for rank, _, _ in bad}), sum(row.wrong or 0 for _, _, row in bad)
        _, collective, first = bad[0]
        yield seen.finding(
            "wrong",
            f"wrong values from {backend}",
            f"{collective} over {backend} gave {count(total, 'wrong element')} on {ranks_text(got)}, first with "
            f"{size_text(first.size_bytes)}; 0 expected. The rank with the wrong result may not be the one that sent a "
            "wrong value.",
            evidence={"wrong": total, "arrived_at": [*got[:_SHOWN]]},
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
            f"rank {line.rank} on {line.host} is the slowest rank over {line.backend}",
            f"Rank {line.rank} on {line.host} {line.slow}. All ranks wait for it in {line.backend}'s collectives.",
            ranks=[line.rank],
            evidence={"copy_bytes_per_s": line.copy_bytes_per_s},
            fix=f"On {line.host} end other processes (`top`, `nvidia-smi`), and compare clocks with another host "
            f"(`lscpu`, `nvidia-smi -q -d CLOCK,PERFORMANCE`). If it stays slow, {leave_out([line.host])}.",
        )


def _far_below(seen: Seen[Data], report: BenchReport) -> Iterator[Finding]:
    """Yield a finding for each collective over NCCL that is far below the rate of the links within its only host.

    Several hosts are not judged: if NCCL uses TCP sockets, the nominal speed of a network card is no expectation.
    """
    series = {one.collective: one for one in report.series[::-1] if one.backend == "nccl"}
    for one in series.values() if len(seen.world.hosts) == 1 else ():
        if one.expectation is None or one.share is None or one.share >= seen.number("far_ratio"):
            continue
        name, expected = f"{one.collective} over {one.backend}", one.expectation.busbw_bytes_per_s
        rate = rate_text(one.peak_busbw_bytes_per_s)
        yield seen.finding(
            "far-below",
            f"{name} is far too slow for this hardware: {rate}",
            f"{name} reaches {rate} busbw at {size_text(one.best_bytes)}. At least "
            f"{share_text(seen.number('far_ratio'))} of {rate_text(expected)} is expected: {one.expectation.source}.",
            hosts=seen.world.hosts_of(seen.world.living),
            evidence={"busbw_bytes_per_s": one.peak_busbw_bytes_per_s, "expected_bytes_per_s": expected},
            fix="Run `ddpdiag check` with the same ranks while nothing else runs there: it measures each link, reads "
            "NCCL's log, and names what slows GPUs down.",
        )


def _below(seen: Seen[Data], report: BenchReport) -> Iterator[Finding]:
    """Yield a finding for each series below `--min-busbw`. Sweeps that were cut short have other findings."""
    if (least := report.asked.min_busbw_bytes_per_s) is None:
        return
    whole = {(sweep.backend, sweep.collective) for sweep in sweeps(seen) if _is_whole(seen, sweep)}
    for one in report.series:
        if one.peak_busbw_bytes_per_s >= least or (one.backend, one.collective) not in whole:
            continue
        rate = rate_text(one.peak_busbw_bytes_per_s)
        yield seen.finding(
            "below",
            f"{one.collective} over {one.backend} does not reach {rate_text(least)}",
            f"{one.collective} over {one.backend} reaches {rate} busbw at best, at {size_text(one.best_bytes)}; "
            f"--min-busbw requires {rate_text(least)}. {one.sentence}",
            evidence={"busbw_bytes_per_s": one.peak_busbw_bytes_per_s, "min_busbw_bytes_per_s": least},
            fix=_below_fix(one, least),
        )


def _below_fix(one: Series, least: float) -> str:
    if one.expectation is not None and one.expectation.busbw_bytes_per_s < least:
        return (
            f"These hosts allow {rate_text(one.expectation.busbw_bytes_per_s)} over {one.backend}: use another backend "
            f"(nccl, with GPUs), or set --min-busbw below that."
        )
    return "Run `ddpdiag check` with the same ranks: it measures each link, and names a slow rank or host."


def curves_of(seen: Seen[Data]) -> tuple[BenchCurve, ...]:
    """A curve for each collective, backend and dtype, for comparisons with other runs."""
    curves: dict[tuple[str, str, str], list[BenchPoint]] = {}
    fabrics: dict[tuple[str, str], dict[str, str]] = {}
    for sweep in sweeps(seen):
        fabrics[sweep.collective, sweep.backend] = _fabric(seen, sweep)
        for row in rows(sweep):
            point = BenchPoint(size_bytes=row.size_bytes, busbw_bytes_per_s=row.busbw_bytes_per_s, cv=row.cv)
            curves.setdefault((row.collective, row.backend, row.dtype), []).append(point)
    return tuple(
        BenchCurve(
            collective=collective,
            backend=backend,
            dtype=dtype,
            fabric=fabrics[collective, backend],
            points=tuple(sorted(points, key=lambda point: point.size_bytes)),
        )
        for (collective, backend, dtype), points in curves.items()
    )
