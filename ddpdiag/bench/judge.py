"""Judge a recorded benchmark: make its part of the report, with a summary, and the findings of COL002."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from ddpdiag.bench.data import Data, Sweep, sweeps, table_rows
from ddpdiag.bench.series import bench_ranks, series_of_sweep
from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import leave_out, ranks_text
from ddpdiag.checks.launch import versions as lch003
from ddpdiag.model import Finding
from ddpdiag.model.bench import BenchCurve, BenchPoint, BenchRank, BenchReport, BenchRequest, RankRow, Series
from ddpdiag.text import begun, count, rate_text, share_text, size_text

# The summary has at most so many sentences, and the number of those that are left out.
_MAX_SENTENCES = 3


def summary_text(series: Sequence[Series]) -> str:
    """Join the first sentences of the series, and count the others. Equal ones (about one slow rank) are given once."""
    sentences = [*dict.fromkeys(one.sentence for one in series)]
    omitted = len(sentences) - _MAX_SENTENCES
    closing = [f"{omitted} more {'result is' if omitted == 1 else 'results are'} in the report."] if omitted > 0 else []
    return " ".join((*sentences[:_MAX_SENTENCES], *closing)) or "Nothing was measured."


@lru_cache(maxsize=1)
def bench_report(seen: Seen[Data]) -> BenchReport:
    """The benchmark's part of the report. It has no rows if nothing was measured. The latest result is cached."""
    request, done = seen.options.bench or BenchRequest(), sweeps(seen)
    expected_sweeps = len(request.collective) * max(1, len(request.backend))
    rows_of_sweeps = [(sweep, tuple(table_rows(sweep))) for sweep in done]
    all_rows = tuple(row for _, sweep_rows in rows_of_sweeps for row in sweep_rows)
    all_series = tuple(one for sweep, sweep_rows in rows_of_sweeps for one in series_of_sweep(seen, sweep, sweep_rows))
    wrong_counts = [row.wrong for row in all_rows if row.wrong is not None]
    notes = [note for sweep in done for data in sweep.data_by_rank.values() for note in data.notes]
    notes += [
        f"{sweep.collective} over {sweep.backend} was cut short; the table has the sizes that all ranks measured"
        for sweep in done
        if not seen.succeeded(sweep.trial)
    ]
    versions = seen.of(lch003.CHECK).by_rank
    return BenchReport(
        request=request,
        rows=all_rows,
        series=all_series,
        ranks=tuple(line for sweep in done for line in bench_ranks(seen, sweep)),
        omissions=tuple(dict.fromkeys(notes)),
        wrong=sum(wrong_counts) if wrong_counts else None,
        complete=len(done) == expected_sweeps and all(_is_complete(seen, sweep) for sweep in done),
        sentence=summary_text(all_series),
        torch_version=next((data.torch for data in versions.values()), None),
        nccl_version=next((data.nccl for data in versions.values()), None),
    )


def _is_complete(seen: Seen[Data], sweep: Sweep) -> bool:
    """Whether a sweep measured all its sizes on all its ranks."""
    return (
        set(sweep.data_by_rank) == set(sweep.trial.ranks)
        and seen.succeeded(sweep.trial)
        and all(data.is_complete for data in sweep.data_by_rank.values())
    )


def _fabric(seen: Seen[Data], sweep: Sweep) -> dict[str, str]:
    """The hardware of a sweep, such as {"devices": "NVIDIA H100"}. Only runs with the same hardware are compared."""
    limits = [data.limits for data in sweep.data_by_rank.values()]
    devices = sorted({data.device for data in sweep.data_by_rank.values()})
    rates = sorted({each.nic_bytes_per_s for each in limits if each.nic_bytes_per_s is not None})
    fabric = {"devices": ", ".join(devices) or "unknown"}
    if sweep.backend != "nccl":
        cores = sorted({each.cores for each in limits if each.cores is not None})
        fabric["cores"] = " to ".join(dict.fromkeys(map(str, (cores[0], cores[-1])))) if cores else "unknown"
    if len(seen.world.hosts) > 1:
        fabric["network"] = ", ".join(f"{rate / 125e6:g} Gbit/s" for rate in rates) or "of unknown speed"
    return fabric


