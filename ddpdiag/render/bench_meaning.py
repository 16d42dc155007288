"""What the rows of a benchmark mean: backends beside each other, every rank, and where the bottleneck is."""

from collections.abc import Sequence
from statistics import fmean

from rich.table import Table
from rich.text import Text

from ddpdiag.model import Severity
from ddpdiag.model.bench import BenchRank, BenchReport, BenchRow, Bottleneck, Fit, Series
from ddpdiag.render.bench_rows import traits
from ddpdiag.render.page import Page, one_line
from ddpdiag.render.terminal.findings import LIST_SHOWN
from ddpdiag.render.terminal.ranks import Ranks, Row
from ddpdiag.render.terminal.tables import write_hosts_rule
from ddpdiag.render.units import ABSENT, byte_count, bytes_per_s, count, figure, percent, seconds

# Of more series than this, a line each: all types and operations make dozens.
SERIES_SHOWN = 4

# Collective, type, operation, root; and of one of them bus bandwidths by size and backend, one for each cycle.
_Kind = tuple[str, str, str, int]
_Sizes = dict[int, dict[str, list[float]]]


def write_meaning(page: Page, bench: BenchReport, *, details: bool) -> None:
    """Everything between the tables of nccl-tests and the findings."""
    if bench.rows:
        page.blank()
    else:
        page.write("nothing was measured", style="bold")
    for remark in bench.remarks:
        page.write(one_line(remark), lead="note: ")
    if bench.remarks or not bench.rows:
        page.blank()
    _beside(page, bench.rows)
    _ranks(page, bench.ranks, details=details)
    _all_series(page, bench, details=details)


def _beside(page: Page, rows: Sequence[BenchRow]) -> None:
    """Where several backends did the same: their bus bandwidth by size, and the first one's over each other's."""
    kinds: dict[_Kind, _Sizes] = {}
    for row in rows:
        if (mode := row.natural()) is not None:
            sizes = kinds.setdefault((row.collective, row.dtype, row.op, row.root), {})
            sizes.setdefault(row.size_bytes, {}).setdefault(row.backend, []).append(mode.busbw_bytes_per_s)
    for kind, sizes in kinds.items():
        shared = {size: backends for size, backends in sorted(sizes.items()) if len(backends) > 1}
        if shared:
            page.write(f"busbw of {_named(*kind)}, in GB/s", style="bold")
            page.table(_table(shared, absent=ABSENT if page.color else "-"))
            page.blank()


def _table(sizes: _Sizes, absent: str) -> Table:
    backends = tuple(dict.fromkeys(name for of in sizes.values() for name in of))
    first, *others = backends
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in ("size (B)", *backends, *(f"{first}/{other}" for other in others)):
        table.add_column(Text(one_line(header)), justify="right")
    for size, of in sizes.items():
        busbws = {name: fmean(values) for name, values in of.items()}
        rates = [f"{busbws[name] / 1e9:.2f}" if name in busbws else absent for name in backends]
        ratios = [_ratio(busbws.get(first), busbws.get(other), absent) for other in others]
        table.add_row(*map(Text, (str(size), *rates, *ratios)))
    return table


def _ratio(above: float | None, below: float | None, absent: str) -> str:
    return figure(above / below) if above is not None and below else absent


def _named(collective: str, dtype: str, op: str, root: int) -> str:
    """ "broadcast, float, root 0"."""
    return one_line(", ".join((collective, *traits(dtype, op, root))))


def _ranks(page: Page, lines: Sequence[BenchRank], *, details: bool) -> None:
    """A table for each collective and backend, and below it why some ranks are called slow."""
    tables: dict[tuple[str, str, int], list[BenchRank]] = {}
    for line in lines:
        tables.setdefault((line.collective, line.backend, line.size_bytes), []).append(line)
    for (collective, backend, size), of in tables.items():
        page.write(one_line(f"ranks of {collective} over {backend} at {byte_count(size)}"), style="bold")
        slow = dict.fromkeys((line.rank for line in of if line.slow), Severity.WARNING)
        # In a log, where scripts read the tables, all of it.
        ranks = Ranks(tuple(map(_row, of)), slow, details, brief=page.tty, healthy=not slow)
        write_hosts_rule(page, ranks.hosts.rule)
        for table in ranks.tables(color=page.color, width=page.width):
            page.table(table)
        if ranks.remark:
            page.write(ranks.remark, style="dim")
        if not page.tty:
            # For eyes, the findings below say so, with a way out.
            _reasons(page, [line for line in of if line.slow], limit=None if details else LIST_SHOWN)
        page.blank()