_RANKS_SHOWN = 16


def findings(seen: Seen[Data]) -> Iterator[Finding]:
    """Yield all findings about the benchmark; nothing if it had no trial."""
    if not seen.trials:
        return
    report = bench_report(seen)
    yield from _unsupported_finding(seen)
    yield from _unmeasured_findings(seen)
    yield from _wrong_value_findings(seen)
    yield from _slow_rank_findings(seen, report)
    yield from _far_below_findings(seen, report)
    yield from _below_minimum_findings(seen, report)


def _unsupported_finding(seen: Seen[Data]) -> Iterator[Finding]:
    reasons = tuple(dict.fromkeys(text for row in seen.rows for text in row.data.unsupported))
    if reasons:
        yield seen.finding(
            "unsupported",
            reasons[0],
            f"{'; '.join(reasons)}.",
            evidence={"unsupported": list(reasons)},
            fix="Leave this type or collective out (-d, --collective), or use another backend (--backend).",
            is_about_run=True,
        )


def _unmeasured_findings(seen: Seen[Data]) -> Iterator[Finding]:
    """Yield a finding for each sweep that succeeded, but had too little time or memory for some rows."""
    for sweep in sweeps(seen):
        unsupported = any(data.unsupported for data in sweep.data_by_rank.values())
        if unsupported or not seen.succeeded(sweep.trial) or (sweep.rank_rows and _is_complete(seen, sweep)):
            continue
        notes = "; ".join(dict.fromkeys(text for data in sweep.data_by_rank.values() for text in data.notes))
        subject = f"{'a part' if sweep.rank_rows else 'no size'} of {sweep.collective} over {sweep.backend}"
        title = f"{subject} was {'not ' if sweep.rank_rows else ''}measured"
        yield seen.finding(
            "unmeasured",
            title,
            f"{begun(title)}{f': {notes}' if notes else ''}.",
            fix="Measure fewer sizes (`-b`, `-e`) with fewer calls (`-n 5`), or allow more time (`-T SECONDS`).",
            is_about_run=True,
        )


def _wrong_value_findings(seen: Seen[Data]) -> Iterator[Finding]:
    """Yield a finding for each backend that gave wrong values. Only COL001 can find the rank that sent them."""
    by_backend: dict[str, list[tuple[int, str, RankRow]]] = {}
    for sweep in sweeps(seen):
        for by_rank in sweep.rank_rows.values():
            wrong_rows = [(rank, sweep.collective, row) for rank, row in by_rank.items() if row.wrong]
            by_backend.setdefault(sweep.backend, []).extend(wrong_rows)
    for backend, wrong_rows in ((name, found) for name, found in by_backend.items() if found):
        receivers = sorted({rank for rank, _, _ in wrong_rows})
        total = sum(row.wrong or 0 for _, _, row in wrong_rows)
        _, collective, first = wrong_rows[0]
        yield seen.finding(
            "wrong",
            f"wrong values from {backend}",
            f"{collective} over {backend} gave {count(total, 'wrong element')} on {ranks_text(receivers)}, first with "
            f"{size_text(first.size_bytes)}; 0 expected. The rank with the wrong result may not be the one that sent a "
            "wrong value.",
            evidence={"wrong": total, "arrived_at": [*receivers[:_RANKS_SHOWN]]},
            fix="Do not train here. Run `ddpdiag check --select COL001,P2P` with the same ranks: it finds the rank or "
            "the path that changes values.",
        )