def _row(line: BenchRank) -> Row:
    return {
        "rank": line.rank,
        "local_rank": line.local_rank,
        "node": line.node,
        "gpu_uuid": line.gpu_uuid,
        "time_seconds": line.seconds,
        "algbw_bytes_per_s": line.algbw_bytes_per_s,
        "busbw_bytes_per_s": line.busbw_bytes_per_s,
        "spread_share": line.spread_share,
        "lag_seconds": line.lag_seconds,
        "copy_bytes_per_s": line.copy_bytes_per_s,
        "pair_bytes_per_s": line.pair_busbw_bytes_per_s,
    }


def _reasons(page: Page, slow: Sequence[BenchRank], limit: int | None) -> None:
    for line in slow[:limit]:
        page.write(one_line(line.slow), lead=one_line(f"rank {line.rank} on {line.node}: "), lead_style="bold yellow")
    if limit is not None and len(slow) > limit:
        page.write(f"{count(len(slow) - limit, 'more slow rank')}; the JSON report has all of them", style="dim")


def _all_series(page: Page, bench: BenchReport, *, details: bool) -> None:
    """What each series comes to; a line each where there are many."""
    if len(bench.series) > SERIES_SHOWN and not details:
        for series in bench.series:
            name = _named(series.collective, series.dtype, series.op, series.root)
            page.write(_reached(series), lead=one_line(f"{name}, over {series.backend}: "), lead_style="bold")
        page.blank()
        return
    for series in bench.series:
        # What the sentence of the whole says is said last, below.
        _series(page, series, says=not _is_said(series, bench.sentence))


def _is_said(series: Series, sentence: str) -> bool:
    """Is what holds it back in the sentence of the whole, alone or together with others'?"""
    told = series.sentence.partition(f" over {series.backend} ")[2].partition(": ")[0]
    return series.sentence in sentence or (bool(told) and series.collective in sentence and f"each {told}," in sentence)


def _series(page: Page, series: Series, *, says: bool) -> None:
    """What a series comes to: three lines, and its sentence where it has one of its own."""
    name = _named(series.collective, series.dtype, series.op, series.root)
    page.write(one_line(f"{name}, over {series.backend}"), style="bold")
    if series.fit is not None:
        page.write(_fit(series.fit), indent=4, lead="fit: ", lead_style="bold")
    page.write(_reached(series), indent=4, lead="best: ", lead_style="bold")
    if series.sentence and says:
        page.write(one_line(series.sentence), indent=4)
    page.blank()


def _fit(fit: Fit) -> str:
    text = (
        f"latency {seconds(fit.latency_seconds)}, asymptotic busbw {bytes_per_s(fit.busbw_bytes_per_s)}, "
        f"half of it at {byte_count(fit.half_bytes)}"
    )
    if fit.residual_share is None:
        return text
    where = f" at {byte_count(fit.residual_bytes)}" if fit.residual_bytes is not None else ""
    return f"{text}, residual {'+' if fit.residual_share > 0 else ''}{percent(fit.residual_share)}{where}"


def _reached(series: Series) -> str:
    best = f"{bytes_per_s(series.peak_busbw_bytes_per_s)} busbw at {byte_count(series.best_bytes)}"
    if series.expectation is None:
        judged = series.bottleneck is not Bottleneck.NOT_JUDGED
        return f"{best}; what this hardware should reach is not known" if judged else best
    share = f"{percent(series.share)} of " if series.share is not None else ""
    expected = bytes_per_s(series.expectation.busbw_bytes_per_s)
    return f"{best}: {share}{expected} expected ({one_line(series.expectation.source)})"