def _slow_rank_findings(seen: Seen[Data], report: BenchReport) -> Iterator[Finding]:
    slow_ranks: dict[str, dict[int, BenchRank]] = {}
    for line in report.ranks:
        if line.slow_reason:
            slow_ranks.setdefault(line.backend, {}).setdefault(line.rank, line)
    for line in (line for lines in slow_ranks.values() for line in lines.values()):
        yield seen.finding(
            "slow-rank",
            f"rank {line.rank} on {line.host} is the slowest rank over {line.backend}",
            f"Rank {line.rank} on {line.host} {line.slow_reason}. "
            f"All ranks wait for it in {line.backend}'s collectives.",
            ranks=[line.rank],
            evidence={"copy_bytes_per_s": line.copy_bytes_per_s},
            fix=f"On {line.host} end other processes (`top`, `nvidia-smi`), and compare clocks with another host "
            f"(`lscpu`, `nvidia-smi -q -d CLOCK,PERFORMANCE`). If it stays slow, {leave_out([line.host])}.",
        )


def _far_below_findings(seen: Seen[Data], report: BenchReport) -> Iterator[Finding]:
    """Yield a finding for each collective over NCCL that is far below the rate of the links within a single host.

    Several hosts are not judged: NCCL may use TCP sockets, which do not reach the nominal rate of a network card.
    """
    series = {one.collective: one for one in report.series[::-1] if one.backend == "nccl"}
    for one in series.values() if len(seen.world.hosts) == 1 else ():
        if one.expectation is None or one.share is None or one.share >= seen.setting("far_ratio"):
            continue
        name, expected = f"{one.collective} over {one.backend}", one.expectation.busbw_bytes_per_s
        rate = rate_text(one.peak_busbw_bytes_per_s)
        yield seen.finding(
            "far-below",
            f"{name} is far too slow for this hardware: {rate}",
            f"{name} reaches {rate} busbw at {size_text(one.best_size_bytes)}. At least "
            f"{share_text(seen.setting('far_ratio'))} of {rate_text(expected)} is expected: {one.expectation.source}.",
            hosts=seen.world.host_names(seen.world.living_ranks),
            evidence={"busbw_bytes_per_s": one.peak_busbw_bytes_per_s, "expected_bytes_per_s": expected},
            fix="Run `ddpdiag check` with the same ranks while nothing else runs there: it measures each link, reads "
            "NCCL's log, and names what slows GPUs down.",
        )


def _below_minimum_findings(seen: Seen[Data], report: BenchReport) -> Iterator[Finding]:
    """Yield a finding for each series below `--min-busbw`. Incomplete sweeps have findings of their own."""
    if (minimum := report.request.min_busbw_bytes_per_s) is None:
        return
    complete_sweeps = {(sweep.backend, sweep.collective) for sweep in sweeps(seen) if _is_complete(seen, sweep)}
    for one in report.series:
        if one.peak_busbw_bytes_per_s >= minimum or (one.backend, one.collective) not in complete_sweeps:
            continue
        rate = rate_text(one.peak_busbw_bytes_per_s)
        yield seen.finding(
            "below",
            f"{one.collective} over {one.backend} does not reach {rate_text(minimum)}",
            f"{one.collective} over {one.backend} reaches {rate} busbw at best, at {size_text(one.best_size_bytes)}; "
            f"--min-busbw requires {rate_text(minimum)}. {one.sentence}",
            evidence={"busbw_bytes_per_s": one.peak_busbw_bytes_per_s, "min_busbw_bytes_per_s": minimum},
            fix=_fix_of_low_bandwidth(one, minimum),
        )


def _fix_of_low_bandwidth(series: Series, minimum: float) -> str:
    if series.expectation is not None and series.expectation.busbw_bytes_per_s < minimum:
        rate = rate_text(series.expectation.busbw_bytes_per_s)
        allowed = f"These hosts allow {rate} over {series.backend}"
        return f"{allowed}: use another backend (nccl, with GPUs), or set --min-busbw below that."
    return "Run `ddpdiag check` with the same ranks: it measures each link, and names a slow rank or host."


def curves_of(seen: Seen[Data]) -> tuple[BenchCurve, ...]:
    """The bus bandwidth over size for each collective, backend and dtype, for comparisons with other runs."""
    curves: dict[tuple[str, str, str], list[BenchPoint]] = {}
    fabrics: dict[tuple[str, str], dict[str, str]] = {}
    for sweep in sweeps(seen):
        fabrics[sweep.collective, sweep.backend] = _fabric(seen, sweep)
        for row in table_rows(sweep):
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
